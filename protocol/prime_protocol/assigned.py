"""Rule that derives problems and seeds from a step's secret, for the coordinator that assigns and for those that verify.

    problem of a slot       environment by weight, index, from blake3(secret, "problem", run, slot, draw)
    seeds of a group        blake3(secret, "seeds", run, policy, environment, index, slot), 8 bytes a completion of its
                            extendable output, in order, the top bit cleared

A receipt that accepts a bundle lists the assigned slots and draws, and a digest of the problems and seeds (`Assigned`).
Once the step's secret is open (seed_chain.py), anyone can recompute them from the ledger alone. If the seed chain commits to
prompts, it has a digest of these too, for anyone who has the environments. SPEC.md, section 9.
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
from prime_protocol.assignment import HELD_OUT_START, Count, GroupAssignment, Lease, Problem
from prime_protocol.digest import Digest, digest_of
from prime_protocol.envelope import WireModel
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.noise import SEED_MAX
from prime_protocol.run_spec import RunSpec

INDEX_BITS = 48
"""Size of problem indices. Their low bits are the slot's place in its step, so no problem occurs twice in a step."""


class Assigned(WireModel):
    """Assignment of a lease. Example: Assigned(slots=((16, 2),), seeds="77ab...") is slots 16 and 17."""

    slots: tuple[tuple[Count, Annotated[int, Field(ge=1, le=limits.LEASE_ROLLOUTS_MAX)]], ...] = Field(
        min_length=1, max_length=limits.LEASE_ROLLOUTS_MAX
    )
    """Runs of slots in the lease's order: the first slot, and how many."""
    draws: tuple[Count, ...] = Field(
        default=(), max_length=limits.LEASE_ROLLOUTS_MAX, exclude_if=lambda draws: not draws
    )
    """Number of skipped problems for each slot; omitted if all are 0."""
    seeds: Digest
    """Digest of the problems and seeds (`digest_of_groups`)."""
    prompts: Digest | None = Field(default=None, exclude_if=lambda digest: digest is None)
    """Digest of the prompts (`digest_of_prompts`), if the seed chain commits to them."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        num_slots = sum(count for _, count in self.slots)
        if num_slots > limits.LEASE_ROLLOUTS_MAX or len(self.draws) not in (0, num_slots):
            raise ValueError("expected one draw for each slot or none, and no more slots than a lease has rollouts")
        return self

    def places(self) -> list[tuple[int, int]]:
        """Return (slot, draw) of each group, in the lease's order."""
        slots = [slot for first, count in self.slots for slot in range(first, first + count)]
        return list(zip(slots, self.draws or (0,) * len(slots), strict=True))


def digest_of_groups(groups: Iterable[tuple[int, Problem, Sequence[int]]]) -> str:
    """Return the digest of (slot, problem, seeds) in the lease's order.

    It covers JSON without spaces: [[slot,"environment",index,[seed,...]],...].
    """
    rows = [[slot, problem.environment, problem.index, list(seeds)] for slot, problem, seeds in groups]
    return digest_of(json.dumps(rows, separators=(",", ":"), ensure_ascii=False).encode())


def digest_of_prompts(prompts: Iterable[Sequence[int]]) -> str:
    """Return the digest of a lease's prompts, in its order of groups. It covers JSON without spaces: [[token,...],...]."""
    return digest_of(json.dumps([list(prompt) for prompt in prompts], separators=(",", ":")).encode())


def assigned_in(groups: Sequence[GroupAssignment], draws: Sequence[int], *, prompts: str | None = None) -> Assigned:
    """Return a receipt's description of a lease's groups.

    `draws` has one entry per slot, or none. `prompts` is the prompts' digest, if the run commits to it.
    """
    runs: list[tuple[int, int]] = []
    for group in groups:
        if runs and sum(runs[-1]) == group.slot:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((group.slot, 1))
    seeds = digest_of_groups((group.slot, group.problem, group.seeds) for group in groups)
    return Assigned(slots=tuple(runs), draws=tuple(draws) if any(draws) else (), seeds=seeds, prompts=prompts)


