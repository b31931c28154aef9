"""The manifests' part of an audit: checks (1) to (4) and (9). See audit.py.

Manifests are read when needed and not all held: of each one, only its digest, its roots and its encodings' sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from prime_node.broadcast.audit.audit_report import TITLES, Check, date_of
from prime_node.broadcast.follow.pinned import fetch_key_rings
from prime_node.broadcast.routes import Hop, Path, PathSearch, UpdateRoute, routes_of
from prime_node.ports.transport import PublicSource
from prime_protocol.chain import check_link, check_manifest, check_not_a_fork
from prime_protocol.envelope import Envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import Encoding, Manifest, SignedManifest, open_manifest
from prime_protocol.run_spec import PinnedRun, open_run_spec
from prime_protocol.timestamp import Timestamp, check_fresh, open_timestamp

WITH_PATH_MAX = 256
"""Manifests looked at for the cheapest path, once some path is known."""

Step = tuple[Manifest, Encoding]
"""One hop of an update path."""


@dataclass
class ManifestAudit:
    """State of the manifests' checks: what was read, and what it established."""

    source: PublicSource
    on_check: Callable[[Check], None]
    now_ms: int | None = None
    """Time at which the source must be fresh; None for a copy, whose age is reported and not judged."""
    is_pinned: bool = True
    """Whether the caller named the expected run; False if it comes from the audited folder's own link."""
    due: tuple[int, ...] = tuple(TITLES)
    checks: list[Check] = field(default_factory=list)
    at: int = 1
    """Number of the check in progress."""
    pinned: PinnedRun | None = None
    timestamp: Timestamp | None = None
    stamped: Envelope | None = None
    """Timestamp as received."""
    timestamp_fault: RemoteError | None = None
    """Reason why there is no timestamp, reported by check (9)."""
    head: SignedManifest | None = None
    wanted: SignedManifest | None = None
    """Requested policy: the head, or an earlier one."""
    evidence: tuple[Envelope, ...] = ()
    """Signed statements that contradict each other."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digests of the manifests that were opened."""
    routes: dict[int, tuple[UpdateRoute, ...]] = field(default_factory=dict)
    """Encodings of those manifests."""
    roots: dict[int, str] = field(default_factory=dict)
    base_roots: dict[tuple[int, int], str] = field(default_factory=dict)
    """Root of each base, by policy and base, as the policy's manifest states it."""
    closed: set[tuple[int, int | None]] = field(default_factory=set)
    """Encodings whose bytes are no longer kept."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of each policy's encodings."""

    async def manifests(self, run: str | None, *, chain: bool, policy_version: int | None) -> Path:
        """Make checks (1) to (4).

        Return the path to the wanted policy, itself last, or an empty one with `chain`, which decodes everything.
        """
        self.pinned = await self._run_spec(run)
        await fetch_key_rings(self.source, self.pinned.keys)
        self.established(1, self._about_run(run))
        self.timestamp = await self._timestamp(self.pinned)  # before the head, which must then not be older
        self.head = await self._head()
        self.wanted = await self._wanted(self.head, policy_version)
        if chain:
            await self._walk_chain(0, self.head)
        elif policy_version is not None:
            await self._walk_chain(self.wanted.manifest.policy_version, self.head)
        path = Path(()) if chain else await self.path_to(self.wanted)
        self._check_bases()
        await self._same_under_its_number(self.head)
        self._about_manifests(chain=chain, walked=policy_version is not None)
        return path

    # (1)

    async def _run_spec(self, run: str | None) -> PinnedRun:
        envelope = await self.source.run_spec()
        return open_run_spec(envelope, pinned=run or envelope.digest)

    def _about_run(self, run: str | None) -> str:
        assert self.pinned is not None
        rings = f"; keys by key ring {self.pinned.keys.version}" if self.pinned.keys.version else ""
        signed = f"'{self.pinned.spec.name}' ({self.pinned.digest[:12]}), signed by its root keys{rings}"
        if run and self.is_pinned:
            return signed
        by = "checked against the folder's own link; " if run else ""
        return f"{signed}; {by}not pinned: give the join link or --run to know that it is the run you mean"

    # (2) to (4)

    async def _manifest(self, policy_version: int) -> SignedManifest:
        """Fetch one manifest, with checks (2) and (3)."""
        assert self.pinned is not None
        self.at = 2
        signed = open_manifest(await self.source.manifest(policy_version), self.pinned)
        self.at = 3
        check_manifest(signed.manifest, self.pinned)
        if signed.manifest.policy_version != policy_version:
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN,
                f"the file of manifest {policy_version} has manifest {signed.manifest.policy_version}",
            )
        return signed

    async def _head(self) -> SignedManifest:
        assert self.pinned is not None
        self.at = 2
        envelope = await self.source.head()
        if envelope is None:
            raise RemoteError(ErrorCode.NOT_FOUND, "no policy has been published yet")
        signed = open_manifest(envelope, self.pinned)
        self.at = 3
        check_manifest(signed.manifest, self.pinned)
        named = self.pinned.keys.published
        if named is not None and signed.manifest.policy_version < named.policy_version:
            self.at = 4
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN,
                f"rollback: the head is policy {signed.manifest.policy_version}, and the run's root names a newer one, "
                f"{named.policy_version}",
            )
        self._note(signed)
        return signed

    def _note(self, signed: SignedManifest) -> None:
        version = signed.manifest.policy_version
        if self.digests.get(version, signed.digest) != signed.digest:
            self.at = 4
            self.evidence = (signed.envelope,)
            raise RemoteError(
                ErrorCode.FORK, f"the source changed manifest {version} during the audit; start the audit again"
            )
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
            raise RemoteError(
                ErrorCode.NOT_FOUND, f"policy {policy_version} is not published yet; the head is {newest}"
            )
        wanted = await self._manifest(policy_version)
        self._note(wanted)
        return wanted

    async def _walk_chain(self, first: int, head: SignedManifest) -> None:
        """Check the links from policy `first` to the head."""
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

    async def path_to(self, wanted: SignedManifest) -> Path:
        """Return the cheapest path from nothing. Raises RemoteError(NOT_FOUND) if none is open."""

        def open_routes(version: int) -> list[UpdateRoute] | None:
            made = self.routes.get(version)
            return None if made is None else [one for one in made if (version, one.base_version) not in self.closed]

        found = PathSearch(wanted.manifest.policy_version, open_routes, with_path_max=WITH_PATH_MAX)
        while unread := found.unread():
            self._note(await self._manifest(unread[0]))
        return found.require_path()

    async def step(self, hop: Hop) -> Step:
        """Return a hop of a path with its manifest, which is fetched again: a path may have thousands of hops."""
        assert self.wanted is not None
        is_wanted = hop.policy_version == self.wanted.manifest.policy_version
        manifest = self.wanted.manifest if is_wanted else await self.known(hop.policy_version)
        encoding = manifest.encoding(hop.route.base_version)
        assert encoding is not None
        return manifest, encoding

    def _check_bases(self) -> None:
        """Check that every delta's base is the policy of that number, as far as manifests were read."""
        self.at = 4
        for (version, base), root in self.base_roots.items():
            if self.roots.get(base, root) != root:
                raise RemoteError(ErrorCode.CHAIN_BROKEN, f"manifest {version}: its base has another state root")

    async def _same_under_its_number(self, head: SignedManifest) -> None:
        """Check that the head and the manifest under its number are the same: otherwise the source shows a fork."""
        numbered = await self._manifest(head.manifest.policy_version)
        self.at = 4
        self.evidence = (numbered.envelope, head.envelope)
        check_not_a_fork(numbered, head)
        self.evidence = ()

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

    async def known(self, policy_version: int) -> Manifest:
        """Fetch a manifest of the walked chain again; they are not all held in memory."""
        self.at = 5
        envelope = await self.source.manifest(policy_version)
        if envelope.digest != self.digests[policy_version]:
            raise RemoteError(
                ErrorCode.FORK,
                f"the source changed manifest {policy_version} during the audit; start the audit again",
            )
        return parse_json(envelope.payload, Manifest)

    # (9)

    async def _timestamp(self, pinned: PinnedRun) -> Timestamp | None:
        """Return the coordinator's timestamp, if there is one. Its age is check (9), which comes last."""
        try:
            self.stamped = await self.source.timestamp()
            stamp = open_timestamp(self.stamped, pinned)
            if stamp.key_ring > pinned.keys.version:  # it may have arrived meanwhile, and have replaced the signer
                await fetch_key_rings(self.source, pinned.keys)
                stamp = open_timestamp(self.stamped, pinned)
        except RemoteError as error:
            self.timestamp_fault = error
            return None
        return stamp

    def freshness(self) -> None:
        """Make check (9)."""
        assert self.pinned is not None
        assert self.head is not None
        self.at = 9
        version, stamp = self.head.manifest.policy_version, self.timestamp
        if stamp is not None:
            self._check_newest(stamp, self.pinned, self.head)
        if version == self.pinned.spec.max_steps:
            self.established(9, f"policy {version} is the run's last one")
        elif stamp is None:
            assert self.timestamp_fault is not None
            if self.now_ms is not None or self.timestamp_fault.code is not ErrorCode.NOT_FOUND:
                raise self.timestamp_fault
            self.established(9, "the source has no timestamp: a newer policy may exist")
        elif self.now_ms is None:
            self.established(
                9, f"policy {stamp.policy_version} was the newest at {date_of(stamp.issued_at_ms)}; this is a copy"
            )
        else:
            check_fresh(stamp, self.now_ms)
            self.established(9, f"policy {stamp.policy_version} is the newest, until {date_of(stamp.expires_at_ms)}")

    def _check_newest(self, stamp: Timestamp, pinned: PinnedRun, head: SignedManifest) -> None:
        """Check that the head is no older than the timestamp says. Raises RemoteError."""
        version = head.manifest.policy_version
        if stamp.policy_version > version:
            raise RemoteError(
                ErrorCode.EXPIRED,
                f"freeze: the source's head is policy {version}, but policy {stamp.policy_version} is published",
            )
        if stamp.policy_version == version and stamp.head != head.point:
            self.evidence = (head.envelope,) if self.stamped is None else (head.envelope, self.stamped)
            raise RemoteError(
                ErrorCode.FORK,
                f"the coordinator's timestamp names another manifest for policy {version} than the head",
            )
        if stamp.key_ring > pinned.keys.version:
            raise RemoteError(
                ErrorCode.EXPIRED, f"freeze: key ring {stamp.key_ring} is in force, but the source does not have it"
            )

    # Results

    def established(self, number: int, detail: str) -> None:
        """Record and report a check that passed."""
        check = Check(number, True, detail)
        self.checks.append(check)
        self.on_check(check)
