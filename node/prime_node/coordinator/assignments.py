"""The problem of each slot and the seeds of its completions: keyed hashes, so they need no storage.

The keys are secrets of the coordinator. So no worker can foresee a problem or a seed before its lease, nor choose a better one:
policy and slot determine them, whichever worker gets the lease and however often it was returned. A newer policy has other
seeds for the same problem. The secrets of the run's seed chain (prime_protocol/assigned.py) determine the problems and seeds of
its steps. The ledger opens them one after another, so that anyone can compute them again. Other values use a secret that is
never published:

    held-out problem       place p after the run's slots is number p // E of environment p % E, of E in the RunSpec's order
    seeds of a held-out    blake3(key, "held out", run, environment, index): every policy meets the same noise
    name of a network      blake3(key, "network", run, prefix)
    audit of a bundle      blake3(key, "audit", run, bundle digest)

A run without a chain uses that secret for problems and seeds too, with the manifest's digest instead of the policy's number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from secrets import token_hex

from blake3 import blake3

from prime_node.coordinator.state.records import LeaseRecord
from prime_node.envs.source import is_leasable, prompt_of
from prime_node.ports.environment import Environment, Tokenizer
from prime_protocol.assigned import Assigned, SeedRule, assigned_in, digest_of_prompts
from prime_protocol.assignment import HELD_OUT_START, GroupAssignment, Lease, Problem
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import PinnedRun
from prime_protocol.seed_chain import OpenSecret, chain_from, committed

DIGESTS_REMEMBERED = 65_536
"""Leases whose digests are kept, some 10 MB; that of an older one is computed again."""
DRAWS_MAX = 16
"""Maximum draws of a problem whose prompt is too long. An environment in which none fits is the operator's fault."""


def secret_of(key: SigningKey) -> bytes:
    """Return the assignment secret derived from a coordinator's first key.

    It outlives the key: leases and batches depend on it.
    """
    return blake3(key.to_bytes(), derive_key_context="prime-node 2026 coordinator assignment secret").digest()


def chain_of(secret: bytes, length: int) -> list[bytes]:
    """Return the secrets of a run's steps, derived from the assignment secret, so that a restored secret gives the same ones."""
    last = blake3(secret, derive_key_context="prime-node 2026-11-22 last secret of the seed chain").digest()
    return chain_from(last, length)


def secrets_of(run: PinnedRun, secret: bytes) -> list[bytes]:
    """Return the secrets of a run's steps; empty if it has no chain. Raise LocalError if the secret belongs to another run."""
    chain = run.spec.seed_chain
    secrets = [] if chain is None else chain_of(secret, chain.length)
    if chain is not None and committed(secrets, prompts=chain.prompts) != chain:
        raise LocalError(
            "the assignment secret is not the one that this run began with: restore the coordinator's folder from a "
            "copy, above all assignment.secret"
        )
    return secrets


def newest_open(run: PinnedRun, secrets: list[bytes], steps_over: int) -> OpenSecret | None:
    """Return the secret that the ledger's head opens once the trainer has the groups of the first `steps_over` steps."""
    chain = run.spec.seed_chain
    number = None if chain is None else chain.newest_open(steps_over, max_steps=run.spec.max_steps)
    return None if number is None else OpenSecret(number=number, secret=secrets[number].hex())


