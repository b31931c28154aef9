"""The checks of the GPU path run on a CPU in small shapes, so that only the numbers are new where a GPU is at hand."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "scripts" / "gpu_check.py"


def lines(*arguments: str) -> list[dict[str, Any]]:
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], check=False, capture_output=True, text=True, timeout=560
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_does_every_step_but_vllms_second_runner() -> None:
    pytest.importorskip("triton")
    found = {line["step"]: line for line in lines("all", "--dry-run")}
    assert found.pop("vllm_v2")["skipped"].startswith("needs a GPU")
    with_vllm = {"vllm_v1"} if importlib.util.find_spec("vllm") else set()
    assert {name for name, line in found.items() if line["ok"]} == {
        "imports",
        "noise",
        "attention",
        "trainer",
        "validator",
        *with_vllm,
    }


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_step_names_the_package_that_is_missing(tmp_path: Path) -> None:
    hides = "import sys\nsys.modules['pydantic'] = None\nsys.argv = ['gpu_check', 'validator', '--dry-run']\n"
    hides += f"sys.path.insert(0, {str(PROGRAM.parent)!r})\n"
    runner = tmp_path / "without_pydantic.py"
    runner.write_text(f"{hides}import runpy\nrunpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n")
    ended = subprocess.run([sys.executable, str(runner)], check=True, capture_output=True, text=True, timeout=100)
    assert json.loads(ended.stdout)["skipped"] == "needs pydantic"
