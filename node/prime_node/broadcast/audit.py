"""Is a published checkpoint what it claims to be? Numbered checks over any source, without torch.

    (1) the RunSpec has the pinned digest, and its root keys signed it
    (2) the trainer that the RunSpec names signed every manifest
    (3) every manifest's content holds: schema, limits, tensor table, encodings
    (4) the manifests form one chain up to the head, and the source shows no second one
    (5) every part and index has its digest, and each index fills its parts and covers its tensors
    (6) every chunk has its digest
    (7) every tensor decodes to its digest, and all of them to the state root
    (8) the model files are the ones that the RunSpec names

A policy may have several encodings. Of the head the cheapest way is taken; with `chain` all of every policy are decoded, and
each must give the same tensors.

The audit stops at the first thing that does not hold. Each check says what it established and nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from prime_node.broadcast.paths import Path, Route, routes_of, search
from prime_node.ports.transport import CheckpointSource, Unreachable
from prime_protocol.chain import check_link, check_manifest, check_not_a_fork
from prime_protocol.checkpoint import CheckpointDecoder
from prime_protocol.chunk_index import open_index
from prime_protocol.codec import CodecError
from prime_protocol.digest import digest_of
from prime_protocol.envelope import parse_json
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.manifest import Encoding, Manifest, PartEntry, SignedManifest, open_manifest
from prime_protocol.run_spec import PinnedRun, open_run_spec
from prime_protocol.weights import Weights

TITLES = {
    1: "run",
    2: "signatures",
    3: "manifests",
    4: "chain",
    5: "parts",
    6: "chunks",
    7: "tensors",
    8: "model files",
}


MANIFESTS_MAX = 256
"""Manifests read for the head's cheapest way, once some way is known."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check's outcome. Example: Check(5, passed=True, detail="3 parts, 4,096 bytes")."""

    number: int
    passed: bool
    detail: str
    """What was established, or why it does not hold."""

    @property
    def title(self) -> str:
        return TITLES[self.number]


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found."""

    checks: tuple[Check, ...]
    run: str | None
    """Digest of the RunSpec, once it was verified."""
    policy_version: int
    """The head; -1 where none was verified."""
    num_manifests: int
    num_policies: int
    """Policies whose every byte was verified."""
    num_bytes: int
    """Bytes of parts that were hashed."""

    @property
    def passed(self) -> bool:
        return len(self.checks) == len(TITLES) and all(check.passed for check in self.checks)

    @property
    def failure(self) -> Check | None:
        return next((check for check in self.checks if not check.passed), None)


