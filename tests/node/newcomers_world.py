"""Shared parts of the tests of newcomers: requests to join."""

from __future__ import annotations

from tests.node.coordinator_world import (
    ENGINE,
)

from prime_protocol.requests import JoinRequest


def request(**changes: object) -> JoinRequest:
    fields: dict[str, object] = {"name": "node", "software": "prime-node 0.1.0", "engine": ENGINE, "rollouts_max": 8}
    return JoinRequest.model_validate(fields | changes)