class SeedRule:
    """Rule with a run's parameters. Pure; the secret is an argument."""

    def __init__(self, run: str, spec: RunSpec) -> None:
        """Set up the rule. `run` is the RunSpec's digest."""
        self._run = run
        self._spec = spec
        self._admission = spec.admission
        self._held_out_start = spec.max_steps * spec.groups_per_step
        self._shares = list(accumulate(environment.weight for environment in spec.environments))

    def problem(self, secret: bytes, slot: int, draw: int) -> Problem:
        """Return the draw-th problem of a slot, counted from 0."""
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
        """Return one seed for each completion of a group.

        `policy` is its version (a manifest's digest in runs without a chain).
        """
        return self.drawn_seeds(secret, "seeds", policy, problem.environment, problem.index, slot)

    def drawn_seeds(self, secret: bytes, purpose: str, *fields: str | int) -> tuple[int, ...]:
        """Return as many seeds as a group has completions."""
        num = self._spec.rollouts_per_group
        stream = self.hashed(secret, purpose, *fields, num_bytes=8 * num)
        return tuple(int.from_bytes(stream[8 * i : 8 * i + 8], "big") & SEED_MAX for i in range(num))

    def hashed(self, secret: bytes, purpose: str, *fields: str | int, num_bytes: int = 32) -> bytes:
        """Return BLAKE3 keyed with the secret, over the purpose, the run and the fields as text, separated by NUL."""
        # Digests, key ids and names contain no NUL, so the fields stay distinct.
        message = "\0".join([purpose, self._run, *map(str, fields)]).encode()
        return blake3(message, key=secret).digest(length=num_bytes)

    def is_trained(self, slot: int) -> bool:
        """Return whether a slot belongs to a step.

        Other slots are places of an evaluation, whose seeds come from a secret that is never opened.
        """
        return slot < self._held_out_start

    def evaluation_problem(self, slot: int) -> Problem:
        """Return the problem of an evaluation's slot."""
        environments = self._spec.environments
        number, which = divmod(slot - self._held_out_start, len(environments))
        return Problem(environment=environments[which].name, index=HELD_OUT_START + number)

    def check_slots(self, assigned: Assigned, *, step: int, policy_version: int, num_rollouts: int) -> None:
        """Check a receipt's slots and draws, before its step's secret is open too. Raises RemoteError.

        (1) The bundle is no larger than a lease, and has as many groups as there are slots, all of the step; (2) the
        policy may serve these slots: each policy has other seeds, so with any policy a coordinator could pick seeds;
        (3) no draw is beyond what is ever needed, for the same reason; (4) the prompts' digest is there if the run
        commits to it.
        """
        places, admission = assigned.places(), self._admission
        if not self._has_groups(len(places), num_rollouts) or any(
            self._spec.step_of(slot) != step for slot, _ in places
        ):  # (1)
            raise RemoteError(ErrorCode.MALFORMED, f"the slots do not belong to step {step}, or their number is wrong")
        last_slot = max(slot for slot, _ in places)
        if not admission.admits_slot(last_slot, policy_version) or not admission.admits_step(
            step, policy_version
        ):  # (2)
            raise RemoteError(ErrorCode.MALFORMED, f"policy {policy_version} may not serve the slots of step {step}")
        if any(draw >= limits.LEASE_DRAWS_MAX for draw in assigned.draws):  # (3)
            raise RemoteError(ErrorCode.MALFORMED, f"a draw is not below {limits.LEASE_DRAWS_MAX}")
        self._require_prompts(assigned)  # (4)

    def check_seeds(self, assigned: Assigned, secret: bytes, *, policy_version: int) -> None:
        """Check that a receipt's problems and seeds follow from its step's secret. Raises RemoteError.

        Call `check_slots` first: it bounds the number of seeds.
        """
        drawn = [(slot, self.problem(secret, slot, draw)) for slot, draw in assigned.places()]
        groups = [(slot, problem, self.seeds(secret, policy_version, problem, slot)) for slot, problem in drawn]
        if digest_of_groups(groups) != assigned.seeds:
            raise RemoteError(ErrorCode.MALFORMED, "problems or seeds differ from those that the step's secret gives")

    def check_evaluation(self, assigned: Assigned, *, step: int, policy_version: int, num_rollouts: int) -> None:
        """Check what is visible in a receipt for held-out problems, whose seeds stay secret. Raises RemoteError.

        There are as many slots as the bundle has groups, all beyond the run's; no draws; and its step is its policy's
        version.
        """
        places = assigned.places()
        is_trained = any(self.is_trained(slot) for slot, _ in places)
        if is_trained or assigned.draws or not self._has_groups(len(places), num_rollouts) or step != policy_version:
            raise RemoteError(
                ErrorCode.MALFORMED,
                f"not the slots of an evaluation of policy {policy_version}, or their number is wrong",
            )
        self._require_prompts(assigned)

    def check_prompts(self, assigned: Assigned, prompts: Iterable[Sequence[int]]) -> None:
        """Check that the prompts of the assigned problems are those that a receipt states. Raises RemoteError."""
        if digest_of_prompts(prompts) != assigned.prompts:
            raise RemoteError(ErrorCode.MALFORMED, "the prompts differ from those of the assigned problems")

    def _require_prompts(self, assigned: Assigned) -> None:
        if (assigned.prompts is not None) is not self._spec.commits_to_prompts:
            wrong = (
                "states prompts, to which the run does not commit" if assigned.prompts else "lacks the prompts' digest"
            )
            raise RemoteError(ErrorCode.MALFORMED, f"the assignment {wrong}")

    def _has_groups(self, num_groups: int, num_rollouts: int) -> bool:
        """Return whether a bundle has this number of groups and is no larger than a lease."""
        return num_groups * self._spec.rollouts_per_group == num_rollouts <= limits.LEASE_ROLLOUTS_MAX

    def check_lease(self, lease: Lease, secret: bytes) -> None:
        """Check that a lease follows from its step's secret. Raises RemoteError.

        Its problems may be any of the first LEASE_DRAWS_MAX draws.
        """
        for group in lease.groups:
            draws = (self.problem(secret, group.slot, draw) for draw in range(limits.LEASE_DRAWS_MAX))
            if group.slot // self._spec.groups_per_step != lease.step or group.problem not in draws:
                raise RemoteError(
                    ErrorCode.MALFORMED, f"slot {group.slot}: the leased problem is not that of the step's secret"
                )
            if group.seeds != self.seeds(secret, lease.policy_version, group.problem, group.slot):
                raise RemoteError(
                    ErrorCode.MALFORMED, f"slot {group.slot}: the leased seeds are not those of the step's secret"
                )
