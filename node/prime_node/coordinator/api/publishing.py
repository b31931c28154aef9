"""Publication: upload of the trainer's blobs and manifests, and reading of manifests.

A manifest becomes the head after checks of its signature, its schema, chain.py, its indices, its bases and the presence of all
its bytes. Then, in this order: the manifest's file, the event, head.json. If the daemon is killed between any two, it finds the
old head or the new one, and the trainer publishes again. Two different manifests for one policy version are a fork: the first
one stays, and both are kept as evidence.
"""

from __future__ import annotations

import asyncio
import logging

from prime_node.broadcast.routes import routes_of, search
from prime_node.coordinator.api.requests import Caller, RequestGate, require_role, wrong_run
from prime_node.coordinator.api.training import batch_digests
from prime_node.coordinator.core import Core
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Topic
from prime_protocol import limits
from prime_protocol.chain import check_link, check_manifest, check_not_a_fork
from prime_protocol.chunk_index import open_index
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.key_ring import Role
from prime_protocol.manifest import Manifest, SignedManifest, open_manifest
from prime_protocol.messages import BlobHeader
from prime_protocol.parcel import open_parcel

log = logging.getLogger(__name__)


async def put_blob(core: Core, gate: RequestGate, parcel: bytes, *, address: str) -> str:
    """Store a checkpoint part or model file of the trainer. Content-addressed and idempotent.

    It must be fresh: a replay would restore bytes that were deleted since.
    """
    with gate.blame(address, core.clock.monotonic_s()):
        opened = open_parcel(parcel, body_bytes_max=core.run.spec.limits.blob_bytes_max)
        signer = opened.envelope.sole_signer()
        require_role(signer, Caller.TRAINER, run=core.run, state=core.state)
        header = parse_json(opened.envelope.verify(PayloadType.BLOB, trusted=(signer,)), BlobHeader)
    if header.run != core.run.digest:
        raise wrong_run(header.run, core.run)
    gate.require_fresh(
        header.epoch,
        header.issued_at_ms,
        now_ms=core.clock.now_ms(),
        now_s=core.clock.monotonic_s(),
        on_its_way_s=header.body_bytes / 2**20 * limits.BLOB_S_PER_MIB_MAX,
    )
    return await core.public.put(bytes(opened.check_body(header)), digest=header.body_digest)


