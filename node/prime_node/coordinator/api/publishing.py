"""Publication: upload of the trainer's blobs and manifests, and reading of manifests.

A manifest becomes the head after checks of its signature, its schema, chain.py, its indices, its bases and the presence of all
its bytes. Then, in this order: the manifest's file, the event, head.json. If the daemon is killed between any two, it finds the
old head or the new one, and the trainer publishes again. Two different manifests for one policy version are a fork: the first
one stays, and both are kept as evidence.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from prime_node.broadcast.routes import routes_of, search
from prime_node.coordinator.api.clock_readings import read_clocks
from prime_node.coordinator.api.requests import Caller, RequestGate, require_role, wrong_run
from prime_node.coordinator.api.statements import BatchSeals
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.evaluating import Evaluations
from prime_node.coordinator.manifests import PublishedManifests
from prime_node.coordinator.measure.observer import Observer
from prime_node.coordinator.replay_archive import ReplayArchive
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Topic
from prime_node.coordinator.waiting import Notifications
from prime_node.ports.blobs import Blobs, DamagedBlob
from prime_node.ports.clock import Clock
from prime_node.ports.documents import Documents
from prime_node.traces import of_step, spanned
from prime_protocol import limits
from prime_protocol.chain import check_link, check_manifest, check_not_a_fork
from prime_protocol.chunk_index import open_index
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.manifest import Manifest, SignedManifest, open_manifest
from prime_protocol.parcel import open_parcel
from prime_protocol.requests import BlobHeader
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)


@dataclass(slots=True)
class BlobIntake:
    """Intake of the trainer's blobs."""

    run: PinnedRun
    clock: Clock
    decisions: Decisions
    gate: RequestGate
    public: Blobs

    async def put_blob(self, parcel: bytes, *, address: str) -> dict[str, str]:
        """Store a checkpoint part or model file of the trainer. Idempotent; return its digest.

        It must be fresh: a replay would restore bytes that were deleted since.
        """
        with self.gate.blame(address, self.clock.monotonic_s()):
            opened = open_parcel(parcel, body_bytes_max=self.run.spec.limits.blob_bytes_max)
            signer = opened.envelope.sole_signer()
            require_role(signer, Caller.TRAINER, run=self.run, state=self.decisions.state)
            header = parse_json(opened.envelope.verify(PayloadType.BLOB, trusted=(signer,)), BlobHeader)
        if header.run != self.run.digest:
            raise wrong_run(header.run, self.run)
        self.gate.require_fresh(
            header.epoch,
            header.issued_at_ms,
            read_clocks(self.clock),
            on_its_way_s=header.body_bytes / 2**20 * limits.BLOB_S_PER_MIB_MAX,
        )
        return {"digest": await self.public.put(bytes(opened.check_body(header)), digest=header.body_digest)}


