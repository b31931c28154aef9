"""Timestamps: the coordinator's short-lived statement of the newest policy and keys. TUF's timestamp role.

A signature does not expire, so an old head remains valid. An attacker between a machine and the run could show it
forever (the freeze attack). Therefore the coordinator, whose key is online anyway, signs every 30 seconds by default what is
newest, with an expiry time. It decides nothing else: the trainer vouches for weights, the root for keys.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from prime_protocol import limits
from prime_protocol.amendment import CalibrationChain
from prime_protocol.assignment import Count
from prime_protocol.digest import Digest
from prime_protocol.envelope import Envelope, PayloadType, WireModel, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.key_ring import ChainPoint, Role
from prime_protocol.run_spec import PinnedRun

_SKEW_MS = round(limits.REQUEST_AGE_S_MAX * 1_000)
"""Milliseconds by which the clocks of coordinator and client may differ."""


class Timestamp(WireModel):
    """Statement of what is newest (envelope type TIMESTAMP)."""

    run: Digest
    head: ChainPoint | None
    """Newest manifest, None before the first."""
    key_ring: int = Field(ge=0, le=limits.KEY_RINGS_MAX)
    """Version of the newest key ring; 0 is the RunSpec."""
    calibration: int = Field(default=0, ge=0, le=limits.CALIBRATIONS_MAX, exclude_if=lambda version: version == 0)
    """Version of the newest amendment of the calibration; 0 is the RunSpec."""
    amendment: Digest | None = Field(default=None, exclude_if=lambda digest: digest is None)
    """Digest of that amendment, so that a former root's keys can show no other one."""
    issued_at_ms: Count
    expires_at_ms: Count

    @model_validator(mode="after")
    def _lives_for_a_while(self) -> Self:
        lifetime_ms = self.expires_at_ms - self.issued_at_ms
        if not 0 < lifetime_ms <= limits.TIMESTAMP_LIFETIME_S_MAX * 1_000:
            raise ValueError("expires_at_ms must be after issued_at_ms, by at most TIMESTAMP_LIFETIME_S_MAX")
        return self

    @property
    def policy_version(self) -> int:
        """Policy version of the head; -1 before the first."""
        return -1 if self.head is None else self.head.policy_version


def open_timestamp(envelope: Envelope, run: PinnedRun) -> Timestamp:
    """Verify a timestamp's envelope and parse it. Raises RemoteError.

    Checks size, signature by a current coordinator key, schema and run. check_fresh checks its age.
    """
    if len(envelope.payload) > limits.TIMESTAMP_BYTES_MAX:
        raise LimitExceeded("TIMESTAMP_BYTES_MAX", len(envelope.payload), limits.TIMESTAMP_BYTES_MAX)
    stamp = parse_json(run.keys.verify(envelope, PayloadType.TIMESTAMP, Role.COORDINATOR), Timestamp)
    if stamp.run != run.digest:
        raise RemoteError(ErrorCode.WRONG_RUN, f"the timestamp belongs to run {stamp.run[:12]}, not {run.digest[:12]}")
    return stamp


def check_fresh(stamp: Timestamp, now_ms: int) -> None:
    """Check that it is fresh, allowing a clock difference of REQUEST_AGE_S_MAX. Raises RemoteError(EXPIRED)."""
    if is_ahead(stamp, now_ms):
        ahead_s = (stamp.issued_at_ms - now_ms) / 1_000
        raise RemoteError(
            ErrorCode.EXPIRED, f"the timestamp is {ahead_s:.0f} s ahead of this machine's clock; set the clock"
        )
    if stamp.expires_at_ms + _SKEW_MS < now_ms:
        age_s = (now_ms - stamp.issued_at_ms) / 1_000
        raise RemoteError(
            ErrorCode.EXPIRED,
            (
                f"the timestamp of policy {stamp.policy_version} is {age_s:,.0f} s old by this machine's clock and has expired, "
                "and there is no newer one"
            ),
        )


def check_follows(stamp: Timestamp, known: Timestamp, now_ms: int) -> bool:
    """Return whether `stamp` replaces `known` at a client whose clock shows `now_ms`.

    Raises RemoteError: FORK if the two name different things of one version, EXPIRED if `stamp` says something new and is not
    fresh, CHAIN_BROKEN if the one issued later takes something back. Dates order two timestamps only while the clocks agree: one
    that is expired or ahead of this clock may have been dated by a wrong one, and convicts no coordinator. A copy of an earlier
    timestamp is not a fault: mirrors lag.
    """
    _require_same_where_equal(stamp, known)
    pairs = (
        (stamp.policy_version, known.policy_version),
        (stamp.key_ring, known.key_ring),
        (stamp.calibration, known.calibration),
    )
    takes_back, adds = any(new < old for new, old in pairs), any(new > old for new, old in pairs)
    if is_ahead(known, now_ms):  # it was taken by a clock that was wrong: its date orders nothing
        if takes_back:
            return False
        check_fresh(stamp, now_ms)
        return True
    is_newer = stamp.issued_at_ms > known.issued_at_ms
    if is_newer or adds:
        check_fresh(stamp, now_ms)
    if takes_back if is_newer else adds:
        earlier, later = (known, stamp) if is_newer else (stamp, known)
        raise RemoteError(
            ErrorCode.CHAIN_BROKEN, f"rollback: {_what(later)} come in a newer timestamp than {_what(earlier)}"
        )
    return is_newer


def is_ahead(stamp: Timestamp, now_ms: int) -> bool:
    """Return whether a timestamp is further ahead of a clock than clocks may differ."""
    return stamp.issued_at_ms > now_ms + _SKEW_MS


def _require_same_where_equal(stamp: Timestamp, known: Timestamp) -> None:
    same_version = stamp.calibration == known.calibration and None not in (stamp.amendment, known.amendment)
    if same_version and stamp.amendment != known.amendment:
        raise RemoteError(ErrorCode.FORK, f"two timestamps name different amendments {stamp.calibration}")
    if stamp.policy_version == known.policy_version and stamp.head != known.head:
        raise RemoteError(ErrorCode.FORK, f"two timestamps name different manifests for policy {stamp.policy_version}")


def require_named(shown: CalibrationChain, stamp: Timestamp) -> None:
    """Raise RemoteError(FORK) if a chain of amendments has another one of the version that a timestamp names."""
    version = stamp.calibration
    if stamp.amendment is None or not 1 <= version <= shown.version:
        return
    if shown.amendments[version - 1][1].digest != stamp.amendment:
        raise RemoteError(ErrorCode.FORK, f"calibration {version} is not the one that the timestamp names")


def _what(stamp: Timestamp) -> str:
    return f"policy {stamp.policy_version}, key ring {stamp.key_ring} and calibration {stamp.calibration}"