class ManifestIntake:
    """Intake of manifests, one at a time."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def publish(self, gate: RequestGate, body: bytes, *, address: str) -> None:
        """Publish a manifest. Idempotent for the same manifest. Raise PeerError."""
        core = self._core
        with gate.blame(address, core.clock.monotonic_s()):
            envelope = open_envelope(body)
            require_role(_trainer_of(envelope, core), Caller.TRAINER, run=core.run, state=core.state)
            signed = open_manifest(envelope, core.run)
        async with self._core.blobs_turn:
            await self._take_in(signed)

    async def _take_in(self, signed: SignedManifest) -> None:
        core, manifest = self._core, signed.manifest
        core.run.keys.verify_manifest(signed.envelope, signed.point)  # again: the keys may have changed meanwhile
        check_manifest(manifest, core.run)
        if manifest.policy_version <= core.state.head:
            await self._compare_with_known(signed)
            return
        check_link(manifest, core.head)
        _check_batch(core, manifest)
        await _check_blobs(core, manifest)
        await _check_bases(core, manifest)
        await core.published.write(manifest_name(manifest.policy_version), signed.envelope.to_bytes())
        core.decide(
            ev.ManifestPublished(
                policy_version=manifest.policy_version,
                digest=signed.digest,
                routes=routes_of(manifest),
            )
        )
        if begun := core.evaluations.due(core.state):
            core.decide(begun)
        core.observer.made(manifest.policy_version, manifest.created_at_ms)
        await core.journal.synced()  # a head that was shown and then lost would look like a fork
        core.head = signed
        core.news.publish(Topic.HEAD)
        await core.published.write("head.json", signed.envelope.to_bytes())
        sizes = ", ".join(f"{encoding.kind} {encoding.sent_bytes:,}" for encoding in manifest.encodings)
        log.info("policy %d published, bytes: %s", manifest.policy_version, sizes)

    async def _compare_with_known(self, signed: SignedManifest) -> None:
        core, version = self._core, signed.manifest.policy_version
        known = await read_manifest(core, version)
        try:
            check_not_a_fork(signed, open_manifest(known, core.run))
        except PeerError:
            log.exception("the trainer key signed two manifests for policy %d; both are kept", version)
            for envelope in (known, signed.envelope):
                name = f"forks/{version:08d}-{envelope.digest[:16]}.json"
                await core.private.write(name, envelope.to_bytes())
            raise


def _trainer_of(envelope: Envelope, core: Core) -> str:
    """Return a signer that may publish, or else the first one. open_manifest counts the signers."""
    signers = [one.key_id for one in envelope.signatures]
    return next((signer for signer in signers if signer in core.run.keys.current.of(Role.TRAINER)), signers[0])


async def _check_blobs(core: Core, manifest: Manifest) -> None:
    """Check that all blobs are stored and that each index is valid. Raise PeerError."""
    for blob in manifest.blobs:
        if not await core.public.has(blob.digest) or await core.public.size(blob.digest) != blob.size:
            raise PeerError(ErrorCode.NOT_FOUND, f"blob {blob.digest[:12]} is not here; upload it first")
    for encoding in manifest.encodings:
        index = await core.public.get(encoding.index.digest)
        await asyncio.to_thread(open_index, index, encoding, manifest.tensors)


async def _check_bases(core: Core, manifest: Manifest) -> None:
    """Check that deltas have published bases, and that a newcomer has an update path. Raise PeerError(CHAIN_BROKEN)."""
    for encoding in manifest.encodings:
        if encoding.base is not None:
            envelope = await read_manifest(core, encoding.base.policy_version)
            if parse_json(envelope.payload, Manifest).state_root != encoding.base.state_root:
                raise PeerError(
                    ErrorCode.CHAIN_BROKEN,
                    f"policy {manifest.policy_version}: its base {encoding.base.policy_version} has another state root",
                )
    routes = {version: publication.routes for version, publication in core.state.published.items()}
    if search(manifest.policy_version, {**routes, manifest.policy_version: routes_of(manifest)}).path is None:
        raise PeerError(ErrorCode.CHAIN_BROKEN, f"policy {manifest.policy_version}: no way leads to it from nothing")


def _check_batch(core: Core, manifest: Manifest) -> None:
    """Check that a policy comes from the batch of its step. Raise PeerError(CHAIN_BROKEN)."""
    number = manifest.policy_version - 1
    if number < core.state.durable_step:  # policy 0, or the trainer is durable past this step already
        return
    if not core.state.is_given(number):
        raise PeerError(ErrorCode.CHAIN_BROKEN, f"policy {number + 1} comes before the batch of step {number}")
    if manifest.produced_by.batch != batch_digests(core, number, core.state.rules.batches_per_step - 1).envelope:
        raise PeerError(ErrorCode.CHAIN_BROKEN, f"policy {number + 1} names another batch than step {number} was given")


async def read_manifest(core: Core, policy_version: int) -> Envelope:
    """Return a published manifest. Raise PeerError(NOT_FOUND)."""
    # A file may exist before its event if the daemon was killed between the two; it is not published then.
    if policy_version <= core.state.head:
        try:
            return open_envelope(await core.published.read(manifest_name(policy_version)))
        except KeyError:
            log.error("%s is missing in the published folder", manifest_name(policy_version))
    raise PeerError(ErrorCode.NOT_FOUND, f"policy {policy_version} is not published; the newest is {core.state.head}")


async def restore_head(core: Core) -> None:
    """Read the head from its file after a restart, and rewrite head.json."""
    if core.state.head >= 0:
        envelope = await read_manifest(core, core.state.head)
        core.head = open_manifest(envelope, core.run)
        core.observer.made(core.state.head, core.head.manifest.created_at_ms)
        await core.published.write("head.json", envelope.to_bytes())


def manifest_name(policy_version: int) -> str:
    """Return the name of a manifest's file."""
    return f"manifests/{policy_version:08d}.json"
