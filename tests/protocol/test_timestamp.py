"""Timestamps: valid signers, lifetime, and rollbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.key_ring import ChainPoint
from prime_protocol.timestamp import Timestamp, check_follows, check_fresh, open_timestamp

Raises = Callable[..., RemoteError]
NOW_MS = 10**12


def stamp(sample: Any, policy_version: int | None = 3, **changes: object) -> Timestamp:
    head = None
    if policy_version is not None:
        head = ChainPoint(policy_version=policy_version, manifest=digest_of(b"%d" % policy_version))
    fields: dict[str, object] = {
        "run": sample.run.digest,
        "head": head,
        "key_ring": 0,
        "issued_at_ms": NOW_MS,
        "expires_at_ms": NOW_MS + 600_000,
    }
    return Timestamp.model_validate(fields | changes)


def signed(timestamp: Timestamp, key: Any) -> Envelope:
    return seal(timestamp, PayloadType.TIMESTAMP, key)


def test_a_timestamp_by_the_coordinator_is_opened(sample: Any) -> None:
    timestamp = stamp(sample)
    assert open_timestamp(signed(timestamp, sample.coordinator), sample.run) == timestamp
    assert (timestamp.policy_version, stamp(sample, None).policy_version) == (3, -1)


@pytest.mark.parametrize("role", ["root", "trainer", "validator", "worker", "stranger"])
def test_only_the_coordinators_key_signs_timestamps(sample: Any, raises: Raises, role: str) -> None:
    raises(ErrorCode.BAD_SIGNATURE, open_timestamp, signed(stamp(sample), getattr(sample, role)), sample.run)


def test_a_timestamp_of_another_run_or_kind_or_size_is_refused(sample: Any, raises: Raises) -> None:
    other = stamp(sample, run=digest_of(b"other"))
    raises(ErrorCode.WRONG_RUN, open_timestamp, signed(other, sample.coordinator), sample.run)
    receipt = seal(stamp(sample), PayloadType.RECEIPT, sample.coordinator)
    raises(ErrorCode.WRONG_PAYLOAD_TYPE, open_timestamp, receipt, sample.run)
    large = seal(b" " * (limits.TIMESTAMP_BYTES_MAX + 1), PayloadType.TIMESTAMP, sample.coordinator)
    raises(ErrorCode.TOO_LARGE, open_timestamp, large, sample.run)


def test_every_changed_byte_of_a_timestamp_is_noticed(sample: Any) -> None:
    data = signed(stamp(sample), sample.coordinator).to_bytes()
    for place in range(len(data)):
        with pytest.raises(RemoteError):
            open_timestamp(open_envelope(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]), sample.run)


@pytest.mark.parametrize("lifetime_ms", [0, -1, int(limits.TIMESTAMP_LIFETIME_S_MAX * 1_000) + 1])
def test_a_timestamp_lives_for_a_while_and_no_longer(sample: Any, raises: Raises, lifetime_ms: int) -> None:
    payload = stamp(sample).model_copy(update={"expires_at_ms": NOW_MS + lifetime_ms})
    raises(ErrorCode.WRONG_TYPE, open_timestamp, signed(payload, sample.coordinator), sample.run)


@pytest.mark.parametrize(
    ("now_ms", "holds"),
    [
        (NOW_MS, True),
        (NOW_MS - 120_000, True),
        (NOW_MS - 120_001, False),
        (NOW_MS + 720_000, True),
        (NOW_MS + 720_001, False),
        (0, False),
    ],
)
def test_it_holds_until_it_expires_give_or_take_two_minutes_of_the_clocks(
    sample: Any, raises: Raises, now_ms: int, *, holds: bool
) -> None:
    if holds:
        check_fresh(stamp(sample), now_ms)
    else:
        raises(ErrorCode.EXPIRED, check_fresh, stamp(sample), now_ms)


def test_a_later_one_may_name_the_same_or_more_and_an_earlier_copy_says_nothing(sample: Any) -> None:
    known = stamp(sample, key_ring=1)
    assert check_follows(stamp(sample, key_ring=1, issued_at_ms=NOW_MS + 1), known, NOW_MS)
    assert check_follows(stamp(sample, 4, key_ring=2, issued_at_ms=NOW_MS + 1), known, NOW_MS)
    assert not check_follows(known, known, NOW_MS)
    assert not check_follows(stamp(sample, 2, issued_at_ms=NOW_MS - 1), known, NOW_MS)


def test_a_later_one_that_takes_something_back_is_a_rollback_or_a_fork(sample: Any, raises: Raises) -> None:
    known = stamp(sample, key_ring=1)
    later: dict[str, Any] = {"issued_at_ms": NOW_MS + 1}
    raises(ErrorCode.CHAIN_BROKEN, check_follows, stamp(sample, 2, key_ring=1, **later), known, NOW_MS)
    raises(ErrorCode.CHAIN_BROKEN, check_follows, stamp(sample, None, key_ring=1, **later), known, NOW_MS)
    raises(ErrorCode.CHAIN_BROKEN, check_follows, stamp(sample, 4, key_ring=0, **later), known, NOW_MS)
    other = ChainPoint(policy_version=3, manifest=digest_of(b"other"))
    raises(ErrorCode.FORK, check_follows, stamp(sample, key_ring=1, head=other, **later), known, NOW_MS)


def test_what_was_said_before_and_comes_later_contradicts_as_well(sample: Any, raises: Raises) -> None:
    """Another source may have kept a statement that the coordinator has since replaced."""
    known = stamp(sample, key_ring=1)
    earlier: dict[str, Any] = {"issued_at_ms": NOW_MS - 1}
    raises(ErrorCode.CHAIN_BROKEN, check_follows, stamp(sample, 4, key_ring=1, **earlier), known, NOW_MS)
    raises(ErrorCode.CHAIN_BROKEN, check_follows, stamp(sample, 2, key_ring=2, **earlier), known, NOW_MS)
    other = ChainPoint(policy_version=3, manifest="e" * 64)
    raises(ErrorCode.FORK, check_follows, stamp(sample, key_ring=1, head=other, **earlier), known, NOW_MS)
    assert not check_follows(stamp(sample, 2, key_ring=0, **earlier), known, NOW_MS)


def test_a_date_that_a_wrong_clock_gave_convicts_no_coordinator_and_hides_nothing(sample: Any, raises: Raises) -> None:
    """The coordinator's clock, or this one, was an hour ahead or behind."""
    hour_ms = 3_600_000
    known = stamp(sample, key_ring=1)
    behind, ahead = ({"issued_at_ms": ms, "expires_at_ms": ms + 600_000} for ms in (NOW_MS - hour_ms, NOW_MS + hour_ms))
    raises(ErrorCode.EXPIRED, check_follows, stamp(sample, 4, key_ring=1, **behind), known, NOW_MS)
    raises(ErrorCode.EXPIRED, check_follows, stamp(sample, 2, key_ring=1, **ahead), known, NOW_MS)
    assert not check_follows(stamp(sample, 2, key_ring=1, **behind), known, NOW_MS), "an old copy says nothing"
    taken_by_a_wrong_clock = stamp(sample, key_ring=1, **ahead)
    assert check_follows(known, taken_by_a_wrong_clock, NOW_MS)
    assert check_follows(stamp(sample, 4, key_ring=1), taken_by_a_wrong_clock, NOW_MS)
    assert not check_follows(stamp(sample, 2, key_ring=1), taken_by_a_wrong_clock, NOW_MS)
    other = ChainPoint(policy_version=3, manifest="e" * 64)
    for dated in (behind, ahead):
        raises(ErrorCode.FORK, check_follows, stamp(sample, key_ring=1, head=other, **dated), known, NOW_MS)
