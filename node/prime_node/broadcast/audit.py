"""Is a published checkpoint what it claims to be? Numbered checks over any source, without torch.

    (1) the RunSpec has the pinned digest, and its root keys signed it
    (2) the trainer that the RunSpec names signed every manifest
    (3) every manifest's content holds: schema, limits, tensor table, encodings
    (4) the manifests form one chain up to the head, and the source shows no second one
    (5) every part and index has its digest, and each index fills its parts and covers its tensors
    (6) every chunk has its digest
    (7) every tensor decodes to its digest, and all of them to the state root
    (8) the model files are the ones that the RunSpec names

A policy may have several encodings. Of one policy the cheapest way that is kept is taken; with `chain` all of every policy are
decoded, and each must give the same tensors.

The audit stops at the first thing that does not hold. Each check says what it established and nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from prime_node.broadcast.audit_report import TITLES, AuditReport, Check
from prime_node.broadcast.paths import Route, routes_of, search
from prime_node.broadcast.verified_parts import CheckFailed, feed_parts
from prime_node.ports.transport import CheckpointSource, Unreachable
from prime_protocol.chain import check_link, check_manifest, check_not_a_fork
from prime_protocol.checkpoint import CheckpointDecoder
from prime_protocol.chunk_index import ChunkIndex, open_index
from prime_protocol.digest import digest_of
from prime_protocol.envelope import parse_json
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.manifest import Encoding, Manifest, SignedManifest, open_manifest
from prime_protocol.run_spec import PinnedRun, open_run_spec
from prime_protocol.weights import Weights

__all__ = ["TITLES", "Audit", "AuditReport", "Check", "Verified", "audit"]


MANIFESTS_MAX = 256
"""Manifests read for the cheapest way, once some way is known."""

Step = tuple[Manifest, Encoding]
"""One hop of a way."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What an audit has found to hold, for whoever goes on with it: an export, a comparison."""

    run: PinnedRun
    signed: SignedManifest
    weights: Weights
    model_files: Mapping[str, bytes]


async def audit(
    source: CheckpointSource,
    run: str | None,
    *,
    chain: bool = False,
    policy_version: int | None = None,
    on_check: Callable[[Check], None] = lambda _: None,
    on_bytes: Callable[[int], None] = lambda _: None,
    on_total: Callable[[int], None] = lambda _: None,
    on_verified: Callable[[Verified], None] | None = None,
) -> AuditReport:
    """Check the head, or policy `policy_version` and how the head follows from it, or with `chain` everything
    from policy 0 to the head.

    `run` is the digest from the join link; None takes the source's RunSpec for what it says, and (1) says so.
    Bytes of policies before the head that the source no longer keeps are counted, not failed: retention is no
    forgery. `on_total` hears how many bytes there are, `on_bytes` of each part that was hashed, and
    `on_verified` gets the policy asked for, once every check has passed. Never raises for what a source does.
    """
    work = Audit(source, on_check, on_bytes, on_total, keep_weights=on_verified is not None)
    try:
        await work.all_checks(run, chain=chain, policy_version=policy_version)
    except (PeerError, Unreachable) as error:
        work.stop(error)
        return work.report()
    if on_verified is not None:
        on_verified(work.verified())
    return work.report()


