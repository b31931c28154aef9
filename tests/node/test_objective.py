"""The way from losses to a step's objective: aggregation, training modes, custom losses; and independence of the split."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases_world import check_each

from prime_node.adapters.training.torch_batch import Tallies, loss_inputs
from prime_node.algo.losses import LOG_RATIO_ABS, LOSSES, LossInputs, Objective, find_loss
from prime_node.algo.losses.objective import Aggregation
from prime_node.algo.shares import batch_counts
from prime_node.ports.train_backend import AggregationKind
from prime_node.ports.train_samples import TrainingMode, TrainSample
from prime_protocol.errors import LocalError

SEED_EXAMPLE = """
import torch
from prime_node.algo.losses import LossInputs, LossOutputs

def ppo_clip_loss(inputs: LossInputs, clip_eps: float = 0.2) -> LossOutputs:
    ratio = torch.exp(inputs.trainer_logprobs - inputs.inference_logprobs)
    clipped_ratio = torch.clamp(ratio, 1 - clip_eps, 1 + clip_eps)

    surr1 = ratio * inputs.advantages
    surr2 = clipped_ratio * inputs.advantages

    loss = -torch.min(surr1, surr2)[inputs.loss_mask].sum()

    return LossOutputs(
        loss=loss,
        metrics={"clip_frac": (ratio != clipped_ratio)[inputs.loss_mask].float().mean()},
    )
"""
"""The example of prime-rl's docs/bring-your-own-algorithms.md (Apache-2.0), except for its import line."""


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "seed_example.py").write_text(SEED_EXAMPLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "seed_example.ppo_clip_loss"


def samples(count: int = 9, *, modes: tuple[TrainingMode, ...] = (TrainingMode.RL,)) -> list[TrainSample]:
    """Return samples of unequal lengths, with masked tokens in the middle; one is masked entirely."""
    rng = random.Random(5)
    result = []
    for index in range(count):
        length = rng.randrange(1, 9)
        mask = tuple(rng.random() < 0.7 for _ in range(length)) if index != 2 else (False,) * length
        result.append(
            TrainSample(
                (1,),
                tuple(range(length)),
                tuple(rng.uniform(-3.0, -0.1) for _ in range(length)),
                rng.gauss(0.0, 1.0),
                mode=modes[index % len(modes)],
                loss_mask=mask,
                teacher_logprobs=tuple(rng.uniform(-3.0, -0.1) for _ in range(length)),
                selected=tuple(place % 3 == 1 for place in range(length)),
            )
        )
    return result


Result = tuple[float, dict[str, float], list[list[float]]]
"""Return the batch's loss, its metrics, and each sample's gradient."""


def descend(loss: Objective, batch: list[TrainSample], micro_batches: list[list[int]], *, padding: int = 0) -> Result:
    """Act as a backend with given logprobs per sample; samples are named by their index in the batch."""
    rng = random.Random(7)
    values = [torch.tensor([rng.uniform(-3.0, -0.1) for _ in sample.completion_token_ids]) for sample in batch]
    logprobs = [value.requires_grad_() for value in values]
    num_tokens, num_sequences = batch_counts(batch)
    denominator = loss.denominator(num_tokens=num_tokens, num_sequences=num_sequences)
    total, tallies = 0.0, Tallies()
    for indices in micro_batches:
        chosen = [batch[index] for index in indices]
        joined = torch.cat([logprobs[index] for index in indices])
        if padding:
            chosen.append(TrainSample((1,), (0,) * padding, (-9.0,) * padding, 5.0, loss_mask=(False,) * padding))
            joined = torch.cat([joined, torch.full((padding,), -77.0)])
        outputs = loss(loss_inputs(joined, chosen))
        torch.autograd.backward(outputs.loss / denominator)
        total += outputs.loss.item() / denominator
        tallies.add(outputs.metrics)
    gradients = [value.grad for value in logprobs]
    return total, tallies.means(), [[] if grad is None else grad.tolist() for grad in gradients]


WHOLE = [list(range(9))]
SPLITS = {
    "one by one": [[index] for index in range(9)],
    "in two": [[0, 1, 2], [3, 4, 5, 6, 7, 8]],
    "in another order": [[8, 3, 1], [7, 0, 2], [6, 5, 4]],
}


@pytest.mark.parametrize("name", [*sorted(LOSSES), "the seed's example"])
def test_micro_batches_order_and_padding_change_nothing_but_rounding(name: str, example: str) -> None:
    """Tolerance: 1e-6 of the largest term, some roundings of a float32 sum in another order."""
    path = example if name not in LOSSES else None

    def check(kind: AggregationKind) -> None:
        loss = find_loss(name, import_path=path, aggregation=kind, constant_length=8)
        batch = samples()
        total, metrics, gradients = descend(loss, batch, WHOLE)
        assert total != 0.0
        for how, split in SPLITS.items():
            for padding in (0, 5):
                found, its_metrics, its_gradients = descend(loss, batch, split, padding=padding)
                assert found == pytest.approx(total, rel=1e-5, abs=1e-6), how
                assert its_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6), how
                for expected, seen in zip(gradients, its_gradients, strict=True):
                    assert seen == pytest.approx(expected, rel=1e-5, abs=1e-6), how

    check_each(((str(kind), kind) for kind in AggregationKind), check)


