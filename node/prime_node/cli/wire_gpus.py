"""The part of wire.py for GPUs: which roles of `prime-node up` use one, and the plan that divides this machine's among them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prime_node.algo.memory_plan import ModelShape, TrainerLoad
from prime_node.cli.gpu_plan import Gpu, GpuPlan, RunRoles, TrainerRole, ValidatorRole, WorkerRole, plan_gpus
from prime_node.cli.options import Options
from prime_node.cli.run_dir import RunDir
from prime_node.cli.up_config import UpConfig
from prime_node.cli.wire_classes import class_of_kind, has_gpu_driver, parts_of_kind, worker_kind
from prime_node.coordinator.new_run import RunConfig
from prime_node.trainer.config import TrainerConfig
from prime_node.validator.config import ValidatorConfig
from prime_node.worker.config import WorkerConfig
from prime_protocol.errors import LocalError

log = logging.getLogger(__name__)

QUERY_SECONDS = 120


def plan_here(run_dir: RunDir, options: Options, engine: str | None) -> GpuPlan | None:
    """Return the division of this machine's GPUs among the roles of `up`; None if no role uses one. Raises LocalError.

    `engine` is the workers', if the command line names it. It is called before a new run is made.
    """
    if not has_gpu_driver() and not _names_gpu(options):
        return None
    roles = roles_of(options, engine, vllm_on_gpu=class_of_kind("vllm/bf16").endswith("/cuda"))
    if roles == RunRoles():
        return None
    gpus = find_gpus() if has_gpu_driver() else []
    if not gpus:
        raise LocalError(
            "[trainer] or [validator] device = cuda, and torch finds no GPU here; `prime-node doctor` tells more"
        )
    return plan_gpus(gpus, roles, _shape(run_dir, options))


def roles_of(options: Options, engine: str | None, *, vllm_on_gpu: bool) -> RunRoles:
    """Return the roles that use a GPU by their settings. `vllm_on_gpu`: whether this machine's vLLM computes on GPUs."""
    settings = options.load(TrainerConfig)
    validator, worker = options.load(ValidatorConfig), options.load(WorkerConfig)
    if engine is not None:
        worker = WorkerConfig.model_validate(worker.model_dump() | {"engine": engine})
    run = options.load(RunConfig)
    lora = run.adapters or settings.lora
    trains = _trainer_role(settings, None if lora is None else lora.rank) if settings.on_gpu else None
    by_vllm = validator.engine == "vllm"
    judges = vllm_on_gpu if by_vllm else validator.device != "cpu"
    count = options.load(UpConfig).num_workers
    works = vllm_on_gpu and worker_kind(worker).startswith("vllm/") and count != 0
    return RunRoles(
        trainer=trains,
        validator=ValidatorRole(
            vllm=by_vllm,
            dtype=validator.dtype,
            memory_share=validator.gpu_memory_share,
            device_index=None if by_vllm else _index(validator.device),
        )
        if judges
        else None,
        workers=WorkerRole(
            count=count,
            tensor_parallel=worker.tensor_parallel,
            memory_share=worker.gpu_memory_share,
            sequences_max=worker.sequences_max,
            context_tokens=_context_tokens(run),
            dtype=parts_of_kind(worker_kind(worker))[1],
        )
        if works
        else None,
    )


def find_gpus() -> list[Gpu]:
    """Return this machine's GPUs as torch sees them. A separate process asks it, because the question takes memory of each."""
    command = [sys.executable, "-P", "-m", "prime_node.adapters.hardware"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
        return [Gpu(*values) for values in json.loads(answer.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise LocalError(f"this machine's GPUs cannot be queried: {error}; `prime-node doctor` tells more") from None


def require_trainer_memory(settings: TrainerConfig, model: Path, *, nproc: int, adapter_rank: int | None) -> None:
    """Check, before anything is allocated, that a rank's GPU holds what the trainer will need. Raises LocalError if not."""
    from prime_node.adapters.hardware import gpu_memory
    from prime_node.adapters.models.model_config import model_shape

    role = replace(_trainer_role(settings, adapter_rank), nproc=nproc, device_index=None)
    gpus = [Gpu(rank, *gpu_memory(settings.device)) for rank in range(nproc)]
    for line in plan_gpus(gpus, RunRoles(trainer=role), model_shape(model)).lines():
        log.info(line)


def _trainer_role(settings: TrainerConfig, adapter_rank: int | None) -> TrainerRole:
    how, given = settings.ranks, settings.evaluation_device
    return TrainerRole(
        load=TrainerLoad(
            compute_dtype=settings.compute_dtype,
            recompute=how.recompute,
            offload=how.offload,
            reduce_each_pass=how.reduce_each_pass,
            pass_tokens=settings.micro_batch_tokens,
            moments=settings.optimizer.moments,
            kept_policies=_keeps_reference(settings) + settings.compute_prox_log_prob,
            critic_moments=None if settings.critic is None else settings.critic.optimizer.moments,
        ),
        adapter_rank=adapter_rank,
        nproc=how.nproc,
        replicas=how.replicas,
        device_index=_index(settings.device),
        evaluates=settings.evaluates and given != "cpu",
        evaluates_copy=given is not None or adapter_rank is not None or how.offload,
    )


def _keeps_reference(settings: TrainerConfig) -> bool:
    modes = (settings.mode, *settings.environment_modes.values())
    teaches = "opsd" in modes and settings.self_distillation.policy == "reference"
    return settings.loss.kl_loss_coef > 0 or settings.use_kl_in_reward or teaches


def _shape(run_dir: RunDir, options: Options) -> ModelShape:
    """Return the sizes of the run's model, or of the model that a new run would have."""
    from prime_node.adapters.models.model_config import model_shape
    from prime_node.cli.wire_new import make_model_files

    if run_dir.exists:
        return model_shape(run_dir.model)
    with tempfile.TemporaryDirectory() as scratch:
        make_model_files(options.load(RunConfig).model, Path(scratch))
        return model_shape(Path(scratch))


def _names_gpu(options: Options) -> bool:
    return options.load(TrainerConfig).on_gpu or options.load(ValidatorConfig).device != "cpu"


def _index(device: str) -> int | None:
    _, _, number = device.partition(":")
    return int(number) if number.isdecimal() else None


def _context_tokens(run: RunConfig) -> int:
    lengths: Sequence[int] = [one.context_tokens_max or 0 for one in run.environments]
    return max(*lengths, run.limits.prompt_tokens_max + run.completion_tokens_max)
