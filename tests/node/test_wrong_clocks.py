"""A coordinator's clock jumps by seconds to days, over restarts too: its timestamps contradict none that a client took."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.node.coordinator_world import COORDINATOR, make_manifest, make_run
from tests.node.table_engine import table_weights
from tests.node.trust_world import make_source, make_trust
from tests.time_world import VirtualClock

from prime_lab.memory_blobs import MemoryDocuments
from prime_node.adapters.system_clock import SystemClock
from prime_node.coordinator.api.statements import DATES_NAME, TimestampSigner
from prime_node.coordinator.manifests import PublishedManifests
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.limits import REQUEST_AGE_S_MAX
from prime_protocol.timestamp import Timestamp, check_follows, check_fresh

RUN = make_run()
HOUR_S, DAY_S = 3_600.0, 86_400.0
LIFETIME_S, INTERVAL_S = 600.0, 30.0
REACH_S = LIFETIME_S + 2 * REQUEST_AGE_S_MAX


class JumpingClock(SystemClock):
    """A clock that a test sets: `seconds` pass, and the wall clock is ahead of the true time."""

    def __init__(self) -> None:
        self.seconds, self.ahead_s = 1_000_000.0, 0.0

    def now_ms(self) -> int:
        return round(1_000 * (self.seconds + self.ahead_s))

    def monotonic_s(self) -> float:
        return self.seconds


@dataclass
class Signing:
    """The signer of a coordinator that may restart, without the rest of it."""

    clock: JumpingClock = field(default_factory=JumpingClock)
    documents: MemoryDocuments = field(default_factory=MemoryDocuments)
    private: MemoryDocuments = field(default_factory=MemoryDocuments)
    lifetime_s: float = LIFETIME_S

    def __post_init__(self) -> None:
        self.manifests = PublishedManifests(RUN, None, self.documents)  # type: ignore[arg-type]
        self._begin()

    def _begin(self) -> None:
        self.signer = TimestampSigner(
            RUN,
            COORDINATOR,
            self.clock,
            self.manifests,
            self.documents,
            self.private,
            interval_s=INTERVAL_S,
            lifetime_s=self.lifetime_s,
        )

    async def restart(self) -> None:
        self._begin()
        await self.signer.restore_time()

    def publish(self) -> None:
        batch = "b" * 64 if self.manifests.head else None
        self.manifests.head = make_manifest(RUN, self.manifests.head, batch=batch)[0]

    async def stamp(self) -> Timestamp:
        await self.signer.timestamp()
        assert self.signer.newest is not None
        return self.signer.newest[0]


def take(stamp: Timestamp, known: Timestamp | None, now_ms: int) -> Timestamp | None:
    """Return the newest timestamp of a client that is shown one. A contradiction raises."""
    try:
        if known is None:
            check_fresh(stamp, now_ms)
        elif not check_follows(stamp, known, now_ms):
            return known
    except RemoteError as error:
        if error.code is not ErrorCode.EXPIRED:
            raise
        return known
    return stamp


async def jump_about(seed: int, *, restarts: float) -> int:
    """Let a clock jump between looks of three clients. Return how often the clock dated a timestamp before the last one."""
    drawn, signing = random.Random(seed), Signing()
    clients_ahead_s = (0.0, drawn.uniform(-100.0, 0.0), drawn.uniform(0.0, 100.0))
    known: list[Timestamp | None] = [None] * 3
    last_ms, num_back = 0, 0
    for _ in range(150):
        signing.clock.seconds += drawn.choice((1.0, 30.0, 200.0)) * drawn.random()
        if drawn.random() < 0.15:
            far_s = drawn.choice((0.0, 60.0, 150.0, 400.0, 900.0, HOUR_S, DAY_S))
            signing.clock.ahead_s = drawn.choice((-1, 1)) * far_s * drawn.uniform(0.5, 1.0)
        if drawn.random() < restarts:
            await signing.restart()
        if drawn.random() < 0.2:
            signing.publish()
        stamp = await signing.stamp()
        num_back += stamp.issued_at_ms < last_ms
        last_ms = stamp.issued_at_ms
        for index, ahead_s in enumerate(clients_ahead_s):
            if drawn.random() < 0.7:
                now_ms = round(1_000 * (signing.clock.seconds + ahead_s))
                known[index] = take(stamp, known[index], now_ms)
    signing.clock.ahead_s = 0.0
    for _ in range(2):  # the clock is right again: each client comes back
        await signing.stamp()
        signing.clock.seconds += REACH_S
    now_ms = round(1_000 * signing.clock.seconds)
    taken = take(await signing.stamp(), known[0], now_ms)
    assert taken is not None
    check_fresh(taken, now_ms)
    return num_back


@pytest.mark.parametrize("restarts", [0.0, 0.1])
def test_no_jump_of_the_coordinators_clock_contradicts_what_a_client_took(restarts: float) -> None:
    backs = [asyncio.run(jump_about(seed, restarts=restarts)) for seed in range(25)]
    assert sum(backs) > 25, "the clock is followed back as well, if no client can hold both timestamps"


@pytest.mark.parametrize("ahead_s", [REACH_S + 1.0, 2_459.0, 3 * DAY_S])
async def test_after_a_clock_that_was_far_ahead_for_seconds_timestamps_are_fresh_at_once_and_over_restarts(
    caplog: pytest.LogCaptureFixture, ahead_s: float
) -> None:
    signing = Signing()
    await signing.stamp()
    signing.clock.ahead_s = ahead_s
    signing.clock.seconds += 2.0
    await signing.stamp()
    signing.clock.ahead_s = 0.0
    await signing.restart()
    for _ in range(60):  # as the clock comes near the wrong date, that one does not count again
        check_fresh(await signing.stamp(), signing.clock.now_ms())
        signing.clock.seconds += 60.0
        await signing.restart()
    assert caplog.text.count("timestamps follow the clock, which is") == 1


async def test_after_a_clock_that_was_ahead_by_less_timestamps_are_dated_after_the_last_until_it_has_caught_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    signing = Signing()
    await signing.stamp()
    signing.clock.ahead_s = REACH_S
    ahead = await signing.stamp()
    signing.clock.ahead_s = 0.0
    signing.publish()
    last_ms = ahead.issued_at_ms
    for _ in range(round(REACH_S)):
        stamp = await signing.stamp()
        assert stamp.issued_at_ms > last_ms
        last_ms = stamp.issued_at_ms
        signing.publish()
        signing.clock.seconds += 1.0
    assert f"the last timestamp is {REACH_S:.0f} s ahead of the clock" in caplog.text
    assert caplog.text.count("ahead of the clock, which") == 1
    signing.clock.seconds += 1.0
    await signing.restart()
    assert (await signing.stamp()).issued_at_ms == signing.clock.now_ms()


async def test_the_lifetime_of_the_next_timestamp_decides_whether_it_may_be_dated_before_the_last() -> None:
    """A client that took the last one may have a clock that is behind it: the next one must have expired there."""
    signing = Signing(lifetime_s=60.0)
    signing.clock.ahead_s = 400.0
    last = await signing.stamp()
    signing.clock.ahead_s, signing.lifetime_s = 0.0, LIFETIME_S
    await signing.restart()
    assert (await signing.stamp()).issued_at_ms > last.issued_at_ms


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("off_s", [-HOUR_S, HOUR_S])
async def test_a_clock_that_is_corrected_after_a_leap_contradicts_no_earlier_timestamp(
    off_s: float, restarts: bool
) -> None:
    """It was a minute ahead, then an hour off for some seconds, then right: clients know what it dated a minute ahead."""
    signing = Signing()
    signing.clock.ahead_s = 60.0
    first = await signing.stamp()
    signing.clock.ahead_s = off_s
    await signing.stamp()
    signing.clock.ahead_s = 0.0
    signing.clock.seconds += 10.0
    signing.publish()
    if restarts:
        await signing.restart()
    stamp = await signing.stamp()
    assert take(stamp, first, signing.clock.now_ms()) == stamp


async def test_damaged_dates_of_earlier_timestamps_stop_no_restart(caplog: pytest.LogCaptureFixture) -> None:
    signing = Signing()
    for ahead_s in (0.0, HOUR_S, 0.0):
        signing.clock.ahead_s = ahead_s
        signing.clock.seconds += 10.0
        last = await signing.stamp()
    await signing.private.write(DATES_NAME, (await signing.private.read(DATES_NAME)).replace(b"1", b"9"))
    await signing.restart()
    assert "the dates of earlier timestamps are damaged" in caplog.text
    assert (await signing.stamp()).issued_at_ms == last.issued_at_ms + 1


async def test_a_timestamp_counts_from_when_it_was_last_shown() -> None:
    """A client with a right clock takes one that is ahead when its clock has come near, long after it was dated."""
    signing = Signing()
    signing.clock.ahead_s = 800.0
    ahead = await signing.stamp()
    signing.clock.ahead_s = 0.0
    signing.clock.seconds += 700.0
    assert await signing.stamp() == take(ahead, None, signing.clock.now_ms())
    right_ms = signing.clock.now_ms()
    signing.clock.ahead_s = -200.0
    signing.publish()
    stamp = await signing.stamp()
    assert take(stamp, ahead, right_ms) == stamp


@pytest.mark.parametrize("ahead_s", [-HOUR_S, HOUR_S])
async def test_a_machine_whose_clock_is_an_hour_off_waits_with_a_reason_and_comes_back(
    tmp_path: Path, ahead_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Each role that takes new work asks Trust: worker, validator, follower of a seed. Before, each second of the clock's made
    a new reason, and each question two lines in the log."""
    clock = VirtualClock()
    source = make_source(clock)
    trust = make_trust(tmp_path, clock, source)
    await trust.refresh()
    assert trust.fault() == ""
    right = clock.seconds
    source.now_ms = lambda: round(1_000 * right)
    clock.seconds = right + ahead_s
    await trust.refresh()
    assert ("set the clock" if ahead_s < 0 else "old by this machine's clock and has expired") in trust.fault()
    num_lines = len(caplog.messages)
    for _ in range(60):
        clock.seconds += 2.0
        await trust.refresh()
    assert len(caplog.messages) == num_lines <= 2, "it is said once"
    clock.seconds = right
    await trust.refresh()
    assert trust.fault() == ""
    assert not (tmp_path / "evidence").exists()


async def test_a_timestamp_that_both_clocks_dated_an_hour_ahead_is_replaced_by_the_next_one(tmp_path: Path) -> None:
    """Coordinator and worker may share one machine."""
    clock = VirtualClock()
    source = make_source(clock)
    trust = make_trust(tmp_path, clock, source)
    clock.seconds += HOUR_S
    await trust.refresh()
    clock.seconds -= HOUR_S
    assert "set the clock" in trust.fault()
    source.publish(table_weights(1))
    await trust.refresh()
    assert trust.fault() == ""
    assert not (tmp_path / "evidence").exists()
