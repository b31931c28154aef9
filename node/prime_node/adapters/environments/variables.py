"""Selection of the host's environment variables for environment processes, and removal of a process's own."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from pathlib import Path

MODULES = "PYTHONPATH"
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", MODULES, "VIRTUAL_ENV", "OMP_NUM_THREADS")
"""Names of our environment variables that are passed on; any other may be a secret."""
FOR_LAUNCHER = ("HOME", "TMPDIR")
"""Further variables of a launcher, which finds the same folders as its role."""
FOR_ENVIRONMENTS = "PRIME_ENVIRONMENT_"
"""Prefix for judges that need their own key: our variable PRIME_ENVIRONMENT_X is X in an environment."""
SAME_HASHES = {"PYTHONHASHSEED": "0"}
"""Python's random hashes order sets of strings. Tasks that iterate over one, such as ransom_note of reasoning_gym, would give
other problems in each process."""
SECRET = re.compile(r"TOKEN|KEY|AUTH|SECRET")


def passed_on(folder: Path, *, network: bool = False) -> dict[str, str]:
    """Choose the variables of a process that works in `folder`. Judges' keys are passed on only with network access."""
    kept = _harmless()
    kept |= {name.removeprefix(FOR_ENVIRONMENTS): os.environ[name] for name in keys_of_judges() if network}
    kept.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
    # The hub's cache is readable there, not writable, and an unreadable token would be an error to its library.
    of_the_hub = {"HF_DATASETS_CACHE": str(folder / "datasets"), "HF_TOKEN_PATH": str(folder / "token")}
    if not network:
        kept["HF_HUB_OFFLINE"] = "1"  # without this the library would retry for minutes
    return kept | of_the_hub | SAME_HASHES | {"HOME": str(folder), "TMPDIR": str(folder)}


def for_launcher(*, network: bool) -> dict[str, str]:
    """Choose the variables of a launcher, from which `passed_on` derives those of its processes."""
    names = [name for name in FOR_LAUNCHER if name in os.environ] + (keys_of_judges() if network else [])
    return _harmless() | {name: os.environ[name] for name in names}


def keys_of_judges() -> list[str]:
    """List the names that begin with PRIME_ENVIRONMENT_."""
    return [name for name in os.environ if name.startswith(FOR_ENVIRONMENTS)]


def forget(names: Iterable[str]) -> None:
    """Delete variables, and overwrite them in memory that /proc/PID/environ shows."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    for name in names:
        place = libc.getenv(os.fsencode(name))
        if place:
            ctypes.memset(place, 0, len(os.fsencode(os.environ[name])))
        del os.environ[name]


def module_folders() -> list[Path]:
    """List the absolute folders of PYTHONPATH for environment processes. Relative ones would lead elsewhere there."""
    return [Path(entry) for entry in os.environ.get(MODULES, "").split(os.pathsep) if Path(entry).is_absolute()]


def _harmless() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in PASSED_ON}
    kept |= {name: value for name, value in os.environ.items() if name.startswith("HF_") and not SECRET.search(name)}
    return kept | ({MODULES: os.pathsep.join(map(str, module_folders()))} if MODULES in kept else {})
