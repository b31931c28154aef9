"""The trainer's loop against a coordinator in memory: real batches, real steps, real publications; and kill -9 everywhere."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.node.batch_coordinator import GROUPS, ROLLOUTS, BatchCoordinator, Fuse, KilledError, make_run
from tests.node.trainer_world import CONFIG, make_trainer, root_of_backend, rows

from prime_node.trainer.algorithm_config import FilterConfig
from prime_node.trainer.checkpointing import Checkpoints
from prime_node.trainer.loop import run_trainer
from prime_node.trainer.state import Phase, TrainerState
from prime_protocol.errors import LocalError

STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def whole(folder: Path) -> BatchCoordinator:
    """The coordinator after an undisturbed run."""

    async def undisturbed() -> BatchCoordinator:
        coordinator = BatchCoordinator(make_run(max_steps=STEPS))
        assert await run_trainer(make_trainer(folder, coordinator), asyncio.Event())
        return coordinator

    return asyncio.run(undisturbed())


def test_the_loop_trains_every_step_and_publishes_a_chain(whole: BatchCoordinator) -> None:
    coordinator = whole
    assert [signed.manifest.policy_version for signed in coordinator.manifests] == list(range(STEPS + 1))
    assert len(set(coordinator.roots)) == STEPS + 1
    produced = coordinator.manifests[-1].manifest.produced_by
    assert (produced.step, produced.optimizer_steps) == (STEPS - 1, CONFIG.sft.steps_max + STEPS)
    assert coordinator.manifests[0].manifest.produced_by.batch is None
    assert produced.batch is not None


def test_metrics_say_what_each_step_did(whole: BatchCoordinator, folder: Path) -> None:
    trained = rows(folder, "reward_mean")
    assert [row["step"] for row in trained] == list(range(STEPS))
    for row in trained:
        assert (row["num_groups"], row["num_rollouts"]) == (GROUPS, GROUPS * ROLLOUTS)
        assert (row["num_flat_groups"], row["filtered_zero_advantage"]) == (1, ROLLOUTS)
        assert row["lag_max"] == min(int(str(row["step"])), 2)
        assert {"loss", "grad_norm", "lr", "idle_seconds", "train_seconds", "trainer/idle_ratio"} <= row.keys()
    assert [row["step"] for row in rows(folder, "eval_greedy")] == [0, 2, 4, 5]
    assert [row["policy_version"] for row in rows(folder, "sent_bytes")] == list(range(STEPS + 1))
    assert [row["sft_step"] for row in rows(folder, "sft_accuracy")] == [2]


def test_each_evaluation_reaches_the_coordinator_also_the_last_one(whole: BatchCoordinator, folder: Path) -> None:
    measured = {row["step"]: row["eval_greedy"] for row in rows(folder, "eval_greedy")}
    told = {one.policy_version: one.greedy.mean for one in whole.held_out if one.greedy is not None}
    assert told == measured
    assert list(told) == [0, 2, 4, STEPS]


def test_the_learning_rate_warms_up_falls_and_is_damped(whole: BatchCoordinator, folder: Path) -> None:
    first, second, third, *_ = [float(str(row["lr"])) for row in rows(folder, "reward_mean")]
    peak = CONFIG.optimizer.lr
    assert first == pytest.approx(peak / 2)
    assert second == pytest.approx(peak * (1 - 0.9 / STEPS) * 0.75)
    assert third == pytest.approx(peak * (1 - 1.8 / STEPS) * 0.75**2)


PLACES = [
    *(("after train_step", at) for at in (1, 3, 4, 7)),
    *((place, at) for place in ("within save", "within write") for at in (1, 2, 3)),
    *(("copy", at) for at in (1, 2, 5)),
    *((place, at) for place in ("put_blob", "before publish", "after publish") for at in (1, 3)),
    ("batch", 2),
    ("bundle", 2),
    ("after new_optimizer", 2),
]
"""Places between any two phases, and how often each is passed before the kill: in the supervised steps and in the others."""


@pytest.mark.slow
@pytest.mark.parametrize(("place", "at"), PLACES)
async def test_killed_anywhere_it_continues_bit_exactly(
    tmp_path: Path, whole: BatchCoordinator, place: str, at: int
) -> None:
    coordinator = BatchCoordinator(make_run(max_steps=STEPS))
    with pytest.raises(KilledError):
        await run_trainer(make_trainer(tmp_path / "cut", coordinator, fuse=Fuse(place, at)), asyncio.Event())
    resumed = make_trainer(tmp_path / "cut", coordinator)
    assert await run_trainer(resumed, asyncio.Event())
    assert coordinator.roots == whole.roots
    assert root_of_backend(resumed) == whole.roots[-1]
    assert not list((tmp_path / "cut").rglob("*.partial"))


@pytest.mark.parametrize("every", [1, STEPS], ids=["to the one before", "to the start, as there is one"])
async def test_with_its_newest_checkpoint_damaged_it_goes_back_bit_exactly(
    tmp_path: Path, whole: BatchCoordinator, every: int
) -> None:
    coordinator = BatchCoordinator(make_run(max_steps=STEPS))
    config = CONFIG.model_copy(update={"checkpoint_every": every, "checkpoints_kept": 2})
    with pytest.raises(KilledError):
        await run_trainer(
            make_trainer(tmp_path, coordinator, config=config, fuse=Fuse("after publish", 4)), asyncio.Event()
        )
    *_, newest = sorted((tmp_path / "checkpoints").iterdir())
    weights = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    assert await run_trainer(make_trainer(tmp_path, coordinator, config=config), asyncio.Event())
    assert coordinator.roots == whole.roots


async def test_bundles_that_rot_between_their_step_and_the_checkpoint_are_trained_again_from_copies(
    tmp_path: Path, whole: BatchCoordinator
) -> None:
    coordinator = BatchCoordinator(make_run(max_steps=STEPS))
    config = CONFIG.model_copy(update={"checkpoint_every": STEPS})
    with pytest.raises(KilledError):
        await run_trainer(
            make_trainer(tmp_path, coordinator, config=config, fuse=Fuse("after publish", 4)), asyncio.Event()
        )
    rotten = set(coordinator.bundles.values())
    coordinator.spoil = lambda data: data[:-1] if data in rotten else data
    assert await run_trainer(make_trainer(tmp_path, coordinator, config=config), asyncio.Event())
    assert coordinator.roots == whole.roots


async def test_stopping_finishes_the_step_saves_publishes_and_leaves(tmp_path: Path, whole: BatchCoordinator) -> None:
    coordinator, stop = BatchCoordinator(make_run(max_steps=STEPS)), asyncio.Event()
    trainer = make_trainer(tmp_path / "cut", coordinator)
    training = asyncio.create_task(run_trainer(trainer, stop))
    await coordinator.until(lambda: len(coordinator.manifests) >= 2)
    stop.set()
    assert not await training
    held = trainer.state.step
    assert coordinator.roots == whole.roots[: held + 1]
    resumed = make_trainer(tmp_path / "cut", coordinator)
    assert await run_trainer(resumed, asyncio.Event())
    assert coordinator.roots == whole.roots


async def test_stopping_wakes_a_wait_for_a_batch(tmp_path: Path) -> None:
    coordinator, stop = BatchCoordinator(make_run(max_steps=STEPS)), asyncio.Event()
    coordinator.gate.clear()  # policy 0 is not taken in, so there is no batch 0
    training = asyncio.create_task(run_trainer(make_trainer(tmp_path, coordinator), stop))
    await coordinator.until(lambda: bool(coordinator.asked))
    stop.set()
    coordinator.gate.set()
    assert not await training
    assert coordinator.roots == [coordinator.roots[0]]


@pytest.mark.parametrize("taken_in", [0, 2])
async def test_stopped_while_the_coordinator_is_away_it_leaves_and_loses_nothing(
    tmp_path: Path, whole: BatchCoordinator, taken_in: int
) -> None:
    """`taken_in`: number of policies that the coordinator accepts before it becomes unreachable."""
    coordinator, stop = BatchCoordinator(make_run(max_steps=STEPS)), asyncio.Event()
    config = CONFIG.model_copy(update={"leave_seconds": 0.01})
    training = asyncio.create_task(run_trainer(make_trainer(tmp_path, coordinator, config=config), stop))
    await coordinator.until(lambda: len(coordinator.manifests) >= taken_in)
    coordinator.away = 10**9
    asked = coordinator.refused
    await coordinator.until(lambda: coordinator.refused > asked)
    stop.set()
    assert not await training
    coordinator.away = 0
    assert await run_trainer(make_trainer(tmp_path, coordinator), asyncio.Event())
    assert coordinator.roots == whole.roots


async def test_a_finished_run_is_found_finished(tmp_path: Path, whole: BatchCoordinator, folder: Path) -> None:
    shutil.copytree(folder, tmp_path / "again")
    before = list(whole.roots)
    assert await run_trainer(make_trainer(tmp_path / "again", whole), asyncio.Event())
    assert whole.roots == before


async def test_an_absent_coordinator_is_waited_for(tmp_path: Path, whole: BatchCoordinator) -> None:
    coordinator = BatchCoordinator(make_run(max_steps=STEPS))
    coordinator.away = 50
    assert await run_trainer(make_trainer(tmp_path / "late", coordinator), asyncio.Event())
    assert coordinator.roots == whole.roots


async def test_a_trainer_that_computes_other_weights_is_refused(tmp_path: Path, whole: BatchCoordinator) -> None:
    other = CONFIG.model_copy(update={"seed": CONFIG.seed + 1})
    with pytest.raises(LocalError, match=f"policy 0 is published with state root {whole.roots[0]}"):
        await run_trainer(make_trainer(tmp_path, whole, config=other), asyncio.Event())


async def test_a_misspelt_algorithm_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    coordinator = BatchCoordinator(make_run(max_steps=1))
    config = CONFIG.model_copy(update={"filters": (FilterConfig(type="zero"),)})
    with pytest.raises(LocalError, match="unknown filter 'zero'"):
        await run_trainer(make_trainer(tmp_path, coordinator, config=config), asyncio.Event())
    assert not rows(tmp_path, "sft_step")
    assert not coordinator.manifests


async def test_without_a_supervised_phase_the_first_policy_is_the_initial_model(tmp_path: Path) -> None:
    coordinator = BatchCoordinator(make_run(max_steps=1))
    config = CONFIG.model_copy(update={"sft": CONFIG.sft.model_copy(update={"steps_max": 0})})
    trainer = make_trainer(tmp_path, coordinator, config=config)
    initial = root_of_backend(trainer)
    assert await run_trainer(trainer, asyncio.Event())
    assert coordinator.roots[0] == initial


async def test_killed_while_it_was_ahead_of_the_publisher_it_announces_what_was_on_its_way(
    tmp_path: Path, whole: BatchCoordinator
) -> None:
    """Checkpoints 2 and 3 are written while policies 2 and 3 are not announced: it must resume where it can make policy 2."""
    coordinator = BatchCoordinator(make_run(max_steps=STEPS))
    coordinator.takes_in_max = 2
    config = CONFIG.model_copy(update={"checkpoint_every": 1, "checkpoints_kept": 1})
    with pytest.raises(KilledError):
        await run_trainer(make_trainer(tmp_path, coordinator, fuse=Fuse("copy", 4), config=config), asyncio.Event())
    assert checkpoint_steps(tmp_path)[-2:] == [2, 3]
    assert len(coordinator.manifests) == 2
    coordinator.takes_in_max = 10**9
    resumed = make_trainer(tmp_path, coordinator, config=config)
    assert await run_trainer(resumed, asyncio.Event())
    assert coordinator.roots == whole.roots
    assert checkpoint_steps(tmp_path)[-1] == STEPS


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.partition("-step-")[2]) for path in (folder / "checkpoints").glob("*-step-*"))


RL = TrainerState(run="0" * 64, phase=Phase.RL)


def save(checkpoints: Checkpoints, state: TrainerState, *, head: int, error: OSError | None = None) -> None:
    folder = checkpoints.begin(state)
    assert folder is not None

    def write() -> None:
        (folder / "weights").write_bytes(b"1234")
        if error is not None:
            raise error

    checkpoints.finish(state, write, head=head)


def test_a_checkpoint_is_whole_or_not_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, run=RL.run, kept=2)
    assert checkpoints.newest(head=-1) is None
    save(checkpoints, RL, head=-1)
    with pytest.raises(LocalError, match=r"00000000-step-00000001 cannot be written.*No space left on device"):
        save(checkpoints, RL.updated(step=1), head=0, error=OSError(28, "No space left on device"))
    found = checkpoints.newest(head=0)
    assert found is not None
    assert found[0] == RL
    assert (found[1] / "weights").read_bytes() == b"1234"
    assert checkpoints.begin(RL) is None


def test_only_checkpoints_that_no_restart_can_need_are_deleted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", run=RL.run, kept=1)
    for step, head, kept in ((0, -1, [0]), (1, 0, [1]), (2, 0, [1, 2]), (3, 0, [1, 2, 3]), (4, 2, [3, 4])):
        save(checkpoints, RL.updated(step=step), head=head)
        assert checkpoint_steps(tmp_path) == kept
        assert checkpoints.durable_step(head) == min(step, head + 1)
    found = checkpoints.newest(head=2)
    assert found is not None
    assert found[0].step == 3
    assert checkpoint_steps(tmp_path) == [3]


def test_every_so_many_steps_a_checkpoint_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", run=RL.run, kept=1, keep_every=4)
    for step in range(10):
        save(checkpoints, RL.updated(step=step), head=step)
    assert checkpoint_steps(tmp_path) == [0, 4, 8, 9]


def test_checkpoints_of_both_phases_are_found_in_the_order_of_training(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, run=RL.run, kept=9)
    taught = RL.updated(phase=Phase.SFT, sft_step=20)
    for state in (taught.updated(sft_step=10), taught, taught.updated(phase=Phase.RL)):
        save(checkpoints, state, head=-1)
        found = checkpoints.newest(head=-1)
        assert found is not None
        assert found[0] == state


def test_a_coordinator_that_lost_its_policies_is_an_error(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, run=RL.run, kept=1)
    save(checkpoints, RL.updated(step=7), head=6)
    with pytest.raises(LocalError, match="begin at step 7, but the coordinator's newest policy is 3"):
        checkpoints.newest(head=3)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    save(Checkpoints(tmp_path, run="0" * 64, kept=2), RL, head=-1)
    with pytest.raises(LocalError, match="belongs to run 000000000000, not 111111111111"):
        Checkpoints(tmp_path, run="1" * 64, kept=2).newest(head=-1)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in ("weights", "state.json") for damage in ("a flipped bit", "a cut", "a deletion")),
        *(("digests.json", damage) for damage in ("a flipped bit", "a cut", "a folder")),
        ("weights", "a folder"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_resumed(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, run=RL.run, kept=2)
    for step in (3, 5):
        save(checkpoints, RL.updated(step=step), head=step)
    assert checkpoints.durable_step(5) == 3, "the coordinator must keep what the older one needs"
    path = tmp_path / "00000000-step-00000005" / name
    data = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage != "a deletion":
        path.write_bytes(data[:-1] if damage == "a cut" else bytes([data[0] ^ 1]) + data[1:])
    found = checkpoints.newest(head=5)
    assert found is not None
    assert found[0].step == 3
    assert str(path) in caplog.text
    save(checkpoints, RL.updated(step=5), head=5)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["00000000-step-00000003", "00000000-step-00000005"]


def test_without_an_intact_checkpoint_the_trainer_says_which_files_are_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, run=RL.run, kept=2)
    for step in (1, 2):
        save(checkpoints, RL.updated(step=step), head=2)
        (tmp_path / f"00000000-step-{step:08d}" / "weights").write_bytes(b"1235")
    for _ in range(2):  # the next start must not begin at step 0, and delete what may be restored
        with pytest.raises(
            LocalError, match=r"no checkpoint .* is intact.*00000001.damaged, 00000000-step-00000002.damaged"
        ):
            checkpoints.newest(head=2)
    assert "00000002/weights is not what was written" in caplog.text
    for step in (1, 2):
        assert (tmp_path / f"00000000-step-{step:08d}.damaged" / "weights").exists()


@pytest.mark.parametrize("steps", [(0,), (0, 4)])
def test_with_the_first_checkpoints_damaged_it_begins_again_while_no_batch_was_deleted(
    tmp_path: Path, steps: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, run=RL.run, kept=2)
    for step in steps:
        save(checkpoints, RL.updated(step=step), head=5)
        assert checkpoints.durable_step(5) == 0
        (tmp_path / f"00000000-step-{step:08d}" / "weights").write_bytes(b"1235")
    for _ in range(2):
        assert checkpoints.newest(head=5) is None
    assert "from the initial weights" in caplog.text


def test_a_checkpoint_of_a_release_without_digests_is_resumed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, run=RL.run, kept=2)
    save(checkpoints, RL, head=-1)
    (tmp_path / "00000000-step-00000000" / "digests.json").unlink()
    found = checkpoints.newest(head=-1)
    assert found is not None
    assert found[0] == RL
