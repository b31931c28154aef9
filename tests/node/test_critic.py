"""The critic: advantages and losses by hand, its training with the policy, its checkpoints, and the memory that it takes."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.node.batch_coordinator import BatchCoordinator, Fuse, KilledError, make_run, write_model
from tests.node.trainer_world import CONFIG, make_trainer, rows
from tests.tensors_world import held_bytes

from prime_node.adapters.models.lora import LoraSettings
from prime_node.adapters.training.critic import value_losses
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.advantages import AdvantageInputs, RolloutView, TokenNeed, find_advantage
from prime_node.algo.losses import LossInputs, LossOutputs, find_loss, needs
from prime_node.algo.memory_plan import TrainerLoad, trainer_memory
from prime_node.ports.train_backend import CriticSettings, LossNeed, TrainingDiverged
from prime_node.ports.train_samples import Group, TrainSample
from prime_node.trainer.batch import prepare
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.loop import run_trainer
from prime_node.trainer.recipe import Recipe
from prime_node.trainer.state import TrainerState
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason

VALUES = ((0.5, 0.4, 0.2), (0.1,), ())
BATCH = [
    TrainSample((258, 10, 259), (30, 31, 32), (-5.5,) * 3, 0.7, values=(0.0,) * 3, returns=(1.0, 0.5, 1.0)),
    TrainSample(
        (258, 11, 259), (31, 30), (-5.5,) * 2, 0.1, values=(0.0,) * 2, returns=(-1.0, 9.0), loss_mask=(True, False)
    ),
]


def recipe_of(**settings: Any) -> Recipe:
    config = TrainerConfig.load({"trainer": {"filters": []} | settings})
    return Recipe.of(config, max_steps=9, completion_tokens_max=4, vocab_size=264)


def test_generalized_advantages_are_by_hand() -> None:
    """gamma 0.9, lam 0.5: the differences -0.14, -0.22, 0.8 give -0.077, 0.14, 0.8; the other rollout 0 - 0.1."""
    advantage = find_advantage("gae", kwargs={"gamma": 0.9, "lam": 0.5})
    group = AdvantageInputs(tuple(map(RolloutView, (1.0, 0.0, 1.0))))
    costs: tuple[tuple[float, ...], ...] = ((0.0,) * 3, (0.0,), ())
    found = advantage.of_tokens(group, costs, values=VALUES)
    assert found == [pytest.approx([-0.077, 0.14, 0.8]), pytest.approx([-0.1]), []]
    assert advantage.needs == {TokenNeed.VALUES}
    assert advantage.is_whitened
    returns = advantage.returns_of_tokens(group, costs, VALUES, found)
    assert returns == [pytest.approx([0.423, 0.54, 1.0]), pytest.approx([0.0]), []]
    costly = advantage.of_tokens(group, ((0.1, 0.0, 0.3), (0.0,), ()), values=VALUES)
    assert costly[0] == pytest.approx([-0.24 + 0.45 * (-0.22 + 0.45 * 0.5), -0.22 + 0.45 * 0.5, 0.5])
    plain = find_advantage("gae").of_tokens(group, costs, values=VALUES)
    assert plain[0] == pytest.approx([0.5, 0.6, 0.8]), "the rewards less the value"
    assert find_advantage("group_mean").returns_of_tokens(group, costs, VALUES, found)[0] == [1.0] * 3


def test_samples_carry_values_returns_and_whitened_advantages() -> None:
    completion = Completion((30, 31), (-5.0, -5.5), FinishReason.STOP)
    group = Group(0, (258, 259), (completion,) * 2, (1.0, 0.0), (0, 0), "worker")
    recipe = recipe_of(advantage={"type": "gae"}, critic={})
    values = [[[0.25, 0.5], [0.5, 0.5]]]
    first, second = prepare([group], recipe, step=0, costs=[[[0.0] * 2] * 2], values={"values": values}).samples
    assert (first.values, first.returns, second.returns) == ((0.25, 0.5), (1.0, 1.0), (0.0, 0.0))
    raw = torch.tensor([0.75, 0.5, -0.5, -0.5], dtype=torch.float64)
    white = ((raw - raw.mean()) / (raw.var() + 1e-8).sqrt()).tolist()
    assert [*first.advantages, *second.advantages] == pytest.approx(white)


def test_a_values_loss_is_by_hand_and_has_its_gradient() -> None:
    """Old values 0, bound 0.2: 0.1 is within, 0.5 is clipped to 0.2 towards a return of 1, and free towards one of -1."""
    values = torch.tensor([0.1, 0.5, 0.5], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    losses, clipped = value_losses(values, old, returns, 0.2)
    assert losses.tolist() == pytest.approx([0.405, 0.32, 1.125])
    assert clipped.tolist() == [False, True, False]
    (slope,) = torch.autograd.grad(losses.sum(), values)
    assert slope.tolist() == pytest.approx([-0.9, 0.0, 1.5])
    torch.autograd.gradcheck(lambda given: value_losses(given, old, returns, 0.2)[0], values)
    assert value_losses(values, old, returns, None)[0].tolist() == pytest.approx([0.405, 0.125, 1.125])


def made(folder: Path, **settings: Any) -> TorchBackend:
    return TorchBackend(folder, seed=5, threads=1, row_tokens=16, critic=CriticSettings(**settings))


def test_a_critic_learns_beside_a_policy_that_stays(tmp_path: Path) -> None:
    """Mean of the returns 1, 0.5, 1, -1 is 0.375; the mean square 0.8125; the first values are exactly 0."""
    backend = made(write_model(tmp_path / "model"), cliprange_value=None)
    policy = backend.logprobs(BATCH)
    assert backend.values(BATCH) == [[0.0] * 3, [0.0] * 2]
    first = backend.train_critic(BATCH, lr=1e-2)
    assert first.loss == pytest.approx(0.8125 / 2)
    assert first.metrics["returns_mean"] == pytest.approx(0.375)
    assert first.metrics["explained_variance"] == pytest.approx(1.0 - 0.8125 / (0.8125 - 0.375**2))
    for _ in range(60):
        last = backend.train_critic(BATCH, lr=1e-2)
    assert last.loss < 0.05 * first.loss
    assert last.metrics["explained_variance"] > 0.9
    found = backend.values(BATCH)
    assert found[0] == pytest.approx([1.0, 0.5, 1.0], abs=0.2)
    assert found[1][0] == pytest.approx(-1.0, abs=0.2)
    assert backend.logprobs(BATCH) == policy


def test_without_tokens_a_critic_stays_and_an_infinite_return_changes_nothing(tmp_path: Path) -> None:
    backend = made(write_model(tmp_path / "model"))
    assert backend.train_critic([], lr=1.0).loss == 0.0
    with pytest.raises(
        TrainingDiverged, match=r"the norm of the critic's gradient is .*trainer\.critic\.optimizer\.lr"
    ):
        backend.train_critic([replace(BATCH[0], returns=(math.inf, 0.0, 0.0))], lr=1.0)
    assert backend.values(BATCH) == [[0.0] * 3, [0.0] * 2]
    assert backend.train_critic(BATCH, lr=1e-2).grad_norm > 0.0, "nothing of the failed step is left"


def test_a_critic_begins_with_the_policys_weights(tmp_path: Path) -> None:
    """After the supervised phase the decoders are equal: so are the gradients of the heads, and their values after a step."""
    folder = write_model(tmp_path / "model")
    backend = made(folder)
    for _ in range(3):
        backend.train_step(BATCH, find_loss("aipo"), lr=1e-1)
    backend.begin_critic()
    backend.train_critic(BATCH, lr=1e-3)
    settings = CriticSettings()
    other = TorchBackend(folder, backend.snapshot(), seed=5, threads=1, row_tokens=16, critic=settings)
    other.train_critic(BATCH, lr=1e-3)
    for found, expected in zip(backend.values(BATCH), other.values(BATCH), strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
        assert min(map(abs, found)) > 0.0


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2, alpha=4)])
def test_a_critic_survives_a_checkpoint_and_is_not_published(tmp_path: Path, lora: LoraSettings | None) -> None:
    folder = write_model(tmp_path / "model")

    def backend_of() -> TorchBackend:
        return TorchBackend(folder, seed=5, threads=1, row_tokens=16, lora=lora, critic=CriticSettings())

    backend, plain = backend_of(), TorchBackend(folder, seed=5, threads=1, row_tokens=16, lora=lora)
    backend.train_critic(BATCH, lr=1e-2)
    (tmp_path / "saved").mkdir()
    write = backend.save(tmp_path / "saved")
    saved = backend.values(BATCH)
    backend.train_critic(BATCH, lr=1e-2)  # before the checkpoint is written
    write()
    resumed = backend_of()
    resumed.load(tmp_path / "saved")
    assert resumed.values(BATCH) == saved
    resumed.train_critic(BATCH, lr=1e-2)
    assert resumed.values(BATCH) == backend.values(BATCH) != saved
    assert backend.snapshot().keys() == plain.snapshot().keys()
    (tmp_path / "plain").mkdir()
    plain.save(tmp_path / "plain")()
    later = backend_of()
    later.load(tmp_path / "plain")
    assert later.values(BATCH) == [[0.0] * 3, [0.0] * 2], "a checkpoint without a critic leaves it as it begins"


def test_a_critic_that_joins_a_run_begins_with_the_policy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A step from equal decoders gives equal values: from the seed's own they differ."""
    folder = write_model(tmp_path / "model")
    plain = TorchBackend(folder, seed=5, threads=1, row_tokens=16)
    for _ in range(3):
        plain.train_step(BATCH, find_loss("aipo"), lr=1e-1)
    plain.save(tmp_path)()
    joined, expected = made(folder), made(folder)
    joined.load(tmp_path)
    assert "has no critic: a new one begins" in caplog.text
    own = TorchBackend(folder, plain.snapshot(), seed=5, threads=1, row_tokens=16, critic=CriticSettings())
    for backend in (joined, expected, own):
        backend.train_critic(BATCH, lr=1e-3)
    assert joined.values(BATCH)[0] == pytest.approx(own.values(BATCH)[0], abs=1e-6)
    assert joined.values(BATCH)[0] != pytest.approx(expected.values(BATCH)[0], abs=1e-6)


