"""The secrets behind the assigned randomness: one a step, in a hash chain whose end the RunSpec names.

    secret of number n      32 bytes; n serves step n, and the last number every step from there on
    link(secret of n + 1) = secret of n          link(secret of 0) = the end, in the RunSpec

So the coordinator is bound to all of them before there is a policy to choose seeds by; and the secret of a step, told when the
step is over, gives everybody those of the steps before and nobody those after. SPEC.md, section 9.
"""

from __future__ import annotations

from blake3 import blake3
from pydantic import Field

from prime_protocol import limits
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.errors import ErrorCode, PeerError

_LINK = "prime-node 2026-11-22 seed chain link"


class SeedChain(WireModel):
    """What a RunSpec says of the secrets. Example: SeedChain(end="3f1c...", length=1_000)."""

    end: Digest
    """link(secret of number 0), in hexadecimal digits."""
    length: int = Field(ge=1, le=limits.SEED_CHAIN_LENGTH_MAX)
    """How many secrets there are; at most `max_steps`."""

    def number(self, step: int) -> int:
        """Which secret serves a step."""
        return min(step, self.length - 1)

    def newest_open(self, steps_over: int, *, max_steps: int) -> int | None:
        """The highest number that serves none but steps below `steps_over`; None: there is none."""
        if steps_over >= max_steps:
            return self.length - 1
        return min(steps_over, self.length - 1) - 1 if steps_over > 0 and self.length > 1 else None


class OpenSecret(WireModel):
    """A secret whose steps are over; all before it follow."""

    number: int = Field(ge=0, le=limits.SEED_CHAIN_LENGTH_MAX)
    secret: Digest
    """32 bytes as hexadecimal digits."""


def link(secret: bytes) -> bytes:
    """The secret before this one."""
    return blake3(secret, derive_key_context=_LINK).digest()


def chain_from(last: bytes, length: int) -> list[bytes]:
    """All secrets by their numbers, from the last one."""
    secrets = [last]
    for _ in range(length - 1):
        secrets.append(link(secrets[-1]))
    return secrets[::-1]


def committed(secrets: list[bytes]) -> SeedChain:
    """What a RunSpec says of them."""
    return SeedChain(end=link(secrets[0]).hex(), length=len(secrets))


def opened_secrets(chain: SeedChain, told: OpenSecret) -> list[bytes]:
    """The secrets from number 0 to the one that was told. Raises PeerError where it is not the chain's."""
    if told.number < chain.length:
        secrets = chain_from(bytes.fromhex(told.secret), told.number + 1)
        if link(secrets[0]).hex() == chain.end:
            return secrets
    raise PeerError(ErrorCode.CHAIN_BROKEN, f"the secret of number {told.number} does not lead to the RunSpec's chain")
