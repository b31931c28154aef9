"""Find the newest policy by signature and chain, whichever source shows it.

Several sources are asked for their heads. Before a head is accepted, these are checked: (1) the trainer's signature over the
manifest; (2) check_manifest; (3) the links from the known head, and that it is no older than what a key ring of the root
names. The newest verified head is kept on disk, so that a restart does not allow a rollback. Two signed manifests for one
policy version are evidence: both are kept. Linked peers are asked what they hold under a known version, so that a coordinator
cannot show one head to us and another to them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from prime_node.broadcast.follow.known_chain import HeadOrder, KnownChain
from prime_node.broadcast.swarm.sources import NamedSource, SourceKind, SourcePool
from prime_node.files import write_durably
from prime_node.inside import place
from prime_node.patience import unless
from prime_node.ports.transport import Unreachable
from prime_protocol.chain import check_manifest
from prime_protocol.envelope import Envelope, open_envelope
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.manifest import BasePolicy, SignedManifest, open_manifest
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)

MANIFESTS_AT_ONCE = 8
EVIDENCE_FILES_MAX = 16
COMPARED_MAX = 2
"""Peers with which each head is compared: a manifest may be long, and each peer compares with others."""
COMPARE_S_MAX = 10.0


class Heads:
    """The verified head, and the manifests that lead to it."""

    def __init__(
        self, run: PinnedRun, pool: SourcePool, folder: Path, *, on_head: Callable[[int], None] = lambda version: None
    ) -> None:
        """Start from the head that `folder` holds from the last run. `on_head` is called with each verified head's version."""
        self.chain = KnownChain()
        self._run = run
        self._pool = pool
        self._folder = folder
        self._on_head = on_head
        self._ring = run.keys.version
        """Key ring by which the head was verified."""
        self._compared: dict[int, set[str]] = {}
        """Peers with which the newest version was compared."""
        folder.mkdir(parents=True, exist_ok=True)
        self._restore()

    @property
    def newest(self) -> int:
        """Policy version of the head; -1 before the first."""
        return -1 if self.chain.head is None else self.chain.head.manifest.policy_version

    async def look(self, *, wait_s: float = 0.0) -> None:
        """Ask every source that does not rest for its head, and follow the highest valid one.

        Peers are asked when they announce a newer policy. The preferred source may hold the request for `wait_s` until there
        is a new head, or until a peer announces one.
        """
        self._require_the_roots_chain()
        await self._compare()
        asked = [named for named in self._pool.ready() if named.kind is not SourceKind.PEER or named.head > self.newest]
        if wait_s and not any(named.kind is SourceKind.PEER for named in asked):
            await unless(self._pool.hinted(self.newest), self._ask(asked, wait_s=wait_s))
        else:
            await self._ask(asked)

    async def hinted(self) -> None:
        """Wait until a peer announces a newer policy."""
        await self._pool.hinted(self.newest)

    async def _compare(self) -> None:
        """Compare the head's manifest with that of peers that hold its version. `_order_of` keeps and reports a fork."""
        version = self.newest
        if version < 0:
            return
        self._compared = {version: self._compared.get(version, set())}
        names = self._compared[version]
        peers = [one for one in self._pool.ready() if one.kind is SourceKind.PEER and one.head >= version]
        fresh = [one for one in peers if one.name not in names][: COMPARED_MAX - len(names)]
        names.update(one.name for one in fresh)
        await asyncio.gather(*(self._compare_with(one, version) for one in fresh))

    async def _compare_with(self, named: NamedSource, version: int) -> None:
        try:
            async with asyncio.timeout(COMPARE_S_MAX):
                shown = await self._open(await named.source.manifest(version))
            if shown.manifest.policy_version != version:
                raise RemoteError(
                    ErrorCode.CHAIN_BROKEN, f"the source answered a request for manifest {version} with another one"
                )
            self._order_of(shown)
        except TimeoutError:
            self._pool.failed(named, Unreachable(f"manifest {version} took longer than {COMPARE_S_MAX:g} s"))
        except (RemoteError, Unreachable) as error:
            if not (isinstance(error, RemoteError) and error.code in (ErrorCode.FORK, ErrorCode.NOT_FOUND)):
                self._pool.failed(named, error)  # a fork is the trainer's fault, not that of the peer that shows it

    async def _ask(self, asked: Sequence[NamedSource], *, wait_s: float = 0.0) -> None:
        await asyncio.gather(*(self._look_at(named, wait_s=wait_s if named is asked[0] else 0.0) for named in asked))

    async def manifest(self, policy_version: int) -> SignedManifest:
        """Return a manifest at or below the head, verified against the chain. Raises RemoteError or Unreachable."""
        held = self.chain.recent(policy_version)
        if held is not None:
            return held
        while policy_version < self.chain.lowest:
            await self._fetch(self.chain.lowest)
        return await self._fetch(policy_version)

    async def base(self, wanted: BasePolicy) -> SignedManifest:
        """Return the manifest of a policy that a verified manifest names as a base: its root identifies it.

        It may precede the known chain; no links are walked for it. Raises RemoteError or Unreachable.
        """
        held = self.chain.recent(wanted.policy_version)
        return held if held and _is(held, wanted) else await self._fetch(wanted.policy_version, wanted)

    async def _look_at(self, named: NamedSource, *, wait_s: float) -> None:
        try:
            envelope = await named.source.head(wait_s=wait_s)
            if envelope is not None and not self._is_head(envelope):
                await self._consider(named, await self._open(envelope))
            if named.head > self.newest:
                promised, named.head = named.head, self.newest
                raise RemoteError(ErrorCode.NOT_FOUND, f"it claims policy {promised}, but does not serve it")
            self._pool.succeeded(named)
        except (RemoteError, Unreachable) as error:
            self._pool.failed(named, error)

    def _is_head(self, envelope: Envelope) -> bool:
        """Return whether this is the verified head. The check is cheap, and most polls end here."""
        return self.chain.head is not None and envelope.payload == self.chain.head.envelope.payload

    async def _open(self, envelope: Envelope) -> SignedManifest:
        """Check (1) and (2) in a thread, since a manifest may be large. Raises RemoteError."""
        return await asyncio.to_thread(_open_checked, envelope, self._run)

    async def _consider(self, named: NamedSource, shown: SignedManifest) -> None:
        """Accept a head if it is newer and continues the known chain (3). Raises RemoteError or Unreachable."""
        order = self._order_of(shown)
        if order is HeadOrder.OLDER:
            log.debug("source %s is behind: its newest is policy %d", named.name, shown.manifest.policy_version)
        if order is not HeadOrder.NEWER or self._is_rolled_back(shown):
            return
        if self.chain.head is None:
            self.chain.begin(shown)
        else:
            await self._link(named, shown)
        self._on_head(self.newest)
        self._write(self._folder / "head.json", shown.envelope)

    def _is_rolled_back(self, shown: SignedManifest) -> bool:
        """Return whether it is older than a manifest named by the run's root: then it is not the head, from any source."""
        named = self._run.keys.published
        return named is not None and shown.manifest.policy_version < named.policy_version

    def _require_the_roots_chain(self) -> None:
        """Check that the head still belongs to the run by the newest key ring, which may exclude a thief's.

        Raises LocalError if the head is not the run's.
        """
        head, version = self.chain.head, self._run.keys.version
        if head is None or version == self._ring:
            return
        try:
            self._run.keys.verify_manifest(head.envelope, head.point)
        except RemoteError as error:
            self._write(place(self._folder, f"evidence/withdrawn-{head.digest[:16]}.json"), head.envelope)
            (self._folder / "head.json").unlink(missing_ok=True)
            raise LocalError(
                f"policy {self.newest}, which this machine follows, is not part of the run by key ring {version}: "
                f"{error.detail}. It is kept in {self._folder / 'evidence'}; start again to follow the run's own policies"
            ) from None
        self._ring = version

    async def _link(self, named: NamedSource, shown: SignedManifest) -> None:
        """Walk from the known head to a newer one, along this source's manifests."""
        while self.newest < shown.manifest.policy_version - 1:
            versions = range(self.newest + 1, shown.manifest.policy_version)[:MANIFESTS_AT_ONCE]
            for envelope in await asyncio.gather(*(named.source.manifest(version) for version in versions)):
                await self._extend(named, await self._open(envelope))
        await self._extend(named, shown)

    async def _extend(self, named: NamedSource, new: SignedManifest) -> None:
        if new.manifest.policy_version <= self.newest:
            self._order_of(new)  # another source was faster; this one must agree
            return
        try:
            self.chain.extend(new)
        except RemoteError:
            # Both are signed. If the source has another manifest for our own head, that is the fork.
            other = await self._open(await named.source.manifest(self.newest))
            self._order_of(other)
            raise

    def _order_of(self, shown: SignedManifest) -> HeadOrder:
        """Return KnownChain.compare, and keep the evidence of a fork."""
        try:
            return self.chain.compare(shown)
        except RemoteError:
            self._keep_evidence(shown)
            raise

    async def _fetch(self, policy_version: int, wanted: BasePolicy | None = None) -> SignedManifest:
        last: Exception = Unreachable("every source is paused after errors")
        for named in self._pool.ready():
            try:
                signed = await self._open(await named.source.manifest(policy_version))
                if signed.manifest.policy_version != policy_version:
                    raise RemoteError(
                        ErrorCode.CHAIN_BROKEN,
                        f"the source answered a request for manifest {policy_version} with another one",
                    )
                if wanted is not None and not _is(signed, wanted):
                    raise RemoteError(
                        ErrorCode.CHAIN_BROKEN, f"policy {policy_version} is not the base that the manifest names"
                    )
                self._order_of(signed)
                if policy_version >= self.chain.lowest:
                    self.chain.confirm(signed)
                return signed
            except (RemoteError, Unreachable) as error:
                last = error
                if not (isinstance(error, RemoteError) and error.code is ErrorCode.NOT_FOUND):
                    self._pool.failed(named, error)
        raise last

    def _keep_evidence(self, other: SignedManifest) -> None:
        """Write down two signed manifests for one version, once: they convict the trainer's key."""
        version = other.manifest.policy_version
        folder = self._folder / "evidence"
        for signed in (self.chain.recent(version), other):
            if signed is None:
                continue
            path = place(folder, f"fork-{version:08d}-{signed.digest[:16]}.json")
            if not path.exists() and len(list(folder.glob("*.json"))) < EVIDENCE_FILES_MAX:
                self._write(path, signed.envelope)
                log.error("fork: two signed manifests for policy %d; the evidence is in %s", version, path)

    def _restore(self) -> None:
        """Load and verify the head from the last run. A damaged file does not stop the machine."""
        path = self._folder / "head.json"
        if not path.exists():
            return
        try:
            head = _open_checked(open_envelope(path.read_bytes()), self._run)
            if not self._is_rolled_back(head):
                self.chain.begin(head)
                self._on_head(self.newest)
        except RemoteError as error:
            log.warning("%s: %s; starting from the sources' head", path, error)
            path.unlink()

    def _write(self, path: Path, envelope: Envelope) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, envelope.to_bytes())
        except OSError as error:
            raise LocalError(f"checkpoint folder {self._folder}: {error}; free some space and start again") from None


def _open_checked(envelope: Envelope, run: PinnedRun) -> SignedManifest:
    signed = open_manifest(envelope, run)
    check_manifest(signed.manifest, run)
    return signed


def _is(signed: SignedManifest, wanted: BasePolicy) -> bool:
    return (signed.manifest.policy_version, signed.manifest.state_root) == (wanted.policy_version, wanted.state_root)
