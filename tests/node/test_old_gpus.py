"""A GPU that torch has no kernels for counts as none: in set-up, in the installer, in `doctor` and `up`."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from prime_node.adapters.hardware import gpus
from prime_node.adapters.old_gpus import CAPABILITY_MIN, why_gpus_are_too_old
from prime_node.cli.main import app
from prime_node.cli.options import Options
from prime_node.cli.up import remarks_on_machine
from prime_node.cli.wire_classes import has_gpu_driver, unused_gpus, vllm_extra
from prime_node.cli.wire_sandbox import worker_needs
from prime_node.envs.settings import EnvironmentSettings
from prime_node.worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[2]
INSTALL: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "install.py"))
NEEDED = "8.0" if CAPABILITY_MIN == (8, 0) else "7.5"
VOLTA = f"Tesla V100-SXM2-16GB has compute capability 7.0, and torch needs {NEEDED} or higher"
DRIVER = "580.95.05"
ANSWERS = {
    "7.0, Tesla V100-SXM2-16GB": VOLTA,
    "6.1, NVIDIA GeForce GTX 1080\n7.0, Tesla V100-SXM2-16GB": VOLTA,
    f"{NEEDED}, the oldest": "",
    "7.0, Tesla V100-SXM2-16GB\n12.0, NVIDIA RTX PRO 6000": "",
    "10.0, NVIDIA B200": "",
    "[N/A], Tesla V100-SXM2-16GB": "",
    "No devices were found": "",
    "": "",
    'Field "compute_cap" is not a valid field to query.': "",
}
"""What nvidia-smi prints, and what follows."""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that makes this a machine with a GPU, whose nvidia-smi gives an answer about capabilities."""

    def answers(text: str) -> None:
        folder = tmp_path / f"bin{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "capabilities").write_text(text + "\n")
        (folder / "drivers").write_text(f"Tesla V100-SXM2-16GB, {DRIVER}\n")
        fails = 2 if text.startswith("Field") else 0
        (folder / "nvidia-smi").write_text(
            "#!/bin/sh\n"
            'case "$1" in\n'
            f"    --query-gpu=compute_cap,name) cat '{folder}/capabilities'; exit {fails} ;;\n"
            f"    --query-gpu=name,driver_version) cat '{folder}/drivers' ;;\n"
            "    *) exit 2 ;;\n"
            "esac\n"
        )
        (folder / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    monkeypatch.setattr("prime_node.cli.wire_classes.gpu_devices", lambda: (Path("/dev/nvidia0"),))
    return answers


@pytest.mark.parametrize("answer", ANSWERS)
def test_the_node_and_the_installer_find_the_same_gpus_too_old(driver: Callable[[str], None], answer: str) -> None:
    driver(answer)
    assert why_gpus_are_too_old() == INSTALL["why_no_gpu"]() == unused_gpus() == ANSWERS[answer]
    assert has_gpu_driver() == (ANSWERS[answer] == "")


@pytest.mark.parametrize(("kind", "host"), [("x86_64", "x86_64"), ("aarch64", "aarch64"), ("arm64", "x86_64")])
def test_the_oldest_gpus_are_those_of_torch_s_own_table(monkeypatch: pytest.MonkeyPatch, kind: str, host: str) -> None:
    monkeypatch.setattr("platform.machine", lambda: kind)
    lowest = min(torch.cuda.PYTORCH_RELEASES_CODE_CC["13.0"][host])
    for file in ("scripts/install.py", "node/prime_node/adapters/old_gpus.py"):
        assert runpy.run_path(str(ROOT / file))["CAPABILITY_MIN"] == divmod(lowest, 10)


def test_a_machine_without_nvidia_smi_has_no_gpu_that_is_too_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (why_gpus_are_too_old(), INSTALL["why_no_gpu"]()) == ("", "no NVIDIA GPU")


def test_a_set_up_with_a_gpu_that_is_too_old_takes_the_parts_for_cpus(driver: Callable[[str], None]) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "setup.py"), "--parts", "train", "--gpu-parts", "vllm", "--plan"]

    def plan() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()[0]

    driver("7.0, Tesla V100-SXM2-16GB")
    assert f"{VOLTA}: CPU parts" in plan()
    driver("9.0, NVIDIA H100")
    assert f"Tesla V100-SXM2-16GB, driver {DRIVER})" in plan()


@pytest.mark.skipif(sys.platform != "linux", reason="needs no CPU build here")
def test_the_installer_takes_the_cpu_build_of_torch_for_a_gpu_that_is_too_old(
    driver: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    entries = ["numpy==2.0 --hash=1", "torch==2.1 --hash=2", "triton==3 --hash=3"]
    add = INSTALL["add_torch_for_cpus"]
    driver("7.0, Tesla V100-SXM2-16GB")
    assert add(["true"], entries, "0.1.0") == entries[:1]
    assert f"{VOLTA}: the CPU build of torch==2.1 comes from" in capsys.readouterr().out
    driver("9.0, NVIDIA H100")
    assert add(["false"], entries, "0.1.0") == entries
    assert capsys.readouterr().out == ""


def test_doctor_and_a_worker_use_no_gpu_that_is_too_old(driver: Callable[[str], None]) -> None:
    driver("7.0, Tesla V100-SXM2-16GB")
    found = {one["what"]: one for one in json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["findings"]}
    assert found["torch"]["ok"]
    assert f"CPU only: {VOLTA}" in found["torch"]["seen"]
    assert vllm_extra() == "vllm-cpu"
    assert not worker_needs(WorkerConfig(), EnvironmentSettings(), None).vllm


def test_up_says_first_why_it_uses_no_gpu(driver: Callable[[str], None]) -> None:
    demo = Options(ROOT / "configs" / "demo.toml", [])
    driver("9.0, NVIDIA H100")
    assert remarks_on_machine(demo, "transformers") == []
    driver("7.0, Tesla V100-SXM2-16GB")
    assert remarks_on_machine(demo, "transformers") == [f"no GPU is used: {VOLTA}"]


def test_the_plan_leaves_out_a_gpu_that_is_too_old_next_to_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(7, 0), (9, 0)][index])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10, 80))
    assert gpus() == [(1, 10, 80)]
