"""Division of a machine's GPUs among the roles that `prime-node up` starts. Pure.

1. The trainer gets GPUs 0 to R - 1, one rank each: R is the smallest power of two whose ranks fit, unless `nproc` is given.
2. A worker is one process with tensor_parallel GPUs: the smallest power of two that holds its weights and the keys and values of
   one completion, unless it is given. Workers get the GPUs without another role first, and share when there are more workers.
3. The validator gets the GPU with the fewest workers on which it fits, then the one with the most memory left.
4. What the trainer and the validator leave on a GPU is divided among its workers.

The figures are estimates (algo/memory_plan.py). None of them was compared with a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prime_node.algo.memory_plan import (
    CUDA_BLOCK_LOGITS,
    PROCESS_BYTES,
    SLACK,
    ModelShape,
    TrainerLoad,
    trainer_memory,
)
from prime_protocol.errors import LocalError

USABLE = 0.95
"""Share of a GPU's free memory that is divided."""
PREFILL_TOKENS = 8_192
"""Tokens that vLLM forwards at a time, by its default."""
SCORER_CACHE_BYTES = 2**30
"""Keys and values of one batch of the transformers engine."""
SCORER_TOKENS = 16_384
"""Tokens of a batch whose logits the transformers engine judges."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this machine."""

    index: int
    """Its number in torch."""
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRole:
    """The trainer's settings that decide its memory."""

    load: TrainerLoad
    """The plan fills in its ranks and adapters."""
    adapter_rank: int | None = None
    """Rank of the adapters that are trained; None: the weights are."""
    nproc: int | None = None
    """Number of ranks; None: as few as fit."""
    device_index: int | None = None
    """Number of its GPU, if the settings name it; then it is one rank."""
    replicas: int = 1
    evaluates: bool = False
    """Whether the first rank's GPU also computes evaluations."""
    evaluates_copy: bool = False
    """Whether the evaluation has a model of its own even if there is one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatorRole:
    """The validator's settings that decide its memory."""

    vllm: bool = False
    dtype: str = "fp32"
    memory_share: float | None = None
    """Share of the GPU's memory that its vLLM takes; None: as little as it needs."""
    device_index: int | None = None
    """Number of its GPU, if the settings name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRole:
    """The workers' settings that decide their memory."""

    count: int | None = None
    """Number of workers; None: one for each GPU that the trainer leaves, at least one."""
    tensor_parallel: int | None = None
    """GPUs of each; None: as few as fit."""
    memory_share: float | None = None
    """Share of a GPU's memory; None: what is left, divided."""
    sequences_max: int = 256
    context_tokens: int = 2_048
    dtype: str = "bf16"


@dataclass(frozen=True, slots=True)
class RunRoles:
    """The roles that use GPUs; None: on the CPU."""

    trainer: TrainerRole | None = None
    validator: ValidatorRole | None = None
    workers: WorkerRole | None = None


@dataclass(frozen=True, slots=True)
class RoleShare:
    """What one role gets."""

    role: str
    """Name of the process. Example: "worker-1"."""
    gpus: tuple[int, ...]
    needed_bytes: int
    """Memory that it needs on each of its GPUs."""
    granted_bytes: int
    memory_share: float | None = None
    """Share of a GPU's memory for vLLM; None for roles without it."""

    def assignments(self) -> list[str]:
        """Return the settings of the role's process, as SECTION.NAME=VALUE. It sees its own GPUs only, numbered from 0."""
        section = self.role.partition("-")[0]
        found = [] if self.memory_share is None else [f"{section}.gpu_memory_share={self.memory_share:.3f}"]
        if section == "worker":
            return [*found, f"worker.tensor_parallel={len(self.gpus)}"]
        found += [f"{section}.device=cuda"] if self.memory_share is None else []
        return [*found, *([f"trainer.ranks.nproc={len(self.gpus)}"] if section == "trainer" else [])]


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The shares of all roles."""

    shares: tuple[RoleShare, ...]
    notes: tuple[str, ...] = ()

    def of(self, role: str) -> RoleShare | None:
        """Return the share of a role; None if it uses no GPU."""
        return next((share for share in self.shares if share.role == role), None)

    @property
    def workers(self) -> list[RoleShare]:
        """The workers' shares."""
        return [share for share in self.shares if share.role.startswith("worker-")]

    def lines(self) -> list[str]:
        """Return the plan as lines to print."""
        found = ["GPU memory, estimated:"]
        for share in self.shares:
            where = ("GPU " if len(share.gpus) == 1 else "GPUs ") + ", ".join(map(str, share.gpus))
            part = "" if share.memory_share is None else f", share {share.memory_share:.2f}"
            found.append(
                f"  {share.role:<12} {where:<16} needs {_gib(share.needed_bytes)}, gets {_gib(share.granted_bytes)}{part}"
            )
        return [*found, *(f"  {note}" for note in self.notes)]


