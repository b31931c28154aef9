"""vLLM's V2 model runner chooses the assigned tokens and makes proofs. Its kernels and ours run in Triton's interpreter."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conformance.engine_world import FLIPS_SHARE_MAX, LOGPROB_ERROR_MAX, PROOF_ERROR_MAX, write_model

ROOT = Path(__file__).parents[2]


@pytest.mark.vllm
@pytest.mark.timeout(900)
async def test_v2_samples_by_the_seed_with_filters_proofs_and_a_swap(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.conformance.v2_world", str(write_model(tmp_path))),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output, errors = await program.communicate()
    assert program.returncode == 0, errors.decode()[-4_000:]
    found = json.loads(output)
    assert found.keys() == {"plain", "filters", "swap"}
    for one in found.values():
        assert one["flips"] <= FLIPS_SHARE_MAX * one["tokens"]
        assert one["logprob_error"] <= LOGPROB_ERROR_MAX
        assert one["proof_distance"] < PROOF_ERROR_MAX
    assert found["swap"]["cut"] > 0