@dataclass(slots=True)
class ManifestIntake:
    """Intake of manifests, one at a time."""

    run: PinnedRun
    clock: Clock
    decisions: Decisions
    gate: RequestGate
    manifests: PublishedManifests
    seals: BatchSeals
    evaluations: Evaluations
    observer: Observer
    notifications: Notifications
    archive: ReplayArchive
    public: Blobs
    private: Documents

    async def publish(self, body: bytes, *, address: str) -> None:
        """Publish a manifest. Idempotent for the same manifest. Raise RemoteError."""
        with self.gate.blame(address, self.clock.monotonic_s()):
            envelope = open_envelope(body)
            require_role(self._trainer_of(envelope), Caller.TRAINER, run=self.run, state=self.decisions.state)
            signed = open_manifest(envelope, self.run)
        await self.archive.keep_ahead(signed.manifest)
        version = signed.manifest.policy_version
        with spanned("publish", of_step(version - 1), policy_version=version):
            async with self.manifests.turn:
                await self._take_in(signed)

    async def _take_in(self, signed: SignedManifest) -> None:
        manifest = signed.manifest
        self.run.keys.verify_manifest(signed.envelope, signed.point)  # again: the keys may have changed meanwhile
        check_manifest(manifest, self.run)
        if manifest.policy_version <= self.decisions.state.head:
            await self._compare_with_known(signed)
            return
        check_link(manifest, self.manifests.head)
        self._check_batch(manifest)
        await self._check_blobs(manifest)
        await self._check_bases(manifest)
        await self.archive.require_state(manifest)
        await self.archive.keep(manifest)
        await self.manifests.write(signed)
        self.decisions.decide(
            ev.ManifestPublished(
                policy_version=manifest.policy_version,
                digest=signed.digest,
                routes=routes_of(manifest),
            )
        )
        if begun := self.evaluations.due(self.decisions.state):
            self.decisions.decide(begun)
        self.observer.made(manifest.policy_version, manifest.created_at_ms)
        await self.decisions.synced()  # a head that was shown and then lost would look like a fork
        self.manifests.head = signed
        self.notifications.publish(Topic.HEAD)
        await self.manifests.write_head()
        sizes = ", ".join(f"{encoding.kind} {encoding.sent_bytes:,}" for encoding in manifest.encodings)
        log.info("policy %d published, bytes: %s", manifest.policy_version, sizes)

    async def _compare_with_known(self, signed: SignedManifest) -> None:
        version = signed.manifest.policy_version
        known = await self.manifests.read(version)
        try:
            check_not_a_fork(signed, open_manifest(known, self.run))
        except RemoteError:
            log.exception(
                "the trainer key signed two manifests for policy %d; both are kept as evidence: check who has the key",
                version,
            )
            for envelope in (known, signed.envelope):
                name = f"forks/{version:08d}-{envelope.digest[:16]}.json"
                await self.private.write(name, envelope.to_bytes())
            raise

    def _trainer_of(self, envelope: Envelope) -> str:
        """Return a signer that may publish, or else the first one. open_manifest counts the signers."""
        signers = [one.key_id for one in envelope.signatures]
        return next((signer for signer in signers if signer in self.run.keys.current.of(Role.TRAINER)), signers[0])

    async def _check_blobs(self, manifest: Manifest) -> None:
        """Check that all blobs are stored and that each index is valid. Raise RemoteError."""
        for blob in manifest.blobs:
            if not await self.public.has(blob.digest) or await self.public.size(blob.digest) != blob.size:
                raise _not_here(blob.digest)
        for encoding in manifest.encodings:
            try:
                index = await self.public.get(encoding.index.digest)
            except DamagedBlob:
                index = b""
            if digest_of(index) != encoding.index.digest:  # an upload writes it again
                raise _not_here(encoding.index.digest)
            await asyncio.to_thread(open_index, index, encoding, manifest.tensors)

    async def _check_bases(self, manifest: Manifest) -> None:
        """Check that deltas have published bases, and that a newcomer has an update path. Raise RemoteError(CHAIN_BROKEN)."""
        for encoding in manifest.encodings:
            if encoding.base is not None:
                envelope = await self.manifests.read(encoding.base.policy_version)
                if parse_json(envelope.payload, Manifest).state_root != encoding.base.state_root:
                    raise RemoteError(
                        ErrorCode.CHAIN_BROKEN,
                        f"policy {manifest.policy_version}: its base {encoding.base.policy_version} has another state root",
                    )
        routes = {version: publication.routes for version, publication in self.decisions.state.published.items()}
        if search(manifest.policy_version, {**routes, manifest.policy_version: routes_of(manifest)}) is None:
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN, f"policy {manifest.policy_version}: no update path leads to it from an anchor"
            )

    def _check_batch(self, manifest: Manifest) -> None:
        """Check that a policy comes from the batch of its step. Raise RemoteError(CHAIN_BROKEN)."""
        number = manifest.policy_version - 1
        if number < self.decisions.state.durable_step:  # policy 0, or the trainer is durable past this step already
            return
        if not self.decisions.state.is_given(number):
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN,
                f"policy {number + 1} was published before the coordinator chose the batch of step {number}",
            )
        if (
            manifest.produced_by.batch
            != self.seals.digests(number, self.decisions.state.rules.batches_per_step - 1).envelope
        ):
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN,
                f"policy {number + 1} names another batch than the coordinator chose for step {number}",
            )


def _not_here(digest: str) -> RemoteError:
    return RemoteError(ErrorCode.NOT_FOUND, f"the coordinator does not have blob {digest[:12]}; upload it first")
