#!/usr/bin/env python3
"""Makes .venv hold the parts that a command needs, and does nothing when it already does.

Runs under the user's own Python with the standard library alone. The invariant: `.venv/setup.json` says
`complete` only when every part that it names was installed from the present pyproject.toml and
constraints.txt. From the first change to the last it says `incomplete`, so an interrupted set-up is noticed
and repaired, never trusted.

    scripts/setup.py --parts train,envs                these extras of pyproject.toml, and the core
    scripts/setup.py --parts train --gpu-parts vllm    and these where there is an NVIDIA GPU
    scripts/setup.py --parts train --plan              say what would be installed, and stop

The part `vllm` means the build for this machine: CUDA, or CPU on x86-64 Linux; elsewhere it is left out.
"""

from __future__ import annotations

import platform
import sys

if sys.version_info < (3, 11):  # noqa: UP036 (said here, before an import of something newer fails)
    sys.exit(f"Python {platform.python_version()} is too old, 3.11 is needed. Name one: PYTHON=/path/to/python3.11")

import argparse
import csv
import fcntl
import hashlib
import json
import shutil
import subprocess
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from setup_machine import NEEDS_TORCH, SIZES_MB, Machine, choose_parts, detect_machine, parts_to_add
from setup_native import (
    install_bubblewrap,
    install_chromium,
    install_nftables,
    install_what_is_missing,
    missing_to_build,
    what_to_do,
)
from setup_pip import (
    LEFT_OUT,
    LOG,
    ROOT,
    UV_CACHE,
    VENV,
    VENV_PYTHON,
    SetupError,
    compile_packages,
    install_packages,
    lean_requirements,
    package_name,
    torch_arguments,
)

STAMP = VENV / "setup.json"


@dataclass
class Stamp:
    """Contents of .venv. `{"state": "complete", "extras": ["envs", "train"], ...}`"""

    identity: list[str]  # a .venv of another identity cannot be repaired, only recreated
    state: str = "incomplete"
    fingerprint: str = ""
    extras: list[str] = field(default_factory=list)  # asked for, by this command or an earlier one
    installed: list[str] = field(default_factory=list)  # names in SIZES_MB
    kernels: list[int] = field(default_factory=list)  # when the codec's kernels were last changed, as compiled

    def write(self) -> None:
        draft = STAMP.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(self), indent=2) + "\n")
        draft.replace(STAMP)


