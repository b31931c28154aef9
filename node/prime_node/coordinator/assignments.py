"""Which problem a slot is, and which seeds its completions get: keyed hashes, so nothing has to be stored.

The key is a secret of the coordinator, so that nobody can foresee a problem or a seed before it is leased, nor shop for better
ones: for a given policy and slot there is exactly one answer, whoever is leased it and however often it was handed back. A newer
policy has other seeds for the same problem.

    problem of slot        environment by weight, index, from blake3(key, "problem", run, slot, draw)
    held-out problem       place p beyond the run's slots is number p // E of environment p % E, of E in the RunSpec's order
    seeds of a group       blake3(key, "seeds", run, policy digest, environment, index, slot), 8 bytes a completion
                           of its extendable output, in order, the top bit cleared
    of a held-out one      blake3(key, "held out", run, environment, index) likewise: every policy meets the same noise
    name of a network      blake3(key, "network", run, prefix)
    audit of a bundle      blake3(key, "audit", run, bundle digest)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate

from blake3 import blake3

from prime_node.coordinator.state.records import LeaseRecord
from prime_node.ports.environment import Environment, Tokenizer
from prime_protocol.assignment import HELD_OUT_START, GroupAssignment, Lease, Problem
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.noise import SEED_MAX
from prime_protocol.run_spec import PinnedRun

INDEX_BITS = 48
"""Problem indices are below 2**48. The low bits are the slot's place in its step, so no step has a problem twice."""
DRAWS_MAX = 16
"""A problem whose prompt is too long is drawn again; an environment with none that fits is the operator's fault."""


def secret_of(key: SigningKey) -> bytes:
    """The assignment secret that a coordinator's first key gives. It outlives the key: leases and batches follow from it."""
    return blake3(key.to_bytes(), derive_key_context="prime-node 2026 coordinator assignment secret").digest()


class Assigner:
    """Turns slots into work. Deterministic for a run and a secret."""

    def __init__(
        self,
        run: PinnedRun,
        *,
        secret: bytes,
        environments: Mapping[str, Environment],
        tokenizer: Tokenizer,
        draws: Mapping[int, int] | None = None,
    ) -> None:
        """`draws`: the slots whose problem is not the first draw (curriculum.py); it is looked at each time."""
        self._run = run
        self._draws = {} if draws is None else draws
        self._secret = secret
        self._environments = environments
        self._tokenizer = tokenizer
        self._names = [environment.name for environment in run.spec.environments]
        self._slots_end = run.spec.max_steps * run.spec.groups_per_step
        self._shares = list(accumulate(environment.weight for environment in run.spec.environments))
        # A slot is rendered for its lease, its check and its batch; the window is a few steps.
        self._rendered = lru_cache(maxsize=4 * run.spec.groups_per_step + 1_024)(self._render)

    def problem(self, slot: int, draw: int | None = None) -> tuple[Problem, tuple[int, ...]]:
        """A slot's problem, and its prompt as the worker has to feed it. `draw`: another one than the state says."""
        return self._rendered(slot, self._draws.get(slot, 0) if draw is None else draw)

    def example(self, slot: int, draw: int) -> str:
        """A name for what is asked: the same for indices that give the same prompt."""
        problem, prompt = self._rendered(slot, draw)
        return self._hash("example", problem.environment, *prompt, num_bytes=16).hex()

    def lease_id(self, worker: str, number: int) -> str:
        """A name for the number-th lease that nobody can guess."""
        return self._hash("lease", worker, number).hex()

    def lease(self, record: LeaseRecord) -> Lease:
        """The lease in full, the same each time."""
        groups = []
        for slot in record.slots:
            problem, prompt = self.problem(slot)
            seeds = self.seeds(problem, slot, record.policy_digest)
            groups.append(
                GroupAssignment.model_construct(slot=slot, problem=problem, prompt_token_ids=prompt, seeds=seeds)
            )
        return Lease.model_construct(
            run=self._run.digest,
            lease_id=record.lease_id,
            worker=record.worker,
            step=record.step,
            policy_version=record.policy_version,
            policy_digest=record.policy_digest,
            groups=tuple(groups),
            sampling=self._run.spec.sampling,
            issued_at_ms=record.issued_at_ms,
            expires_at_ms=record.expires_at_ms,
        )

    def seeds(self, problem: Problem, slot: int, policy_digest: str) -> tuple[int, ...]:
        """One seed for each completion of a group."""
        num = self._run.spec.rollouts_per_group
        if problem.index >= HELD_OUT_START:
            stream = self._hash("held out", problem.environment, problem.index, num_bytes=8 * num)
        else:
            fields = (policy_digest, problem.environment, problem.index, slot)
            stream = self._hash("seeds", *fields, num_bytes=8 * num)
        return tuple(int.from_bytes(stream[8 * i : 8 * i + 8], "big") & SEED_MAX for i in range(num))

    def held_out_slots(self, problems: int) -> list[int]:
        """Of the first so many evaluation problems of each environment, or as many as it has; problem by problem."""
        counts = [len(self._environments[name].held_out(problems)) for name in self._names]
        places = ((number, which) for number in range(problems) for which in range(len(counts)))
        return [self._slots_end + number * len(counts) + which for number, which in places if number < counts[which]]

    def held_out_problem(self, slot: int) -> Problem:
        """Of a slot beyond the run's."""
        number, which = divmod(slot - self._slots_end, len(self._names))
        return Problem(environment=self._names[which], index=HELD_OUT_START + number)

    def audit_draw(self, bundle: str) -> float:
        """A number in [0, 1) for an uploaded bundle that nobody can foresee: it is audited where this is below its share."""
        return int.from_bytes(self._hash("audit", bundle, num_bytes=8), "big") / 2**64

    def network_name(self, network: str) -> str:
        """A name for a network that tells nobody which one it is."""
        return self._hash("network", network, num_bytes=16).hex()

    def _render(self, slot: int, first_draw: int) -> tuple[Problem, tuple[int, ...]]:
        longest = self._run.spec.limits.prompt_tokens_max
        is_held_out = slot >= self._slots_end
        for draw in range(first_draw, first_draw + (1 if is_held_out else DRAWS_MAX)):
            problem = self.held_out_problem(slot) if is_held_out else self._draw(slot, draw)
            text = self._environments[problem.environment].prompt(problem.index)
            prompt = tuple(self._tokenizer.encode_prompt(text))
            if 1 <= len(prompt) <= longest:
                return problem, prompt
        raise LocalError(
            f"slot {slot}: no prompt of 1 to {longest} tokens in {DRAWS_MAX} problems; "
            "check the environments' options and prompt_tokens_max"
        )

    def _draw(self, slot: int, draw: int) -> Problem:
        groups = self._run.spec.groups_per_step
        digest = self._hash("problem", slot, draw, num_bytes=16)
        share = int.from_bytes(digest[:8], "big") / 2**64 * self._shares[-1]
        place_bits = (groups - 1).bit_length()
        drawn = int.from_bytes(digest[8:], "big") >> (64 - INDEX_BITS + place_bits)
        return Problem(
            environment=self._names[min(bisect_right(self._shares, share), len(self._names) - 1)],
            index=drawn << place_bits | slot % groups,
        )

    def _hash(self, purpose: str, *fields: str | int, num_bytes: int = 32) -> bytes:
        # Digests, key ids and names hold no NUL, so the fields cannot run into one another.
        message = "\0".join([purpose, self._run.digest, *map(str, fields)]).encode()
        return blake3(message, key=self._secret).digest(length=num_bytes)