def plan_gpus(gpus: Sequence[Gpu], roles: RunRoles, shape: ModelShape) -> GpuPlan:
    """Divide the GPUs among the roles. Raises LocalError, with what would fit, if they do not fit."""
    assert gpus, "a plan needs a GPU"
    left = {gpu.index: int(gpu.free_bytes * USABLE) for gpu in gpus}
    shares: list[RoleShare] = []
    if roles.trainer is not None:
        shares += _place_trainer(roles, roles.trainer, shape, left)
    trained_on = {index for share in shares for index in share.gpus}
    wanted = None if roles.workers is None else _worker_gpus(roles.workers, shape, gpus, left, trained_on)
    if roles.validator is not None:
        busy = {index: sum(index in one for one in wanted or ()) for index in left}
        shares.append(_place_validator(roles.validator, shape, gpus, left, busy))
    if roles.workers is not None and wanted is not None:
        shares += _place_workers(roles.workers, shape, gpus, left, wanted, shares)
    alone = [index for index in left if not any(index in share.gpus for share in shares)]
    notes = (
        () if not alone else (f"GPUs without a role: {', '.join(map(str, alone))}; raise up.num_workers to use them",)
    )
    return GpuPlan(tuple(shares), notes)


def worker_bytes(role: WorkerRole, shape: ModelShape, tensor_parallel: int) -> int:
    """Return the memory of each GPU of a worker that computes at least one completion of the run's full length."""
    return _vllm_bytes(
        shape, role.dtype, sequences=role.sequences_max, context_tokens=role.context_tokens, ranks=tensor_parallel
    )


def scorer_bytes(shape: ModelShape, dtype: str) -> int:
    """Return the memory of a transformers engine: weights and a batch."""
    size = 2 if dtype == "bf16" else 4
    return PROCESS_BYTES + int(SLACK * (size * shape.parameters + _batch_bytes(shape)))


def evaluation_bytes(role: TrainerRole, shape: ModelShape, count: int) -> int:
    """Return the memory of the evaluation: with one rank it uses the trainer's weights."""
    if not role.evaluates:
        return 0
    if count == 1 and not role.evaluates_copy:
        return int(SLACK * _batch_bytes(shape))
    return scorer_bytes(shape, role.load.compute_dtype) - PROCESS_BYTES


def _batch_bytes(shape: ModelShape) -> int:
    return SCORER_CACHE_BYTES + 3 * 4 * min(SCORER_TOKENS * shape.vocab, CUDA_BLOCK_LOGITS)


def _vllm_bytes(shape: ModelShape, dtype: str, *, sequences: int, context_tokens: int, ranks: int = 1) -> int:
    size = 4 if dtype == "fp32" else 2
    weights = size * shape.parameters + (2 * shape.hidden * shape.vocab if dtype.endswith("fp32head") else 0)
    cache = shape.cache_bytes(context_tokens) * size // 2
    widest = 2 * size * PREFILL_TOKENS * (shape.hidden + 2 * shape.mlp)
    logits = 3 * 4 * sequences * shape.vocab
    return PROCESS_BYTES + int(SLACK * ((weights + cache + widest) / ranks + logits))


