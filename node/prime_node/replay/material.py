"""Verified material of a run's steps, from any source: manifests, batches, bundles, training states and the recipe.

Waiting: each method waits for the source and retries nothing. Everything is checked against what the RunSpec and the manifests
sign. What a source lacks, or sends with other bytes, raises Withheld; what is signed and cannot be true, Unfaithful.

The progress of a re-execution is shown, because a step of a real model takes minutes. Any of its threads writes, one reader
reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TypeVar

from prime_node.patience import may_pass
from prime_node.ports.transport import ReplaySource, Unreachable
from prime_node.replay.finding import ReplayFault, Unfaithful, Withheld
from prime_protocol.chain import check_link, checked_manifest
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, parse_json
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.manifest import SignedManifest
from prime_protocol.replay import BundleAccess, ReplayPolicy
from prime_protocol.replies import NotYet, TrainBatch
from prime_protocol.requests import BatchRequest, BundleRequest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.training_state import TrainingState, TrainingTensor, open_training_state


@dataclass(slots=True)
class ReplayProgress:
    """Place of a re-execution. Example of its text: "step 41 of 40 to 49: passes 12 of 64"."""

    step: str = ""
    """What is worked on."""
    _parts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def note(self, part: str, done: int, total: int) -> None:
        """Note that `done` of `total` pieces of a part are done. A complete part is shown no longer."""
        if done < total:
            self._parts[part] = (done, total)
        else:
            self._parts.pop(part, None)

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Note a part without pieces, as long as the context lasts."""
        self.note(part, 0, 1)
        try:
            yield
        finally:
            self.note(part, 1, 1)

    @property
    def text(self) -> str:
        """The place as text for people; empty before the beginning."""
        parts = [
            part if total == 1 else f"{part} {done} of {total}" for part, (done, total) in list(self._parts.items())
        ]
        return ": ".join(filter(None, (self.step, ", ".join(parts))))


T = TypeVar("T")
MASTERS = ("model.", "critic.model.")
"""What names of masters begin with in a training state."""
OPTIMIZER_VALUES_MAX = 8
"""Tensors that an optimizer may keep of one master."""
KEPT_BYTES_MAX = 2**26
"""Bytes of the manifests that are kept to compare their links; older ones are requested again."""


