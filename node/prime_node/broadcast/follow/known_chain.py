"""What a machine knows of the chain of manifests: one unbroken run of versions that ends in the head.

Invariant: every digest in here belongs to a manifest that the trainer signed and that links to its
neighbours. A newcomer begins with the head that it is shown: its signature says whose it is, and its digest
fixes the whole history before it, which `prime-node verify --chain` walks. From then on the head only moves
forward, link by link: an older head changes nothing (rollback), and another manifest for a known version is a
fork, reported as PeerError(FORK).
"""

from __future__ import annotations

from enum import StrEnum

from prime_protocol.chain import check_link
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.manifest import SignedManifest

RECENT_MAX = 16
"""Manifests kept whole; of older ones only the digest."""
DIGESTS_MAX = 2**16
"""Of what is still older nothing: it is fetched link by link where somebody asks for it, as a newcomer does."""


class HeadNews(StrEnum):
    """What a head that somebody shows means beside the known one."""

    SAME = "same"
    NEWER = "newer"
    OLDER = "older"
    """A source that lags, or one that tries a rollback. Not followed either way."""


class KnownChain:
    """Takes manifests whose signature and content have been checked (open_manifest, check_manifest)."""

    def __init__(self) -> None:
        self.head: SignedManifest | None = None
        self._digests: dict[int, str] = {}
        self._recent: dict[int, SignedManifest] = {}

    @property
    def lowest(self) -> int:
        """The oldest version whose digest is known."""
        return min(self._digests)

    def digest(self, policy_version: int) -> str | None:
        return self._digests.get(policy_version)

    def recent(self, policy_version: int) -> SignedManifest | None:
        """The whole manifest, where it is still held."""
        return self._recent.get(policy_version)

    def news(self, shown: SignedManifest) -> HeadNews:
        """Compare a shown head with what is known. Raises PeerError(FORK)."""
        if self.head is None:
            return HeadNews.NEWER
        version = shown.manifest.policy_version
        known = self._digests.get(version)
        if known is not None and known != shown.digest:
            raise PeerError(
                ErrorCode.FORK,
                f"two signed manifests for policy {version}: {known[:12]} and {shown.digest[:12]}",
            )
        newest = self.head.manifest.policy_version
        if version == newest:
            return HeadNews.SAME
        return HeadNews.NEWER if version > newest else HeadNews.OLDER

    def begin(self, head: SignedManifest) -> None:
        """The first head."""
        assert self.head is None
        if head.manifest.policy_version == 0:
            check_link(head.manifest, None)
        self._remember(head)
        self.head = head

    def extend(self, new: SignedManifest) -> None:
        """The next manifest after the head. Raises PeerError(CHAIN_BROKEN)."""
        assert self.head is not None
        check_link(new.manifest, self.head)
        self._remember(new)
        self.head = new
        if len(self._digests) > DIGESTS_MAX:  # one for one: whoever walks back meanwhile arrives
            del self._digests[self.lowest]

    def confirm(self, older: SignedManifest) -> None:
        """A manifest below the head that was fetched again, or for the first time. Raises PeerError(FORK)."""
        version = older.manifest.policy_version
        assert version in self._digests
        self.news(older)
        self._remember(older)

    def _remember(self, signed: SignedManifest) -> None:
        version = signed.manifest.policy_version
        self._digests[version] = signed.digest
        if signed.manifest.previous is not None:
            self._digests.setdefault(version - 1, signed.manifest.previous)
        self._recent[version] = signed
        while len(self._recent) > RECENT_MAX:
            del self._recent[min(self._recent)]