class Assigner:
    """Conversion of slots to work. Deterministic for a run and a secret, except for lease ids."""

    def __init__(
        self,
        run: PinnedRun,
        *,
        secret: bytes,
        environments: Mapping[str, Environment],
        tokenizer: Tokenizer | None,
        draws: Mapping[int, int] | None = None,
    ) -> None:
        """Read `draws` at each use: the slots whose problem is not the first draw (curriculum.py). Raise LocalError.

        Without a tokenizer it makes no prompts, which `assigned` does not need.
        """
        self._run = run
        self.rule = SeedRule(run.digest, run.spec)
        """Rule that derives problems and seeds."""
        self.secrets = secrets_of(run, secret)
        """Secrets by number; those of unfinished steps must not leave the coordinator."""
        self._draws = {} if draws is None else draws
        self._secret = secret
        self._start = token_hex(16)
        self._environments = environments
        self._tokenizer = tokenizer
        self._names = [environment.name for environment in run.spec.environments]
        self._slots_end = run.spec.max_steps * run.spec.groups_per_step
        self._digests: dict[str, str] = {}
        """Digests of the newest leases, by lease."""
        # A slot is rendered for its lease, its check and its batch; the window is a few steps.
        self._rendered = lru_cache(maxsize=4 * run.spec.groups_per_step + 1_024)(self._render)

    def problem(self, slot: int, draw: int | None = None) -> tuple[Problem, tuple[int, ...]]:
        """Return a slot's problem, and its prompt as the worker has to feed it. `draw` replaces the draw in the state."""
        return self._drawn(slot, draw)[:2]

    def _drawn(self, slot: int, draw: int | None = None) -> tuple[Problem, tuple[int, ...], int]:
        return self._rendered(slot, self._draws.get(slot, 0) if draw is None else draw)

    def asked_draw(self, slot: int, draw: int) -> int:
        """Return the draw that a slot uses: later than `draw` if the prompts from there on are too long."""
        return self._drawn(slot, draw)[2]

    def asked_draws(self, slots: Sequence[int], draws: Sequence[int]) -> tuple[int, ...]:
        """Return the draws that the slots of a new lease use; empty if all use their first. The same holds for `draws`.

        So no receipt of the lease needs its prompts again: by then an environment may fail.
        """
        asked = tuple(self.asked_draw(slot, draw) for slot, draw in _with_draws(slots, draws))
        return asked if any(asked) else ()

    def prompts_digest(self, slots: Sequence[int], draws: Sequence[int]) -> str:
        """Return the digest of the prompts of a new lease, which its receipts state; empty if the run commits to none."""
        if not self._run.spec.commits_to_prompts:
            return ""
        return digest_of_prompts(self.problem(slot, draw)[1] for slot, draw in _with_draws(slots, draws))

    def example(self, slot: int, draw: int) -> str:
        """Return an id of the prompt: the same for indices that give the same prompt."""
        problem, prompt = self.problem(slot, draw)
        return self._hash("example", problem.environment, *prompt, num_bytes=16).hex()

    def lease_id(self, worker: str, number: int) -> str:
        """Return an unguessable id for the number-th lease.

        Each start gives other ids. After a restored backup the numbers repeat, and an upload for an old lease must not count
        against the new lease with the same number.
        """
        return self._hash("lease", worker, number, self._start).hex()

    def lease(self, record: LeaseRecord) -> Lease:
        """Return the full lease, the same each time."""
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

    def lease_payload(self, record: LeaseRecord) -> bytes:
        """Return the payload of the lease, the same each time, and remember its digest for the bundle."""
        payload = self.lease(record).model_dump_json().encode()
        self._digests[record.lease_id] = digest_of(payload)
        if len(self._digests) > DIGESTS_REMEMBERED:
            del self._digests[next(iter(self._digests))]
        return payload

    def lease_digest(self, record: LeaseRecord) -> str:
        """Return the digest of the lease's payload, which the header of its bundle names."""
        return self._digests.get(record.lease_id) or digest_of(self.lease_payload(record))

    def prompts(self, record: LeaseRecord) -> list[tuple[Problem, tuple[int, ...]]]:
        """Return the problem and the prompt of each group of a lease. Seeds, which take longer, are not computed."""
        return [(problem, prompt) for problem, prompt, _ in self._drawn_for(record)]

    def assigned(self, record: LeaseRecord) -> Assigned | None:
        """Return what each receipt that accepts a lease's bundle states; None if the run has no chain.

        It reads no environment, so an escrow can be released long after the lease.
        """
        if not self.secrets:
            return None
        groups = []
        for slot, draw in _with_draws(record.slots, record.draws):
            problem = self._problem(slot, draw)
            seeds = self.seeds(problem, slot, record)
            groups.append(GroupAssignment.model_construct(slot=slot, problem=problem, prompt_token_ids=(), seeds=seeds))
        return assigned_in(groups, record.draws, prompts=record.prompts or None)

    def _drawn_for(self, record: LeaseRecord) -> list[tuple[Problem, tuple[int, ...], int]]:
        return [self._drawn(slot, draw) for slot, draw in _with_draws(record.slots, record.draws)]

    def seeds(self, problem: Problem, slot: int, record: LeaseRecord) -> tuple[int, ...]:
        """Return one seed for each completion of a group."""
        if problem.index >= HELD_OUT_START:
            return self.rule.drawn_seeds(self._secret, "held out", problem.environment, problem.index)
        policy = record.policy_version if self.secrets else record.policy_digest
        return self.rule.seeds(self._secret_of(slot), policy, problem, slot)

    def _secret_of(self, slot: int) -> bytes:
        chain = self._run.spec.seed_chain
        return self._secret if chain is None else self.secrets[chain.number(self._run.spec.step_of(slot))]

    def held_out_slots(self, problems: int) -> list[int]:
        """Return the slots of each environment's first `problems` evaluation problems, or of all it has, problem by problem."""
        counts = [len(self._environments[name].held_out(problems)) for name in self._names]
        places = ((number, which) for number in range(problems) for which in range(len(counts)))
        return [self._slots_end + number * len(counts) + which for number, which in places if number < counts[which]]

    def audit_draw(self, bundle: str) -> float:
        """Return an unpredictable number in [0, 1) for an uploaded bundle: it is audited if this is below its share."""
        return self._chance("audit", bundle)

    def look_draw(self, bundle: str) -> float:
        """Return the same kind of number for a second look by another validator."""
        return self._chance("look", bundle)

    def draw_chance(self, slot: int, draw: int) -> float:
        """Return an unpredictable number in [0, 1) for a slot's draw, for choices by weight. It is the same after a restart."""
        return self._chance("draw", slot, draw)

    def network_name(self, network: str) -> str:
        """Return a name for a network that does not reveal the network."""
        return self._hash("network", network, num_bytes=16).hex()

    def _render(self, slot: int, first_draw: int) -> tuple[Problem, tuple[int, ...], int]:
        limits = self._run.spec.limits
        is_held_out = slot >= self._slots_end
        for draw in range(first_draw, first_draw + (1 if is_held_out else DRAWS_MAX)):
            problem = self._problem(slot, draw)
            assert self._tokenizer is not None
            prompt = prompt_of(self._environments[problem.environment], problem.index, self._tokenizer)
            if is_leasable(prompt, limits):
                return problem, prompt, draw
        raise LocalError(
            f"slot {slot}: no prompt of 1 to {limits.prompt_tokens_max} tokens in {DRAWS_MAX} problems; "
            "check the environments' options and prompt_tokens_max"
        )

    def _problem(self, slot: int, draw: int) -> Problem:
        if slot >= self._slots_end:
            return self.rule.evaluation_problem(slot)
        return self.rule.problem(self._secret_of(slot), slot, draw)

    def _chance(self, purpose: str, *fields: str | int) -> float:
        return int.from_bytes(self._hash(purpose, *fields, num_bytes=8), "big") / 2**64

    def _hash(self, purpose: str, *fields: str | int, num_bytes: int = 32) -> bytes:
        return self.rule.hashed(self._secret, purpose, *fields, num_bytes=num_bytes)


def _with_draws(slots: Sequence[int], draws: Sequence[int]) -> Iterator[tuple[int, int]]:
    # A lease without draws has its slots' first ones. The slots may have drawn again since.
    return zip(slots, draws or (0,) * len(slots), strict=True)
