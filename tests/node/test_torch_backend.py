"""The torch backend against plain transformers and plain AdamW: sharing prefixes changes the speed and nothing else."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.node.batch_coordinator import tiny_files, write_model
from transformers import AutoConfig, AutoModelForCausalLM

from prime_node.adapters.engines.torch_weights import to_torch
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import LossInputs, LossOutputs, Objective, find_loss
from prime_node.algo.losses.objective import Aggregation, BoundLoss
from prime_node.ports.train_backend import KeptPolicy, OptimizerSettings, TrainingDiverged
from prime_node.ports.train_samples import TrainingMode, TrainSample
from prime_protocol.errors import LocalError
from prime_protocol.weights import WeightTensor, root_of

AIPO = find_loss("aipo", kwargs={"delta": 4.0})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def samples(count: int = 12, seed: int = 0) -> list[TrainSample]:
    """Return prompts that share a template, and completions that share beginnings, of unequal lengths."""
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        prompt = (258, 10, 11, 12, *(rng.choice((20, 21)) for _ in range(rng.randrange(1, 5))), 259)
        completion = tuple(rng.choice((30, 31, 32)) for _ in range(rng.randrange(1, 6)))
        result.append(TrainSample(prompt, completion, (-5.5,) * len(completion), rng.gauss(0.0, 1.0)))
    return result


def plain_model(folder: Path, backend: TorchBackend) -> Any:
    """Return the same weights in transformers' own attention, in exactly the snapshot's dtype."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="sdpa")
    weights = {name: to_torch(tensor) for name, tensor in backend.snapshot().items()}
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    missing = model.load_state_dict(weights, strict=False)
    assert (set(missing.missing_keys), missing.unexpected_keys) == (tied, [])
    return model


def plain_logprobs(model: Any, sample: TrainSample, temperature: float = 1.0) -> torch.Tensor:
    ids = torch.tensor([sample.prompt_token_ids + sample.completion_token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_token_ids) - 1 : -1]
    chosen = torch.tensor(sample.completion_token_ids)[:, None]
    chosen_logprobs: torch.Tensor = (logits / temperature).log_softmax(-1).gather(1, chosen)[:, 0]
    return chosen_logprobs


def exact(folder: Path, **settings: Any) -> TorchBackend:
    """Return a backend with a lossless snapshot."""
    return TorchBackend(folder, published_dtype="fp32", **settings)


@pytest.mark.parametrize("row_tokens", [1, 16, 128])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_are_those_of_each_sequence_by_itself(
    folder: Path, row_tokens: int, temperature: float
) -> None:
    """Tolerance: 2e-6 nats, some roundings of float32 at 5.6 nats."""
    backend = exact(folder, row_tokens=row_tokens, temperature=temperature)
    batch, model = samples(), plain_model(folder, backend)
    for sample, found in zip(batch, backend.logprobs(batch), strict=True):
        expected = plain_logprobs(model, sample, temperature)
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0.0, atol=2e-6)


def test_a_greedy_run_takes_its_logprobs_at_temperature_one(folder: Path) -> None:
    batch = samples()
    assert exact(folder, temperature=0.0).logprobs(batch) == exact(folder).logprobs(batch)


def test_grouped_query_attention_packs_as_well(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "gqa")
    config = json.loads(tiny_files()["config.json"])
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4, "head_dim": 8}))
    backend = exact(folder, row_tokens=16)
    batch, model = samples(), plain_model(folder, backend)
    for sample, found in zip(batch, backend.logprobs(batch), strict=True):
        torch.testing.assert_close(torch.tensor(found), plain_logprobs(model, sample), rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_is_that_of_a_plain_loop(tmp_path: Path, tied: bool) -> None:
    """Tolerance: 2e-4 of a step of 1e-3; Adam divides by the root of tiny squares, which amplifies rounding.

    A tied head adds gradients of two places, so its tolerance is 1e-3 of a step.
    """
    folder = write_model(tmp_path, tie_word_embeddings=tied)
    backend = exact(folder, row_tokens=16, micro_batch_tokens=40)
    settings = OptimizerSettings(betas=(0.9, 0.95), weight_decay=0.1, grad_norm_max=0.5, eps=1e-6)
    backend.new_optimizer(settings)
    batch, model = samples(), plain_model(folder, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=settings.betas, weight_decay=0.1, eps=settings.eps)
    num_tokens = sum(len(sample.completion_token_ids) for sample in batch)
    total = torch.zeros(())
    for sample in batch:
        ratio = (plain_logprobs(model, sample) - torch.tensor(sample.inference_logprobs)).exp()
        total = total - (ratio.clamp(max=4.0) * sample.advantage).sum() / num_tokens
    torch.autograd.backward(total)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_norm_max).item()
    optimizer.step()

    stats = backend.train_step(batch, AIPO, lr=1e-3)
    assert stats.num_tokens == num_tokens
    assert stats.loss == pytest.approx(total.item(), abs=1e-6)
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
    other = plain_model(folder, backend)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-6 if tied else 2e-7)


