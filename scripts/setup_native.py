"""System packages that pip cannot install: libraries to compile libp2p, bubblewrap, and for tests nftables and Chromium. Standard
library only.

libp2p's signatures (fastecdsa) are C source that pip compiles against GMP. Without them peers talk over HTTP alone.
bubblewrap gives environments a network, processes and a /tmp of their own.
nftables makes the NATs of tests, and Chromium shows the page to tests, for the part `dev`.
The set-up continues without them and reports what is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

APT_TIMEOUT_S = 300
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
"""Folders of programs that a user's PATH leaves out on some systems."""


def missing_to_build() -> list[str]:
    """Return what is missing, in words: "a C compiler", "the headers of Python", "the headers of GMP"."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    missing = [] if compiler else ["a C compiler"]
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append("the headers of Python")
    if compiler and not compiles(compiler, "#include <gmp.h>\nint main(void) { mpz_t x; mpz_init(x); return 0; }\n"):
        missing.append("the headers of GMP")
    return missing


def compiles(compiler: str, program: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.c"
        source.write_text(program)
        command = [compiler, str(source), "-lgmp", "-o", str(Path(folder) / "try")]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def debian_packages() -> list[str]:
    return ["gcc", "libc6-dev", "libgmp-dev", f"python3.{sys.version_info.minor}-dev"]


def install_what_is_missing() -> bool:
    """Install the packages, as root on Debian or Ubuntu. Return whether libp2p can be built now."""
    apt_install([name for name in debian_packages() if "python" not in name or _is_debians_python()])
    return not missing_to_build()


def install_bubblewrap() -> str:
    """Install bubblewrap on Linux where it is missing. Returns what to do by hand, or an empty string."""
    return _install_program(
        "bwrap",
        "bubblewrap",
        "environments share this machine's network, processes and /tmp. To separate them",
    )


def install_nftables() -> str:
    """Install nftables on Linux where it is missing. Returns what to do by hand, or an empty string."""
    return _install_program("nft", "nftables", "tests of peers behind a NAT are skipped. To run them")


def install_chromium() -> str:
    """Install Chromium on Linux where it is missing. Returns what to do by hand, or an empty string."""
    if any(shutil.which(name) for name in ("chromium-browser", "google-chrome")):
        return ""
    return _install_program("chromium", "chromium", "tests of the page in a browser are skipped. To run them")


def _install_program(program: str, package: str, consequence: str) -> str:
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS))
    if not sys.platform.startswith("linux") or shutil.which(program, path=path):
        return ""
    apt_install([package])
    if shutil.which(program, path=path):
        return ""
    return f"{package} is not installed: {consequence}: sudo apt install {package} (or your system's)."


def apt_install(packages: list[str]) -> None:
    """Install packages as root on Debian or Ubuntu; do nothing elsewhere. The caller checks what it needed."""
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        return
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ([apt, "-qq", "update"], [apt, "-qq", "install", "--yes", "--no-install-recommends", *packages]):
        try:
            subprocess.run(command, env=env, capture_output=True, timeout=APT_TIMEOUT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            continue  # an index may be unreachable while the packages are in the cache


def _is_debians_python() -> bool:
    return sys.base_prefix == "/usr"  # any other one, pyenv's for example, brings its own headers


def what_to_do(missing: list[str]) -> str:
    return (
        f"libp2p cannot be built here: {' and '.join(missing)} missing. Going on without it: peers talk over HTTP alone. "
        f"To have it: sudo apt install {' '.join(debian_packages())} (or your system's), then run the same command again."
    )