async def audit(
    source: CheckpointSource,
    run: str | None,
    *,
    chain: bool = False,
    on_check: Callable[[Check], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> AuditReport:
    """Check the head, or with `chain` everything from policy 0 to the head.

    `run` is the digest from the join link; None takes the source's RunSpec for what it says, and (1) says so.
    Bytes of policies before the head that the source no longer keeps are counted, not failed: retention is no
    forgery. `on_bytes` hears of each part that was hashed. Never raises for what a source does.
    """
    work = _Audit(source, on_check, on_bytes)
    try:
        await work.all_checks(run, chain=chain)
    except (PeerError, Unreachable) as error:
        work.stop(error)
    return work.report()


@dataclass
class _Audit:
    source: CheckpointSource
    on_check: Callable[[Check], None]
    on_bytes: Callable[[int], None]
    checks: list[Check] = field(default_factory=list)
    at: int = 1
    """Number of the check under way."""
    pinned: PinnedRun | None = None
    head: SignedManifest | None = None
    digests: dict[int, str] = field(default_factory=dict)
    """Of the manifests that were opened."""
    routes: dict[int, tuple[Route, ...]] = field(default_factory=dict)
    """Their encodings."""
    roots: dict[int, str] = field(default_factory=dict)
    base_roots: dict[tuple[int, int], str] = field(default_factory=dict)
    """By policy and base: the root that the policy's manifest says its base has."""
    num_parts: int = 0
    num_chunks: int = 0
    num_tensors: int = 0
    num_policies: int = 0
    num_absent: int = 0
    """Policies before the head whose bytes are no longer kept."""
    num_bytes: int = 0

    async def all_checks(self, run: str | None, *, chain: bool) -> None:
        self.pinned = await self._run_spec(run)
        self._established(1, self._about_run(run))
        self.head = await self._head()
        if chain:
            await self._walk_chain(self.head)
        closed: set[tuple[int, int | None]] = set()
        path = None if chain else await self._path_to(self.head, closed)
        self._check_bases()
        await self._same_under_its_number(self.head)
        self._about_manifests(chain=chain)
        if path is None:
            await self._all_bytes(self.head)
        else:
            await self._bytes_of_head(self.head, path, closed)
        self._about_bytes()
        await self._model_files()
        self._established(8, f"{len(self.pinned.spec.model_files)} files have the digests of the RunSpec")

    # (1)

    async def _run_spec(self, run: str | None) -> PinnedRun:
        envelope = await self.source.run_spec()
        return open_run_spec(envelope, pinned=run or envelope.digest)

    def _about_run(self, run: str | None) -> str:
        assert self.pinned is not None
        signed = f"'{self.pinned.spec.name}' ({self.pinned.digest[:12]}), signed by its root keys"
        return signed if run else f"{signed}; not pinned: give the join link to know that it is the run you mean"

    # (2) to (4)

    async def _manifest(self, policy_version: int) -> SignedManifest:
        """(2) and (3) of one manifest."""
        assert self.pinned is not None
        self.at = 2
        signed = open_manifest(await self.source.manifest(policy_version), self.pinned)
        self.at = 3
        check_manifest(signed.manifest, self.pinned)
        if signed.manifest.policy_version != policy_version:
            raise PeerError(
                ErrorCode.CHAIN_BROKEN,
                f"under number {policy_version} lies manifest {signed.manifest.policy_version}",
            )
        return signed

    async def _head(self) -> SignedManifest:
        assert self.pinned is not None
        self.at = 2
        envelope = await self.source.head()
        if envelope is None:
            raise PeerError(ErrorCode.NOT_FOUND, "nothing has been published yet")
        signed = open_manifest(envelope, self.pinned)
        self.at = 3
        check_manifest(signed.manifest, self.pinned)
        self._note(signed)
        return signed

    def _note(self, signed: SignedManifest) -> None:
        version = signed.manifest.policy_version
        self.digests[version] = signed.digest
        self.routes[version] = routes_of(signed.manifest)
        self.roots[version] = signed.manifest.state_root
        for encoding in signed.manifest.encodings:
            if encoding.base is not None:
                self.base_roots[version, encoding.base.policy_version] = encoding.base.state_root

    async def _walk_chain(self, head: SignedManifest) -> None:
        previous: SignedManifest | None = None
        for version in range(head.manifest.policy_version):
            signed = await self._manifest(version)
            self.at = 4
            check_link(signed.manifest, previous)
            self._note(signed)
            previous = signed
        self.at = 4
        check_link(head.manifest, previous)

    async def _path_to(self, head: SignedManifest, closed: set[tuple[int, int | None]]) -> Path:
        """The cheapest way from nothing to the head. Raises PeerError(NOT_FOUND) where none is open."""
        while True:
            routes = {
                version: [route for route in known if (version, route.base_version) not in closed]
                for version, known in self.routes.items()
            }
            found = search(head.manifest.policy_version, routes)
            if not found.unread or (found.path is not None and len(self.routes) > MANIFESTS_MAX):
                break
            self._note(await self._manifest(found.unread[0]))
        if found.path is None:
            raise PeerError(ErrorCode.NOT_FOUND, f"no way leads to policy {head.manifest.policy_version} any more")
        return found.path

    def _check_bases(self) -> None:
        """Every delta's base is the policy of that number, as far as manifests were read."""
        self.at = 4
        for (version, base), root in self.base_roots.items():
            if self.roots.get(base, root) != root:
                raise PeerError(ErrorCode.CHAIN_BROKEN, f"manifest {version}: its base has another state root")

    async def _same_under_its_number(self, head: SignedManifest) -> None:
        """The head as such and the manifest under its number are one: else the source shows a fork."""
        numbered = await self._manifest(head.manifest.policy_version)
        self.at = 4
        check_not_a_fork(numbered, head)

    def _about_manifests(self, *, chain: bool) -> None:
        assert self.head is not None
        count, version = len(self.digests), self.head.manifest.policy_version
        self._established(2, f"{count} signed by the run's trainer")
        self._established(3, f"{count} within the limits; tensor tables hash to their state roots")
        walked = f"unbroken from policy 0 to policy {version} ({self.head.digest[:12]})"
        self._established(
            4, walked if chain else f"head is policy {version} ({self.head.digest[:12]}); history not walked"
        )

    # (5) to (7)

    async def _bytes_of_head(self, head: SignedManifest, path: Path, closed: set[tuple[int, int | None]]) -> None:
        """The bytes of the cheapest way to the head that is still kept."""
        while True:
            weights: Weights | None = None
            for hop in path.hops:
                name = hop.policy_version, hop.route.base_version
                manifest = head.manifest if name[0] == head.manifest.policy_version else await self._known(name[0])
                encoding = manifest.encoding(name[1])
                assert encoding is not None
                try:
                    weights = await self._decode(manifest, encoding, weights)
                except PeerError as error:
                    if error.code is not ErrorCode.NOT_FOUND:
                        raise
                    closed.add(name)
                    missing = error
                    break
            else:
                self.num_policies += len(path.hops)
                return
            try:
                path = await self._path_to(head, closed)
            except PeerError:
                self.at = 5
                raise missing from None

    async def _all_bytes(self, head: SignedManifest) -> None:
        """Every encoding of every policy from 0 to the head; weights are held while a later delta needs them."""
        last_use = {route.base_version: version for version, routes in sorted(self.routes.items()) for route in routes}
        held: dict[int, Weights] = {}
        for version in sorted(self.routes):
            manifest = head.manifest if version == head.manifest.policy_version else await self._known(version)
            weights = await self._every_encoding(manifest, held)
            if weights is None:
                if version == head.manifest.policy_version:
                    self.at = 5
                    raise PeerError(ErrorCode.NOT_FOUND, f"policy {version}: what it is built on is not kept")
                self.num_absent += 1
                continue
            self.num_policies += 1
            held[version] = weights
            held = {base: kept for base, kept in held.items() if last_use.get(base, -1) > version}

    async def _every_encoding(self, manifest: Manifest, held: dict[int, Weights]) -> Weights | None:
        """One policy's weights; None where no encoding of it is kept with its base."""
        weights = None
        for encoding in manifest.encodings:
            base = None if encoding.base is None else held.get(encoding.base.policy_version)
            if encoding.base is not None and base is None:
                continue
            try:
                weights = await self._decode(manifest, encoding, base)
            except PeerError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
        return weights

    async def _known(self, policy_version: int) -> Manifest:
        """A manifest of the walked chain again; they are not all held in memory."""
        self.at = 5
        envelope = await self.source.manifest(policy_version)
        if envelope.digest != self.digests[policy_version]:
            raise PeerError(ErrorCode.FORK, f"the source has changed manifest {policy_version} during the audit")
        return parse_json(envelope.payload, Manifest)

    async def _decode(self, manifest: Manifest, encoding: Encoding, base: Weights | None) -> Weights:
        """(5) to (7) of one encoding."""
        what = f"policy {manifest.policy_version}"
        index = open_index(await self._blob(encoding.index, f"{what}: index"), encoding, manifest.tensors)
        self.at = 7
        decoder = await asyncio.to_thread(CheckpointDecoder, manifest, encoding, index, base)
        for number, entry in enumerate(encoding.parts):
            data = await self._blob(entry, f"{what}: part {number}")
            self.num_parts += 1
            self.at = 6
            try:
                await asyncio.to_thread(decoder.feed_part, number, data)
            except CodecError:
                self.at = 7
                raise
        self.at = 7
        weights = await asyncio.to_thread(decoder.finish)
        self.num_chunks += len(index)
        self.num_tensors += len(manifest.tensors)
        return weights

    async def _blob(self, entry: PartEntry, what: str) -> bytes:
        """(5) of one blob."""
        self.at = 5
        data = await self.source.blob(entry.digest, start=0, end=entry.size)
        if len(data) != entry.size or await asyncio.to_thread(digest_of, data) != entry.digest:
            raise PeerError(ErrorCode.DIGEST_MISMATCH, f"{what} does not have its digest {entry.digest[:12]}")
        self.num_bytes += len(data)
        self.on_bytes(len(data))
        return data

    def _about_bytes(self) -> None:
        absent = f"; {self.num_absent} earlier policies are no longer kept" if self.num_absent else ""
        self._established(5, f"{self.num_parts} with their digests, {self.num_bytes:,} bytes{absent}")
        self._established(6, f"{self.num_chunks} with their digests")
        self._established(
            7,
            f"{self.num_tensors} tensors of {self.num_policies} policies decode to their digests and state roots",
        )

    # (8)

    async def _model_files(self) -> None:
        assert self.pinned is not None
        for file in self.pinned.spec.model_files:
            self.at = 8
            data = await self.source.blob(file.digest, start=0, end=file.size)
            if len(data) != file.size or digest_of(data) != file.digest:
                raise PeerError(ErrorCode.DIGEST_MISMATCH, f"{file.name} is not the file that the RunSpec names")

    # What was found

    def _established(self, number: int, detail: str) -> None:
        check = Check(number, True, detail)
        self.checks.append(check)
        self.on_check(check)

    def stop(self, error: PeerError | Unreachable) -> None:
        """Report what the checks before the failing one established, then the failure."""
        at = self.at
        if len(self.checks) < 2 and at > 2:
            self._established(2, f"{len(self.digests)} signed by the run's trainer")
        if len(self.checks) < 3 and at > 3:
            self._established(3, f"{len(self.digests)} within the limits; tensor tables hash to their state roots")
        if len(self.checks) < 5 and at > 5:
            self._established(5, f"{self.num_parts} with their digests, {self.num_bytes:,} bytes so far")
        if len(self.checks) < 6 and at > 6:
            self._established(6, f"{self.num_chunks} with their digests so far")
        detail = error.detail if isinstance(error, PeerError) else f"the source does not answer: {error}"
        check = Check(at, False, detail)
        self.checks.append(check)
        self.on_check(check)

    def report(self) -> AuditReport:
        return AuditReport(
            checks=tuple(self.checks),
            run=None if self.pinned is None else self.pinned.digest,
            policy_version=-1 if self.head is None else self.head.manifest.policy_version,
            num_manifests=len(self.digests),
            num_policies=self.num_policies,
            num_bytes=self.num_bytes,
        )
