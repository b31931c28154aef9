"""Find the newest policy by signature and chain, whichever source shows it.

Several sources are asked for their heads. Before a head is accepted, these are checked: (1) the trainer's signature over the
manifest; (2) check_manifest; (3) the links from the known head, and that it is no older than what a key ring of the root
names. The newest verified head is kept on disk, so that a restart does not allow a rollback. Two signed manifests for one
policy version are evidence: both are kept. Linked peers are asked what they hold under a known version, so that a coordinator
cannot show one head to us and another to them.

Waiting: a slow source delays no other. Each source has one question for its head at a time, with a time limit. `look` waits
GRACE_S from the first answer, unless that is the newest policy that any peer announces; questions without an answer continue,
and a later `look` uses their result. A peer's hint ends the wait for a held request, not the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from prime_node.broadcast.follow.known_chain import HeadOrder, KnownChain
from prime_node.broadcast.swarm.sources import NamedSource, SourceKind, SourcePool
from prime_node.files import disk_faults, read_or_begin, write_durably
from prime_node.inside import place
from prime_node.patience import first_answer
from prime_node.ports.transport import Unreachable
from prime_protocol.chain import checked_manifest
from prime_protocol.envelope import Envelope, open_envelope
from prime_protocol.errors import ErrorCode, RemoteError, TransientFault
from prime_protocol.manifest import BasePolicy, SignedManifest
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)

MANIFESTS_AT_ONCE = 8
EVIDENCE_FILES_MAX = 16
COMPARED_MAX = 2
"""Peers with which each head is compared: a manifest may be long, and each peer compares with others."""
ANSWER_S_MAX = 10.0
"""Seconds that a source has for one answer. They double with each failure of a permanent source, up to DOUBLINGS_MAX times:
it may be the only one, and the line slow."""
DOUBLINGS_MAX = 5
GRACE_S = 0.5
"""Seconds for which `look` waits for further answers after the first: a source that lags may be the fastest."""
FIRST_GRACE_S = 2.0
"""The same before the first head: the download that follows is the longest."""
HEDGE_S = 1.0
"""Seconds without an answer after which the next source is asked for the same manifest."""

_T = TypeVar("_T")


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
        self._is_forked = False
        """Whether two manifests of one policy were seen, of which the head or a predecessor is one."""
        self._compared: dict[int, set[str]] = {}
        """Peers with which the newest version was compared."""
        self._answered = ""
        """Source that served a manifest last. It is asked first, so that a stalled one costs HEDGE_S once."""
        self._questions: dict[tuple[str, bool], asyncio.Task[bool]] = {}
        """Questions that have not ended, or not been looked at since: by source, and whether its head was requested."""
        self._held: asyncio.Task[bool] | None = None
        """Question that its source may hold."""
        folder.mkdir(parents=True, exist_ok=True)
        self._restore()

    @property
    def newest(self) -> int:
        """Policy version of the head; -1 before the first."""
        return -1 if self.chain.head is None else self.chain.head.manifest.policy_version

    async def look(self, *, wait_s: float = 0.0, grace_s: float | None = None) -> None:
        """Ask every source that does not rest for its head, and follow the highest valid one.

        Peers are asked when they announce a newer policy. The preferred source may hold the request for `wait_s` until there
        is a new head, or until a peer announces one. With `grace_s`, further answers have that time in place of GRACE_S.
        Raises LocalError.
        """
        self._require_the_roots_chain()
        self._collect()
        asked = [
            named
            for named in self._pool.ready()
            if not self._is_asked(named.name) and (named.kind is not SourceKind.PEER or named.head > self.newest)
        ]
        held = None if self._held is None or self._held.done() else self._held
        if not wait_s or not (asked or held) or any(named.kind is SourceKind.PEER for named in asked):
            questions = [*self._begin_comparisons(), *(self._begin(named) for named in asked)]
            await self._answers(questions, grace_s=grace_s)
            return
        self._held = held = held or self._begin(asked.pop(0), wait_s=wait_s)
        questions = [*self._begin_comparisons(), held, *(self._begin(named) for named in asked)]
        hinted = asyncio.create_task(self.hinted())
        try:
            await self._answers(questions, wait_s=wait_s, hinted=hinted)
        finally:
            hinted.cancel()

    async def hinted(self) -> None:
        """Wait until a peer announces a newer policy."""
        await self._pool.hinted(self.newest, is_asked=self._is_asked)

    def close(self) -> None:
        """Cancel all questions. Idempotent."""
        for question in self._questions.values():
            question.cancel()

    def _is_asked(self, name: str) -> bool:
        return (name, True) in self._questions

    def _begin(self, named: NamedSource, *, wait_s: float = 0.0) -> asyncio.Task[bool]:
        question = asyncio.create_task(self._look_at(named, wait_s=wait_s))
        self._questions[named.name, True] = question
        return question

    def _collect(self) -> None:
        """Forget the questions that have ended. Raises LocalError for one that the disk has ended."""
        ended = [key for key, question in self._questions.items() if question.done()]
        for question in [self._questions.pop(key) for key in ended]:
            if not question.cancelled():
                question.result()

    async def _answers(
        self,
        questions: Sequence[asyncio.Task[bool]],
        *,
        wait_s: float = 0.0,
        grace_s: float | None = None,
        hinted: asyncio.Task[None] | None = None,
    ) -> None:
        """Wait for all questions, for GRACE_S after an answer, for the newest policy that peers announce, or for `hinted`.

        With `wait_s`, the first new head or the end of that time ends the wait. A cancellation cancels the questions.
        """
        loop, before = asyncio.get_running_loop(), self.newest
        grace_s = grace_s or (GRACE_S if before >= 0 else FIRST_GRACE_S)
        end_s = loop.time() + wait_s + grace_s if wait_s else None
        try:
            while open_ones := {question for question in questions if not question.done()}:
                left_s = None if end_s is None else end_s - loop.time()
                if left_s is not None and left_s <= 0:
                    break
                every: set[asyncio.Task[Any]] = {*open_ones, *self._questions.values(), *([hinted] if hinted else [])}
                await asyncio.wait(every, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                self._collect()
                announced = max((named.head for named in self._pool.peers), default=-1)
                is_new = self.newest > before and (wait_s or self.newest >= announced >= 0)
                if is_new or (hinted is not None and hinted.done()):
                    break
                if end_s is None and (self.newest > before or any(map(_is_answered, questions))):
                    end_s = loop.time() + grace_s
        except asyncio.CancelledError:
            for question in questions:
                question.cancel()
            raise
        self._collect()

    def _begin_comparisons(self) -> list[asyncio.Task[bool]]:
        """Compare the head's manifest with that of peers that hold its version. `_order_of` keeps and reports a fork."""
        version = self.newest
        if version < 0:
            return []
        self._compared = {version: self._compared.get(version, set())}
        names = self._compared[version]
        peers = [one for one in self._pool.ready() if one.kind is SourceKind.PEER and one.head >= version]
        new = [one for one in peers if one.name not in names and (one.name, False) not in self._questions]
        chosen = new[: COMPARED_MAX - len(names)]
        names.update(one.name for one in chosen)
        begun = {(one.name, False): asyncio.create_task(self._compare_with(one, version)) for one in chosen}
        self._questions |= begun
        return list(begun.values())

    async def _compare_with(self, named: NamedSource, version: int) -> bool:
        asked_s = self._pool.clock.monotonic_s()
        try:
            self._order_of(await self._manifest_of(named, version))
        except (RemoteError, Unreachable) as error:
            if not (isinstance(error, RemoteError) and error.code in (ErrorCode.FORK, ErrorCode.NOT_FOUND)):
                self._pool.failed(named, error, asked_s=asked_s)  # a fork is the trainer's fault, not that of the peer
        return False  # no answer about the head

    async def _answer(self, named: NamedSource, ask: Callable[[], Awaitable[_T]], *, wait_s: float = 0.0) -> _T:
        """Return one answer of a source. Raises RemoteError, and Unreachable also after the time that the source has."""
        doublings = 0 if named.kind is SourceKind.PEER else min(named.failures, DOUBLINGS_MAX)
        seconds = wait_s + ANSWER_S_MAX * 2**doublings
        try:
            async with asyncio.timeout(seconds):
                return await ask()
        except TimeoutError:
            raise Unreachable(f"an answer took longer than {seconds:g} s") from None

    async def _manifest_of(self, named: NamedSource, version: int) -> SignedManifest:
        """Return a source's manifest of a version, after checks (1) and (2). Raises RemoteError or Unreachable."""
        signed = await self._open(await self._answer(named, partial(named.source.manifest, version)))
        if signed.manifest.policy_version != version:
            raise RemoteError(
                ErrorCode.CHAIN_BROKEN, f"the source answered a request for manifest {version} with another one"
            )
        return signed

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

    async def _look_at(self, named: NamedSource, *, wait_s: float) -> bool:
        """Ask one source for its head, and follow it. Return whether the source kept its promises. Raises LocalError."""
        promised, asked_s = named.head, self._pool.clock.monotonic_s()
        try:
            envelope = await self._answer(named, partial(named.source.head, wait_s=wait_s), wait_s=wait_s)
            if envelope is not None and not self._is_head(envelope):
                await self._consider(named, await self._open(envelope))
            if promised > self.newest:
                named.head = self.newest if named.head <= promised else named.head
                raise RemoteError(ErrorCode.NOT_FOUND, f"it claims policy {promised}, but does not serve it")
            self._pool.succeeded(named)
        except (RemoteError, Unreachable) as error:
            self._pool.failed(named, error, asked_s=asked_s)
            return False
        if named.head > self.newest:  # announced meanwhile
            asyncio.get_running_loop().call_soon(self._pool.tell)
        return True

    def _is_head(self, envelope: Envelope) -> bool:
        """Return whether this is the verified head. The check is cheap, and most polls end here."""
        return self.chain.head is not None and envelope.payload == self.chain.head.envelope.payload

    async def _open(self, envelope: Envelope) -> SignedManifest:
        """Check (1) and (2) in a thread, since a manifest may be large. Raises RemoteError."""
        return await asyncio.to_thread(checked_manifest, envelope, self._run)

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

        After a fork, a head before the policy that the root names may be the wrong one of two, and nothing continues it then.
        Raises LocalError if the head is not the run's, or may not be.
        """
        head, version = self.chain.head, self._run.keys.version
        if head is not None and self._is_forked and self._is_rolled_back(head):
            self._withdraw(head, "there is another one, and the root names a later policy")
        if head is None or version == self._ring:
            return
        try:
            self._run.keys.verify_manifest(head.envelope, head.point)
        except RemoteError as error:
            self._withdraw(head, error.detail)
        self._ring = version

    def _withdraw(self, head: SignedManifest, reason: str) -> NoReturn:
        """Forget the head, keep it as evidence, and raise TransientFault."""
        self._write(place(self._folder, f"evidence/withdrawn-{head.digest[:16]}.json"), head.envelope)
        (self._folder / "head.json").unlink(missing_ok=True)
        raise TransientFault(
            f"policy {self.newest}, which this machine follows, is not part of the run by key ring {self._run.keys.version}: "
            f"{reason}. It is kept in {self._folder / 'evidence'}; start again to follow the run's own policies"
        )

    async def _link(self, named: NamedSource, shown: SignedManifest) -> None:
        """Walk from the known head to a newer one, along this source's manifests."""
        while self.newest < shown.manifest.policy_version - 1:
            versions = range(self.newest + 1, shown.manifest.policy_version)[:MANIFESTS_AT_ONCE]
            answers = (self._answer(named, partial(named.source.manifest, version)) for version in versions)
            for envelope in await asyncio.gather(*answers):
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
            other = await self._open(await self._answer(named, partial(named.source.manifest, self.newest)))
            self._order_of(other)
            raise

    def _order_of(self, shown: SignedManifest) -> HeadOrder:
        """Return KnownChain.compare, and keep the evidence of a fork."""
        try:
            return self.chain.compare(shown)
        except RemoteError:
            self._is_forked = True
            self._keep_evidence(shown)
            raise

    async def _fetch(self, policy_version: int, wanted: BasePolicy | None = None) -> SignedManifest:
        ready = self._pool.ready()
        if not ready:
            raise Unreachable("every source is paused after errors")
        ready.sort(key=lambda named: named.name != self._answered)
        asks = [partial(self._fetch_from, named, policy_version, wanted) for named in ready]
        return await first_answer(asks, hedge_s=HEDGE_S)

    async def _fetch_from(self, named: NamedSource, policy_version: int, wanted: BasePolicy | None) -> SignedManifest:
        asked_s = self._pool.clock.monotonic_s()
        try:
            signed = await self._manifest_of(named, policy_version)
            if wanted is not None and not _is(signed, wanted):
                raise RemoteError(
                    ErrorCode.CHAIN_BROKEN, f"policy {policy_version} is not the base that the manifest names"
                )
            self._order_of(signed)
            if policy_version >= self.chain.lowest:
                self.chain.confirm(signed)
        except (RemoteError, Unreachable) as error:
            if not (isinstance(error, RemoteError) and error.code is ErrorCode.NOT_FOUND):
                self._pool.failed(named, error, asked_s=asked_s)
            raise
        self._answered = named.name
        return signed

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
        if not (data := read_or_begin(path)):
            return
        try:
            head = checked_manifest(open_envelope(data), self._run)
            if not self._is_rolled_back(head):
                self.chain.begin(head)
                self._on_head(self.newest)
        except RemoteError as error:
            log.warning("%s: %s; starting from the sources' head", path, error)
            path.unlink()

    def _write(self, path: Path, envelope: Envelope) -> None:
        with disk_faults(f"checkpoint folder {self._folder}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, envelope.to_bytes())


def _is(signed: SignedManifest, wanted: BasePolicy) -> bool:
    return (signed.manifest.policy_version, signed.manifest.state_root) == (wanted.policy_version, wanted.state_root)


def _is_answered(question: asyncio.Task[bool]) -> bool:
    return question.done() and not question.cancelled() and question.exception() is None and question.result()
