"""Distillation towards a teacher's distribution: by hand, in float64, from a server, and from the policy itself."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.node.batch_coordinator import BatchCoordinator, make_run, write_model
from tests.node.teacher_world import BackendTeacher
from tests.node.trainer_world import CONFIG, EchoEnvironment, make_trainer, rows
from tests.time_world import VirtualClock
from torch import Tensor

from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.training import chosen_logprobs
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import Distillation, LossInputs, find_loss
from prime_node.ports.train_backend import KeptPolicy, LossNeed
from prime_node.ports.train_samples import DistillationKind, Group, TrainingMode, TrainSample
from prime_node.trainer.batch import samples_of
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.lessons import Lessons
from prime_node.trainer.loop import run_trainer
from prime_node.trainer.recipe import Recipe
from prime_node.trainer.teaching import check_teacher, self_taught, taught
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason

Q, P = (0.5, 0.2), (0.25, 0.4)
"""Two of four tokens: the rest has the mass 0.3 for the teacher and 0.35 for the student."""
FORWARD = 0.5 * math.log(0.5 / 0.25) + 0.2 * math.log(0.2 / 0.4)
REVERSE = 0.25 * math.log(0.25 / 0.5) + 0.4 * math.log(0.4 / 0.2)
REST = (0.05, 0.3)
"""The student's other two tokens."""
ENTROPY = -sum(p * math.log(p) for p in (*P, *REST))
BY_HAND: dict[str, tuple[dict[str, Any], float]] = {
    "forward": ({}, FORWARD),
    "reverse": ({"kl_type": DistillationKind.REVERSE}, REVERSE),
    "mixed": ({"kl_type": DistillationKind.MIXED, "mixed_kl_weight": 0.25}, 0.25 * FORWARD + 0.75 * REVERSE),
    "forward with a tail": ({"include_tail": True}, FORWARD + 0.3 * math.log(0.3 / 0.35)),
    "reverse with zero outside": (
        {"kl_type": DistillationKind.REVERSE, "zero_outside_topk": True},
        REVERSE + sum(p * (math.log(p) + 100.0) for p in REST),
    ),
    "mixed with zero outside": (
        {"kl_type": DistillationKind.MIXED, "zero_outside_topk": True},
        0.5 * FORWARD + 0.5 * (REVERSE + sum(p * (math.log(p) + 100.0) for p in REST)),
    ),
}


def inputs_of(student: Tensor, teacher: Tensor, entropy: Tensor | None = None) -> LossInputs:
    zeros = student[:, 0] * 0.0
    mask = torch.ones(len(student), dtype=torch.bool)
    return LossInputs(
        zeros, zeros.detach(), zeros.detach(), mask, top_logprobs=student, teacher_top_logprobs=teacher, entropy=entropy
    )


@pytest.mark.parametrize(("settings", "value"), BY_HAND.values(), ids=BY_HAND)
def test_the_loss_is_its_formula_and_has_its_gradient(settings: dict[str, Any], value: float) -> None:
    logits = torch.tensor([[*P, *REST]], dtype=torch.float64).log().requires_grad_()
    teacher = torch.tensor([Q], dtype=torch.float64).log()
    loss = Distillation(**settings)

    def total(logits: Tensor) -> Tensor:
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1) if loss.needs else None
        return loss(inputs_of(logprobs[:, :2], teacher, entropy)).loss.sum()

    assert total(logits).item() == pytest.approx(value)
    torch.autograd.gradcheck(total, logits)


def test_over_the_whole_vocabulary_both_directions_are_the_divergence_and_vanish_at_the_teacher() -> None:
    torch.manual_seed(1)
    teacher = torch.randn(3, 7, dtype=torch.float64).log_softmax(-1)
    student = torch.randn(3, 7, dtype=torch.float64).log_softmax(-1)
    forward = Distillation()(inputs_of(student, teacher)).loss
    reverse = Distillation(DistillationKind.REVERSE)(inputs_of(student, teacher)).loss
    torch.testing.assert_close(forward, (teacher.exp() * (teacher - student)).sum(-1))
    torch.testing.assert_close(reverse, (student.exp() * (student - teacher)).sum(-1))
    for kind in DistillationKind:
        assert Distillation(kind)(inputs_of(teacher, teacher)).loss.abs().max().item() < 1e-12


