"""Which problem a slot is and which seeds its completions get, from a step's secret: one rule for who assigns and who checks.

    problem of a slot       environment by weight, index, from blake3(secret, "problem", run, slot, draw)
    seeds of a group        blake3(secret, "seeds", run, policy, environment, index, slot), 8 bytes a completion of its
                            extendable output, in order, the top bit cleared

A receipt that accepts a bundle says which slots and draws were assigned, and a digest of the problems and seeds (`Assigned`).
Once the step's secret is open (seed_chain.py) anybody can work them out again, from the ledger alone. SPEC.md, section 9.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated, Self

from blake3 import blake3
from pydantic import Field, model_validator

from prime_protocol import limits
from prime_protocol.assignment import Count, GroupAssignment, Lease, Problem
from prime_protocol.digest import Digest, digest_of
from prime_protocol.envelope import WireModel
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.noise import SEED_MAX
from prime_protocol.run_spec import RunSpec

INDEX_BITS = 48
"""Problem indices are below 2**48. The low bits are the slot's place in its step, so no step has a problem twice."""


class Assigned(WireModel):
    """What a lease asked for, without prompts. Example: Assigned(slots=((16, 2),), seeds="77ab...") is slots 16 and 17."""

    slots: tuple[tuple[Count, Annotated[int, Field(ge=1, le=limits.LEASE_ROLLOUTS_MAX)]], ...] = Field(
        min_length=1, max_length=limits.LEASE_ROLLOUTS_MAX
    )
    """Runs of slots in the lease's order: the first one, and how many."""
    draws: tuple[Count, ...] = Field(
        default=(), max_length=limits.LEASE_ROLLOUTS_MAX, exclude_if=lambda draws: not draws
    )
    """Of each slot, how many problems were passed over; left out where none was."""
    seeds: Digest
    """Of the problems and seeds (`digest_of_groups`)."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        num_slots = sum(count for _, count in self.slots)
        if num_slots > limits.LEASE_ROLLOUTS_MAX or len(self.draws) not in (0, num_slots):
            raise ValueError("there is one draw for each slot, or none, and no more slots than a lease has rollouts")
        return self

    def places(self) -> list[tuple[int, int]]:
        """(slot, draw) of each group, in the lease's order."""
        slots = [slot for first, count in self.slots for slot in range(first, first + count)]
        return list(zip(slots, self.draws or (0,) * len(slots), strict=True))


def digest_of_groups(groups: Iterable[tuple[int, Problem, Sequence[int]]]) -> str:
    """Of (slot, problem, seeds) in the lease's order, as JSON without spaces: [[slot,"environment",index,[seed,...]],...]."""
    rows = [[slot, problem.environment, problem.index, list(seeds)] for slot, problem, seeds in groups]
    return digest_of(json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode())


def assigned_in(groups: Sequence[GroupAssignment], draws: Sequence[int]) -> Assigned:
    """What a receipt says of a lease's groups. `draws`: of each slot, or none."""
    runs: list[tuple[int, int]] = []
    for group in groups:
        if runs and sum(runs[-1]) == group.slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((group.slot, 1))
    seeds = digest_of_groups((group.slot, group.problem, group.seeds) for group in groups)
    return Assigned(slots=tuple(runs), draws=tuple(draws) if any(draws) else (), seeds=seeds)


