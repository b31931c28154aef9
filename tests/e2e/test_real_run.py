"""The shipped run of a real model, `configs/smollm2.toml`, in small: vLLM in bf16, a validator in fp32, two steps.

A processor without bf16 instructions computes some ten tokens a second, so there are few of them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.conftest import Up

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]


def test_the_run_of_smollm2_trains_and_refuses_no_honest_rollout(up: Up) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "models.py"), "smollm2"]
    model = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    up.start(
        f"run.model.name_or_path={model}",
        f"trainer.initial_weights={model}",
        "run.max_steps=2",
        "run.groups_per_step=2",
        "run.rollouts_per_group=4",
        "trainer.evaluate_every=0",
        "up.num_workers=1",
        "up.unsafe_cheaters={}",
        arguments=("--config", str(ROOT / "configs" / "smollm2.toml")),
        new=False,
    )
    assert up.finish(timeout_s=840) == 0, up.everything()
    summary = up.summary()
    assert summary["verification"]["ok"]
    assert summary["rollouts"] == {"accepted": 2 * 2 * 4, "refused": {}}
    assert summary["bans"] == []