def test_the_model_computes_with_exactly_the_published_weights(folder: Path) -> None:
    """Before, it computed with the unrounded ones, from which workers never sample."""
    backend = TorchBackend(folder)
    for seed in range(3):
        batch = samples(seed=seed)
        backend.train_step(batch, AIPO, lr=1e-3)
        published = plain_model(folder, backend)
        for sample, found in zip(batch, backend.logprobs(batch), strict=True):
            torch.testing.assert_close(torch.tensor(found), plain_logprobs(published, sample), rtol=0.0, atol=2e-6)


def test_updates_below_the_rounding_add_up(folder: Path, tmp_path: Path) -> None:
    """Each step is a hundredth of a unit of bf16 for most weights. A checkpoint keeps what was not published yet."""

    def changed(backend: TorchBackend, steps: int) -> int:
        before = backend.snapshot()
        for _ in range(steps):
            backend.train_step(samples(), AIPO, lr=1e-6)
        after = backend.snapshot()
        return sum(int((before[name].data != after[name].data).sum()) for name in before)

    whole, resumed = TorchBackend(folder), TorchBackend(folder)
    assert changed(whole, 1) < changed(whole, 40) / 10
    changed(resumed, 20)
    resumed.save(tmp_path / "state")()
    again = TorchBackend(folder, seed=1)
    again.load(tmp_path / "state")
    changed(again, 21)
    assert root_of(again.snapshot()) == root_of(whole.snapshot())


def test_a_checkpoint_is_the_state_at_its_save_even_if_steps_come_before_its_write(
    folder: Path, tmp_path: Path
) -> None:
    backend = TorchBackend(folder)
    backend.train_step(samples(seed=0), AIPO, lr=1e-3)
    before = root_of(backend.snapshot())
    write = backend.save(tmp_path / "state")
    backend.train_step(samples(seed=1), AIPO, lr=1e-3)
    after = root_of(backend.snapshot())
    write()
    again = TorchBackend(folder, seed=1)
    again.load(tmp_path / "state")
    assert root_of(again.snapshot()) == before
    again.train_step(samples(seed=1), AIPO, lr=1e-3)
    assert root_of(again.snapshot()) == after


@pytest.mark.parametrize(("row_tokens", "micro_batch_tokens"), [(1, 10_000), (8, 30), (64, 10_000)])
def test_rows_and_micro_batches_change_nothing_but_rounding(
    folder: Path, row_tokens: int, micro_batch_tokens: int
) -> None:
    batch = samples()
    expected = exact(folder, row_tokens=128).train_step(batch, AIPO, lr=1e-3)
    split = exact(folder, row_tokens=row_tokens, micro_batch_tokens=micro_batch_tokens)
    found = split.train_step(batch, AIPO, lr=1e-3)
    assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-7)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert found.log_ratio_abs == pytest.approx(expected.log_ratio_abs, rel=1e-5)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)


def test_a_batch_packed_ahead_trains_as_its_samples_do(folder: Path) -> None:
    alone, ahead = exact(folder), exact(folder)
    packed = ahead.pack(samples())
    expected, found = (one.train_step(batch, AIPO, lr=1e-3) for one, batch in ((alone, samples()), (ahead, packed)))
    assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert root_of(ahead.snapshot()) == root_of(alone.snapshot())


def test_the_order_of_the_samples_changes_nothing_but_rounding(folder: Path) -> None:
    batch = samples()
    forward = exact(folder).train_step(batch, AIPO, lr=1e-3)
    backward = exact(folder).train_step(batch[::-1], AIPO, lr=1e-3)
    assert backward.loss == pytest.approx(forward.loss, rel=1e-5, abs=1e-7)
    assert backward.grad_norm == pytest.approx(forward.grad_norm, rel=1e-5)


def test_sequences_do_not_see_one_another(folder: Path) -> None:
    batch = samples()
    backend = exact(folder)
    before = backend.logprobs(batch)
    changed = [*batch[:-1], replace(batch[-1], completion_token_ids=(90, 91, 92, 93), inference_logprobs=(-1.0,) * 4)]
    for old, new in zip(before[:-1], backend.logprobs(changed)[:-1], strict=True):
        assert new == pytest.approx(old, abs=2e-6)


def test_a_loss_over_sequences_is_called_for_each_of_them(folder: Path) -> None:
    lengths: list[int] = []

    def sequence_mean(inputs: LossInputs) -> LossOutputs:
        lengths.append(len(inputs.trainer_logprobs))
        mean = (-inputs.trainer_logprobs * inputs.advantages).mean()
        return LossOutputs(mean, {"length": torch.tensor(float(len(inputs.trainer_logprobs)))})

    batch = samples()
    loss = Objective({TrainingMode.RL: BoundLoss(sequence_mean, {}, per_sequence=True)}, Aggregation())
    stats = exact(folder).train_step(batch, loss, lr=0.0)
    counts = [len(sample.completion_token_ids) for sample in batch]
    assert sorted(lengths) == sorted(counts)
    assert stats.metrics["length"] == pytest.approx(sum(n * n for n in counts) / sum(counts))
    means = [
        -sample.advantage * sum(logprobs) / len(logprobs)
        for sample, logprobs in zip(batch, exact(folder).logprobs(batch), strict=True)
    ]
    assert stats.loss == pytest.approx(sum(means) / sum(counts), rel=1e-5)


