"""Every cheat by name: what it does, and how to make such a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from prime_lab.adversaries import cheap, proofs, shading, ties, tokens, uploads
from prime_lab.adversaries.engine import AdversaryEngine, Answer, ChooseWeights, Means
from prime_node.ports.engine import Engine
from prime_node.ports.transport import WorkerPort
from prime_node.worker import cheats
from prime_protocol.identity import SigningKey
from prime_protocol.rollout import EngineInfo


@dataclass(frozen=True)
class Adversary:
    """One way to cheat, or an accomplice's part in one."""

    idea: str
    """One sentence on what it does."""
    weights: ChooseWeights | None = None
    answer: Answer | None = None
    port: type[uploads.DishonestPort] | None = None
    claims: EngineInfo | None = None
    """Engine that it falsely claims to have."""
    changes_text: bool = True
    """Whether some of its completions differ from those of an honest worker."""
    partner: str | None = None
    """Cheat that a second worker plays along with it."""

    def engine_around(self, engine: Engine, *, means: Means | None = None, honest_loads: int = 0) -> Engine:
        """Return such a worker's engine."""
        if self.weights is None and self.answer is None and self.claims is None:
            return engine
        return AdversaryEngine(
            engine,
            means or Means(),
            weights=self.weights,
            answer=self.answer,
            claims=self.claims,
            honest_loads=honest_loads,
        )

    def port_around(self, port: WorkerPort, key: SigningKey, means: Means) -> WorkerPort:
        """Return such a worker's port to the coordinator."""
        return port if self.port is None else cast("WorkerPort", self.port(port, key, means))


VLLM_BF16 = EngineInfo(name="vllm", version="1", dtype="bf16", device="cpu")
UNKNOWN = EngineInfo(name="homegrown", version="1", dtype="fp8", device="gpu")
UNSEEDED = EngineInfo(name="transformers", version="1", dtype="fp32", device="cpu", seeded=False)

