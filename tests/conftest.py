"""What every test needs: one thread a process, no hub, a log of its own, and a word where the machine lacks a part."""

from __future__ import annotations

import logging
import os
import platform
import shutil
from collections.abc import Iterator

import pytest

# Read by the libraries as they are imported, here and in every process that a test starts. Two torch
# processes with two threads each on two cores spin against one another and fall to a fifth of their speed.
os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_DO_NOT_TRACK="1",
    VLLM_NO_USAGE_STATS="1",
)

HAS_GPU = shutil.which("nvidia-smi") is not None
HAS_VLLM_BUILD = HAS_GPU or (platform.system(), platform.machine()) == ("Linux", "x86_64")


@pytest.fixture(autouse=True)
def _log_ends_with_the_test() -> Iterator[None]:
    """A command that is called in a test points the log at its own standard error, which is closed when it ends."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips by what the machine is, never by what is installed: a missing package must fail its tests."""
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if item.get_closest_marker("vllm") and not HAS_VLLM_BUILD:
            item.add_marker(pytest.mark.skip(reason="vLLM has no build for this machine"))
