"""Is a published checkpoint what it claims to be? Numbered checks over any source, without torch.

    (1) the RunSpec has the pinned digest, and its root keys signed it
    (2) the trainer that the RunSpec names signed every manifest
    (3) every manifest's content holds: schema, limits, tensor table, parts and chunks
    (4) the manifests form one chain up to the head, and the source shows no second one
    (5) every part has its digest
    (6) every chunk has its digest
    (7) every tensor decodes to its digest, and all of them to the state root
    (8) the model files are the ones that the RunSpec names

The audit stops at the first thing that does not hold. Each check says what it established and nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from prime_node.ports.transport import CheckpointSource, Unreachable
from prime_protocol.chain import check_link, check_manifest, check_not_a_fork
from prime_protocol.checkpoint import CheckpointDecoder
from prime_protocol.codec import CodecError
from prime_protocol.digest import digest_of
from prime_protocol.envelope import parse_json
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.manifest import Manifest, SignedManifest, open_manifest
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
    bases: dict[int, int | None] = field(default_factory=dict)
    """What each of them is a delta of."""
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
        path = [] if chain else await self._path_to(self.head)
        await self._same_under_its_number(self.head)
        self._about_manifests(chain=chain)
        await (self._all_bytes(self.head) if chain else self._bytes_of(path))
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
        version, base = signed.manifest.policy_version, signed.manifest.base
        self.digests[version] = signed.digest
        self.bases[version] = None if base is None else base.policy_version

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

    async def _path_to(self, head: SignedManifest) -> list[Manifest]:
        """What the head is built on, in the order in which it is applied: an anchor first, the head last."""
        path = [head.manifest]
        while (base := path[-1].base) is not None:
            below = await self._manifest(base.policy_version)
            self.at = 4
            if below.manifest.state_root != base.state_root:
                raise PeerError(
                    ErrorCode.CHAIN_BROKEN,
                    f"manifest {path[-1].policy_version}: its base has another state root",
                )
            self._note(below)
            path.append(below.manifest)
        return path[::-1]

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

    async def _bytes_of(self, path: list[Manifest]) -> None:
        """The head's bytes, and those of what it is a delta of."""
        weights: Weights | None = None
        for manifest in path:
            weights = await self._decode(manifest, weights)
            self.num_policies += 1

    async def _all_bytes(self, head: SignedManifest) -> None:
        """Every policy from 0 to the head, each decoded once; weights are held while a later delta needs
        them."""
        bases = self.bases
        needed_by_head = _path(head.manifest.policy_version, bases)
        last_use = {base: version for version, base in bases.items() if base is not None}
        held: dict[int, Weights] = {}
        for version, base_version in sorted(bases.items()):
            manifest = await self._known(version)
            base_weights = None if base_version is None else held.get(base_version)
            try:
                if base_version is not None and base_weights is None:
                    raise PeerError(ErrorCode.NOT_FOUND, f"policy {version}: its base {base_version} is not kept")
                weights = await self._decode(manifest, base_weights)
            except PeerError as error:
                if error.code is not ErrorCode.NOT_FOUND or version in needed_by_head:
                    raise
                self.num_absent += 1
                continue
            self.num_policies += 1
            if last_use.get(version, -1) > version:
                held[version] = weights
            for old in [old for old in held if last_use[old] <= version]:
                del held[old]

    async def _known(self, policy_version: int) -> Manifest:
        """A manifest of the walked chain again; they are not all held in memory."""
        self.at = 5
        envelope = await self.source.manifest(policy_version)
        if envelope.digest != self.digests[policy_version]:
            raise PeerError(ErrorCode.FORK, f"the source has changed manifest {policy_version} during the audit")
        return parse_json(envelope.payload, Manifest)

    async def _decode(self, manifest: Manifest, base: Weights | None) -> Weights:
        """(5) to (7) of one policy."""
        self.at = 7
        if manifest.base is None:
            base = None
        decoder = await asyncio.to_thread(CheckpointDecoder, manifest, base)
        for number, entry in enumerate(manifest.parts):
            self.at = 5
            data = await self.source.blob(entry.digest, start=0, end=entry.size)
            if len(data) != entry.size or await asyncio.to_thread(digest_of, data) != entry.digest:
                raise PeerError(
                    ErrorCode.DIGEST_MISMATCH,
                    f"policy {manifest.policy_version}: part {number} does not have its digest {entry.digest[:12]}",
                )
            self.num_parts += 1
            self.num_bytes += len(data)
            self.at = 6
            try:
                await asyncio.to_thread(decoder.feed_part, number, data)
            except CodecError:
                self.at = 7
                raise
            self.on_bytes(len(data))
        self.at = 7
        weights = await asyncio.to_thread(decoder.finish)
        self.num_chunks += len(manifest.chunks)
        self.num_tensors += len(manifest.tensors)
        return weights

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


def _path(version: int, bases: dict[int, int | None]) -> set[int]:
    """A policy and everything that it is built on."""
    path = set()
    at: int | None = version
    while at is not None:
        path.add(at)
        at = bases[at]
    return path
