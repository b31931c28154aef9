"""A person, its machines, and delegations for a running coordinator."""

from __future__ import annotations

from typing import Any

from tests.node.coordinator_world import ENGINE, World

from prime_protocol.delegation import Delegation
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.identity import SigningKey
from prime_protocol.requests import JoinRequest

PERSON, OTHER, CARL = (SigningKey(bytes([number]) * 32) for number in (91, 92, 93))
DAY_MS = 86_400_000


def delegation(world: World, machine: SigningKey, person: SigningKey = PERSON, **changes: Any) -> str:
    """Return a delegation as text. `changes` are fields of the payload, and `by` another signer."""
    now_ms = world.parts.clock.now_ms()
    by = changes.pop("by", person)
    fields = {
        "person": person.key_id,
        "machine": machine.key_id,
        "issued_at_ms": now_ms,
        "expires_at_ms": now_ms + DAY_MS,
    }
    return seal(Delegation.model_validate(fields | changes), PayloadType.DELEGATION, by).to_base64()


async def join(world: World, machine: SigningKey, text: str = "") -> None:
    request = JoinRequest(
        name=f"node {machine.key_id[-4:]}", software="1", engine=ENGINE, rollouts_max=64, delegation=text
    )
    await world.client(machine).join(request)