@pytest.mark.parametrize("settings", [settings for settings, _ in BY_HAND.values()])
def test_missing_and_impossible_tokens_give_no_nan(settings: dict[str, Any]) -> None:
    """A place with one token, one with none, one that the student thinks impossible, and certainty of both."""
    teacher = torch.tensor([[-0.5, -torch.inf], [-torch.inf, -torch.inf], [-0.1, -3.0], [0.0, -torch.inf]])
    student = torch.tensor([[-1.0, -torch.inf], [-1.0, -1.0], [-torch.inf, -0.1], [0.0, -5.0]], requires_grad=True)
    outputs = Distillation(**settings)(inputs_of(student, teacher, torch.full((4,), 0.5)))
    (slope,) = torch.autograd.grad(outputs.loss.sum(), student)
    assert outputs.loss.isfinite().all()
    assert slope.isfinite().all()
    assert outputs.metrics["teacher_mass"][1].item() == 0.0


def test_settings_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(LocalError, match="zero_outside_topk changes reverse and mixed only"):
        Distillation(zero_outside_topk=True)
    with pytest.raises(LocalError, match="include_tail changes forward only"):
        Distillation(DistillationKind.REVERSE, include_tail=True)
    with pytest.raises(LocalError, match=r"lack the teacher's distribution; set trainer\.distillation\.topk"):
        Distillation()(LossInputs(*(torch.zeros(1),) * 3, torch.tensor([True])))
    assert Distillation(DistillationKind.MIXED, zero_outside_topk=True).needs == {LossNeed.ENTROPY}
    assert find_loss("aipo", distillation=Distillation()).needs == frozenset()


@pytest.mark.parametrize("block", [1, 70, 2**24])
def test_the_likeliest_tokens_are_found_in_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setitem(chosen_logprobs.BLOCK_LOGITS, "cpu", block)
    torch.manual_seed(1)
    hidden, head, bias = torch.randn(9, 16), torch.randn(50, 16), torch.randn(50)
    logprobs = ((hidden.double() @ head.double().T + bias) / 0.7).log_softmax(-1)
    for count in (1, 5, 50, 99, -1):
        ids, found = chosen_logprobs.top_of_rows(hidden, head, bias, count, temperature=0.7)
        expected = logprobs.topk(50 if count < 0 else min(count, 50), -1)
        assert ids.tolist() == expected.indices.tolist()
        torch.testing.assert_close(found.double(), expected.values, rtol=0.0, atol=5e-6)


SAMPLES = [
    TrainSample((258, 10, 259), (30, 31, 32), (-5.0,) * 3, 1.0, mode=TrainingMode.OPD),
    TrainSample((258, 11, 259), (33,), (-5.0,), 1.0, mode=TrainingMode.OPD, loss_mask=(True,)),
]


async def test_a_step_moves_the_student_towards_the_teachers_distribution(tmp_path: Path) -> None:
    """Over the whole vocabulary the loss is the mean KL of the two models, by their own logprobs of every token."""
    folder = write_model(tmp_path / "model")
    student, teacher = TorchBackend(folder, published_dtype="fp32"), BackendTeacher(folder, seed=9)
    batch = await taught(SAMPLES, teacher, clock=VirtualClock(), topk=-1, vocab_size=264)
    loss = find_loss("aipo", distillation=Distillation())
    divergence = []
    for sample, ours in zip(batch, student.top_logprobs(batch, -1), strict=True):
        theirs = sample.teacher_top
        assert theirs is not None
        for place in range(len(ours)):
            q, p = np.zeros(264), np.zeros(264)
            q[theirs.token_ids_NK[place]], p[ours.token_ids_NK[place]] = (
                theirs.logprobs_NK[place],
                ours.logprobs_NK[place],
            )
            divergence.append(float((np.exp(q) * (q - p)).sum()))
    first = student.train_step(batch, loss, lr=1e-2)
    assert first.loss == pytest.approx(sum(divergence) / 4, rel=1e-4)
    assert first.metrics["teacher_mass"] == pytest.approx(1.0, rel=1e-5)
    for _ in range(5):
        last = student.train_step(batch, loss, lr=1e-2)
    assert last.loss < first.loss


