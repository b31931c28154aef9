"""Which problem a slot is, and which seeds its completions get: keyed hashes, so nothing has to be stored.

The keys are secrets of the coordinator, so that nobody can foresee a problem or a seed before it is leased, nor shop for better
ones: for a given policy and slot there is exactly one answer, whoever is leased it and however often it was handed back. A newer
policy has other seeds for the same problem. Problems and seeds of the run's steps are by the secrets of its seed chain
(prime_protocol/assigned.py), which the ledger opens one after another, so that everybody can work them out again. What stays
the coordinator's own is by a secret that is never told:

    held-out problem       place p beyond the run's slots is number p // E of environment p % E, of E in the RunSpec's order
    seeds of a held-out    blake3(key, "held out", run, environment, index): every policy meets the same noise
    name of a network      blake3(key, "network", run, prefix)
    audit of a bundle      blake3(key, "audit", run, bundle digest)

A run without a chain has problems and seeds by that secret too, with the manifest's digest for the policy's number.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from secrets import token_hex

from blake3 import blake3

from prime_node.coordinator.state.records import LeaseRecord
from prime_node.ports.environment import Environment, Tokenizer
from prime_protocol.assigned import Assigned, SeedRule, assigned_in
from prime_protocol.assignment import HELD_OUT_START, GroupAssignment, Lease, Problem
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import PinnedRun
from prime_protocol.seed_chain import OpenSecret, chain_from, committed

DRAWS_MAX = 16
"""A problem whose prompt is too long is drawn again; an environment with none that fits is the operator's fault."""


def secret_of(key: SigningKey) -> bytes:
    """The assignment secret that a coordinator's first key gives. It outlives the key: leases and batches follow from it."""
    return blake3(key.to_bytes(), derive_key_context="prime-node 2026 coordinator assignment secret").digest()


def chain_of(secret: bytes, length: int) -> list[bytes]:
    """The secrets of a run's steps. They follow from the assignment secret, so whoever restores that goes on with them."""
    last = blake3(secret, derive_key_context="prime-node 2026-11-22 last secret of the seed chain").digest()
    return chain_from(last, length)


def secrets_of(run: PinnedRun, secret: bytes) -> list[bytes]:
    """The same for a run; empty where it has no chain. Raises LocalError where the secret is another run's."""
    chain = run.spec.seed_chain
    secrets = [] if chain is None else chain_of(secret, chain.length)
    if secrets and committed(secrets) != chain:
        raise LocalError(
            "the assignment secret is not the one that this run was made with: restore the coordinator's folder, "
            "assignment.secret in it above all, from a copy"
        )
    return secrets


def newest_open(run: PinnedRun, secrets: list[bytes], steps_over: int) -> OpenSecret | None:
    """What the ledger's head tells once the groups of so many steps are with the trainer."""
    chain = run.spec.seed_chain
    number = None if chain is None else chain.newest_open(steps_over, max_steps=run.spec.max_steps)
    return None if number is None else OpenSecret(number=number, secret=secrets[number].hex())


