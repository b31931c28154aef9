"""Consequences of faulty requests for the address that sends them."""

from __future__ import annotations

import contextlib

import pytest
from tests.node.coordinator_world import make_run

from prime_node.coordinator.api.limiter import Limiter
from prime_node.coordinator.api.nonces import Nonces
from prime_node.coordinator.api.requests import RequestGate
from prime_protocol.errors import ErrorCode, RemoteError

ADDRESS = "8.8.8.8"


def refuse(gate: RequestGate, code: ErrorCode, now_s: float) -> None:
    with contextlib.suppress(RemoteError), gate.blame(ADDRESS, now_s):
        raise RemoteError(code, "no")


def test_strangers_that_try_again_at_once_do_not_keep_their_address_out() -> None:
    gate = RequestGate(make_run(), Limiter(requests_per_second=1.0, faults_per_second=1.0), Nonces(nonces_max=1_000))
    now_s = 0.0
    for _ in range(100):
        refuse(gate, ErrorCode.MALFORMED, now_s)
    for _ in range(200):
        now_s += 0.01
        refuse(gate, ErrorCode.TOO_MANY_REQUESTS, now_s)
    gate.limiter.by_address.require(ADDRESS, now_s)


def test_the_addresses_of_one_ipv6_host_share_a_bucket() -> None:
    limiter = Limiter(requests_per_second=1.0, faults_per_second=1.0)
    for number in range(100):
        limiter.by_address.charge(f"2001:db8:1:2::{number:x}", 0.0)
    with pytest.raises(RemoteError, match="slow down"):
        limiter.by_address.require("2001:db8:1:2:ffff::1", 0.0)
    limiter.by_address.require("2001:db8:1:3::1", 0.0)
    limiter.by_address.require("8.8.8.8", 0.0)
    for number in range(50):
        limiter.by_address.spend(f"2001:db8:1:3::{number:x}", 0.0)
    with pytest.raises(RemoteError, match="slow down"):
        limiter.by_address.spend("2001:db8:1:3:ffff::1", 0.0)
