"""Secrets behind the assigned randomness: one per step, in a hash chain whose end the RunSpec names.

    secret of number n      32 bytes; n serves step n, and the last number every step from there on
    link(secret of n + 1) = secret of n          link(secret of 0) = the end, in the RunSpec

So the coordinator commits to all of them before a policy exists that could guide its choice of seeds. It publishes the
secret of a step when the step is over. That secret reveals those of earlier steps and none of later ones. SPEC.md,
section 9.
"""

from __future__ import annotations

from blake3 import blake3
from pydantic import Field

from prime_protocol import limits
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.errors import ErrorCode, RemoteError

_LINK = "prime-node 2026-11-22 seed chain link"


class SeedChain(WireModel):
    """Commitment of a RunSpec to the secrets. Example: SeedChain(end="3f1c...", length=1_000)."""

    end: Digest
    """link(secret of number 0), in hexadecimal digits."""
    length: int = Field(ge=1, le=limits.SEED_CHAIN_LENGTH_MAX)
    """Number of secrets; at most `max_steps`."""
    prompts: bool = Field(default=False, exclude_if=lambda prompts: not prompts)
    """Whether receipts commit the coordinator to the prompts of its leases too."""

    def number(self, step: int) -> int:
        """Return the number of the secret that serves a step."""
        return min(step, self.length - 1)

    def newest_open(self, steps_over: int, *, max_steps: int) -> int | None:
        """Return the highest number that serves only steps below `steps_over`, or None."""
        if steps_over >= max_steps:
            return self.length - 1
        return min(steps_over, self.length - 1) - 1 if steps_over > 0 and self.length > 1 else None


class OpenSecret(WireModel):
    """Secret whose steps are over; all earlier ones follow from it."""

    number: int = Field(ge=0, le=limits.SEED_CHAIN_LENGTH_MAX)
    secret: Digest
    """32 bytes as hexadecimal digits."""


def link(secret: bytes) -> bytes:
    """Return the secret before this one."""
    return blake3(secret, derive_key_context=_LINK).digest()


def chain_from(last: bytes, length: int) -> list[bytes]:
    """Return all secrets in the order of their numbers, computed from the last one."""
    secrets = [last]
    for _ in range(length - 1):
        secrets.append(link(secrets[-1]))
    return secrets[::-1]


def committed(secrets: list[bytes], *, prompts: bool = False) -> SeedChain:
    """Return a RunSpec's commitment to the secrets. `prompts`: whether receipts commit to prompts too."""
    return SeedChain(end=link(secrets[0]).hex(), length=len(secrets), prompts=prompts)


def opened_secrets(chain: SeedChain, opened: OpenSecret) -> list[bytes]:
    """Return the secrets from number 0 to the published one. Raises RemoteError if it is not the chain's."""
    if opened.number < chain.length:
        secrets = chain_from(bytes.fromhex(opened.secret), opened.number + 1)
        if link(secrets[0]).hex() == chain.end:
            return secrets
    raise RemoteError(ErrorCode.CHAIN_BROKEN, f"secret {opened.number} is not in the RunSpec's seed chain")