class StopsAt(Fuse):
    """Fuse that asks for a stop when the policy of a step is copied."""

    def __init__(self, step: int, stop: asyncio.Event) -> None:
        super().__init__()
        self._step, self._stop, self._loop = step, stop, asyncio.get_running_loop()

    def passes(self, place: str) -> None:
        super().passes(place)
        if place == "copy" and self.passed[place] == self._step + 1:
            self._loop.call_soon_threadsafe(self._stop.set)


async def test_the_warm_up_of_a_critic_that_joins_a_run_counts_from_there(tmp_path: Path) -> None:
    """Before, it counted from the run's first step: such a critic had none, and its values of 0 made the advantages."""
    coordinator, stop = BatchCoordinator(make_run(max_steps=4)), asyncio.Event()
    assert not await run_trainer(make_trainer(tmp_path, coordinator, fuse=StopsAt(2, stop)), stop)
    changes = {
        "advantage": {"type": "gae"},
        "critic": {"critic_warmup": 1, "optimizer": {"lr": 1e-3, "warmup_steps": 2}},
    }
    config = TrainerConfig.model_validate(CONFIG.model_dump() | changes)
    trainer = make_trainer(tmp_path, coordinator, config=config)
    assert await run_trainer(trainer, asyncio.Event())
    found = rows(tmp_path, "critic_loss")
    assert [row["step"] for row in found] == [2, 3]
    assert [float(str(row["num_tokens"])) > 0 for row in found] == [False, True]
    assert [row["critic_lr"] for row in found] == [5e-4, 1e-3]
    assert (coordinator.roots[2] == coordinator.roots[3], coordinator.roots[3] == coordinator.roots[4]) == (True, False)
    assert (trainer.state.critic_since, trainer.state.critic_steps) == (2, 2)
    recipe = recipe_of()
    trainer.date_critic(recipe)
    assert (trainer.state.critic_since, trainer.state.critic_steps) == (None, 0), "without a critic"