def test_aggregations_weigh_tokens_as_their_names_say() -> None:
    def given() -> LossInputs:
        """Losses 1, 2, (masked), 3 and 10; the last sequence has no trained token."""
        values = torch.tensor([-1.0, -2.0, -50.0, -3.0, -10.0, -99.0], requires_grad=True)
        mask = torch.tensor([True, True, False, True, True, False])
        return LossInputs(values, torch.zeros(6), torch.ones(6), mask, lengths=(4, 1, 1))

    expected = {
        AggregationKind.TOKEN_MEAN: 16.0 / 4,
        AggregationKind.SEQUENCE_MEAN: ((1.0 + 2.0 + 3.0) / 3 + 10.0) / 2,
        AggregationKind.CONSTANT_LENGTH: 16.0 / (2 * 32),
    }
    for kind, mean in expected.items():
        loss = find_loss("sft", aggregation=kind, constant_length=32)
        found = loss(given()).loss.item() / loss.denominator(num_tokens=4, num_sequences=2)
        assert found == pytest.approx(mean)


def test_losses_are_aggregated_as_in_their_papers_by_default() -> None:
    kinds = {name: find_loss(name, constant_length=8).aggregation.kind for name in LOSSES}
    assert {kinds.pop(name) for name in ("gspo", "gmpo", "sapo")} == {AggregationKind.SEQUENCE_MEAN}
    assert kinds.pop("dr_grpo") is AggregationKind.CONSTANT_LENGTH
    assert set(kinds.values()) == {AggregationKind.TOKEN_MEAN}
    gspo = find_loss("gspo", aggregation=AggregationKind("seq-mean-token-sum-norm"), constant_length=4)
    assert gspo.aggregation.kind is AggregationKind.CONSTANT_LENGTH
    with pytest.raises(LocalError, match=r"set trainer\.loss\.constant_length"):
        find_loss("dr_grpo")


def test_each_sample_is_trained_by_its_own_mode() -> None:
    modes = (TrainingMode.RL, TrainingMode.SFT, TrainingMode.OPD)
    batch, loss = samples(modes=modes), find_loss("aipo")
    _, metrics, gradients = descend(loss, batch, WHOLE)
    for mode, name in zip(modes, ("aipo", "sft", "opd"), strict=True):
        alone = find_loss(name)
        for index, sample in enumerate(batch):
            if sample.mode is mode:
                given = [TrainSample(**_fields(other) | {"mode": TrainingMode.RL}) for other in batch]
                expected = descend(alone, given, WHOLE)[2][index]
                assert gradients[index] == pytest.approx(expected, rel=1e-6)
    assert {"cross_entropy", "teacher_kl", "ratio_clipped_share", LOG_RATIO_ABS} <= metrics.keys()


def _fields(sample: TrainSample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in TrainSample.__slots__}


def test_supervised_tokens_do_not_count_as_a_distance_from_the_sampler() -> None:
    batch = samples(modes=(TrainingMode.RL, TrainingMode.SFT))
    logprobs = torch.cat([torch.tensor(sample.inference_logprobs) + 0.25 for sample in batch]).requires_grad_()
    tally = find_loss("aipo")(loss_inputs(logprobs, batch)).metrics[LOG_RATIO_ABS]
    sampled = sum(sample.num_trained for sample in batch if sample.mode is TrainingMode.RL)
    assert tally.tolist() == pytest.approx([0.25 * sampled, sampled])


def test_the_seeds_example_is_called_for_each_sequence_and_gives_what_ppo_clip_gives(example: str) -> None:
    batch = samples()
    loss = find_loss("custom", import_path=example, kwargs={"clip_eps": 0.1})
    built_in = find_loss("ppo_clip", kwargs={"eps_low": 0.1, "eps_high": 0.1, "dual_clip": None})
    found, metrics, gradients = descend(loss, batch, WHOLE)
    expected, _, its_gradients = descend(built_in, batch, WHOLE)
    assert found == pytest.approx(expected, rel=1e-5)
    assert 0.0 < metrics["clip_frac"] < 1.0
    for seen, its in zip(gradients, its_gradients, strict=True):
        assert seen == pytest.approx(its, rel=1e-5, abs=1e-7)


def test_a_batch_without_trained_tokens_has_a_loss_of_zero_that_backward_passes_through(example: str) -> None:
    for path in (None, example):
        batch = [TrainSample((1,), (2, 3), (-1.0, -1.0), 1.0, loss_mask=(False, False))]
        total, _, gradients = descend(find_loss("aipo", import_path=path), batch, [[0]])
        assert (total, gradients) == (0.0, [[0.0, 0.0]])


def test_a_loss_of_ones_own_that_is_not_there_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for path, why in (("my_losses.no", "my_losses has no no"), ("nothing.here", "No module named"), ("x", "expected")):
        with pytest.raises(LocalError, match=why):
            find_loss("unused", import_path=path)


def test_the_value_of_a_masked_token_is_no_part_of_the_sum() -> None:
    zeros = torch.zeros(3)
    given = LossInputs(zeros, zeros, zeros, torch.tensor([True, False, True]), lengths=(2, 1))
    for kind, expected in ((AggregationKind.TOKEN_MEAN, 5.0), (AggregationKind.SEQUENCE_MEAN, 5.0)):
        for nothing in (math.inf, math.nan):
            assert Aggregation(kind).sum(torch.tensor([2.0, nothing, 3.0]), given).item() == expected
