"""Choice of vLLM's model runner, and of the sampler that is made for it.

V1 runs everywhere: its sampler counts a request's tokens on the host, so a step is scheduled after the last one has ended. V2's
sampler reads everything on the device, so steps are scheduled ahead; V2 needs Triton.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.triton_utils import HAS_TRITON

from prime_node.adapters.engines.vllm_seeded_sampler import SeededSampler
from prime_protocol.errors import LocalError


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
