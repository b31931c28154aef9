"""The known part of the chain of manifests: one unbroken sequence of versions that ends in the head.

Invariant: every digest in it belongs to a manifest that the trainer signed and that links to its neighbours. A newcomer
begins with the head that it is shown. Its signature says whose it is, and its digest fixes the whole history before it, which
`prime-node verify --chain` walks. From then on the head only moves forward, link by link. An older head changes nothing
(rollback). Another manifest for a known version is a fork, reported as RemoteError(FORK).
"""

from __future__ import annotations

from enum import StrEnum

from prime_protocol.chain import check_link
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import SignedManifest

RECENT_MAX = 16
"""Manifests kept whole; of older ones only the digest is kept."""
DIGESTS_MAX = 2**16
"""Digests kept. Still older manifests are fetched link by link when requested, as a newcomer does."""


class HeadOrder(StrEnum):
    """Relation of a shown head to the known one."""

    SAME = "same"
    NEWER = "newer"
    OLDER = "older"
    """An older version, from a source that lags or tries a rollback. Not followed either way."""


class KnownChain:
    """The known chain. It takes manifests whose signature and content were checked (open_manifest, check_manifest)."""

    def __init__(self) -> None:
        self.head: SignedManifest | None = None
        self._digests: dict[int, str] = {}
        self._recent: dict[int, SignedManifest] = {}

    @property
    def lowest(self) -> int:
        """Oldest version whose digest is known."""
        return min(self._digests)

    def digest(self, policy_version: int) -> str | None:
        """Return the digest of a version's manifest, if known."""
        return self._digests.get(policy_version)

    def recent(self, policy_version: int) -> SignedManifest | None:
        """Return the whole manifest, if it is still held."""
        return self._recent.get(policy_version)

    def compare(self, shown: SignedManifest) -> HeadOrder:
        """Compare a shown head with the known chain. Raises RemoteError(FORK)."""
        if self.head is None:
            return HeadOrder.NEWER
        version = shown.manifest.policy_version
        known = self._digests.get(version)
        if known is not None and known != shown.digest:
            raise RemoteError(
                ErrorCode.FORK,
                f"two signed manifests for policy {version}: {known[:12]} and {shown.digest[:12]}",
            )
        newest = self.head.manifest.policy_version
        if version == newest:
            return HeadOrder.SAME
        return HeadOrder.NEWER if version > newest else HeadOrder.OLDER

    def begin(self, head: SignedManifest) -> None:
        """Start the chain with the first head."""
        assert self.head is None
        if head.manifest.policy_version == 0:
            check_link(head.manifest, None)
        self._remember(head)
        self.head = head

    def extend(self, new: SignedManifest) -> None:
        """Add the next manifest after the head. Raises RemoteError(CHAIN_BROKEN)."""
        assert self.head is not None
        check_link(new.manifest, self.head)
        self._remember(new)
        self.head = new
        if len(self._digests) > DIGESTS_MAX:  # one for one, so that a walk backward still ends
            del self._digests[self.lowest]

    def confirm(self, older: SignedManifest) -> None:
        """Record a manifest below the head that was fetched. Raises RemoteError(FORK)."""
        version = older.manifest.policy_version
        assert version in self._digests
        self.compare(older)
        self._remember(older)

    def _remember(self, signed: SignedManifest) -> None:
        version = signed.manifest.policy_version
        self._digests[version] = signed.digest
        if signed.manifest.previous is not None:
            self._digests.setdefault(version - 1, signed.manifest.previous)
        self._recent[version] = signed
        while len(self._recent) > RECENT_MAX:
            del self._recent[min(self._recent)]