async def test_tokens_that_the_student_lacks_count_nothing(tmp_path: Path) -> None:
    """A teacher with a larger vocabulary, whose other half the student never computes."""
    folder = write_model(tmp_path / "model")
    teacher = BackendTeacher(folder, seed=9)
    batch = await taught(SAMPLES, teacher, clock=VirtualClock(), topk=-1, vocab_size=100)
    for sample in batch:
        assert sample.teacher_top is not None
        ids_NK, logprobs_NK = sample.teacher_top.token_ids_NK, sample.teacher_top.logprobs_NK
        assert ids_NK.max() < 100
        assert (ids_NK[np.isneginf(logprobs_NK)] == 0).all()
        assert (np.isfinite(logprobs_NK).sum(-1) == 100).all()
        assert logprobs_NK.dtype == np.float32
    stats = TorchBackend(folder).train_step(batch, find_loss("aipo", distillation=Distillation()), lr=0.0)
    assert math.isfinite(stats.loss)
    assert math.isfinite(stats.grad_norm)
    assert 0.0 < stats.metrics["teacher_mass"] < 0.9


async def test_a_mixed_batch_needs_tops_of_some_samples_only(tmp_path: Path) -> None:
    """The gradients of both modes add up, whatever the packing."""
    folder = write_model(tmp_path / "model")
    (one, two), teacher = SAMPLES, BackendTeacher(folder, seed=9)
    mixed = [
        *await taught([one], teacher, clock=VirtualClock(), topk=3, vocab_size=264),
        replace(two, mode=TrainingMode.RL, advantage=0.5),
    ]
    loss = find_loss("aipo", distillation=Distillation())
    whole = TorchBackend(folder, published_dtype="fp32").train_step(mixed, loss, lr=0.0)
    parts = [TorchBackend(folder, published_dtype="fp32").train_step([each], loss, lr=0.0) for each in mixed]
    assert whole.loss == pytest.approx((3 * parts[0].loss + parts[1].loss) / 4, rel=1e-5)
    split = TorchBackend(folder, published_dtype="fp32", micro_batch_tokens=4, row_tokens=4).train_step(
        mixed, loss, lr=0.0
    )
    assert (split.loss, split.grad_norm) == (
        pytest.approx(whole.loss, rel=1e-5),
        pytest.approx(whole.grad_norm, rel=1e-4),
    )


async def test_a_teacher_that_gives_fewer_tokens_is_named_at_the_start(tmp_path: Path) -> None:
    teacher, spec = BackendTeacher(write_model(tmp_path / "model"), seed=9, allowed=20), make_run(max_steps=1).spec
    await check_teacher(teacher, spec, clock=VirtualClock(), topk=20)
    with pytest.raises(
        LocalError, match=r"refuses trainer\.distillation\.topk = 64: .* start vLLM with --max-logprobs 64"
    ):
        await check_teacher(teacher, spec, clock=VirtualClock(), topk=64)


async def test_a_run_learns_from_a_distribution(tmp_path: Path) -> None:
    changes = {"mode": "opd", "teacher": {"url": "http://unused", "model": "t"}, "distillation": {"topk": 8}}
    config = TrainerConfig.model_validate(CONFIG.model_dump() | changes)
    trainer = make_trainer(tmp_path, BatchCoordinator(make_run(max_steps=4)), config=config)
    trainer.teacher = BackendTeacher(tmp_path / "model", seed=99)
    assert await run_trainer(trainer, asyncio.Event())
    distances = [float(str(row["teacher_kl"])) for row in rows(tmp_path, "teacher_kl")]
    assert len(distances) == 4
    assert distances[-1] < distances[0]