class Assigner:
    """Turns slots into work. Deterministic for a run and a secret, but for the names of leases."""

    def __init__(
        self,
        run: PinnedRun,
        *,
        secret: bytes,
        environments: Mapping[str, Environment],
        tokenizer: Tokenizer,
        draws: Mapping[int, int] | None = None,
    ) -> None:
        """`draws`: the slots whose problem is not the first draw (curriculum.py); looked at each time. Raises LocalError."""
        self._run = run
        self._rule = SeedRule(run.digest, run.spec)
        self.secrets = secrets_of(run, secret)
        """By number; those of steps that are not over must not leave the coordinator."""
        self._draws = {} if draws is None else draws
        self._secret = secret
        self._start = token_hex(16)
        self._environments = environments
        self._tokenizer = tokenizer
        self._names = [environment.name for environment in run.spec.environments]
        self._slots_end = run.spec.max_steps * run.spec.groups_per_step
        # A slot is rendered for its lease, its check and its batch; the window is a few steps.
        self._rendered = lru_cache(maxsize=4 * run.spec.groups_per_step + 1_024)(self._render)

    def problem(self, slot: int, draw: int | None = None) -> tuple[Problem, tuple[int, ...]]:
        """A slot's problem, and its prompt as the worker has to feed it. `draw`: another one than the state says."""
        return self._drawn(slot, draw)[:2]

    def _drawn(self, slot: int, draw: int | None = None) -> tuple[Problem, tuple[int, ...], int]:
        return self._rendered(slot, self._draws.get(slot, 0) if draw is None else draw)

    def asked_draw(self, slot: int, draw: int) -> int:
        """The draw that a slot asks: a later one than `draw` where the prompts from there on are too long."""
        return self._drawn(slot, draw)[2]

    def example(self, slot: int, draw: int) -> str:
        """A name for what is asked: the same for indices that give the same prompt."""
        problem, prompt = self.problem(slot, draw)
        return self._hash("example", problem.environment, *prompt, num_bytes=16).hex()

    def lease_id(self, worker: str, number: int) -> str:
        """A name for the number-th lease that nobody can guess.

        Each start gives other names: after a restored backup the numbers repeat, and an upload for the lease that had the number
        before must not count against the one that has it now.
        """
        return self._hash("lease", worker, number, self._start).hex()

    def lease(self, record: LeaseRecord) -> Lease:
        """The lease in full, the same each time."""
        groups = []
        for slot, (problem, prompt, _) in zip(record.slots, self._drawn_for(record), strict=True):
            seeds = self.seeds(problem, slot, record)
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

    def assigned(self, record: LeaseRecord) -> Assigned | None:
        """What the receipt of a lease's bundle says was assigned; None where the run has no chain."""
        if not self.secrets:
            return None
        return assigned_in(self.lease(record).groups, [draw for _, _, draw in self._drawn_for(record)])

    def _drawn_for(self, record: LeaseRecord) -> list[tuple[Problem, tuple[int, ...], int]]:
        draws: tuple[int | None, ...] = record.draws or (None,) * len(record.slots)
        return [self._drawn(slot, draw) for slot, draw in zip(record.slots, draws, strict=True)]

    def seeds(self, problem: Problem, slot: int, record: LeaseRecord) -> tuple[int, ...]:
        """One seed for each completion of a group."""
        if problem.index >= HELD_OUT_START:
            return self._rule.drawn_seeds(self._secret, "held out", problem.environment, problem.index)
        policy = record.policy_version if self.secrets else record.policy_digest
        return self._rule.seeds(self._secret_of(slot), policy, problem, slot)

    def _secret_of(self, slot: int) -> bytes:
        chain = self._run.spec.seed_chain
        return self._secret if chain is None else self.secrets[chain.number(self._run.spec.step_of(slot))]

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

    def look_draw(self, bundle: str) -> float:
        """The same for a second look by another validator."""
        return int.from_bytes(self._hash("look", bundle, num_bytes=8), "big") / 2**64

    def network_name(self, network: str) -> str:
        """A name for a network that tells nobody which one it is."""
        return self._hash("network", network, num_bytes=16).hex()

    def _render(self, slot: int, first_draw: int) -> tuple[Problem, tuple[int, ...], int]:
        longest = self._run.spec.limits.prompt_tokens_max
        is_held_out = slot >= self._slots_end
        for draw in range(first_draw, first_draw + (1 if is_held_out else DRAWS_MAX)):
            problem = (
                self.held_out_problem(slot) if is_held_out else self._rule.problem(self._secret_of(slot), slot, draw)
            )
            text = self._environments[problem.environment].prompt(problem.index)
            prompt = tuple(self._tokenizer.encode_prompt(text))
            if 1 <= len(prompt) <= longest:
                return problem, prompt, draw
        raise LocalError(
            f"slot {slot}: no prompt of 1 to {longest} tokens in {DRAWS_MAX} problems; "
            "check the environments' options and prompt_tokens_max"
        )

    def _hash(self, purpose: str, *fields: str | int, num_bytes: int = 32) -> bytes:
        return self._rule.hashed(self._secret, purpose, *fields, num_bytes=num_bytes)
