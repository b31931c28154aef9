"""What strangers need to re-execute a step: its signed batch, its bundles, and training states.

The batch of each published policy is a document that stays. Its bundles and the validators' logprobs of them become public blobs
when the policy is published, or are kept apart where the RunSpec gives them to auditors only. A training state comes as public
blobs of the trainer. Both are deleted when they are as old as the
RunSpec says, by the dates of their manifests, or when all of them have more bytes than it says: then the oldest policies' go.

Each manifest, batch and state's index is read once per start. While one of them is damaged, nothing is deleted: what it names
would be unknown.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from pydantic import BaseModel, ConfigDict, Field

from prime_node.coordinator.api.statements import BatchSeals
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.manifests import PublishedManifests
from prime_node.patience import at_once
from prime_node.ports.blobs import Blobs, DamagedBlob
from prime_node.ports.clock import Clock
from prime_node.ports.documents import Documents, batch_name, manifest_name
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import Manifest
from prime_protocol.replay import BundleAccess, ReplayPolicy
from prime_protocol.replies import TrainBatch
from prime_protocol.run_spec import PinnedRun
from prime_protocol.training_state import open_training_state

log = logging.getLogger(__name__)

_FIRST_KEPT = "replay.json"
"""Document with the first policy of which there may be bundles, and the first of which there may be a training state."""
_DAY_MS, _HOUR_MS = 86_400_000, 3_600_000
_TRANSFERS_MAX = 16
"""Blobs and documents that are read, copied or deleted at once. Each may take rollout_bytes_max bytes of memory."""
_FORGOTTEN_MAX = 16
"""Policies whose material is deleted in one turn, for which publications wait."""
_DIGEST_BYTES = 32


class _FirstKept(BaseModel):
    """Form of that document."""

    model_config = ConfigDict(extra="forbid")

    bundles: int = Field(ge=1)
    states: int = Field(ge=0)


@dataclass(slots=True)
class ReplayArchive:
    """Material for re-execution. In a run that promises none, every method does nothing."""

    run: PinnedRun
    clock: Clock
    decisions: Decisions
    seals: BatchSeals
    manifests: PublishedManifests
    published: Documents
    private: Documents
    public: Blobs
    bundles: Blobs
    archived: Blobs
    """Bundles that only auditors may read."""
    _first_kept: dict[str, int] = field(default_factory=lambda: {"bundles": 1, "states": 0})
    _digests: dict[str, dict[int, bytes]] = field(default_factory=lambda: {"bundles": {}, "states": {}})
    """Digests of each kept policy's blobs, one after another, that of a state's index last. A million take 32 MB."""
    _sizes: dict[str, dict[int, int]] = field(default_factory=lambda: {"bundles": {}, "states": {}})
    """Bytes of these blobs, in a run that bounds them. A bundle counts for each policy whose batch has a group of it."""
    _due_ms: int = 0
    """Time before which nothing becomes too old."""
    _complaint: str = ""
    """Why the last deletion failed, as in the log."""

    @property
    def policy(self) -> ReplayPolicy | None:
        """What the RunSpec promises."""
        return self.run.spec.replay

    async def restore(self) -> None:
        """Read, after a restart, from which policy on there is anything to delete."""
        try:
            self._first_kept = _FirstKept.model_validate_json(await self.private.read(_FIRST_KEPT)).model_dump()
        except (KeyError, ValueError):  # none yet, or damaged: begin with the first policy
            return

    async def require_state(self, manifest: Manifest) -> None:
        """Check that the training state which a manifest commits to is stored. Raise RemoteError."""
        if manifest.produced_by.training_state is None:
            return
        for digest, size in await self._state_blobs(manifest):
            if not await self.public.has(digest) or await self.public.size(digest) != size:
                raise RemoteError(
                    ErrorCode.NOT_FOUND,
                    f"the coordinator lacks blob {digest[:12]} of training state {manifest.policy_version}; upload it first",
                )

    async def keep(self, manifest: Manifest) -> None:
        """Publish the batch behind a policy, before the policy is published. Idempotent."""
        if self.policy is None or manifest.policy_version == 0:
            return
        step = manifest.policy_version - 1
        for part, envelope in enumerate(self._sealed(step)):
            await self.published.write(batch_name(step, part), envelope.to_bytes())
        await self._copy_bundles(step)
        if self.policy.bytes_max:
            self._due_ms = 0  # what is published now may be too much

    async def keep_ahead(self, manifest: Manifest) -> None:
        """Publish the bundles behind the next policy before its turn, so that `keep` need not copy them while others wait."""
        state, step = self.decisions.state, manifest.policy_version - 1
        if self.policy is not None and step >= 0 and manifest.policy_version == state.head + 1 and state.is_given(step):
            await self._copy_bundles(step)

    def _store(self, kind: str) -> Blobs:
        """Return where material of a kind is."""
        is_apart = kind == "bundles" and self.policy is not None and self.policy.bundles is BundleAccess.AUDITORS
        return self.archived if is_apart else self.public

    def _sealed(self, step: int) -> list[Envelope]:
        return [self.seals.seal(step, part) for part in range(self.run.spec.schedule.batches_per_step)]

    async def _copy_bundles(self, step: int) -> None:
        """Copy those of a step's bundles and logprobs that are not with their readers yet."""
        store = self._store("bundles")

        async def copy(digest: str) -> None:
            if await store.has(digest):
                return
            try:
                await store.put(await self.bundles.get(digest), digest=digest)
            except (KeyError, DamagedBlob):
                log.error("bundle %s of step %d is lost: this step cannot be re-executed", digest[:12], step)

        found = await asyncio.to_thread(_parcels_of, self._sealed(step))
        await at_once([partial(copy, digest) for digest in sorted(found)], most=_TRANSFERS_MAX)

    async def batch_size(self, step: int, part: int) -> int:
        """Return the bytes of the batch behind a published policy. Raise RemoteError(NOT_FOUND)."""
        with _published(step, part):
            return await self.published.size(self._published_name(step, part))

    async def read_batch(self, step: int, part: int, *, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes [start, end) of the batch behind a published policy, as it is stored. Raise RemoteError(NOT_FOUND)."""
        with _published(step, part):
            return await self.published.read(self._published_name(step, part), start=start, end=end)

    def _published_name(self, step: int, part: int) -> str:
        """Return the name of a batch behind a published policy. Raise KeyError."""
        if self.policy is None or step >= self.decisions.state.head:
            raise KeyError(step)
        return batch_name(step, part)

    async def forget_old(self) -> None:
        """Delete bundles and training states that are older, or more, than promised. What fails is tried again in an hour."""
        now_ms, more, complaint = self.clock.now_ms(), False, ""
        if self.policy is None or now_ms < self._due_ms:
            return
        self._due_ms = now_ms + _HOUR_MS  # a publication meanwhile makes it due again
        try:
            await self._read_digests()  # most of them before the turn, for which publications wait
            async with self.manifests.turn:
                fitting = self._first_fitting()
                for kind, days in (("bundles", self.policy.bundle_days), ("states", self.policy.state_days)):
                    more |= await self._forget(kind, before_ms=now_ms - round(days * _DAY_MS), before=fitting)
        except (RemoteError, OSError) as error:
            complaint = error.detail if isinstance(error, RemoteError) else str(error)
            if complaint != self._complaint:
                log.error("old bundles and training states stay, next try in an hour: %s", complaint)
        self._complaint = complaint
        if more and not complaint:
            self._due_ms = 0

    async def needed(self) -> set[str]:
        """Return the digests of the public blobs that must stay. Raise RemoteError or OSError if a document cannot be read."""
        if self.policy is None:
            return set()
        await self._read_digests()
        return {self.policy.recipe} | await self._since(self._first_kept)

    async def _since(self, first_kept: Mapping[str, int]) -> set[str]:
        """Return the digests of all material from these policies on."""
        kept = [
            digests
            for kind, first in first_kept.items()
            for version, digests in self._digests[kind].items()
            if version >= first
        ]
        return await asyncio.to_thread(_split, kept)

    def _first_fitting(self) -> int:
        """Return the first policy whose material may stay, so that all from it on has no more bytes than promised.

        The newest training state stays, and the bundles of the steps after it.
        """
        assert self.policy is not None
        states, bundles = self._sizes["states"], self._sizes["bundles"]
        newest = max((version for version, size in states.items() if size), default=0)
        left, version = self.policy.bytes_max, self.decisions.state.head + 1
        while self.policy.bytes_max and version > 0:
            version -= 1
            left -= states.get(version, 0) + bundles.get(version, 0)
            if left < 0 and version < newest:
                return version + 1
        return 0

    async def _forget(self, kind: str, *, before_ms: int, before: int) -> bool:
        """Delete the oldest material of a kind: dated before a time, or of policies before one. Return whether there may be more.

        The document follows, and a state's index goes last, so that after a crash between the deletion is repeated.
        """
        assert self.policy is not None
        await self._read_digests()
        known, first = self._digests[kind], self._first_kept[kind]
        version, end = first, min(first + _FORGOTTEN_MAX, self.decisions.state.head + 1)
        while version < end and (version < before or (await self._manifest(version)).created_at_ms < before_ms):
            version += 1
        if version == first:
            return False
        old = [known[each] for each in range(first, version)]
        first_kept = {**self._first_kept, kind: version}
        unneeded = _split(old) - await self._since(first_kept) - {self.policy.recipe}
        last = _split(digests[-_DIGEST_BYTES:] for digests in old)

        async def delete(digest: str) -> None:
            if self.decisions.may_answer():  # or else the next leader may need it again
                await self._store(kind).delete(digest)

        for some in (unneeded - last, unneeded & last):
            await at_once([partial(delete, digest) for digest in some], most=_TRANSFERS_MAX)
        if not self.decisions.may_answer():
            return False
        await self.private.write(_FIRST_KEPT, json.dumps(first_kept).encode())
        self._first_kept = first_kept
        for each in range(first, version):
            del known[each]
            self._sizes[kind].pop(each, None)
        log.info("deleted the %s of policies %d to %d, which are older or more than promised", kind, first, version - 1)
        return version == first + _FORGOTTEN_MAX

    async def _read_digests(self) -> None:
        """Read which blobs each kept policy has, if this is not known yet. Raise RemoteError or OSError."""

        async def read(kind: str, version: int) -> None:
            found = await self._blobs_of(kind, version)
            if self.policy is not None and self.policy.bytes_max:
                self._sizes[kind][version] = sum([await self._size(kind, digest) for digest in _split([found])])
            self._digests[kind][version] = found

        unknown = [
            partial(read, kind, version)
            for kind, first in self._first_kept.items()
            for version in range(first, self.decisions.state.head + 1)
            if version not in self._digests[kind]
        ]
        await at_once(unknown, most=_TRANSFERS_MAX)

    async def _size(self, kind: str, digest: str) -> int:
        try:
            return await self._store(kind).size(digest)
        except KeyError:  # a lost bundle
            return 0

    async def _blobs_of(self, kind: str, version: int) -> bytes:
        if kind == "states":
            manifest = await self._manifest(version)
            try:
                return _joined(digest for digest, _ in await self._state_blobs(manifest))
            except RemoteError:  # its index is absent or damaged: its parts help no one
                return b""
        envelopes = []
        for part in range(self.run.spec.schedule.batches_per_step):
            with _named(batch_name(version - 1, part)):
                batch = await self.read_batch(version - 1, part)
                envelopes.append(await asyncio.to_thread(open_envelope, batch, bytes_max=limits.WORK_BYTES_MAX))
        return _joined(await asyncio.to_thread(_parcels_of, envelopes))

    async def _state_blobs(self, manifest: Manifest) -> list[tuple[str, int]]:
        """Return digest and size of each blob of a policy's training state. Raise RemoteError."""
        digest = manifest.produced_by.training_state
        if digest is None:
            return []
        try:
            index = await self.public.get(digest)
        except (KeyError, DamagedBlob):
            index = b""
        if digest_of(index) != digest:  # an upload writes it again
            raise RemoteError(
                ErrorCode.NOT_FOUND, f"the coordinator does not have training state {manifest.policy_version}"
            )
        state = await asyncio.to_thread(
            open_training_state, index, digest=digest, run=self.run.digest, policy_version=manifest.policy_version
        )
        return [*((part.digest, part.size) for part in state.parts), (digest, len(index))]

    async def _manifest(self, version: int) -> Manifest:
        with _named(manifest_name(version)):
            return await asyncio.to_thread(parse_json, (await self.manifests.read(version)).payload, Manifest)


@contextmanager
def _published(step: int, part: int) -> Iterator[None]:
    """Raise RemoteError(NOT_FOUND) for a KeyError."""
    try:
        yield
    except KeyError:
        raise RemoteError(ErrorCode.NOT_FOUND, f"batch {part} of step {step} is not published") from None


@contextmanager
def _named(document: str) -> Iterator[None]:
    """Name the document in what its reading raises."""
    try:
        yield
    except RemoteError as error:
        raise RemoteError(error.code, f"{document} is missing or damaged: {error.detail}") from None
    except OSError as error:
        raise OSError(f"{document}: {error}") from error


def _parcels_of(envelopes: Iterable[Envelope]) -> set[str]:
    batches = (parse_json(envelope.payload, TrainBatch) for envelope in envelopes)
    parcels = (digest for batch in batches for group in batch.groups for digest in (group.bundle, group.logprobs))
    return {digest for digest in parcels if digest is not None}


def _joined(digests: Iterable[str]) -> bytes:
    return b"".join(map(bytes.fromhex, digests))


def _split(joined: Iterable[bytes]) -> set[str]:
    starts = ((digests, start) for digests in joined for start in range(0, len(digests), _DIGEST_BYTES))
    return {digests[start : start + _DIGEST_BYTES].hex() for digests, start in starts}
