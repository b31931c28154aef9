"""Check whether a published checkpoint is what it claims to be: numbered checks over any source, without torch.

    (1) the RunSpec has the pinned digest, its root keys signed it, and a threshold of them signed each key ring
    (2) the trainer key valid at the time signed every manifest
    (3) every manifest's content is valid: schema, limits, tensor table, encodings
    (4) the manifests form one chain up to the head, and the source shows no second one
    (5) every part and index has its digest, and each index fills its parts and covers its tensors
    (6) every chunk has its digest
    (7) every tensor decodes to its digest, and all of them to the state root
    (8) the model files are the ones that the RunSpec names
    (9) nothing newer is withheld: the coordinator's timestamp names this head, and is fresh

A policy may have several encodings. For one policy, the cheapest path that is kept is decoded. With `chain`, all encodings of
every policy are decoded, and each must give the same tensors.

The audit stops at the first check that fails. Each check reports what it established and nothing more.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from prime_node.broadcast.audit.audit_manifests import ManifestAudit
from prime_node.broadcast.audit.audit_report import AuditReport, Check
from prime_node.broadcast.audit.verified_parts import PARTS_AT_ONCE, CheckFailed, feed_parts
from prime_node.broadcast.routes import Path
from prime_node.memory import raw_bytes, require_room
from prime_node.ports.transport import PublicSource, Unreachable
from prime_protocol.checkpoint import CheckpointDecoder
from prime_protocol.chunk_index import ChunkIndex, open_index
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import Encoding, Manifest, SignedManifest
from prime_protocol.run_spec import PinnedRun
from prime_protocol.weights import Weights, num_bytes

PATHS_MAX = 256
"""Update paths that an audit tries while bytes of each are no longer kept."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Verified policy, as input for an export or a comparison."""

    run: PinnedRun
    signed: SignedManifest
    weights: Weights
    model_files: Mapping[str, bytes]