def test_supervised_steps_learn(folder: Path) -> None:
    backend, loss = exact(folder), find_loss("sft")
    first = backend.train_step(samples(), loss, lr=1e-2).loss
    for _ in range(20):
        last = backend.train_step(samples(), loss, lr=1e-2).loss
    assert last < 0.5 * first


def test_without_samples_nothing_changes(folder: Path) -> None:
    backend = TorchBackend(folder)
    before = root_of(backend.snapshot())
    stats = backend.train_step([], AIPO, lr=1.0)
    assert (stats.num_tokens, stats.loss, stats.grad_norm) == (0, 0.0, 0.0)
    assert root_of(backend.snapshot()) == before


def test_a_step_that_diverges_changes_nothing_and_is_reported(folder: Path) -> None:
    backend = TorchBackend(folder)
    before = root_of(backend.snapshot())
    with pytest.raises(TrainingDiverged, match="norm is nan"):
        backend.train_step([replace(samples()[0], advantage=float("nan"))], AIPO, lr=1e-3)
    assert root_of(backend.snapshot()) == before
    assert backend.train_step(samples(), AIPO, lr=1e-3).grad_norm > 0


def run_steps(backend: TorchBackend, seeds: Sequence[int]) -> str:
    for seed in seeds:
        backend.train_step(samples(seed=seed), AIPO, lr=1e-3)
    return root_of(backend.snapshot())


def test_it_resumes_bit_exactly(folder: Path, tmp_path: Path) -> None:
    settings = OptimizerSettings(betas=(0.8, 0.9), weight_decay=0.3, grad_norm_max=0.2)
    saved = tmp_path / "saved"
    saved.mkdir()
    whole = exact(folder)
    whole.new_optimizer(settings)
    run_steps(whole, [1, 2])
    whole.save(saved)()
    drawn = torch.rand(3)
    expected = run_steps(whole, [3, 4])

    resumed = exact(folder, seed=99)
    run_steps(resumed, [7])
    resumed.load(saved)
    assert torch.equal(torch.rand(3), drawn)
    assert run_steps(resumed, [3, 4]) == expected


def test_the_same_seed_gives_the_same_model_and_another_one_another(folder: Path) -> None:
    assert run_steps(exact(folder, seed=5), [1]) == run_steps(exact(folder, seed=5), [1])
    assert root_of(exact(folder, seed=5).snapshot()) != root_of(exact(folder, seed=6).snapshot())


def test_a_snapshot_is_a_copy_rounded_to_nearest_even(folder: Path) -> None:
    full = exact(folder).snapshot()
    backend = TorchBackend(folder, full)
    rounded = backend.snapshot()
    kept = {name: tensor.data.copy() for name, tensor in rounded.items()}
    for name, tensor in full.items():
        bits = tensor.data.astype(np.uint64)
        expected = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        assert rounded[name].dtype == "bf16"
        np.testing.assert_array_equal(rounded[name].data, expected)
    backend.train_step(samples(), AIPO, lr=1e-2)
    assert all(np.array_equal(rounded[name].data, data) for name, data in kept.items())


def test_published_weights_load_exactly(folder: Path) -> None:
    published = TorchBackend(folder, seed=5).snapshot()
    assert root_of(TorchBackend(folder, published, seed=6).snapshot()) == root_of(published)


def test_weights_of_another_model_are_refused(folder: Path) -> None:
    weights = dict(TorchBackend(folder).snapshot())
    weights["model.norm.weight"] = WeightTensor("bf16", (2,), np.zeros(2, np.uint16))
    with pytest.raises(LocalError, match=r"model\.norm\.weight"):
        TorchBackend(folder, weights)


def test_sliding_windows_below_the_positions_are_refused(folder: Path) -> None:
    config = json.loads(tiny_files()["config.json"])
    changes = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(LocalError, match="sliding_window is 4"):
        TorchBackend(folder)


def test_the_proximal_policy_is_the_one_that_was_kept_and_the_weights_at_hand_stay(folder: Path) -> None:
    backend, batch = exact(folder), samples()
    before = backend.logprobs(batch)
    backend.keep_policy(KeptPolicy.PROXIMAL)
    backend.train_step(batch, AIPO, lr=1e-2)
    trained = backend.logprobs(batch)
    assert trained != before
    assert backend.logprobs(batch, KeptPolicy.PROXIMAL) == before
    assert backend.logprobs(batch) == trained
    untouched = exact(folder)
    untouched.train_step(batch, AIPO, lr=1e-2)
    again = (each.train_step(batch, AIPO, lr=1e-2).grad_norm for each in (backend, untouched))
    assert len(set(again)) == 1, "and it goes on training as if nobody had asked"