@dataclass
class Audit:
    """One audit under way."""

    source: CheckpointSource
    on_check: Callable[[Check], None]
    on_bytes: Callable[[int], None]
    on_total: Callable[[int], None] = lambda _: None
    due: tuple[int, ...] = tuple(TITLES)
    keep_weights: bool = False
    """Whether the wanted policy's weights and the model files outlive their check."""
    checks: list[Check] = field(default_factory=list)
    at: int = 1
    """Number of the check under way."""
    pinned: PinnedRun | None = None
    head: SignedManifest | None = None
    wanted: SignedManifest | None = None
    """The policy that was asked for: the head, or an earlier one."""
    weights: Weights | None = None
    model_files: dict[str, bytes] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    """Of the manifests that were opened."""
    routes: dict[int, tuple[Route, ...]] = field(default_factory=dict)
    """Their encodings."""
    roots: dict[int, str] = field(default_factory=dict)
    base_roots: dict[tuple[int, int], str] = field(default_factory=dict)
    """By policy and base: the root that the policy's manifest says its base has."""
    closed: set[tuple[int, int | None]] = field(default_factory=set)
    """Encodings whose bytes are no longer kept."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of each one's encodings."""
    num_parts: int = 0
    num_chunks: int = 0
    num_tensors: int = 0
    num_policies: int = 0
    num_absent: int = 0
    """Policies before the head whose bytes are no longer kept."""
    num_bytes: int = 0

    async def all_checks(self, run: str | None, *, chain: bool, policy_version: int | None) -> None:
        path = await self.manifests(run, chain=chain, policy_version=policy_version)
        assert self.pinned is not None
        assert self.head is not None
        self.on_total(sum(self.sizes.values() if chain else (encoding.sent_bytes for _, encoding in path)))
        await (self._all_bytes(self.head) if chain else self._bytes_of(path))
        self._about_bytes()
        await self._model_files()
        self.established(8, f"{len(self.pinned.spec.model_files)} files have the digests of the RunSpec")

    async def manifests(self, run: str | None, *, chain: bool, policy_version: int | None) -> list[Step]:
        """(1) to (4). Returns what the wanted policy is built on, itself last; nothing with `chain`, which takes all."""
        self.pinned = await self._run_spec(run)
        self.established(1, self._about_run(run))
        self.head = await self._head()
        self.wanted = await self._wanted(self.head, policy_version)
        if chain:
            await self._walk_chain(0, self.head)
        elif policy_version is not None:
            await self._walk_chain(self.wanted.manifest.policy_version, self.head)
        path = [] if chain else await self._path_to(self.wanted)
        self._check_bases()
        await self._same_under_its_number(self.head)
        self._about_manifests(chain=chain, walked=policy_version is not None)
        return path

    def verified(self) -> Verified:
        assert self.pinned is not None
        assert self.wanted is not None
        assert self.weights is not None
        return Verified(self.pinned, self.wanted, self.weights, self.model_files)

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
        if self.digests.get(version, signed.digest) != signed.digest:
            self.at = 4
            raise PeerError(ErrorCode.FORK, f"the source has changed manifest {version} during the audit")
        self.digests[version] = signed.digest
        self.routes[version] = routes_of(signed.manifest)
        self.roots[version] = signed.manifest.state_root
        self.sizes[version] = sum(encoding.sent_bytes for encoding in signed.manifest.encodings)
        for encoding in signed.manifest.encodings:
            if encoding.base is not None:
                self.base_roots[version, encoding.base.policy_version] = encoding.base.state_root

    async def _wanted(self, head: SignedManifest, policy_version: int | None) -> SignedManifest:
        newest = head.manifest.policy_version
        if policy_version is None or policy_version == newest:
            return head
        if policy_version > newest:
            raise PeerError(ErrorCode.NOT_FOUND, f"policy {policy_version} is not published yet; the head is {newest}")
        wanted = await self._manifest(policy_version)
        self._note(wanted)
        return wanted

    async def _walk_chain(self, first: int, head: SignedManifest) -> None:
        """Link by link from policy `first` to the head."""
        previous: SignedManifest | None = None
        for version in range(first, head.manifest.policy_version):
            signed = await self._manifest(version)
            self.at = 4
            if version == 0 or previous is not None:
                check_link(signed.manifest, previous)
            self._note(signed)
            previous = signed
        self.at = 4
        if head.manifest.policy_version == 0 or previous is not None:
            check_link(head.manifest, previous)

    async def _path_to(self, wanted: SignedManifest) -> list[Step]:
        """The cheapest way from nothing, in the order in which it is applied. Raises PeerError(NOT_FOUND) where none is open."""
        version = wanted.manifest.policy_version
        while True:
            routes = {
                known: [route for route in made if (known, route.base_version) not in self.closed]
                for known, made in self.routes.items()
            }
            found = search(version, routes)
            if not found.unread or (found.path is not None and len(self.routes) > MANIFESTS_MAX):
                break
            self._note(await self._manifest(found.unread[0]))
        if found.path is None:
            raise PeerError(ErrorCode.NOT_FOUND, f"no way leads to policy {version} any more")
        return [await self._step(hop.policy_version, hop.route.base_version, wanted) for hop in found.path.hops]

    async def _step(self, version: int, base: int | None, wanted: SignedManifest) -> Step:
        is_wanted = version == wanted.manifest.policy_version
        manifest = wanted.manifest if is_wanted else await self._known(version)
        encoding = manifest.encoding(base)
        assert encoding is not None
        return manifest, encoding

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

    def _about_manifests(self, *, chain: bool, walked: bool) -> None:
        assert self.head is not None
        assert self.wanted is not None
        count, head = len(self.digests), f"policy {self.head.manifest.policy_version} ({self.head.digest[:12]})"
        self.established(2, f"{count} signed by the run's trainer")
        self.established(3, f"{count} within the limits; tensor tables hash to their state roots")
        if chain or walked:
            first = 0 if chain else self.wanted.manifest.policy_version
            self.established(4, f"unbroken from policy {first} to {head}")
        else:
            self.established(4, f"head is {head}; history not walked")

    # (5) to (7)

    async def _bytes_of(self, path: list[Step]) -> None:
        """The bytes of the cheapest way that is still kept."""
        assert self.wanted is not None
        while True:
            weights: Weights | None = None
            for manifest, encoding in path:
                try:
                    weights = await self._decode(manifest, encoding, weights)
                except PeerError as error:
                    if error.code is not ErrorCode.NOT_FOUND:
                        raise
                    self.closed.add((manifest.policy_version, encoding.base_version))
                    missing = error
                    break
            else:
                self.num_policies += len(path)
                return
            try:
                path = await self._path_to(self.wanted)
            except PeerError:
                self.at = 5
                raise missing from None

    async def _all_bytes(self, head: SignedManifest) -> None:
        """Every encoding of every policy from 0 to the head; weights are held while a later delta needs them."""
        assert self.wanted is not None
        needed = {signed.manifest.policy_version for signed in (head, self.wanted)}
        last_use = {route.base_version: version for version, routes in sorted(self.routes.items()) for route in routes}
        held: dict[int, Weights] = {}
        for version in sorted(self.routes):
            weights = await self._every_encoding(await self._known(version), held)
            if weights is None:
                if version in needed:
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

    async def open_index(self, manifest: Manifest, encoding: Encoding) -> ChunkIndex:
        """(5) of an index."""
        self.at = 5
        data = await self.source.blob(encoding.index.digest, start=0, end=encoding.index.size)
        index = await asyncio.to_thread(open_index, data, encoding, manifest.tensors)
        self.num_bytes += len(data)
        self.on_bytes(len(data))
        return index

    async def _decode(self, manifest: Manifest, encoding: Encoding, base: Weights | None) -> Weights:
        """(5) to (7) of one encoding."""
        index = await self.open_index(manifest, encoding)
        self.at = 7
        decoder = await asyncio.to_thread(CheckpointDecoder, manifest, encoding, index, base)
        try:
            what = f"policy {manifest.policy_version}"
            await feed_parts(self.source, encoding.parts, decoder, what=what, on_part=self._hashed)
        except CheckFailed as failed:
            self.at = failed.at
            raise failed.error from None
        weights = await asyncio.to_thread(decoder.finish)
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
        for file in self.pinned.spec.model_files:
            self.at = 8
            data = await self.source.blob(file.digest, start=0, end=file.size)
            if len(data) != file.size or digest_of(data) != file.digest:
                raise PeerError(ErrorCode.DIGEST_MISMATCH, f"{file.name} is not the file that the RunSpec names")
            if self.keep_weights:
                self.model_files[file.name] = data

    # What was found

    def established(self, number: int, detail: str) -> None:
        check = Check(number, True, detail)
        self.checks.append(check)
        self.on_check(check)

    def stop(self, error: PeerError | Unreachable) -> None:
        """Report what the checks before the failing one established, then the failure."""
        at = self.at
        if len(self.checks) < 2 and at > 2:
            self.established(2, f"{len(self.digests)} signed by the run's trainer")
        if len(self.checks) < 3 and at > 3:
            self.established(3, f"{len(self.digests)} within the limits; tensor tables hash to their state roots")
        if 5 in self.due and len(self.checks) < 5 and at > 5:
            self.established(5, f"{self.num_parts} with their digests, {self.num_bytes:,} bytes so far")
        if len(self.checks) < 6 and at > 6:
            self.established(6, f"{self.num_chunks} with their digests so far")
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
            due=self.due,
        )
