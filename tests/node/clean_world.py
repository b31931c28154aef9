"""Environments with the distributions of chosen extras alone, made of links to what is installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Collection
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def wanted_distributions(requires: Collection[str], extras: Collection[str] = ()) -> list[Distribution]:
    """Return the distributions that requirements name with some extras, also those that these need."""
    found: dict[str, Distribution] = {}
    seen = set[tuple[str, str]]()
    wanted = [(Requirement(text), extra) for text in requires for extra in ("", *extras)]
    while wanted:
        requirement, extra = wanted.pop()
        name = requirement.name.lower().replace("_", "-")
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        found.setdefault(name, distribution(name))
        for asked in {"", *requirement.extras} - {done for of, done in seen if of == name}:
            seen.add((name, asked))
            wanted += [(Requirement(text), asked) for text in found[name].requires or ()]
    return list(found.values())


def core_distributions() -> list[Distribution]:
    """Return the distributions that the project needs without any extra."""
    return wanted_distributions(distribution("prime-node").requires or ())


def _hard_link(source: str, target: str) -> None:
    """Link a file, or copy it to another file system."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target)


def hard_link_distributions(distributions: Collection[Distribution], folder: Path) -> None:
    """Link the files of distributions into a folder for sys.path: a confined process does not see where symbolic links lead."""
    left_out = shutil.ignore_patterns("include", "*.a")
    for each in distributions:
        for first in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            source, target = str(each.locate_file(first)), folder / first
            if Path(source).is_dir():
                shutil.copytree(source, target, copy_function=_hard_link, dirs_exist_ok=True, ignore=left_out)
            else:
                _hard_link(source, str(target))


def link_distributions(distributions: Collection[Distribution], folder: Path) -> None:
    """Link the packages of distributions into a folder for sys.path."""
    for each in distributions:
        for first in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            if not (folder / first).exists():
                (folder / first).symlink_to(Path(str(each.locate_file(first))).resolve())


def make_clean_site(folder: Path) -> Path:
    """Make a folder for PYTHONPATH with the core distributions alone."""
    folder.mkdir()
    link_distributions(core_distributions(), folder)
    return folder


def make_role_environment(folder: Path, wheel: Path, role: str) -> Path:
    """Make a virtual environment with the wheel and the distributions of its extra for a role. Return its folder of programs."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, text=True)
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder), "platbase": str(folder)}))
    (metadata,) = site.glob("prime_node-*.dist-info")
    hard_link_distributions(wanted_distributions(Distribution.at(metadata).requires or (), [role]), site)
    return python.parent


def run_clean(site: Path, *arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in that environment."""
    paths = os.pathsep.join(map(str, (site, ROOT / "node", ROOT / "protocol")))
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": paths,
        "HOME": str(home),
        "OPENBLAS_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    return subprocess.run(
        [sys.executable, "-S", "-m", "prime_node", *arguments],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
