from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.cases_world import check_each

from prime_protocol import assignment, limits, requests, verdict
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, parse_json, seal
from prime_protocol.errors import ErrorCode, RemoteError

Raises = Callable[..., RemoteError]


def stamped(request: dict[str, Any], /, **fields: Any) -> bytes:
    return json.dumps({"run": "ab" * 32, "nonce": "0" * 32, "issued_at_ms": 1, "request": request} | fields).encode()


ENGINE = {"name": "t", "version": "1", "dtype": "fp32", "device": "cpu"}
VALID: dict[str, dict[str, Any]] = {
    "join": {"name": "n", "software": "s", "engine": ENGINE, "rollouts_max": 8},
    "heartbeat": {"state": "idle", "policy_version": -1, "bundles_spooled": 0},
    "lease": {"policy_version": 0, "policy_digest": "ab" * 32, "rollouts_max": 8, "wait_s": 1},
    "return_lease": {"lease_id": "ab" * 32},
    "leave": {},
    "receipts": {"after": 0},
    "check": {"policy_versions": [1, 2], "wait_s": 30},
    "check_result": {"bundle": "ab" * 32, "verdict": {"accepted": True}, "rewards": [0.5], "measured": {"x": 1.0}},
    "batch": {"step": 1, "durable_step": 0},
    "bundle": {"bundle": "ab" * 32},
    "ban": {"worker": "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"},
    "drain": {},
}


def request(action: str) -> dict[str, Any]:
    return {"action": action} | json.loads(json.dumps(VALID[action]))


@pytest.mark.parametrize("action", sorted(VALID))
def test_a_request_is_identified_by_its_action_and_closed(action: str, raises: Raises) -> None:
    assert parse_json(stamped(request(action)), requests.Stamped).request.action == action
    raises(ErrorCode.UNKNOWN_FIELD, parse_json, stamped(request(action) | {"extra": 1}), requests.Stamped)
    raises(ErrorCode.UNKNOWN_FIELD, parse_json, stamped(request(action), extra=1), requests.Stamped)


WRONG: tuple[object, ...] = (None, [], {"x": 1}, -2, 1e300, "x" * 5_000, 2**60, [None], True)


def test_a_field_of_the_wrong_kind_is_refused() -> None:
    """For every field, hypothesis generates only the few of these values that the field's own schema allows."""
    check_each(
        (
            (f"{action}.{field} = {str(value)[:20]}", (action, field, value))
            for action, fields in VALID.items()
            for field in fields
            for value in WRONG
        ),
        lambda case: wrong(*case),
    )


def wrong(action: str, field: str, value: object) -> None:
    body = request(action) | {field: value}
    if (field, value) not in [("policy_versions", []), ("measured", {"x": 1})]:
        with pytest.raises(RemoteError) as caught:
            parse_json(stamped(body), requests.Stamped)
        assert caught.value.code in (ErrorCode.WRONG_TYPE, ErrorCode.UNKNOWN_FIELD)
        return
    message = parse_json(stamped(body), requests.Stamped)
    assert json.loads(message.request.model_dump_json())[field] == value


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"nonce": "0" * 31}, ErrorCode.WRONG_TYPE),
        ({"nonce": "0" * 33}, ErrorCode.WRONG_TYPE),
        ({"nonce": "G" * 32}, ErrorCode.WRONG_TYPE),
        ({"nonce": "0" * 32 + "\n"}, ErrorCode.WRONG_TYPE),
        ({"run": "ab"}, ErrorCode.WRONG_TYPE),
        ({"issued_at_ms": -1}, ErrorCode.WRONG_TYPE),
        ({"issued_at_ms": 1.5}, ErrorCode.WRONG_TYPE),
        ({"request": {"action": "unheard_of"}}, ErrorCode.WRONG_TYPE),
        ({"request": {}}, ErrorCode.WRONG_TYPE),
        ({"request": request("ban") | {"worker": None}}, ErrorCode.WRONG_TYPE),
        ({"request": request("check") | {"wait_s": 30.1}}, ErrorCode.WRONG_TYPE),
        ({"request": request("join") | {"rollouts_max": 0}}, ErrorCode.WRONG_TYPE),
        ({"request": request("check_result") | {"rewards": []}}, ErrorCode.WRONG_TYPE),
        (
            {"request": request("check_result") | {"verdict": {"accepted": False, "reason": "stale"}}},
            ErrorCode.WRONG_TYPE,
        ),
        ({"request": request("check") | {"policy_versions": [0] * 1_025}}, ErrorCode.WRONG_TYPE),
    ],
)
def test_a_stamped_request_outside_its_bounds_is_refused(
    fields: dict[str, Any], code: ErrorCode, raises: Raises
) -> None:
    raises(code, parse_json, stamped(request("leave"), **fields), requests.Stamped)


def test_the_largest_verdict_fits_into_a_request(sample: Any) -> None:
    rewards = tuple(-0.1234567890123456789 * 10.0**-i for i in range(300)) * 13
    result = requests.CheckResultRequest(
        bundle=digest_of(b""),
        verdict=verdict.Verdict.accept(),
        rewards=(rewards + rewards)[: limits.LEASE_ROLLOUTS_MAX],
        measured={f"{i:0200}": 0.1234567890123456789 for i in range(64)},
    )
    message = requests.Stamped(run=digest_of(b""), nonce="0" * 32, issued_at_ms=1, request=result)
    assert len(result.rewards) > 3_800
    assert len(seal(message, PayloadType.REQUEST, sample.validator).to_bytes()) < limits.REQUEST_BYTES_MAX


def test_a_lease_holds_together(sample: Any, raises: Raises) -> None:
    good = json.loads(sample.lease.model_dump_json())
    changes: list[dict[str, Any]] = [
        {"groups": []},
        {"groups": good["groups"][:1] * 2},
        {"groups": [good["groups"][0] | {"seeds": [1] * 4_096}, good["groups"][1]]},
        {"expires_at_ms": good["issued_at_ms"] - 1},
        {"step": 2**31},
        {"groups": [good["groups"][0] | {"seeds": [2**63]}]},
        {"groups": [good["groups"][0] | {"seeds": []}]},
        {"groups": [good["groups"][0] | {"prompt_token_ids": []}]},
        {"groups": [good["groups"][0] | {"prompt_token_ids": [2**31]}]},
        {"worker": "nobody"},
    ]
    for change in changes:
        raises(ErrorCode.WRONG_TYPE, parse_json, json.dumps(good | change).encode(), assignment.Lease)