ADVERSARIES: dict[str, Adversary] = {
    "older-1": Adversary("Samples from the policy before the claimed one.", weights=cheats.older(1)),
    "older-2": Adversary("Samples from the policy two steps before.", weights=cheats.older(2)),
    "older-8": Adversary("Samples from the policy eight steps before.", weights=cheats.older(8)),
    "stale": Adversary("Never swaps its weights: saves the downloads.", weights=cheats.first),
    "base": Adversary("Samples from the run's initial model.", weights=cheap.base),
    "int8": Adversary("Rounds the weights to 8 bits.", weights=cheats.int8),
    "int4": Adversary("Rounds the weights to 4 bits.", weights=cheats.int4),
    "int8-as-vllm": Adversary(
        "Rounds to 8 bits, and claims an engine that is known to be less exact.", weights=cheats.int8, claims=VLLM_BF16
    ),
    "int8-as-unknown": Adversary(
        "Rounds to 8 bits, and claims an engine that no calibration knows.", weights=cheats.int8, claims=UNKNOWN
    ),
    "older-1-as-vllm": Adversary(
        "One policy behind, and claims an engine that is known to be less exact.",
        weights=cheats.older(1),
        claims=VLLM_BF16,
    ),
    "altered": Adversary("Adds noise to the weights.", weights=cheats.noisy),
    "smaller": Adversary("Samples from a smaller model.", answer=cheap.smaller),
    "smaller-rescored": Adversary(
        "Samples from a smaller model, and takes logprobs and proofs from the right one's prefill.",
        answer=cheap.smaller_rescored,
    ),
    "escalation": Adversary(
        "A smaller model chooses, the right one where its two best are within a nat.", answer=cheap.escalating(1.0)
    ),
    "escalation-3": Adversary("The same, within three nats.", answer=cheap.escalating(3.0)),
    "prompt-swap": Adversary("Answers another prompt.", answer=tokens.prompt_swap),
    "easy-problem-swap": Adversary(
        "Claims that every completion answers the lease's easiest problem.", port=uploads.EasyProblems
    ),
    "truncated": Adversary("Uploads the first half of each completion.", answer=cheats.truncated),
    "padded": Adversary("Continues after the stop token.", answer=tokens.padded),
    "forged-stop": Adversary("Ends each completion half-way with a stop token of its own.", answer=tokens.forged_stop),
    "replayed-own": Adversary("Sends its first bundle again for every lease.", port=uploads.ReplayedOwn),
    "replayed-others": Adversary(
        "Sends the bundles of an accomplice again.", port=uploads.ReplayedOthers, partner="telling"
    ),
    "claimed-rewards": Adversary(
        "Adds perfect rewards to its bundles.", port=uploads.ClaimedRewards, changes_text=False
    ),
    "forged-logprobs": Adversary(
        "Claims logprobs half a nat too low, so that the trainer learns more from them.",
        answer=tokens.forged_logprobs,
        changes_text=False,
    ),
    "best-of-n": Adversary("Samples four times and uploads the best.", answer=tokens.best_of_n),
    "forged-seed": Adversary("Samples with randomness of its own.", answer=cheats.forged_seed),
    "temperature-0.8": Adversary("Samples at temperature 0.8.", answer=tokens.with_sampling(temperature=0.8)),
    "temperature-0.95": Adversary("Samples at temperature 0.95.", answer=tokens.with_sampling(temperature=0.95)),
    "top-p-0.95": Adversary("Samples from the nucleus with top-p 0.95.", answer=cheap.nucleus(0.95)),
    "greedy": Adversary("Takes the most likely token.", answer=tokens.with_sampling(temperature=0.0)),
    "copied-proofs": Adversary(
        "Sends the proofs of another completion.", answer=proofs.copied_proofs, changes_text=False
    ),
    "zero-proofs": Adversary("Sends proofs that are all zeros.", answer=proofs.zero, changes_text=False),
    "blank-proofs": Adversary("Sends well-formed proofs of nothing.", answer=proofs.blank, changes_text=False),
    "missing-proofs": Adversary("Sends one proof for all.", answer=proofs.missing, changes_text=False),
    "older-proofs": Adversary(
        "Sends the proofs of the policy two steps before.", answer=proofs.of_another_step, changes_text=False
    ),
    "poison": Adversary(
        "Half of a group stops early, the other half is empty: the policy is to learn the former.",
        answer=tokens.poison(0.0),
    ),
    "loud-poison": Adversary(
        "The same, and claims logprobs two nats too low, so that the trainer learns more from them.",
        answer=tokens.poison(2.0),
    ),
    "ties": Adversary(
        "Takes the second most likely token where it is close and improves the answer.", answer=ties.near_ties
    ),
    "ties-as-vllm": Adversary(
        "The same, and claims an engine that is known to be less exact.", answer=ties.near_ties, claims=VLLM_BF16
    ),
    "ties-as-unknown": Adversary(
        "The same, and claims an engine that no calibration knows.", answer=ties.near_ties, claims=UNKNOWN
    ),
    "unseeded-best-of-n": Adversary(
        "Says that its engine takes no seeds, samples four times and uploads the best.",
        answer=tokens.best_of_n,
        claims=UNSEEDED,
        partner="unseeded",
    ),
    "framing": Adversary(
        "The same, and files what another lease's seeds give: the next worker that samples those looks like a copier.",
        answer=tokens.refiled,
        port=uploads.Framing,
        claims=UNSEEDED,
    ),
    "equivocation": Adversary("Signs two bundles for each lease.", port=uploads.Equivocating, changes_text=False),
    "time-shift": Adversary(
        "Keeps bundles until their step is trained, and backdates them.", port=uploads.TimeShifted, changes_text=False
    ),
    "hoarding": Adversary(
        "Takes as many leases as it can and abandons them all.", port=uploads.Hoarding, changes_text=False
    ),
    "picking": Adversary("Hands back leases with long prompts.", port=uploads.Picking, changes_text=False),
    "partial-10": Adversary("Best of four in a tenth of its completions.", answer=tokens.partly(0.1, tokens.best_of_n)),
    "partial-1": Adversary(
        "Best of four in a hundredth of its completions.", answer=tokens.partly(0.01, tokens.best_of_n)
    ),
    "low-0.0095-as-vllm": Adversary(
        "Claims all logprobs 0.0095 nats too low, and an engine that is known to be less exact.",
        answer=shading.lowered(0.0095),
        claims=VLLM_BF16,
        changes_text=False,
    ),
    "low-0.0095-as-unknown": Adversary(
        "The same, and claims an engine that no calibration knows.",
        answer=shading.lowered(0.0095),
        claims=UNKNOWN,
        changes_text=False,
    ),
    "low-0.02-as-vllm": Adversary(
        "Claims all logprobs 0.02 nats too low, and an engine that is known to be less exact.",
        answer=shading.lowered(0.02),
        claims=VLLM_BF16,
        changes_text=False,
    ),
    "low-0.05-as-vllm": Adversary(
        "The same by 0.05 nats.", answer=shading.lowered(0.05), claims=VLLM_BF16, changes_text=False
    ),
    **{
        f"shading-{nats}{name}": Adversary(
            f"Claims logprobs {nats} nats too low where a completion is rewarded{clause}.",
            answer=shading.by_reward(-nats),
            claims=claims,
            changes_text=False,
        )
        for nats in (0.1, 0.05)
        for name, clause, claims in (
            ("", "", None),
            ("-as-vllm", ", and an engine that is known to be less exact", VLLM_BF16),
            ("-as-unknown", ", and an engine that no calibration knows", UNKNOWN),
        )
    },
    "shading-both-ways": Adversary(
        "Claims logprobs 0.1 nats too low where a completion is rewarded and too high where not, as a less exact engine.",
        answer=shading.by_reward(-0.1, 0.1),
        claims=VLLM_BF16,
        changes_text=False,
    ),
    "spikes-as-unknown": Adversary(
        "Claims some tokens of rewarded completions 0.45 nats too low, and an engine that no calibration knows.",
        answer=shading.spikes,
        claims=UNKNOWN,
        changes_text=False,
    ),
    "temperature-0.98-as-unknown": Adversary(
        "Samples at temperature 0.98, and claims an engine that no calibration knows.",
        answer=tokens.with_sampling(temperature=0.98),
        claims=UNKNOWN,
    ),
    "temperature-0.99-as-unknown": Adversary(
        "The same at temperature 0.99.", answer=tokens.with_sampling(temperature=0.99), claims=UNKNOWN
    ),
    "best-of-n-in-20": Adversary(
        "Best of four in all of a lease, in one lease of twenty.",
        answer=tokens.in_whole_leases(0.05, tokens.best_of_n),
    ),
    "colluding": Adversary(
        "Uploads an accomplice's completions, rescored, instead of any work.",
        answer=tokens.handed,
        partner="handing-out",
    ),
}
"""Cheats that scripts/bench/adversaries.py runs."""

ACCOMPLICES: dict[str, Adversary] = {
    "telling": Adversary(
        "An honest worker that gives its bundles away.", port=uploads.LeakingUploads, changes_text=False
    ),
    "handing-out": Adversary(
        "An honest worker that gives its completions away.", answer=tokens.handing_out, changes_text=False
    ),
    "unseeded": Adversary(
        "An honest worker whose engine takes no seeds.", answer=cheats.forged_seed, claims=UNSEEDED, changes_text=False
    ),
}
