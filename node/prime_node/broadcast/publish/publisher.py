"""Publish policies in the background: encode, store, sign, announce, strictly in version order.

Waiting: `submit` returns at once unless more than `pending_max` policies are pending, the new one included. Then the trainer
waits until the background task has announced enough of them. With `pending_max` = async_level the trainer is never further
ahead of the workers than the step rule allows. The background task waits for an unreachable coordinator without a deadline.
Any other fault ends it, and is raised by the next `submit` or `flush`. A caller that waits for something else meanwhile (a
batch that only the unpublished policy could bring) also waits for `failed`.

encoder.py decides what is encoded, and which older weights are held for it.

Invariant: one policy version has one manifest, forever. A manifest is on disk before it is sent (last_signed.py), and one that
the coordinator had not answered for is sent again. After a crash the trainer recomputes the steps after its checkpoint. A
version that is published already is compared and not published twice; another state root is an error that names both.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from prime_node.broadcast.publish.disk_room import DiskRoom, PartSpool
from prime_node.broadcast.publish.encoder import Attachment, Encoded, Published, SpanEncoder, WholeCopy
from prime_node.broadcast.publish.last_signed import LastSigned
from prime_node.broadcast.publish.spans import FIRST_S_MAX, SpanRules
from prime_node.broadcast.routes import UpdateRoute, routes_of
from prime_node.patience import ask_until_answered, cancel_all, first_of
from prime_node.ports.clock import Clock
from prime_node.ports.train_backend import PolicyCopy
from prime_node.ports.transport import PublishPort
from prime_node.traces import of_step, spanned
from prime_protocol.chain import checked_manifest
from prime_protocol.checkpoint import CheckpointDecoder, root_of_table
from prime_protocol.chunk_index import open_index
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.manifest import (
    Manifest,
    PartEntry,
    Provenance,
    SignedManifest,
    TensorEntry,
    open_manifest,
    sign_manifest,
)
from prime_protocol.run_spec import PinnedRun
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)

UPLOADS_MAX = 3
"""Attempts to publish one policy while the coordinator reports a missing blob of it."""


@dataclass(frozen=True, slots=True)
class _Submission:
    policy_version: int
    copy: PolicyCopy
    provenance: Provenance
    attached: Attachment | None


class Publisher:
    """Signer and announcer of policies. Call `start` first, `flush` and `close` last."""

    def __init__(
        self,
        coordinator: PublishPort,
        run: PinnedRun,
        key: SigningKey,
        *,
        clock: Clock,
        pending_max: int,
        cosigners: Sequence[SigningKey] = (),
        rules: SpanRules | None = None,
        on_published: Callable[[Published], None] = lambda published: None,
        folder: Path,
        copy_of: Callable[[Weights], PolicyCopy] = WholeCopy,
    ) -> None:
        """Publish to `coordinator`.

        `cosigners` sign each manifest in addition to `key`. `on_published` is called for each announced policy, from the
        event loop. `folder` holds policies in progress and the manifest that was signed last. `copy_of` is the train
        backend's, for policy 0 after a restart.
        """
        self._coordinator = coordinator
        self._run = run
        self._keys = (key, *cosigners)
        self._clock = clock
        self._pending_max = pending_max
        self._encoder = SpanEncoder(rules or SpanRules())
        self._on_published = on_published
        self._spool_folder = folder
        self._last_signed = LastSigned(folder)
        self._copy_of = copy_of
        self._config_digest = next(file.digest for file in run.spec.model_files if file.name == "config.json")
        self._head: SignedManifest | None = None
        self._unanswered: SignedManifest | None = None
        """A manifest that an earlier process signed, and that could not be sent again as it is."""
        self._pending: deque[_Submission] = deque()
        self._changed = asyncio.Condition()
        self._worker: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    @property
    def head(self) -> int:
        """Newest policy version that is announced; -1 before the first."""
        return -1 if self._head is None else self._head.manifest.policy_version

    async def start(self) -> None:
        """Fetch and verify the head of the chain from the coordinator.

        Raises RemoteError, and LocalError if the coordinator lost policies.
        """
        envelope = await ask_until_answered(self._coordinator.head, what="head of the chain", clock=self._clock)
        if envelope is not None:
            self._head = checked_manifest(envelope, self._run)
        last = await asyncio.to_thread(self._last_signed.unanswered, self._head, run=self._run.digest)
        if last is not None:
            await self._send_again(last)
        elif self._head is not None:
            await asyncio.to_thread(self._last_signed.note, self._head)
        if self._head is not None and self._encoder.rules.root_every:
            await first_of(self._take_up_first(), self._clock.sleep(FIRST_S_MAX))
        self._worker = asyncio.create_task(self._work())

    async def submit(
        self,
        policy_version: int,
        policy: Weights | PolicyCopy,
        provenance: Provenance,
        attached: Attachment | None = None,
    ) -> None:
        """Publish in the background, and drop copy and attachment when they are no longer needed.

        `policy` is weights that no longer change, or a train backend's copy. Raises the error of an earlier publication.
        """
        self._raise_error()
        assert self._worker is not None, "start() first"
        async with self._changed:
            copy = WholeCopy(policy) if isinstance(policy, Mapping) else policy
            self._pending.append(_Submission(policy_version, copy, provenance, attached))
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._error is not None or len(self._pending) <= self._pending_max)
        self._raise_error()

    async def flush(self) -> None:
        """Wait until everything is announced. Raises the error of a publication."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._error is not None or not self._pending)
        self._raise_error()

    async def failed(self) -> NoReturn:
        """Wait for an error of a publication and raise it. Never returns."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._error is not None)
        assert self._error is not None
        raise self._error

    async def close(self) -> None:
        """End the background task; pending policies are published after the next start. Idempotent."""
        if self._worker is not None:
            await cancel_all(self._worker)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _work(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._pending))
            try:
                version = self._pending[0].policy_version
                with spanned("publish", of_step(version - 1), policy_version=version):
                    await self._publish(self._pending[0])
            except Exception as error:  # noqa: BLE001 - the task's edge: stored, and raised at the trainer's next call
                log.error("policy %d was not published: %s", self._pending[0].policy_version, error)
                self._error = error
            async with self._changed:
                self._pending.popleft()
                self._changed.notify_all()
            if self._error is not None:
                return

    async def _publish(self, submission: _Submission) -> None:
        version = submission.policy_version
        if version <= self.head:
            await self._compare(submission)
            _drop_attached(submission)
            return
        if version != self.head + 1:
            raise LocalError(f"policy {version} cannot follow policy {self.head}, the coordinator's newest one")
        began_s = self._clock.monotonic_s()
        tensors = await asyncio.to_thread(submission.copy.tensors)
        with PartSpool(self._spool_folder) as spool:
            encoded = await asyncio.to_thread(self._encoder.encode, version, submission.copy, spool.keep)
            encoded_s = self._clock.monotonic_s()
            signed = self._signed_before(version, tensors)
            if signed is None:
                signed = sign_manifest(self._manifest(submission, tensors, encoded), *self._keys)
            await self._upload(signed, encoded, spool, submission.attached)
        _drop_attached(submission)
        self._head, self._unanswered = signed, None
        self._encoder.published(signed.manifest, submission.copy, head=version)
        self._on_published(
            Published(
                version,
                signed.manifest.state_root,
                submission.copy.raw_bytes,
                {_name_of(route, version): route.sent_bytes for route in routes_of(signed.manifest)},
                self._clock.monotonic_s() - began_s,
                encoded_s - began_s,
            )
        )

    async def _send_again(self, envelope: Envelope) -> None:
        """Send a manifest for which an earlier process got no answer: peers may have it.

        If the coordinator lacks blobs of it, wait for the policy to be computed again. Raises LocalError if it is refused.
        """
        try:
            signed = open_manifest(envelope, self._run)
        except RemoteError as error:  # its key was replaced since, so followers accept another one
            log.warning("the manifest that this trainer signed last is void: %s", error)
            return
        version = signed.manifest.policy_version
        log.info("policy %d was signed before this start, and is sent again", version)
        try:
            await self._announce(signed)
        except RemoteError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise LocalError(
                    f"policy {version}, which this trainer has signed and peers may have, is refused: {error}. Was the "
                    "coordinator restored from an older copy? docs/operating.md says what to do"
                ) from error
            self._unanswered = signed
        else:
            self._head = signed

    def _signed_before(self, version: int, tensors: tuple[TensorEntry, ...]) -> SignedManifest | None:
        """Return the manifest of this policy that an earlier process signed. Raises LocalError if it has other weights."""
        signed = self._unanswered
        if signed is not None:
            _require_same(version, ours=root_of_table(tensors), theirs=signed.manifest)
        return signed

    async def _announce(self, signed: SignedManifest) -> None:
        version = signed.manifest.policy_version
        send = partial(self._coordinator.publish, signed.envelope)
        await ask_until_answered(send, what=f"manifest {version}", clock=self._clock)

    async def _upload(
        self, signed: SignedManifest, encoded: Sequence[Encoded], spool: PartSpool, attached: Attachment | None
    ) -> None:
        """Upload every blob from the spool, one after the other, then the manifest."""
        version = signed.manifest.policy_version
        in_spool = {blob.digest for one in encoded for blob in one.encoding.blobs}
        for attempt in range(UPLOADS_MAX):
            for entry in signed.manifest.blobs:  # of a manifest signed before, whose encodings may be others
                if entry.digest not in in_spool:
                    await self._put(await self._found_again(entry, version), version)
            for one in encoded:
                await self._put(one.index, version)
            for part in {part.digest: part for one in encoded for part in one.encoding.parts}.values():
                await self._put(await asyncio.to_thread(spool.read, part), version)
            for read in () if attached is None else attached.blobs():
                await self.put_aside(await asyncio.to_thread(read), what=f"the training state of policy {version}")
            # Not earlier: a later start may be unable to make its blobs again.
            await asyncio.to_thread(self._last_signed.note, signed)
            try:
                await self._announce(signed)
                return
            except RemoteError as error:
                # An older policy held the same bytes, and was deleted with them between our upload and our manifest.
                if error.code is not ErrorCode.NOT_FOUND or attempt == UPLOADS_MAX - 1:
                    raise

    async def _found_again(self, entry: PartEntry, version: int) -> bytes:
        try:
            return await self._blob(entry)
        except RemoteError as error:
            raise LocalError(
                f"policy {version} was signed before this start, but bytes of it are lost: {error}. To continue, delete "
                "signed.json in the trainer's folder: workers that have the old manifest reject the new one as a fork"
            ) from error

    async def put_aside(self, blob: bytes, *, what: str) -> None:
        """Upload a public blob that is part of no policy, waiting for an unreachable coordinator. Raises RemoteError."""
        put = partial(self._coordinator.put_blob, blob, seeded=False)
        await ask_until_answered(put, what=what, clock=self._clock)

    async def read_blob(self, digest: str) -> bytes | None:
        """Return a public blob of the coordinator, unverified; None if it has none. Raises RemoteError."""
        try:
            return await ask_until_answered(
                lambda: self._coordinator.blob(digest), what=f"blob {digest[:12]}", clock=self._clock
            )
        except RemoteError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            return None

    async def _put(self, blob: bytes, version: int) -> None:
        put = partial(self._coordinator.put_blob, blob)
        await ask_until_answered(put, what=f"blobs of policy {version}", clock=self._clock)

    async def _take_up_first(self) -> None:
        """Fetch policy 0 from the coordinator, for root deltas, and decode it onto the disk.

        If its bytes are missing or do not arrive, or there is no room for them, no root deltas are made.
        """
        try:
            signed = await self._published_manifest(0)
            manifest, anchor = signed.manifest, signed.manifest.encoding(None)
            if anchor is None:
                raise RemoteError(ErrorCode.NOT_FOUND, "policy 0 has no anchor")
            index = open_index(await self._blob(anchor.index), anchor, manifest.tensors)
            room = await asyncio.to_thread(DiskRoom, manifest.tensors, self._spool_folder)
            decoder = CheckpointDecoder(manifest, anchor, index, allocate=room.tensor)
            for number, part in enumerate(anchor.parts):
                await asyncio.to_thread(decoder.feed_part, number, await self._blob(part))
            weights = await asyncio.to_thread(decoder.finish)
            self._encoder.published(manifest, await asyncio.to_thread(self._copy_of, weights), head=self.head)
        except (RemoteError, LocalError) as error:
            log.warning("policy 0 cannot be fetched, so no root deltas are made: %s", error)

    async def _blob(self, entry: PartEntry) -> bytes:
        return await ask_until_answered(
            lambda: self._coordinator.blob(entry.digest, start=0, end=entry.size),
            what=f"blob {entry.digest[:12]}",
            clock=self._clock,
        )

    async def _published_manifest(self, version: int) -> SignedManifest:
        ask = partial(self._coordinator.manifest, version)
        envelope = await ask_until_answered(ask, what=f"manifest {version}", clock=self._clock)
        return checked_manifest(envelope, self._run)

    async def _compare(self, submission: _Submission) -> None:
        """Check that a version that is published already has the same weights."""
        version = submission.policy_version
        published = self._head
        if published is None or published.manifest.policy_version != version:
            published = await self._published_manifest(version)
        ours = root_of_table(await asyncio.to_thread(submission.copy.tensors))
        _require_same(version, ours=ours, theirs=published.manifest)
        log.info("policy %d was computed again and equals the published one", version)
        self._encoder.published(published.manifest, submission.copy, head=self.head)

    def _manifest(
        self, submission: _Submission, tensors: tuple[TensorEntry, ...], encoded: Sequence[Encoded]
    ) -> Manifest:
        return Manifest(
            run=self._run.digest,
            policy_version=submission.policy_version,
            previous=None if self._head is None else self._head.digest,
            model_config_digest=self._config_digest,
            state_root=root_of_table(tensors),
            tensors=tensors,
            encodings=tuple(one.encoding for one in encoded),
            produced_by=submission.provenance,
            # Auditors take a date before the predecessor's for a false one: here the clock was only put right.
            created_at_ms=max(self._clock.now_ms(), 0 if self._head is None else self._head.manifest.created_at_ms),
        )


def _require_same(version: int, *, ours: str, theirs: Manifest) -> None:
    if theirs.policy_version != version or ours != theirs.state_root:
        raise LocalError(
            f"policy {version} is published with state root {theirs.state_root}, but this trainer computed {ours}. A step is "
            "repeated exactly only on the same kind of machine, with the same settings, number of threads and software"
        )


def _drop_attached(submission: _Submission) -> None:
    if submission.attached is not None:
        submission.attached.drop()


def _name_of(route: UpdateRoute, version: int) -> str:
    return "anchor" if route.base_version is None else f"delta_{version - route.base_version}"