# Self-distillation


def recipe_of(**settings: Any) -> Recipe:
    config = TrainerConfig.load({"trainer": {"filters": [], "mode": "opsd"} | settings})
    return Recipe.of(config, max_steps=9, completion_tokens_max=4, vocab_size=264)


def lessons(folder: Path) -> Lessons:
    return Lessons({"echo": EchoEnvironment()}, {"echo": 1.0}, HfTokenizer(folder), seed=1, problems=5, batch_size=2)


GROUP = Group(
    0,
    (258, 98, 259),
    (Completion((98,), (-1.0,), FinishReason.STOP),),
    (1.0,),
    (0,),
    "worker",
    environment="echo",
    problem_index=1,
)


def test_the_policy_teaches_itself_under_a_prompt_with_the_answer(tmp_path: Path) -> None:
    """Problem 1 is the letter c, and so is its answer."""
    folder = write_model(tmp_path / "model")
    its = lessons(folder)
    prompt = its.hint(GROUP, template="{problem}: {solution}{other}")
    assert HfTokenizer(folder).decode(list(prompt)).endswith("c: c{other}")
    assert its.hint(replace(GROUP, problem_index=None), template="{problem}") == ()
    assert its.hint(replace(GROUP, environment="unknown"), template="{problem}") == ()
    backend, recipe = TorchBackend(folder), recipe_of()
    (own,) = samples_of([GROUP], recipe, lambda group: prompt)[0]
    (sample,) = self_taught(own, recipe, backend)
    (expected,) = backend.logprobs([replace(own[0], prompt_token_ids=prompt)])
    assert sample.teacher_logprobs == pytest.approx(tuple(expected))
    assert sample.prompt_token_ids == GROUP.prompt_token_ids
    stats = backend.train_step([sample], recipe.loss, lr=0.0)
    (student,) = backend.logprobs(own)
    assert stats.metrics["teacher_kl"] == pytest.approx(student[0] - expected[0], abs=1e-5)


def test_the_reference_may_teach_and_what_has_no_answer_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path / "model")
    backend = TorchBackend(folder)
    backend.keep_policy(KeptPolicy.REFERENCE)
    recipe = recipe_of(self_distillation={"policy": "reference"}, distillation={"topk": 4})
    assert recipe.keeps_reference
    assert not recipe.needs_reference
    (own,) = samples_of([GROUP], recipe, lambda group: (258, 98, 99, 259))[0]
    before = backend.top_logprobs([replace(own[0], prompt_token_ids=(258, 98, 99, 259))], 4)[0]
    for _ in range(2):
        backend.train_step([TrainSample((258, 259), (30,), (-5.0,), 1.0)], find_loss("aipo"), lr=1e-2)
    orphan = replace(own[0], teacher_prompt_token_ids=())
    other = replace(own[0], mode=TrainingMode.RL)
    found = self_taught([orphan, *own, other], recipe, backend)
    assert [sample.mode for sample in found] == [TrainingMode.OPSD, TrainingMode.RL]
    assert found[0].teacher_top is not None
    np.testing.assert_allclose(found[0].teacher_top.logprobs_NK, before.logprobs_NK, atol=1e-6)
    assert any("1 samples of mode opsd are left out" in line for line in caplog.messages)


@pytest.mark.parametrize("policy", ["current", "reference"])
async def test_a_run_distils_itself(tmp_path: Path, policy: str) -> None:
    changes = {"mode": "opsd", "self_distillation": {"policy": policy}, "filters": ()}
    config = TrainerConfig.model_validate(CONFIG.model_dump() | changes)
    trainer = make_trainer(tmp_path, BatchCoordinator(make_run(max_steps=3)), config=config)
    assert await run_trainer(trainer, asyncio.Event())
    assert len(rows(tmp_path, "teacher_kl")) == 3
    assert trainer.state.reference_step == (0 if policy == "reference" else None)