def _place_trainer(roles: RunRoles, role: TrainerRole, shape: ModelShape, left: dict[int, int]) -> list[RoleShare]:
    order = sorted(left) if role.device_index is None else _named("trainer", role.device_index, left)
    counts = [role.nproc] if role.nproc is not None else [n for n in _powers(len(order)) if n % role.replicas == 0]
    if not counts or counts[0] > len(order):
        raise LocalError(
            f"trainer.ranks: nproc = {role.nproc or role.replicas} with replicas = {role.replicas} needs as many GPUs, and this "
            f"machine has {len(order)}; lower them, or set trainer.device = cpu"
        )
    for count in counts:
        needed = trainer_memory(shape, _load(role, shape, count)).device
        # The first rank's GPU also has the evaluation engine, and on one GPU everything else.
        first = needed + evaluation_bytes(role, shape, count)
        others = _least_of_others(roles, shape) if count == len(left) else 0
        if needed <= min(left[index] for index in order[:count]) and first + others <= left[order[0]]:
            gpus = tuple(order[:count])
            granted = {index: first if index == order[0] else needed for index in gpus}
            for index, size in granted.items():
                left[index] -= size
            return [RoleShare("trainer", gpus, first, first)]
    raise LocalError(_trainer_refusal(role, shape, counts[-1], min(left.values()), _least_of_others(roles, shape)))


def _least_of_others(roles: RunRoles, shape: ModelShape) -> int:
    """Return what one validator and the given workers need next to the trainer, if they must share its GPUs."""
    validator = 0 if roles.validator is None else _validator_bytes(roles.validator, shape)
    if roles.workers is None:
        return validator
    return validator + (roles.workers.count or 1) * worker_bytes(
        roles.workers, shape, roles.workers.tensor_parallel or 1
    )


