"""The part of wire.py for scorers: the engines that judge."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.cli import wire, wire_adapters
from prime_node.cli.missing_extra import needing_extra
from prime_node.cli.wire_classes import parts_of_kind, vllm_extra
from prime_protocol.errors import LocalError
from prime_protocol.schedule import SwapPolicy

if TYPE_CHECKING:
    from prime_node.adapters.engines.vllm_scorer import VllmScorer
    from prime_node.ports.engine import SamplingScorer
    from prime_node.validator.config import ValidatorConfig
    from prime_protocol.run_spec import PinnedRun


def plain_scorer(
    kind: str,
    model: Path,
    *,
    threads: int,
    context_tokens_max: int | None = None,
    gpu_memory_share: float | None = None,
) -> SamplingScorer:
    """Return a scorer outside of any run. Raises LocalError.

    `context_tokens_max` bounds prompt plus completion for vLLM; None: the model's limit.
    Example: plain_scorer("vllm/bf16", folder, threads=1).
    """
    name, dtype, device = parts_of_kind(kind)
    if name == "transformers":
        return wire.transformers_engine(model, dtype=dtype, threads=threads, device=device)
    return _vllm()(model, dtype=dtype, context_tokens_max=context_tokens_max, gpu_memory_share=gpu_memory_share)


def scorer(settings: ValidatorConfig, model: Path, run: PinnedRun) -> SamplingScorer:
    """Return a validator's scorer. Raises LocalError."""
    wire.check_model(model, run)
    made: SamplingScorer
    if settings.engine == "vllm":
        if run.spec.schedule.swap is SwapPolicy.KEEP_KV:
            raise LocalError(
                "the run's swap is keep_kv, and vLLM cannot forward parts of one sequence by different weights: set "
                "validator.engine = transformers"
            )
        made = _vllm()(
            model,
            dtype=settings.dtype,
            context_tokens_max=max(map(run.spec.context_tokens_max, run.spec.environments)),
            cpu_cache_gib=settings.cpu_cache_gib,
            gpu_memory_share=settings.gpu_memory_share,
            checks=run.spec.checks,
        )
    else:
        made = wire.transformers_engine(model, dtype=settings.dtype, threads=settings.threads, device=settings.device)
    return wire_adapters.merging_scorer(made, run, settings.base_model)


def _vllm() -> type[VllmScorer]:
    with needing_extra(vllm_extra(), "a validator's vLLM"):
        from prime_node.adapters.engines.vllm_scorer import VllmScorer
    return VllmScorer