def read_stamp() -> Stamp | None:
    try:
        return Stamp(**json.loads(STAMP.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def read_pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def identity(machine: Machine) -> list[str]:
    return [sys.version, str(ROOT), machine.torch]


def fingerprint() -> str:
    """Changes when an install would: a new lint rule in pyproject.toml does not count."""
    table = read_pyproject()
    files = [ROOT / "constraints.txt", *sorted(Path(__file__).parent.glob("setup*.py"))]
    paths = table["tool"]["hatch"]["build"]["dev-mode-dirs"]  # an editable install writes them into .venv
    relevant = [table["build-system"], table["project"], paths, *(path.read_text() for path in files)]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def is_current(machine: Machine, extras: Sequence[str]) -> bool:
    stamp = read_stamp()
    return (
        stamp is not None
        and stamp.state == "complete"
        and stamp.identity == identity(machine)
        and stamp.fingerprint == fingerprint()
        and set(extras) <= set(stamp.extras)
        and VENV_PYTHON.exists()
        and ("p2p" not in stamp.extras or "p2p" in stamp.installed or bool(missing_to_build()))
    )


def kernel_times() -> list[int]:
    """numba compiles again every file that was written again."""
    folder = ROOT / "protocol" / "prime_protocol" / "codec" / "kernels"
    return [path.stat().st_mtime_ns for path in sorted(folder.glob("*.py"))]


def has_kernels() -> bool:
    stamp = read_stamp()
    return stamp is not None and stamp.kernels == kernel_times()


def compile_kernels() -> None:
    """Compile now, so that the first processes of a run or of the tests find machine code; others compile for themselves."""
    stamp = read_stamp()
    assert stamp is not None
    subprocess.run([str(VENV_PYTHON), "-m", "prime_node.cli.kernels"], check=False)
    stamp.kernels = kernel_times()
    stamp.write()


def buildable(extras: list[str]) -> list[str]:
    """The extras without libp2p where it cannot be built, having tried."""
    if "p2p" in extras and missing_to_build():
        say("libp2p needs a C compiler and GMP: asking the system's package manager for them")
        if not install_what_is_missing():
            say(what_to_do(missing_to_build()))
            return [extra for extra in extras if extra != "p2p"]
    return extras


def remove_torn_packages() -> None:
    """A killed pip leaves packages with files missing, which the next pip would take for installed."""
    for site_packages in VENV.glob("lib/python*/site-packages"):
        for stash in site_packages.glob("~*"):  # pip's own leftovers of an interrupted uninstall
            shutil.rmtree(stash, ignore_errors=True)
        for dist_info in site_packages.glob("*.dist-info"):
            if not is_whole(dist_info):
                say(f"  {dist_info.stem} is torn: installing it again")
                shutil.rmtree(dist_info)


def is_whole(dist_info: Path) -> bool:
    record = dist_info / "RECORD"  # pip writes it last
    if not record.exists():
        return False
    with record.open(newline="") as rows:
        for name, _, size in csv.reader(rows):
            path = dist_info.parent / name
            compiled = path.suffix == ".pyc"  # Python itself may rewrite these
            if size and not compiled and not (path.is_file() and path.stat().st_size == int(size)):
                return False
    return True


def say(text: str) -> None:
    print(text, flush=True)


def announce(machine: Machine, names: Sequence[str]) -> None:
    """Print the parts and their sizes. Ends the set-up if the disk lacks room for them."""
    what = machine.gpu or f"{machine.gpu_remark}: CPU parts"
    say(f"Setting up {VENV} (Python {platform.python_version()}, {machine.system} {machine.arch}; {what})")
    for name in names:
        say(f"  {name:<12} {SIZES_MB[name][0]:>5} MB to download, {SIZES_MB[name][1]:>5} MB on disk")
    download_mb, disk_mb = (sum(SIZES_MB[name][i] for name in names) for i in (0, 1))
    free_mb = shutil.disk_usage(ROOT).free // 1_000_000
    say(f"  {'about':<12} {download_mb:>5} MB to download, {disk_mb:>5} MB on disk; {free_mb} MB are free")
    if free_mb < download_mb + disk_mb:
        raise SetupError(
            f"The disk of {ROOT} has {free_mb} MB free, and {download_mb + disk_mb} MB are needed while "
            "installing: free some space, then run the same command again."
        )


def make_venv(machine: Machine) -> Stamp:
    if VENV.exists():
        say(f"{VENV} was made for another Python, place or GPU, or never finished: making it again")
        shutil.rmtree(VENV)
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        output = (made.stdout + made.stderr).strip()
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment:\n    {output}\n"
            f"On Debian or Ubuntu: sudo apt install {package}. "
            "Elsewhere name another Python: PYTHON=/path/to/python3"
        )
    stamp = Stamp(identity(machine))
    stamp.write()
    return stamp


def install_programs(extras: list[str]) -> list[str]:
    """Install the system's programs. Return what to do by hand."""
    for_tests = (install_nftables(), install_chromium()) if "dev" in extras else ()
    return [remark for remark in (install_bubblewrap(), *for_tests) if remark]


def install(machine: Machine, extras: list[str]) -> None:
    """Each step may be repeated: what is there already is left alone."""
    stamp = read_stamp()
    if stamp is None or stamp.identity != identity(machine) or not VENV_PYTHON.exists():
        stamp = make_venv(machine)
    if stamp.state != "complete":
        remove_torn_packages()
    asked = sorted({*extras, *stamp.extras})  # an earlier command's parts are kept up to date too
    extras = buildable(asked)
    pool = ThreadPoolExecutor()  # neither uv nor pip keeps all processors busy
    programs = pool.submit(install_programs, extras)
    table = read_pyproject()
    optional = table["project"]["optional-dependencies"]

    # (1) torch first and alone, because only its index may differ
    names = parts_to_add(machine, extras, stamp.installed)
    torch: list[str] = []
    if NEEDS_TORCH & set(extras):
        pin = next(line for line in optional["train"] if package_name(line) == "torch")
        torch = torch_arguments(machine, pin.removeprefix("torch=="))
        if machine.torch == "torch-cpu" and not torch[-1].endswith("+cpu"):
            say("No CPU build of torch is within reach. The CUDA build is taken: it runs here, and is larger.")
            names = ["torch-cuda" if name == "torch-cpu" else name for name in names]
    announce(machine, names)
    stamp.state, stamp.extras, stamp.kernels = "incomplete", asked, []
    stamp.write()
    started = time.monotonic()
    if torch:
        say(f"(1) {torch[-1]}")
        install_packages(*torch)

    # (2) the packages that come without some of what they ask for, since they are large: what is large is compiled during (3)
    wanted = [*table["build-system"]["requires"], "editables", *table["project"]["dependencies"]]
    wanted += [requirement for extra in extras for requirement in optional[extra]]
    listing, wheels = [], []
    for requirement in wanted:
        if package_name(requirement) in LEFT_OUT:
            wheel, needed = lean_requirements(package_name(requirement), requirement)
            wheels.append(str(wheel))
            listing += needed
        else:
            listing.append(requirement)
    if wheels:
        say(f"(2) {', '.join(Path(wheel).name.split('-')[0] for wheel in wheels)}")
        install_packages("--no-deps", *wheels)
        shutil.rmtree(VENV / "wheels")
    compiled = pool.submit(compile_packages, jobs=1)

    # (3) everything else that the parts ask for, in one resolution
    say("(3) what the parts ask for")
    requirements = VENV / "requirements.txt"
    requirements.write_text("\n".join(listing) + "\n")
    install_packages("-r", str(requirements))

    # (4) this project
    say("(4) this project, editable")
    install_packages("--no-deps", "--no-build-isolation", "--editable", ".")
    shutil.rmtree(UV_CACHE, ignore_errors=True)
    compiled.result()
    compile_packages()
    for remark in programs.result():
        say(remark)
    stamp.state, stamp.fingerprint = "complete", fingerprint()
    stamp.installed = sorted({*stamp.installed, *parts_to_add(machine, extras, stamp.installed)})
    stamp.write()
    say(f"Ready in {time.monotonic() - started:.0f} s. Log: {LOG}")


def parts_of(name: str, optional: dict[str, list[str]]) -> list[str]:
    """Return the extras that a role is made of; any other extra is its own part."""
    own = [
        line.partition("[")[2].removesuffix("]").split(",") for line in optional[name] if line.startswith("prime-node[")
    ]
    return [part for parts in own for part in parts] if own or not optional[name] else [name]


def read_arguments() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        if unknown := sorted(set(chosen) - set(known)):
            raise argparse.ArgumentTypeError(f"no such part: {', '.join(unknown)}; there are {', '.join(known)}")
        return [part for name in chosen for part in parts_of(name, optional)]

    optional = read_pyproject()["project"]["optional-dependencies"]
    known = sorted(optional)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=names, default=[], help=f"of {', '.join(known)}")
    parser.add_argument("--gpu-parts", type=names, default=[], help="only where there is an NVIDIA GPU")
    parser.add_argument("--plan", action="store_true", help="say what would be installed, and stop")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    machine = detect_machine()
    if machine.system not in {"Linux", "Darwin"}:
        raise SetupError(f"{machine.system} is not supported: use Linux, macOS, or Linux inside Windows (WSL).")
    extras, remarks = choose_parts(machine, arguments.parts, arguments.gpu_parts)
    if arguments.plan:
        announce(machine, parts_to_add(machine, extras, []))
    elif is_current(machine, extras) and has_kernels():
        return
    for remark in remarks:
        say(remark)
    if arguments.plan:
        return
    with Path(__file__).open() as lock:  # of two commands started together, the second waits and finds the work done
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another set-up is at work here; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current(machine, extras):
            install(machine, extras)
        if not has_kernels():
            compile_kernels()


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"\nSet-up stopped. {error}")
    except KeyboardInterrupt:
        sys.exit("\nSet-up interrupted. Run the same command again to go on from here.")