def _load(role: TrainerRole, shape: ModelShape, count: int) -> TrainerLoad:
    adapters = None if role.adapter_rank is None else shape.adapter_parameters(role.adapter_rank)
    return replace(role.load, ranks=max(count // role.replicas, 1), adapter_parameters=adapters)


def _trainer_refusal(role: TrainerRole, shape: ModelShape, count: int, left: int, others: int) -> str:
    load = _load(role, shape, count)
    found = trainer_memory(shape, load)
    evaluation = evaluation_bytes(role, shape, count)
    needed = found.device + evaluation
    parts = {
        "state": found.state, "gathered layers": found.gathered, "activations": found.activations, "logits": found.logits,
        "evaluation": evaluation,
    }  # fmt: skip
    named = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
    with_others = f", and the other roles {_gib(others)}" if others else ""
    cures = {
        "": load,
        "trainer.ranks.recompute = true": replace(load, recompute=True),
        "trainer.ranks.recompute = true and trainer.micro_batch_tokens = 2048": replace(
            load, recompute=True, pass_tokens=min(load.pass_tokens, 2_048)
        ),
        'trainer.ranks.recompute = true and trainer.optimizer.moments = "8bit"': replace(
            load, recompute=True, moments="8bit"
        ),
        "trainer.ranks.recompute = true and offload = true": replace(load, recompute=True, offload=True),
    }
    fits = []
    for elsewhere in ("", "trainer.evaluation_device = cpu") if evaluation else ("",):
        room = left - others - (0 if elsewhere else evaluation)
        described = {name: " and ".join(filter(None, (elsewhere, name))) for name in cures}
        fits += [described[name] for name, changed in cures.items() if trainer_memory(shape, changed).device <= room]
    advice = f"{fits[0]} would fit" if fits else "use more or larger GPUs, adapters ([run.adapters]) or fewer roles"
    return (
        f"the trainer needs {_gib(needed)} on each of {count} GPUs ({named}){with_others}; {_gib(left)} are free: {advice}. "
        "These are estimates; nothing was started"
    )


def _worker_gpus(
    role: WorkerRole, shape: ModelShape, gpus: Sequence[Gpu], left: dict[int, int], trained_on: set[int]
) -> list[tuple[int, ...]]:
    """Return the GPUs of each worker."""
    order = sorted(left, key=lambda index: (index in trained_on, index))
    free = [index for index in order if index not in trained_on] or order
    total = min(gpu.total_bytes for gpu in gpus)
    sizes = [role.tensor_parallel] if role.tensor_parallel is not None else _powers(len(free))
    fits = [size for size in sizes if worker_bytes(role, shape, size) <= min(total, max(left[index] for index in free))]
    size = fits[0] if fits else sizes[-1]
    if size > len(order):
        raise LocalError(f"worker.tensor_parallel = {size}, and this machine has {len(order)} GPUs; lower it")
    count = role.count if role.count is not None else max(len(free) // size, 1)
    slots = [tuple(free[start : start + size]) for start in range(0, len(free) - size + 1, size)] or [
        tuple(order[:size])
    ]
    return [slots[number % len(slots)] for number in range(count)]


def _place_validator(
    role: ValidatorRole, shape: ModelShape, gpus: Sequence[Gpu], left: dict[int, int], busy: dict[int, int]
) -> RoleShare:
    among = left if role.device_index is None else _named("validator", role.device_index, left)
    needed = _validator_bytes(role, shape)
    index = min(among, key=lambda each: (left[each] < needed, busy[each], -left[each], each))
    total = next(gpu.total_bytes for gpu in gpus if gpu.index == index)
    granted = needed if role.memory_share is None else int(role.memory_share * total)
    if max(needed, granted) > left[index]:
        raise LocalError(
            f"the validator needs {_gib(max(needed, granted))} of a GPU (validator.dtype = {role.dtype}), and GPU {index} has "
            f"{_gib(left[index])} left; set validator.device = cpu. These are estimates; nothing was started"
        )
    left[index] -= granted
    return RoleShare("validator", (index,), needed, granted, granted / total if role.vllm else None)


def _validator_bytes(role: ValidatorRole, shape: ModelShape) -> int:
    if role.vllm:
        return _vllm_bytes(shape, role.dtype, sequences=256, context_tokens=PREFILL_TOKENS)
    return scorer_bytes(shape, role.dtype)


def _place_workers(
    role: WorkerRole,
    shape: ModelShape,
    gpus: Sequence[Gpu],
    left: dict[int, int],
    wanted: Sequence[tuple[int, ...]],
    others: Sequence[RoleShare],
) -> list[RoleShare]:
    totals = {gpu.index: gpu.total_bytes for gpu in gpus}
    sharing = {index: sum(index in one for one in wanted) for index in totals}
    found = []
    for number, mine in enumerate(wanted, start=1):
        needed = worker_bytes(role, shape, len(mine))
        room = min(left[index] // sharing[index] for index in mine)
        granted = room if role.memory_share is None else int(role.memory_share * min(totals[index] for index in mine))
        if needed > granted or granted > room:
            sharers = [share.role for share in others if set(share.gpus) & set(mine)]
            sharers += [f"{sharing[mine[0]] - 1} more workers"] if sharing[mine[0]] > 1 else []
            with_ = f", which it shares with {' and '.join(sharers)}" if sharers else ""
            asked = "" if role.memory_share is None else f" and asks for {_gib(granted)} (worker.gpu_memory_share)"
            raise LocalError(
                f"worker-{number} needs {_gib(needed)}{asked}, and has {_gib(room)} on GPU {mine[0]}{with_}; lower "
                "up.num_workers, worker.sequences_max or the run's completion_tokens_max, raise worker.tensor_parallel, or "
                "move a role to the CPU. These are estimates; nothing was started"
            )
        share = min(granted / totals[index] for index in mine)
        found.append(RoleShare(f"worker-{number}", mine, needed, granted, int(share * 1000) / 1000))
    return found


def _named(role: str, index: int, left: dict[int, int]) -> list[int]:
    if index not in left:
        raise LocalError(f"{role}.device = cuda:{index}, and this machine has GPUs {', '.join(map(str, left))} only")
    return [index]


def _powers(count: int) -> list[int]:
    return [2**n for n in range(count.bit_length()) if 2**n <= count]


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
