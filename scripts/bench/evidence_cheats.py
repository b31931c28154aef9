"""Cheats that evidence.py measures: sampling from other weights, at other temperatures or by other seeds, and their judge."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from prime_node.adapters.engines.torch_noise import torch_gumbel_noise
from prime_node.adapters.models.causal_model import CausalModel
from prime_node.adapters.models.pretrained_model import folder_weights
from prime_node.cli.shipped import shipped_calibration
from prime_node.ports.engine import Engine, Scorer
from prime_node.validator.calibrating import measure_pair, sample_honestly
from prime_node.worker.cheats import INT4_GROUP, mapped, quantised
from prime_protocol.assignment import Lease
from prime_protocol.rollout import Rollouts
from prime_protocol.weights import Weights, WeightTensor

LENGTH = 32
"""Tokens of a completion."""
CALIBRATION = shipped_calibration()
Pair = tuple[str, str]
"""Classes of the engines that sample and that judge."""
Part = dict[str, npt.NDArray[np.float32]]


@dataclass
class World:
    """The right policy in three engines: the one that samples, also for the cheats; the cheats' scorer; and the judge's."""

    engine: Engine
    liar: Scorer
    judge: Scorer
    weights: Weights
    leases: list[Lease]

    @property
    def pair(self) -> Pair:
        return self.engine.info.calibration_class, self.judge.info.calibration_class

    async def by(self, weights: Weights) -> list[Rollouts]:
        """The leases sampled with other weights."""
        await self.engine.load(weights, policy_version=1)
        sampled = await sample_honestly(self.engine, self.leases)
        await self.engine.load(self.weights, policy_version=0)
        return sampled

    async def at(self, **sampling: float) -> list[Rollouts]:
        """The leases sampled with the right weights and another sampling."""
        changed = [
            lease.model_copy(update={"sampling": lease.sampling.model_copy(update=sampling)}) for lease in self.leases
        ]
        return await sample_honestly(self.engine, changed)

    async def rescored(self, sampled: list[Rollouts]) -> list[Rollouts]:
        """The same tokens with the right policy's logprobs. Its proofs would be right too, so there are none to compare."""
        found = []
        for lease, rollouts in zip(self.leases, sampled, strict=True):
            blank = replace(rollouts, logprobs_T=np.zeros_like(rollouts.logprobs_T), proofs_CB=None)
            errors = await measure_pair(self.liar, [lease], [blank])
            found.append(replace(blank, logprobs_T=-np.concatenate(errors.values["logprob"])))
        return found

    async def parts(self, sampled: list[Rollouts]) -> list[Part]:
        """Return the judge's findings, one completion after another."""
        errors = await measure_pair(self.judge, self.leases, sampled)
        num = sum(map(len, errors.lengths))
        split = {name: np.split(np.concatenate(values), num) for name, values in errors.values.items()}
        return [dict(zip(split, values, strict=True)) for values in zip(*split.values(), strict=True)]


def sign_step(weights: Weights, lr: float, seed: int) -> Weights:
    """One optimizer step in a random direction: every weight moves by the learning rate."""
    rng = np.random.default_rng(seed)
    return mapped(weights, lambda values: values + lr * rng.choice([-1.0, 1.0], values.shape))


def fewer_layers(weights: Weights) -> Weights:
    """A model without its last layer: that layer adds nothing."""
    last = max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    silent = (f"layers.{last}.self_attn.o_proj", f"layers.{last}.mlp.down_proj")

    def kept(name: str, tensor: WeightTensor) -> WeightTensor:
        hidden = any(part in name for part in silent)
        return WeightTensor(tensor.dtype, tensor.shape, np.zeros_like(tensor.data)) if hidden else tensor

    return {name: kept(name, tensor) for name, tensor in weights.items()}


def changed_weights(weights: Weights, older: dict[str, str]) -> dict[str, Callable[[], Weights]]:
    """Name of a cheat -> the weights that it samples with."""
    noise = np.random.default_rng(3)
    return {
        **{f"policy {steps} steps older": partial(folder_weights, Path(path)) for steps, path in older.items()},
        "one sign step, lr 1e-6": lambda: sign_step(weights, 1e-6, 1),
        "one sign step, lr 1e-5": lambda: sign_step(weights, 1e-5, 1),
        "one sign step, lr 1e-4": lambda: sign_step(weights, 1e-4, 1),
        "int8 weights": lambda: mapped(weights, lambda v: quantised(v, group=v.shape[-1], largest=127)),
        "int4 weights": lambda: mapped(weights, lambda v: quantised(v, group=INT4_GROUP, largest=7)),
        "noise, 1 % of the spread": lambda: mapped(weights, lambda v: v + noise.normal(0, 0.01 * v.std(), v.shape)),
        "noise, 10 % of the spread": lambda: mapped(weights, lambda v: v + noise.normal(0, 0.1 * v.std(), v.shape)),
        "a layer less": lambda: fewer_layers(weights),
    }


