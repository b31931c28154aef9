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
from prime_node.coordinator.api.statements import TimestampSigner
from prime_node.coordinator.manifests import PublishedManifests
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.limits import REQUEST_AGE_S_MAX
from prime_protocol.timestamp import Timestamp, check_follows, check_fresh

RUN = make_run()
HOUR_S, DAY_S = 3_600.0, 86_400.0
LIFETIME_S, INTERVAL_S = 600.0, 30.0
HELD_S = LIFETIME_S + 2 * REQUEST_AGE_S_MAX + INTERVAL_S


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
            interval_s=INTERVAL_S,
            lifetime_s=LIFETIME_S,
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


async def jump_about(seed: int) -> int:
    """Let a clock jump between looks of three clients. Return how often the clock dated a timestamp before the last one."""
    drawn, signing = random.Random(seed), Signing()
    clients_ahead_s = (0.0, drawn.uniform(-100.0, 0.0), drawn.uniform(0.0, 100.0))
    known: list[Timestamp | None] = [None] * 3
    last_ms, num_back = 0, 0
    for _ in range(150):
        signing.clock.seconds += drawn.choice((1.0, 30.0, 200.0)) * drawn.random()
        if drawn.random() < 0.15:
            far_s = drawn.choice((0.0, 60.0, 150.0, 400.0, 900.0, HOUR_S, DAY_S))
            signing.clock.ahead_s = drawn.choice((-1, 1)) * far_s * drawn.random()
        if drawn.random() < 0.1:
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
        signing.clock.seconds += HELD_S
    now_ms = round(1_000 * signing.clock.seconds)
    taken = take(await signing.stamp(), known[0], now_ms)
    assert taken is not None
    check_fresh(taken, now_ms)
    return num_back


def test_no_jump_of_the_coordinators_clock_contradicts_what_a_client_took() -> None:
    backs = [asyncio.run(jump_about(seed)) for seed in range(25)]
    assert sum(backs) > 5, "the clock is followed back as well, once no client can hold the last timestamp"


async def test_after_a_clock_that_was_days_ahead_new_timestamps_come_once_the_last_ones_expired(
    caplog: pytest.LogCaptureFixture,
) -> None:
    signing = Signing()
    right = await signing.stamp()
    signing.clock.ahead_s = 3 * DAY_S
    signing.clock.seconds += INTERVAL_S
    await signing.stamp()
    signing.clock.ahead_s = 0.0
    signing.publish()
    ahead = await signing.stamp()
    assert ahead.policy_version == 0
    assert ahead.issued_at_ms > right.issued_at_ms + 3 * 1_000 * DAY_S
    assert "the last timestamp is 259200 s ahead of the clock" in caplog.text
    await signing.stamp()
    assert caplog.text.count("ahead of the clock, which") == 1
    await signing.restart()
    signing.clock.seconds += HELD_S - 1.0
    assert (await signing.stamp()).issued_at_ms > ahead.issued_at_ms, "the last one counts over a restart"
    signing.clock.seconds += 2.0
    assert (await signing.stamp()).issued_at_ms == signing.clock.now_ms()


@pytest.mark.parametrize("ahead_s", [-HOUR_S, HOUR_S])
async def test_a_machine_whose_clock_is_an_hour_off_waits_with_a_reason_and_comes_back(
    tmp_path: Path, ahead_s: float
) -> None:
    """Each role that takes new work asks Trust: worker, validator, follower of a seed."""
    clock = VirtualClock()
    source = make_source(clock)
    trust = make_trust(tmp_path, clock, source)
    await trust.refresh()
    assert trust.fault() == ""
    right = clock.seconds
    source.now_ms = lambda: round(1_000 * right)
    clock.seconds = right + ahead_s
    await trust.refresh()
    assert ("set the clock" if ahead_s < 0 else "has expired") in trust.fault()
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
