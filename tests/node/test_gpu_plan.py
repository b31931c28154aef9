"""The division of GPUs among the roles of `up`, on tables of machines and models. Nothing here needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prime_node.adapters.sandbox.system_paths import gpu_devices
from prime_node.algo.memory_plan import ModelShape, TrainerLoad, trainer_memory
from prime_node.cli.gpu_plan import (
    Gpu,
    GpuPlan,
    RunRoles,
    TrainerRole,
    ValidatorRole,
    WorkerRole,
    plan_gpus,
    worker_bytes,
)
from prime_node.cli.options import Options
from prime_node.cli.run_dir import RunDir
from prime_node.cli.wire_classes import class_of_kind, parts_of_kind
from prime_node.cli.wire_gpus import find_gpus, plan_here, roles_of
from prime_node.validator.config import ValidatorConfig
from prime_protocol.errors import LocalError

GIB = 2**30
SMALL = ModelShape(
    parameters=751_632_384, root_parameters=155_582_464, layers=28, hidden=1_024, mlp=3_072, queries=2_048, keys=1_024,
    has_head_norms=True, vocab=151_936,
)  # fmt: skip
"""Qwen3-0.6B."""
SEVEN = ModelShape(
    parameters=7_615_616_512, root_parameters=2 * 544_997_376, layers=28, hidden=3_584, mlp=18_944, queries=3_584, keys=512,
    has_head_norms=False, vocab=152_064,
)  # fmt: skip
"""Qwen2.5-7B."""
LARGE = ModelShape(
    parameters=32_762_123_264, root_parameters=2 * 777_912_320, layers=64, hidden=5_120, mlp=25_600, queries=8_192,
    keys=1_024, has_head_norms=True, vocab=151_936,
)  # fmt: skip
"""Qwen3-32B."""
TRAINER = TrainerRole(load=TrainerLoad(compute_dtype="bf16", recompute=True), evaluates=True)
UNEVALUATED = replace(TRAINER, evaluates=False)
ALL = RunRoles(TRAINER, ValidatorRole(dtype="bf16"), WorkerRole())
NAMED = RunRoles(replace(TRAINER, device_index=1), ValidatorRole(device_index=0))


def machine(count: int, gib: float = 79.0) -> list[Gpu]:
    return [Gpu(index, int(gib * GIB), int(gib * GIB)) for index in range(count)]


def on_each(*gpus: int) -> dict[str, tuple[int, ...]]:
    """Return workers with one GPU each."""
    return {f"worker-{number}": (index,) for number, index in enumerate(gpus, start=1)}


def fits(plan: GpuPlan, gpus: list[Gpu]) -> bool:
    """Return whether no GPU is given away twice and each role gets what it needs."""
    given = {gpu.index: sum(one.granted_bytes for one in plan.shares if gpu.index in one.gpus) for gpu in gpus}
    return all(given[gpu.index] <= gpu.free_bytes for gpu in gpus) and all(
        one.needed_bytes <= one.granted_bytes for one in plan.shares
    )


@pytest.mark.parametrize(
    ("count", "gib", "shape", "roles", "expected"),
    [
        (1, 79.0, SMALL, ALL, {"trainer": (0,), "validator": (0,), "worker-1": (0,)}),
        (2, 79.0, SMALL, ALL, {"trainer": (0,), "worker-1": (1,), "validator": (0,)}),
        (4, 23.5, SMALL, replace(ALL, trainer=None), on_each(0, 1, 2, 3) | {"validator": (0,)}),
        (8, 79.0, SEVEN, replace(ALL, trainer=UNEVALUATED), {"trainer": (0, 1, 2, 3), **on_each(4, 5, 6, 7)}),
        (4, 79.0, LARGE, RunRoles(workers=WorkerRole(context_tokens=32_768)), {"worker-1": (0, 1), "worker-2": (2, 3)}),
        (1, 79.0, SEVEN, RunRoles(workers=WorkerRole(count=2)), {"worker-1": (0,), "worker-2": (0,)}),
        (3, 79.0, SMALL, RunRoles(TRAINER, None, WorkerRole(count=1)), {"trainer": (0,), "worker-1": (1,)}),
        (2, 79.0, SMALL, NAMED, {"trainer": (1,), "validator": (0,)}),
    ],
)  # fmt: skip
def test_each_role_gets_gpus_that_hold_it(
    count: int, gib: float, shape: ModelShape, roles: RunRoles, expected: dict[str, tuple[int, ...]]
) -> None:
    gpus = machine(count, gib)
    plan = plan_gpus(gpus, roles, shape)
    assert {one.role: one.gpus for one in plan.shares if one.role in expected} == expected
    assert fits(plan, gpus)
    assert len(plan.workers) == sum(role.startswith("worker-") for role in expected)


def test_one_gpu_is_divided_and_the_shares_of_vllm_sum_to_less_than_one() -> None:
    plan = plan_gpus(machine(1), RunRoles(TRAINER, ValidatorRole(vllm=True, dtype="bf16"), WorkerRole(count=2)), SMALL)
    shares = [one.memory_share for one in plan.shares if one.memory_share is not None]
    trainer = plan.of("trainer")
    assert trainer is not None
    assert len(shares) == 3
    assert sum(shares) + trainer.granted_bytes / (79 * GIB) <= 0.951


def test_the_plan_becomes_settings_of_each_process() -> None:
    plan = plan_gpus(
        machine(8), RunRoles(UNEVALUATED, ValidatorRole(dtype="bf16"), WorkerRole(tensor_parallel=2)), SEVEN
    )
    told = {one.role: one.assignments() for one in plan.shares}
    assert told["trainer"] == ["trainer.device=cuda", "trainer.ranks.nproc=4"]
    assert told["validator"] == ["validator.device=cuda"]
    assert told["worker-1"][1] == "worker.tensor_parallel=2"
    assert Options(None, [part for all_ in told.values() for part in all_]).overrides["worker"]["tensor_parallel"] == 2
    assert plan.lines()[1].split()[:5] == ["trainer", "GPUs", "0,", "1,", "2,"]


def test_given_settings_win_over_the_plan() -> None:
    given = RunRoles(replace(TRAINER, nproc=2), None, WorkerRole(count=1, tensor_parallel=4, memory_share=0.5))
    plan = plan_gpus(machine(8), given, SMALL)
    trainer, worker = plan.of("trainer"), plan.of("worker-1")
    assert trainer is not None
    assert worker is not None
    assert trainer.gpus == (0, 1)
    assert (worker.gpus, worker.memory_share) == ((2, 3, 4, 5), 0.5)
    assert "without a role: 6, 7" in plan.lines()[-1]


@pytest.mark.parametrize(
    ("count", "gib", "shape", "roles", "message"),
    [
        (1, 23.5, SEVEN, RunRoles(TRAINER), "the trainer needs .*adapters"),
        (8, 79.0, SEVEN, RunRoles(replace(TRAINER, load=TrainerLoad(compute_dtype="bf16"))), "ranks.recompute = true would fit"),
        (8, 79.0, LARGE, RunRoles(TRAINER), "evaluation_device = cpu and .*offload = true would fit"),
        (1, 23.5, LARGE, RunRoles(workers=WorkerRole()), "worker-1 needs .* on GPU 0"),
        (1, 79.0, SEVEN, RunRoles(workers=WorkerRole(count=6)), "5 more workers"),
        (1, 23.5, SEVEN, RunRoles(None, ValidatorRole(dtype="fp32")), "validator.device = cpu"),
        (2, 79.0, SMALL, RunRoles(replace(TRAINER, nproc=4)), "nproc = 4"),
        (2, 79.0, SMALL, RunRoles(replace(TRAINER, replicas=4)), "replicas = 4"),
        (2, 79.0, SMALL, RunRoles(workers=WorkerRole(tensor_parallel=4)), "this machine has 2 GPUs"),
        (1, 79.0, SMALL, RunRoles(None, None, WorkerRole(memory_share=0.99)), "asks for .*gpu_memory_share"),
        (2, 79.0, SMALL, RunRoles(replace(TRAINER, device_index=5)), "cuda:5, and this machine has GPUs 0, 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_a_cure(
    count: int, gib: float, shape: ModelShape, roles: RunRoles, message: str
) -> None:
    with pytest.raises(LocalError, match=message):
        plan_gpus(machine(count, gib), roles, shape)


def test_a_worker_needs_less_on_each_of_several_gpus() -> None:
    needed = [worker_bytes(WorkerRole(), LARGE, size) for size in (1, 2, 4)]
    assert needed == sorted(needed, reverse=True)
    assert needed[0] > 65 * GIB


def test_the_roles_follow_from_the_settings() -> None:
    options = Options(
        Path("configs/qwen3-0.6b-gsm8k.toml"),
        [
            *("trainer.device=cuda", "validator.device=cuda:1", "worker.engine=vllm", "worker.tensor_parallel=2"),
            *("trainer.evaluate_every=0", "up.num_workers=3", "trainer.lora.rank=8"),
        ],
    )
    roles = roles_of(options, None, vllm_on_gpu=True)
    assert roles.trainer is not None
    assert (roles.trainer.load.compute_dtype, roles.trainer.adapter_rank, roles.trainer.evaluates) == ("bf16", 8, False)
    assert roles.validator == ValidatorRole(dtype="bf16", device_index=1)
    assert roles.workers is not None
    assert (roles.workers.count, roles.workers.tensor_parallel) == (3, 2)
    assert roles_of(options, "transformers", vllm_on_gpu=True).workers is None
    assert roles_of(options, None, vllm_on_gpu=False).workers is None


def test_a_run_without_gpus_has_no_plan_and_one_that_asks_for_them_is_refused(tmp_path: Path) -> None:
    if gpu_devices():
        pytest.skip("this machine may have a GPU")
    demo = Path("configs/demo.toml")
    assert plan_here(RunDir(tmp_path / "run"), Options(demo, []), None) is None
    with pytest.raises(LocalError, match="torch finds no GPU here"):
        plan_here(RunDir(tmp_path / "run"), Options(demo, ["trainer.device=cuda"]), None)
    assert find_gpus() == []


def test_devices_of_a_screen_are_no_gpu_to_compute_on(tmp_path: Path) -> None:
    (tmp_path / "dri").mkdir()
    assert gpu_devices(tmp_path) == ()
    for name in ("nvidiactl", "nvidia0"):
        (tmp_path / name).touch()
    assert [path.name for path in gpu_devices(tmp_path)] == ["dri", "nvidia0", "nvidiactl"]


def test_a_validator_on_a_gpu_is_an_engine_class_of_its_own() -> None:
    kind = ValidatorConfig(device="cuda:1").kind
    assert (kind, class_of_kind(kind), parts_of_kind(kind)) == (
        "transformers/fp32/cuda",
        "transformers/fp32/cuda",
        ("transformers", "fp32", "cuda"),
    )
    assert ValidatorConfig().kind == "transformers/fp32"
    for wrong in ("transformers", "vllm/bf16/cuda", "transformers/bf16-fp32head", "transformers/fp32/tpu"):
        with pytest.raises(LocalError, match="known are"):
            parts_of_kind(wrong)


def test_a_trainer_of_seven_billion_fits_where_the_issue_wants_it() -> None:
    room = 79 * GIB * 0.95
    adapters = TrainerLoad(compute_dtype="bf16", recompute=True, adapter_parameters=SEVEN.adapter_parameters(16))
    whole = TrainerLoad(ranks=8, compute_dtype="bf16", recompute=True)
    offloaded = replace(whole, offload=True)
    assert trainer_memory(SEVEN, adapters).device < room
    assert trainer_memory(SEVEN, whole).device < room
    assert trainer_memory(LARGE, offloaded).device < room < trainer_memory(LARGE, whole).device
    assert trainer_memory(LARGE, offloaded).host * 8 == pytest.approx(20 * LARGE.parameters, rel=0.01)