async def audit(
    source: PublicSource,
    run: str | None,
    *,
    is_pinned: bool = True,
    chain: bool = False,
    policy_version: int | None = None,
    now_ms: int | None = None,
    memory_bytes_max: int | None = None,
    on_check: Callable[[Check], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
    on_total: Callable[[int], None] = lambda _: None,
    on_verified: Callable[[Verified], None] | None = None,
) -> AuditReport:
    """Audit the head or policy `policy_version`, or with `chain` all policies from 0 to the head.

    For an earlier policy, the links from it to the head are checked too. `run` is the digest from the join link; None accepts
    the source's RunSpec as it is, and (1) says so. `is_pinned`: the caller named `run`; it was not read from the audited
    folder, which (1) would say. At `now_ms` the source must be fresh; None treats it as a copy.

    Bytes of policies before the head that the source no longer keeps are counted, not failed: retention is no forgery.
    `on_total` gets the number of bytes, `on_bytes` the size of each part that was hashed. `on_verified` gets the requested
    policy once every check has passed. Never raises for what a source does, but LocalError for policies that need more
    memory than `memory_bytes_max`, by default what this machine has available.
    """
    work = Audit(
        source,
        on_check,
        now_ms,
        is_pinned=is_pinned,
        memory_bytes_max=memory_bytes_max,
        on_bytes=on_bytes,
        on_total=on_total,
        keep_weights=on_verified is not None,
    )
    try:
        await work.all_checks(run, chain=chain, policy_version=policy_version)
    except (RemoteError, Unreachable) as error:
        work.stop(error)
        return work.report()
    if on_verified is not None:
        on_verified(work.verified())
    return work.report()


@dataclass
class Audit(ManifestAudit):
    """One audit in progress."""

    on_bytes: Callable[[int], None] = lambda _: None
    on_total: Callable[[int], None] = lambda _: None
    memory_bytes_max: int | None = None
    """Memory for decoded policies and for parts that are read; None: what is available."""
    keep_weights: bool = False
    """Whether the wanted policy's weights and the model files are kept after their check."""
    weights: Weights | None = None
    model_files: dict[str, bytes] = field(default_factory=dict)
    num_parts: int = 0
    num_chunks: int = 0
    num_tensors: int = 0
    num_policies: int = 0
    num_absent: int = 0
    """Policies before the head whose bytes are no longer kept."""
    num_bytes: int = 0
    decoders: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(PARTS_AT_ONCE, "decode"))
    """Threads for the chunks of a part and for tensors, separate from those that read; they end with the audit."""
    roots: dict[int, str] = field(default_factory=dict)
    """State roots of the decoded policies: a base among them is not hashed again."""

    async def all_checks(self, run: str | None, *, chain: bool, policy_version: int | None) -> None:
        """Run all checks in order. Raises RemoteError or Unreachable for the first that fails."""
        path = await self.manifests(run, chain=chain, policy_version=policy_version)
        assert self.pinned is not None
        assert self.head is not None
        self.on_total(sum(self.sizes.values()) if chain else path.sent_bytes)
        await (self._all_bytes(self.head) if chain else self._bytes_of(path))
        self._about_bytes()
        await self._model_files()
        self.established(8, f"{len(self.pinned.spec.model_files)} files have the digests of the RunSpec")
        self.freshness()

    def verified(self) -> Verified:
        """Return the verified policy. Call after all checks have passed."""
        assert self.pinned is not None
        assert self.wanted is not None
        assert self.weights is not None
        return Verified(self.pinned, self.wanted, self.weights, self.model_files)

    # (5) to (7)

    async def _bytes_of(self, path: Path) -> None:
        """Decode the cheapest path that is still kept."""
        assert self.wanted is not None
        wanted = self.wanted.manifest  # its bases have the same tensors: fail before the first of them is fetched
        self.require_room(wanted, raw_bytes(wanted.tensors) * min(2, len(path.hops)))
        while True:
            weights: Weights | None = None
            for hop in path.hops:
                manifest, encoding = await self.step(hop)
                try:
                    held_bytes = 0 if weights is None else num_bytes(weights)
                    weights = await self._decode(manifest, encoding, weights, held_bytes)
                except RemoteError as error:
                    if error.code is not ErrorCode.NOT_FOUND:
                        raise
                    self.closed.add((manifest.policy_version, encoding.base_version))
                    missing = error
                    break
            else:
                self.num_policies += len(path.hops)
                return
            try:
                if len(self.closed) >= PATHS_MAX:
                    raise missing
                path = await self.path_to(self.wanted)
            except RemoteError:
                self.at = 5
                raise missing from None

    async def _all_bytes(self, head: SignedManifest) -> None:
        """Decode every encoding of every policy from 0 to the head; weights are held while a later delta needs them."""
        assert self.wanted is not None
        needed = {signed.manifest.policy_version for signed in (head, self.wanted)}
        last_use = {route.base_version: version for version, routes in sorted(self.routes.items()) for route in routes}
        held: dict[int, Weights] = {}
        for version in sorted(self.routes):
            weights = await self._every_encoding(await self.known(version), held)
            if weights is None:
                if version in needed:
                    self.at = 5
                    raise RemoteError(
                        ErrorCode.NOT_FOUND, f"policy {version}: a policy that it builds on is no longer kept"
                    )
                self.num_absent += 1
                continue
            self.num_policies += 1
            held[version] = weights
            held = {base: kept for base, kept in held.items() if last_use.get(base, -1) > version}

    async def _every_encoding(self, manifest: Manifest, held: dict[int, Weights]) -> Weights | None:
        """Return one policy's weights, or None if no encoding of it is kept with its base."""
        weights = None
        held_bytes = sum(map(num_bytes, held.values()))
        for encoding in manifest.encodings:
            base = None if encoding.base is None else held.get(encoding.base.policy_version)
            if encoding.base is not None and base is None:
                continue
            try:
                kept_bytes = 0 if weights is None else num_bytes(weights)
                weights = await self._decode(manifest, encoding, base, held_bytes + kept_bytes)
            except RemoteError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
        return weights

    async def open_index(self, manifest: Manifest, encoding: Encoding) -> ChunkIndex:
        """Fetch and check (5) an index."""
        self.at = 5
        data = await self.source.blob(encoding.index.digest, start=0, end=encoding.index.size)
        index = await asyncio.to_thread(open_index, data, encoding, manifest.tensors)
        self.num_bytes += len(data)
        self.on_bytes(len(data))
        return index

    def require_room(self, manifest: Manifest, num_bytes: int, *, held_bytes: int = 0) -> None:
        """Check that this machine's memory holds `num_bytes` decoded from a policy. Raises LocalError."""
        require_room(
            f"policy {manifest.policy_version}",
            num_bytes,
            held_bytes=held_bytes,
            bytes_max=self.memory_bytes_max,
            setting="--memory",
        )

    async def _decode(self, manifest: Manifest, encoding: Encoding, base: Weights | None, held_bytes: int) -> Weights:
        """Make checks (5) to (7) of one encoding. `held_bytes` are those of all weights that are held."""
        in_transit = sum(heapq.nlargest(2 * PARTS_AT_ONCE, (part.size for part in encoding.parts)))
        self.require_room(manifest, raw_bytes(manifest.tensors) + in_transit, held_bytes=held_bytes)
        index = await self.open_index(manifest, encoding)
        self.at = 7
        root = None if encoding.base is None else self.roots.get(encoding.base.policy_version)
        decoder = await asyncio.to_thread(
            CheckpointDecoder, manifest, encoding, index, base, base_root=root, pool=self.decoders
        )
        try:
            what = f"policy {manifest.policy_version}"
            await feed_parts(self.source, encoding.parts, decoder, what=what, on_part=self._hashed)
        except CheckFailed as failed:
            self.at = failed.at
            raise failed.error from None
        weights = await asyncio.to_thread(decoder.finish)
        self.roots[manifest.policy_version] = manifest.state_root
        if self.keep_weights and self.wanted and manifest.policy_version == self.wanted.manifest.policy_version:
            self.weights = weights
        self.num_chunks += len(index)
        self.num_tensors += len(manifest.tensors)
        return weights

    def _hashed(self, num_bytes: int) -> None:
        self.num_parts += 1
        self.num_bytes += num_bytes
        self.on_bytes(num_bytes)

    def _about_bytes(self) -> None:
        absent = f"; {self.num_absent} earlier policies are no longer kept" if self.num_absent else ""
        self.established(5, f"{self.num_parts} with their digests, {self.num_bytes:,} bytes{absent}")
        self.established(6, f"{self.num_chunks} with their digests")
        self.established(
            7,
            f"{self.num_tensors} tensors of {self.num_policies} policies decode to their digests and state roots",
        )

    # (8)

    async def _model_files(self) -> None:
        assert self.pinned is not None
        held_bytes = 0 if self.weights is None else num_bytes(self.weights)
        for file in self.pinned.spec.model_files:
            self.at = 8
            kept_bytes = sum(map(len, self.model_files.values()))
            require_room(
                f"model file {file.name}",
                file.size,
                held_bytes=held_bytes + kept_bytes,
                bytes_max=self.memory_bytes_max,
                setting="--memory",
            )
            data = await self.source.blob(file.digest, start=0, end=file.size)
            if len(data) != file.size or digest_of(data) != file.digest:
                raise RemoteError(
                    ErrorCode.DIGEST_MISMATCH,
                    f"{file.name} is not the file that the RunSpec names; take it from the run's creator",
                )
            if self.keep_weights:
                self.model_files[file.name] = data

    # Results

    def stop(self, error: RemoteError | Unreachable) -> None:
        """Report what the checks before the failed one established, then the failure."""
        at = self.at
        if len(self.checks) < 2 and at > 2:
            self.established(2, f"{len(self.digests)} signed by the run's trainer")
        if len(self.checks) < 3 and at > 3:
            self.established(3, f"{len(self.digests)} within the limits; tensor tables hash to their state roots")
        if 5 in self.due and len(self.checks) < 5 and at > 5:
            self.established(5, f"{self.num_parts} with their digests, {self.num_bytes:,} bytes so far")
        if len(self.checks) < 6 and at > 6:
            self.established(6, f"{self.num_chunks} with their digests so far")
        detail = error.detail if isinstance(error, RemoteError) else f"the source does not answer: {error}"
        check = Check(at, False, detail)
        self.checks.append(check)
        self.on_check(check)

    def report(self) -> AuditReport:
        """Return the report of the checks so far."""
        return AuditReport(
            checks=tuple(self.checks),
            run=None if self.pinned is None else self.pinned.digest,
            policy_version=-1 if self.head is None else self.head.manifest.policy_version,
            num_manifests=len(self.digests),
            num_policies=self.num_policies,
            num_bytes=self.num_bytes,
            due=self.due,
            key_ring=0 if self.pinned is None else self.pinned.keys.version,
            timestamp=self.timestamp,
            evidence=self.evidence,
        )