class SeedRule:
    """The rule with a run's numbers. Pure; the secret is an argument."""

    def __init__(self, run: str, spec: RunSpec) -> None:
        """`run`: the RunSpec's digest."""
        self._run = run
        self._spec = spec
        self._shares = list(accumulate(environment.weight for environment in spec.environments))

    def problem(self, secret: bytes, slot: int, draw: int) -> Problem:
        """The draw-th problem of a slot, counted from 0."""
        groups = self._spec.groups_per_step
        digest = self.hashed(secret, "problem", slot, draw, num_bytes=16)
        share = int.from_bytes(digest[:8], "big") / 2**64 * self._shares[-1]
        place_bits = (groups - 1).bit_length()
        drawn = int.from_bytes(digest[8:], "big") >> (64 - INDEX_BITS + place_bits)
        environments = self._spec.environments
        return Problem(
            environment=environments[min(bisect_right(self._shares, share), len(environments) - 1)].name,
            index=drawn << place_bits | slot % groups,
        )

    def seeds(self, secret: bytes, policy: int | str, problem: Problem, slot: int) -> tuple[int, ...]:
        """One for each completion of a group. `policy`: its number (a manifest's digest in runs without a chain)."""
        return self.drawn_seeds(secret, "seeds", policy, problem.environment, problem.index, slot)

    def drawn_seeds(self, secret: bytes, purpose: str, *fields: str | int) -> tuple[int, ...]:
        """As many as a group has completions."""
        num = self._spec.rollouts_per_group
        stream = self.hashed(secret, purpose, *fields, num_bytes=8 * num)
        return tuple(int.from_bytes(stream[8 * i : 8 * i + 8], "big") & SEED_MAX for i in range(num))

    def hashed(self, secret: bytes, purpose: str, *fields: str | int, num_bytes: int = 32) -> bytes:
        """BLAKE3 keyed with the secret, of the purpose, the run and the fields as text, with NUL between them."""
        # Digests, key ids and names hold no NUL, so the fields cannot run into one another.
        message = "\0".join([purpose, self._run, *map(str, fields)]).encode()
        return blake3(message, key=secret).digest(length=num_bytes)

    def is_trained(self, slot: int) -> bool:
        """Whether a slot is one of a step, not a place of an evaluation: those have seeds of a secret that stays one."""
        return slot < self._spec.max_steps * self._spec.groups_per_step

    def check_receipt(
        self, said: Assigned, secret: bytes, *, step: int, policy_version: int, num_rollouts: int
    ) -> None:
        """Whether a receipt's words follow from its step's secret. Raises PeerError.

        (1) as many slots as the bundle has groups, all of the step; (2) no draw that nobody could need: whoever may draw
        for ever picks seeds; (3) problems and seeds are the secret's.
        """
        places = said.places()
        num_slots, num_seeds = self._spec.groups_per_step, self._spec.rollouts_per_group
        if len(places) * num_seeds != num_rollouts or any(slot // num_slots != step for slot, _ in places):  # (1)
            raise PeerError(ErrorCode.MALFORMED, f"slots of another step than {step}, or another number of them")
        if any(draw >= limits.LEASE_DRAWS_MAX for draw in said.draws):  # (2)
            raise PeerError(ErrorCode.MALFORMED, f"a draw beyond the first {limits.LEASE_DRAWS_MAX}")
        drawn = [(slot, self.problem(secret, slot, draw)) for slot, draw in places]
        groups = [(slot, problem, self.seeds(secret, policy_version, problem, slot)) for slot, problem in drawn]
        if digest_of_groups(groups) != said.seeds:  # (3)
            raise PeerError(ErrorCode.MALFORMED, "other problems or seeds than its step's secret gives")

    def check_evaluation(self, said: Assigned, *, step: int, policy_version: int, num_rollouts: int) -> None:
        """What can be seen of a receipt for held-out problems, whose seeds nobody is told. Raises PeerError.

        As many slots as the bundle has groups, all beyond the run's; no draw; and its step is its policy's number.
        """
        places = said.places()
        is_trained = any(self.is_trained(slot) for slot, _ in places)
        if (
            is_trained
            or said.draws
            or len(places) * self._spec.rollouts_per_group != num_rollouts
            or step != policy_version
        ):
            raise PeerError(
                ErrorCode.MALFORMED, f"slots that are no evaluation's of policy {policy_version}, or another number"
            )

    def check_lease(self, lease: Lease, secret: bytes) -> None:
        """The same for a lease, whose problems may be of any of the first LEASE_DRAWS_MAX draws. Raises PeerError."""
        for group in lease.groups:
            draws = (self.problem(secret, group.slot, draw) for draw in range(limits.LEASE_DRAWS_MAX))
            if group.slot // self._spec.groups_per_step != lease.step or group.problem not in draws:
                raise PeerError(
                    ErrorCode.MALFORMED, f"slot {group.slot} was leased another problem than its step's secret gives"
                )
            if group.seeds != self.seeds(secret, lease.policy_version, group.problem, group.slot):
                raise PeerError(
                    ErrorCode.MALFORMED, f"slot {group.slot} was leased other seeds than its step's secret gives"
                )