async def test_a_critics_step_without_tokens_is_not_counted(tmp_path: Path) -> None:
    config = TrainerConfig.model_validate(CONFIG.model_dump() | {"advantage": {"type": "gae"}, "critic": {}})
    trainer = make_trainer(tmp_path, BatchCoordinator(make_run(max_steps=1)), config=config)
    trainer.state = TrainerState(run=trainer.run.digest)
    for samples, count in (([], 0), (BATCH, 1), ([replace(BATCH[0], loss_mask=(False,) * 3)], 1)):
        await trainer.train_critic(samples, lr=1e-3)
        assert trainer.state.critic_steps == count
    await trainer.close()


@needs("values")
def baseline(inputs: LossInputs) -> LossOutputs:
    """A loss of a user's own module."""
    assert inputs.values is not None
    return LossOutputs(-(inputs.advantages - inputs.values) * inputs.trainer_logprobs, {"value_seen": inputs.values})


def test_a_custom_loss_gets_the_values_that_it_asks_for(tmp_path: Path) -> None:
    loss = find_loss("own", import_path=f"{__name__}.baseline")
    assert loss.needs == {LossNeed.VALUES}
    backend = TorchBackend(write_model(tmp_path / "model"), threads=1)
    sample = replace(BATCH[0], values=(0.25, 0.5, 0.75))
    stats = backend.train_step([sample], loss, lr=0.0)
    (ours,) = backend.logprobs([sample])
    expected = -sum((0.7 - value) * logprob for value, logprob in zip(sample.values, ours, strict=True)) / 3
    assert stats.loss == pytest.approx(expected, rel=1e-5)
    assert stats.metrics["value_seen"] == pytest.approx(0.5)
    recipe = recipe_of(loss={"import_path": f"{__name__}.baseline"}, critic={})
    assert recipe.needs_values
    assert recipe.credits_by_weights


