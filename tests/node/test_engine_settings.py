"""The worker's settings decide the arithmetic of its engine."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
from tests.node.batch_coordinator import make_run, write_model

from prime_node.adapters.machine import emulates_bf16
from prime_node.cli import wire
from prime_node.cli.wire_classes import engine_info, has_gpu_driver
from prime_node.worker.config import WorkerConfig
from prime_protocol.errors import LocalError
from prime_protocol.rollout import EngineInfo


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")])
def test_the_arithmetic_of_an_engine_on_a_cpu_is_a_setting(tmp_path: Path, dtype: str, expected: str) -> None:
    settings = WorkerConfig.load({"worker": {"engine": "transformers", "dtype": dtype}})
    engine = wire.engine(settings, write_model(tmp_path), make_run(), cheat=None)
    assert (engine.info.name, engine.info.dtype, engine.info.device) == ("transformers", expected, "cpu")


def test_bf16_on_a_processor_without_its_instructions_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for dtype in ("fp32", "bf16"):
        settings = WorkerConfig.load({"worker": {"engine": "transformers", "dtype": dtype}})
        wire.engine(settings, write_model(tmp_path), make_run(), cheat=None)
    flags = set(Path("/proc/cpuinfo").read_text().split()) if platform.machine() == "x86_64" else {"amx_bf16"}
    is_slow = not flags & {"avx512_bf16", "amx_bf16"}
    assert ["transformers/bf16 generates" in record.message for record in caplog.records] == [True] * is_slow


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu sse2 avx2 avx512f\n", True),
        ("processor : 0\nflags\t\t: fpu sse2 avx2 avx512f avx512_bf16\n", False),
        ("processor : 0\nflags\t\t: fpu sse2 avx2 amx_bf16\n", False),
        ("processor : 0\nFeatures\t: fp asimd\n", False),
    ],
)
def test_processors_that_emulate_bf16(tmp_path: Path, cpuinfo: str, expected: bool) -> None:
    file = tmp_path / "cpuinfo"
    assert not emulates_bf16(file)
    file.write_text(cpuinfo)
    assert emulates_bf16(file) is expected


@pytest.mark.skipif(not emulates_bf16(), reason="this processor has bf16 instructions")
@pytest.mark.parametrize(("dtype", "expected"), [("auto", False), ("bf16", True)])
def test_up_says_first_that_an_arithmetic_is_slow(tmp_path: Path, dtype: str, expected: bool) -> None:
    """Its workers say so in their logs, which are read last."""
    asked = ["up", str(tmp_path / "run"), "--config", "configs/smollm2.toml", "--engine", "transformers"]
    chosen = ["--set", f"worker.dtype={dtype}", "--set", "run.model.name_or_path=/nowhere/at/all"]
    ran = subprocess.run([sys.executable, "-m", "prime_node", *asked, *chosen], capture_output=True, text=True)
    assert "model /nowhere/at/all: not a folder" in ran.stderr
    assert ('set worker.dtype = "fp32"' in ran.stdout) is expected


@pytest.mark.vllm
@pytest.mark.parametrize(("dtype", "expected"), [("auto", "fp32"), ("bf16", "bf16")])
def test_so_is_that_of_vllm(tmp_path: Path, dtype: str, expected: str) -> None:
    settings = WorkerConfig.load({"worker": {"engine": "vllm", "dtype": dtype}})
    engine = wire.engine(settings, write_model(tmp_path), make_run(), cheat=None)
    assert (engine.info.name, engine.info.dtype) == ("vllm", "bf16" if engine.info.device == "cuda" else expected)


def announced_and_built(tmp_path: Path, **worker: str) -> tuple[EngineInfo, EngineInfo]:
    settings = WorkerConfig.load({"worker": dict(worker)})
    return engine_info(settings), wire.engine(settings, write_model(tmp_path), make_run(), cheat=None).info


@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_an_engine_is_announced_as_what_it_is_when_it_is_built(tmp_path: Path, dtype: str) -> None:
    announced, built = announced_and_built(tmp_path, engine="transformers", dtype=dtype)
    assert announced == built


@pytest.mark.vllm
@pytest.mark.parametrize("dtype", ["auto", "bf16", "bf16-fp32head"])
def test_vllm_is_announced_as_what_it_is_when_it_is_built(tmp_path: Path, dtype: str) -> None:
    announced, built = announced_and_built(tmp_path, engine="vllm", dtype=dtype)
    assert announced == built


def test_settings_that_no_engine_has_are_refused_before_the_run_is_joined() -> None:
    with pytest.raises(LocalError, match=r"worker\.seeded = false needs worker\.engine = vllm"):
        engine_info(WorkerConfig.load({"worker": {"engine": "transformers", "seeded": False}}))
    with pytest.raises(LocalError, match="transformers/bf16-fp32head: known are"):
        engine_info(WorkerConfig.load({"worker": {"engine": "transformers", "dtype": "bf16-fp32head"}}))


def test_an_engine_is_announced_without_importing_it() -> None:
    program = (
        "import sys\n"
        "from prime_node.cli import wire\n"
        "from prime_node.cli.wire_classes import engine_info\n"
        "from prime_node.worker.config import WorkerConfig\n"
        "engine_info(WorkerConfig()), wire.describe_hardware()\n"
        "print(*{'torch', 'transformers', 'vllm'} & set(sys.modules))"
    )
    if has_gpu_driver():
        pytest.skip("torch alone can tell what a GPU can do")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