@dataclass
class Material:
    """Implementation of ports.transport.BatchPort for a feed that trains published steps again."""

    source: ReplaySource
    run: PinnedRun
    policy: ReplayPolicy
    progress: ReplayProgress = field(default_factory=ReplayProgress)
    batches: dict[int, tuple[TrainBatch, ...]] = field(default_factory=dict)
    """Parts of the step requested last, as the manifests name them. The feed checks their signatures."""
    _manifests: dict[int, SignedManifest] = field(default_factory=dict, init=False)
    _num_bytes: int = field(default=0, init=False)
    _bundles: tuple[int, int] = field(default=(0, 0), init=False)
    """Bundles of that step that were taken, and all."""
    _parts: tuple[int, tuple[Envelope, ...]] = field(default=(-1, ()), init=False)
    """The step requested last, and its batches."""

    async def head(self) -> int:
        """Return the newest policy of the source, -1 if there is none."""
        envelope = await given(self.source.head(), "its newest manifest")
        if envelope is None:
            return -1
        return checked_manifest(envelope, self.run).manifest.policy_version

    async def signed(self, version: int) -> SignedManifest:
        """Return a policy's manifest, linked to those of its neighbours that are known. Raises Withheld or Unfaithful."""
        if version not in self._manifests:
            envelope = await given(self.source.manifest(version), f"manifest {version}")
            try:
                signed = checked_manifest(envelope, self.run)
                if signed.manifest.policy_version != version:
                    raise Withheld(f"the source shows another policy's manifest as {version}")
                if version - 1 in self._manifests:
                    check_link(signed.manifest, self._manifests[version - 1])
                if version + 1 in self._manifests:
                    check_link(self._manifests[version + 1].manifest, signed)
            except RemoteError as error:
                raise Unfaithful(f"manifest {version}: {error.detail}") from None
            self._keep(version, signed)
        return self._manifests[version]

    def _keep(self, version: int, signed: SignedManifest) -> None:
        """Keep a manifest, and drop the first ones while all of them are too many bytes."""
        self._manifests[version] = signed
        self._num_bytes += len(signed.envelope.payload)
        while self._num_bytes > KEPT_BYTES_MAX and len(self._manifests) > 1:
            dropped = self._manifests.pop(next(iter(self._manifests)))
            self._num_bytes -= len(dropped.envelope.payload)

    async def recipe(self) -> bytes:
        """Return the recipe's document."""
        return await self.blob(self.policy.recipe, "the recipe")

    async def blob(self, digest: str, what: str, size: int | None = None) -> bytes:
        """Return a blob whose digest holds. Raises Withheld."""
        data = await given(self.source.blob(digest, end=size), what)
        if digest_of(data) != digest:
            raise Withheld(f"{what}: the source sends other bytes than those of {digest[:12]}")
        return data

    async def state_before(self, step: int) -> int:
        """Return the newest policy up to `step` whose manifest commits to a training state."""
        version = step
        while (await self.signed(version)).manifest.produced_by.training_state is None:
            version -= 1  # policy 0 has one
        return version

    async def state_index(self, version: int) -> TrainingState:
        """Return the index of a policy's training state. Raises Withheld or Unfaithful."""
        digest = (await self.signed(version)).manifest.produced_by.training_state
        assert digest is not None, "the caller looks first"
        index = await self.blob(digest, f"the index of training state {version}")
        try:
            return open_training_state(index, digest=digest, run=self.run.digest, policy_version=version)
        except RemoteError as error:
            raise Unfaithful(error.detail, ReplayFault.STATE) from None

    async def fetch_state(self, version: int, path: Path) -> TrainingState:
        """Write the parts of a policy's training state to a file. Return its index. Raises Withheld, Unfaithful or LocalError."""
        state = await self.state_index(version)
        num_bytes, free = sum(part.size for part in state.parts), shutil.disk_usage(path.parent).free
        if num_bytes > free:
            raise LocalError(
                f"training state {version} has {num_bytes:,} bytes, and {free:,} are free in {path.parent}; free some there"
            )
        with path.open("wb") as file:
            for number, part in enumerate(state.parts):
                data = await self.blob(part.digest, f"part {number} of training state {version}", part.size)
                await asyncio.to_thread(file.write, data)
                self.progress.note(f"parts of training state {version}", number + 1, len(state.parts))
        return state

    # For a feed

    async def batch(self, request: BatchRequest) -> Envelope | NotYet:
        """Return a published batch, once the manifest of the step's policy leads to it."""
        if self._parts[0] != request.step:
            self._parts = request.step, await self._parts_of(request.step)
        return self._parts[1][request.part]

    async def _parts_of(self, step: int) -> tuple[Envelope, ...]:
        """Return a step's batches: the manifest names the last one, and each names the one before it. Raises Unfaithful.

        No slot may be in two of them.
        """
        due = (await self.signed(step + 1)).manifest.produced_by.batch
        found: list[tuple[Envelope, TrainBatch]] = []
        size = self.run.spec.groups_per_step // self.run.spec.schedule.batches_per_step
        for part in reversed(range(self.run.spec.schedule.batches_per_step)):
            what = f"batch {part} of step {step}"
            envelope = await given(self.source.public_batch(step, part), what)
            if envelope.digest != due:
                names = f"policy {step + 1} was computed from" if not found else f"the one after {what} follows"
                raise Unfaithful(f"{names} another batch than the one that is published", ReplayFault.BATCH)
            try:
                batch = parse_json(envelope.payload, TrainBatch)
            except RemoteError as error:
                raise Unfaithful(f"{what}: {error.detail}", ReplayFault.BATCH) from None
            if len(batch.groups) != size:
                raise Unfaithful(f"{what} has {len(batch.groups)} groups, and {size} are due", ReplayFault.BATCH)
            found.insert(0, (envelope, batch))
            due = batch.previous
        if due is not None:
            raise Unfaithful(f"batch 0 of step {step} names one before it", ReplayFault.BATCH)
        slots = [group.slot for _, batch in found for group in batch.groups]
        if len(set(slots)) != len(slots):
            raise Unfaithful(f"step {step} trains on a slot in two of its batches", ReplayFault.BATCH)
        self.batches = {step: tuple(batch for _, batch in found)}
        named = {digest for _, batch in found for group in batch.groups for digest in (group.bundle, group.logprobs)}
        self._bundles = 0, len(named - {None})
        self.progress.note("bundles", *self._bundles)
        return tuple(envelope for envelope, _ in found)

    async def bundle(self, request: BundleRequest) -> bytes:
        """Return a bundle, or a validator's logprobs of one."""
        digest = request.bundle
        if self.policy.bundles is BundleAccess.PUBLIC:
            data = await self.blob(digest, f"bundle {digest[:12]}")
        else:
            data = await given(self.source.bundle(request), f"bundle {digest[:12]}, which no mirror has")
            if digest_of(data) != digest:
                raise Withheld(f"bundle {digest[:12]}: the source sends other bytes")
        self._bundles = self._bundles[0] + 1, self._bundles[1]
        self.progress.note("bundles", *self._bundles)
        return data


def foreign_tensor(stated: Sequence[TrainingTensor], masters: Mapping[str, TrainingTensor]) -> str:
    """Return what a state holds or lacks that one of these masters cannot; empty if it fits.

    Besides masters it holds a reference policy of their shapes, and a few values of the optimizer, none larger than its master.
    """
    left, counts = set(masters), Counter[str]()
    for tensor in stated:
        if (known := masters.get(tensor.name)) is not None:
            left.discard(tensor.name)
            fits = (tensor.dtype, tensor.shape) == (known.dtype, known.shape)
        elif tensor.name.startswith("reference."):
            like = masters.get(f"model.{tensor.name.removeprefix('reference.')}")
            fits = like is not None and tensor.shape == like.shape
        else:
            critic, _, rest = tensor.name.rpartition("optimizer.")
            like = masters.get(f"{critic}model.{rest.rpartition('.')[0]}")
            fits = like is not None and prod(tensor.shape) <= max(1, prod(like.shape))
            counts[like.name if like is not None else ""] += 1
            fits = fits and like is not None and counts[like.name] <= OPTIMIZER_VALUES_MAX
        if not fits:
            return f"{tensor.name} of shape {tensor.shape} is none of this model and recipe"
    return f"it lacks {min(left)}" if left else ""


async def given(asked: Awaitable[T], what: str) -> T:
    """Return the source's answer. Raises Withheld if there is none, and RemoteError if it is busy or the clock here is wrong."""
    try:
        return await asked
    except RemoteError as error:
        if may_pass(error):
            raise
        raise Withheld(f"{what}: {error.detail}") from None
    except Unreachable as error:
        raise Withheld(f"{what}: the source does not answer: {error}") from None