def test_a_critic_and_what_uses_it_go_together() -> None:
    with pytest.raises(LocalError, match=r"advantage gae needs the values of a critic: add \[trainer\.critic\]"):
        recipe_of(advantage={"type": "gae"})
    with pytest.raises(LocalError, match="the loss needs the values of a critic"):
        recipe_of(loss={"import_path": f"{__name__}.baseline"})
    with pytest.raises(LocalError, match=r"trainer\.critic: nothing uses its values"):
        recipe_of(critic={})
    assert recipe_of().critic is None
    critic = recipe_of(
        advantage={"type": "gae"}, critic={"critic_warmup": 3, "optimizer": {"lr": 0.1, "warmup_steps": 2}}
    ).critic
    assert critic is not None
    assert (critic.warmup_steps, [critic.rates.at(step) for step in (0, 1, 8)]) == (3, [0.05, 0.1, 0.1])


def test_the_memory_plan_counts_a_critic(tmp_path: Path) -> None:
    """16 bytes a parameter with its gradient, on each of the ranks among which it is divided; between steps 12."""
    from prime_node.adapters.models.model_config import model_shape

    folder = write_model(tmp_path / "model")
    shape = model_shape(folder)
    for ranks in (1, 4):
        plain, critic = (
            trainer_memory(shape, TrainerLoad(ranks=ranks, critic_moments=moments)) for moments in (None, "fp32")
        )
        assert critic.state - plain.state == pytest.approx(16 * shape.critic_parameters / ranks, abs=1)
        assert (critic.gathered, critic.activations, critic.logits) == (plain.gathered, plain.activations, plain.logits)
    before = held_bytes()
    with_critic = made(folder)
    with_critic.train_critic(BATCH, lr=1e-2)
    between = held_bytes()
    without = TorchBackend(folder, seed=5, threads=1, row_tokens=16)
    assert with_critic.published_bytes == without.published_bytes
    held = (between - before) - (held_bytes() - between)
    steps = 4 * 24  # AdamW counts the steps of each tensor
    assert held == pytest.approx(12 * shape.critic_parameters, abs=2 * steps)


async def test_a_run_with_a_critic_continues_bit_exactly_after_a_kill(tmp_path: Path) -> None:
    """The critic is trained alone for two steps, in which the policy stays."""
    changes = {
        "advantage": {"type": "gae", "lam": 0.95},
        "critic": {"critic_warmup": 2, "optimizer": {"lr": 1e-3}},
        "use_kl_in_reward": True,
    }
    config = TrainerConfig.model_validate(CONFIG.model_dump() | changes)
    whole, cut = (BatchCoordinator(make_run(max_steps=4, async_level=2)) for _ in range(2))
    assert await run_trainer(make_trainer(tmp_path / "whole", whole, config=config), asyncio.Event())
    fuse = Fuse("after train_critic", 4)
    with pytest.raises(KilledError):
        await run_trainer(make_trainer(tmp_path / "cut", cut, config=config, fuse=fuse), asyncio.Event())
    assert await run_trainer(make_trainer(tmp_path / "cut", cut, config=config), asyncio.Event())
    assert cut.roots == whole.roots
    assert len(set(whole.roots[:3])) == 1
    assert len(set(whole.roots[2:])) == 3
    found = rows(tmp_path / "whole", "critic_loss")
    assert len(found) == 4
    assert [float(str(row["num_tokens"])) > 0 for row in found] == [False, False, True, True]
    assert all(float(str(row["critic_grad_norm"])) > 0.0 for row in found)
    assert float(str(found[-1]["values_mean"])) != 0.0
