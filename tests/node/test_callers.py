"""Behind a reverse proxy a request counts against the proxy's client, and no client can forge another's address."""

from __future__ import annotations

import logging

import pytest
from tests.node.coordinator_world import ANNA, BEN, make_run, memory_parts, running
from tests.node.newcomers_world import request

from prime_node.coordinator.api.callers import Callers
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.ports.web import Request
from prime_protocol.errors import ErrorCode
from prime_protocol.identity import SigningKey

CONFIG = CoordinatorConfig(proxies=("127.0.0.1", "10.0.0.0/8"))


def address(remote: str, forwarded: str | None, *, config: CoordinatorConfig = CONFIG) -> str:
    headers = {} if forwarded is None else {"x-forwarded-for": forwarded}
    callers = Callers(proxies=config.behind, trusted=config.trusted)
    return callers.address_of(Request(params={}, body=b"", headers=headers, remote=remote))


@pytest.mark.parametrize(
    ("remote", "forwarded", "caller"),
    [
        ("127.0.0.1", "203.0.113.5", "203.0.113.5"),
        ("::ffff:127.0.0.1", "203.0.113.5", "203.0.113.5"),
        ("127.0.0.1", "198.51.100.1, 203.0.113.5", "203.0.113.5"),  # the first one is the caller's own word
        ("127.0.0.1", "198.51.100.1, 203.0.113.5, 10.1.2.3", "203.0.113.5"),  # two proxies of ours
        ("127.0.0.1", "10.0.0.9", "10.0.0.9"),  # a machine of our own
        ("198.51.100.7", "203.0.113.5", "198.51.100.7"),  # no proxy of ours
        ("127.0.0.1", None, "127.0.0.1"),
        ("127.0.0.1", "203.0.113.5:4711", "203.0.113.5"),
        ("127.0.0.1", "2001:db8::1", "2001:db8::1"),
        ("127.0.0.1", "[2001:db8::1]:4711", "2001:db8::1"),
        ("127.0.0.1", "unknown", "unknown"),
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "," * 10_000, ""),
    ],
)
def test_the_caller_is_the_last_address_that_is_no_proxy_of_ours(
    remote: str, forwarded: str | None, caller: str
) -> None:
    assert address(remote, forwarded) == caller


def test_a_proxy_missing_from_the_settings_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    config = CoordinatorConfig()
    callers = Callers(proxies=config.behind, trusted=config.trusted)
    for remote in ("203.0.113.9", "127.0.0.1", "127.0.0.1"):
        callers.address_of(Request(params={}, body=b"", headers={"x-forwarded-for": "203.0.113.5"}, remote=remote))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "coordinator.proxies" in caplog.text


def test_a_proxy_that_is_named_is_not_asked_for_where_a_caller_is_on_the_same_machine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert address("127.0.0.1", "127.0.0.1") == "127.0.0.1"
    assert not caplog.records


@pytest.mark.parametrize(
    ("settings", "is_warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"host": "0.0.0.0", "proxies": ("10.0.0.1",)}, False),
        ({"host": "0.0.0.0", "trusted_networks": ("127.0.0.0/8",)}, False),
    ],
)
def test_networks_without_limits_are_named_at_the_start(settings: dict[str, object], is_warned: bool) -> None:
    assert bool(CoordinatorConfig.model_validate(settings).unlimited) is is_warned


async def test_workers_behind_a_proxy_are_distinguished_by_its_header() -> None:
    """All connections come from this machine, which is trusted; the limits apply to the proxy's clients."""
    async with running(memory_parts(make_run(), proxies=("127.0.0.1",), workers_per_network_max=1)) as world:

        async def joined(key: SigningKey, address: str) -> str:
            body = world.signed(request(), key)
            return str((await world.post("/v1/join", body, **{"X-Forwarded-For": address}))[1].get("code", "ok"))

        assert await joined(ANNA, "203.0.113.5") == "ok"
        assert await joined(BEN, "203.0.113.77") == ErrorCode.TOO_MANY_REQUESTS
        assert await joined(BEN, "198.51.100.1, 203.0.113.77") == ErrorCode.TOO_MANY_REQUESTS, "its own word"
        assert await joined(BEN, "198.51.100.1") == "ok"
