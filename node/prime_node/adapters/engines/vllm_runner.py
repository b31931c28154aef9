"""Choice of vLLM's model runner, of the sampler that is made for it, and of the process that computes.

V1 runs everywhere: its sampler counts a request's tokens on the host, so a step is scheduled after the last one has ended. V2's
sampler reads everything on the device, so steps are scheduled ahead; V2 needs Triton.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from prime_node.adapters.engines.vllm_seeded_sampler import SeededSampler
from prime_protocol.errors import LocalError

UNCOMPILED = "TORCHDYNAMO_DISABLE"
"""Variable that makes torch.compile do nothing in the processes that inherit it."""


def runner_arguments(model_runner: str, *, seeded: bool) -> dict[str, Any]:
    """Set the variable that selects the runner, v1 or v2, and return its arguments of the engine.

    Raises LocalError where V2 cannot run.
    """
    if model_runner == "v2" and not HAS_TRITON:
        raise LocalError("worker.model_runner = v2 needs Triton, and so a GPU; v1 runs everywhere")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(model_runner == "v2"))
    if model_runner == "v1":
        return {"async_scheduling": False, "logits_processors": [SeededSampler] if seeded else None}
    from prime_node.adapters.engines.vllm_slot_sampler import SlotSampler

    return {"async_scheduling": True, "logits_processors": [SlotSampler]}  # unseeded requests need it for proofs


def executor_of(tensor_parallel: int) -> type[Executor] | None:
    """Return the executor that computes in the engine's own process; None: vLLM's choice.

    On a CPU vLLM would start one more process, to bind its threads to cores, and hold half a gigabyte more for its modules. Here
    threads are not bound, unless the user sets vLLM's variable.
    """
    is_bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
    return None if is_bound or tensor_parallel > 1 or not current_platform.is_cpu() else UniProcExecutor


def start_engine(arguments: AsyncEngineArgs) -> AsyncLLM:
    """Start vLLM. On a CPU its processes compile nothing, unless the user sets torch's variable.

    The model is not compiled there, but vLLM would compile the function that ranks a token's logprob: half a minute of g++ at the
    start of each worker, and its memory.
    """
    is_ours = current_platform.is_cpu() and UNCOMPILED not in os.environ
    if is_ours:
        os.environ[UNCOMPILED] = "1"
    try:
        return AsyncLLM.from_engine_args(arguments)
    finally:
        if is_ours:  # what this process starts later may compile
            os.environ.pop(UNCOMPILED, None)
