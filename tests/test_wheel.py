"""The wheel is small, and holds nothing that only tests and benchmarks need."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.source_tree import PACKAGES, ROOT

BYTES_MAX = 1_300_000
"""The aim is 800,000 bytes; a third of the wheel is docstrings and comments. Lower the bound whenever the wheel shrinks.
The page in the browser takes 40,000: its own files 22,000, its history and its live changes the rest."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size <= BYTES_MAX


def test_the_wheel_holds_both_packages_and_nothing_for_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    product = {name: folder for name, folder in PACKAGES.items() if name != "prime_lab"}
    modules = {
        f"{package}/{path.relative_to(folder)}" for package, folder in product.items() for path in folder.rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in names} == set(product)
    assert any(name.startswith("prime_node/_configs/") for name in names)