Make = Callable[[World], Awaitable[dict[str, list[Part]]]]
"""Whose numbers are claimed -> what the judge finds."""


def cheats(weights: Weights, older: dict[str, str]) -> dict[str, Make]:
    """By what they do."""

    def with_weights(changed: Callable[[], Weights]) -> Make:
        async def make(world: World) -> dict[str, list[Part]]:
            sampled = await world.by(changed())
            return {"own": await world.parts(sampled), "rescored": await world.parts(await world.rescored(sampled))}

        return make

    def at(temperature: float) -> Make:
        async def make(world: World) -> dict[str, list[Part]]:
            return {"rescored": await world.parts(await world.rescored(await world.at(temperature=temperature)))}

        return make

    async def forged(world: World) -> dict[str, list[Part]]:
        return {"own": await world.parts(await sample_honestly(world.engine, leases_like(world.leases)))}

    by_weights = {name: with_weights(make) for name, make in changed_weights(weights, older).items()}
    temperatures = {"temperature 0.95": at(0.95), "temperature 0.8": at(0.8), "greedy": at(0.0)}
    return by_weights | temperatures | {"forged seeds": forged}


def leases_like(leases: list[Lease]) -> list[Lease]:
    """The same leases with other seeds."""
    rng = np.random.default_rng(99)

    def reseeded(lease: Lease) -> Lease:
        groups = (
            group.model_copy(update={"seeds": tuple(rng.integers(0, 2**62, len(group.seeds)).tolist())})
            for group in lease.groups
        )
        return lease.model_copy(update={"groups": tuple(groups)})

    return [reseeded(lease) for lease in leases]


def noisy_scores(model: CausalModel, weights: Weights, lease: Lease, sampled: Rollouts) -> npt.NDArray[np.float32]:
    """[T, V] what each token is chosen by under these weights, after the same tokens before it."""
    model.load(weights)
    found = []
    prompts = [group.prompt_token_ids for group in lease.groups for _ in group.seeds]
    for prompt, seed, completion in zip(prompts, sampled.seeds_N.tolist(), sampled.completions(), strict=True):
        rows, first_1H = model.begin([prompt], spare=LENGTH)
        later_TH = model.extend(rows, torch.tensor([completion.token_ids[:-1]]))[0]
        logits_TV = model.logits(torch.cat([first_1H, later_TH]))
        noise_TV = torch_gumbel_noise([seed] * LENGTH, list(range(LENGTH)), logits_TV.shape[1], logits_TV.device)
        found.append((logits_TV + noise_TV).numpy())
    return np.concatenate(found)


def escalation(folder: Path, world: World, honest: list[Rollouts]) -> list[str]:
    """Report savings and risk of a cheap model that uses the right one where its two best tokens are within some nats."""
    model, rows = CausalModel(folder, dtype="fp32", device="cpu"), []
    leases = [(lease, one) for lease, one in zip(world.leases, honest, strict=True) if len(lease.groups) > 1][:1]
    cheap_ones = {
        "int8": mapped(world.weights, lambda v: quantised(v, group=v.shape[-1], largest=127)),
        "int4": mapped(world.weights, lambda v: quantised(v, group=INT4_GROUP, largest=7)),
    }
    with torch.inference_mode():
        right_TV = np.concatenate([noisy_scores(model, world.weights, *each) for each in leases])
        top_T2 = np.sort(right_TV, axis=1)[:, -2:]
        near = float(np.mean(top_T2[:, 1] - top_T2[:, 0] < 0.1))
        rows.append(f"the right model's two best are within 0.1 nats at {near:.3f} of the tokens")
        for name, weights in cheap_ones.items():
            cheap_TV = np.concatenate([noisy_scores(model, weights, *each) for each in leases])
            best_T2 = np.sort(cheap_TV, axis=1)[:, -2:]
            gap_T, wrong_T = best_T2[:, 1] - best_T2[:, 0], cheap_TV.argmax(axis=1) != right_TV.argmax(axis=1)
            for nats in (0.0, 0.1, 0.3, 1.0):
                asked, flips = float(np.mean(gap_T < nats)), float(np.mean(wrong_T & (gap_T >= nats)))
                rows.append(
                    f"{name}, asks within {nats:g} nats: asks for {asked:.3f} of the tokens, {flips:.5f} of them flip"
                )
    for pair in CALIBRATION.pairs:
        if pair.worker == world.pair[0]:
            moments = pair.moments["flip"]
            free = min(each / rate for each, rate in zip(moments.log_moments, moments.lambdas, strict=True))
            rows.append(f"flips that no evidence ever grows from, judged by {pair.validator}: {free:.5f} of the tokens")
    return rows
