"""Sandbox of `join`, `seed` and `validator`: what each may access, and the log line on what the system enforces.

Order in a role: read settings, lock the folder, compile the codec's kernels (for a worker a child begins to, and reads nothing
from outside), load the key; then `confine_role`; then the network. So a process that could still open its user's files never
handles untrusted input.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.cli.place import HOME
from prime_protocol.errors import LocalError

if TYPE_CHECKING:
    from prime_node.adapters.environments.launcher import Launcher
    from prime_node.adapters.sandbox.rules import SandboxLevel, SandboxRules
    from prime_node.config import SandboxSettings
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.validator.config import ValidatorConfig
    from prime_node.worker.config import WorkerConfig

log = logging.getLogger(__name__)

SECRETS = re.compile(
    r"TOKEN|SECRET|PASS|CREDENTIAL|COOKIE|PRIV|AUTH|ACCESS_KEY|KEYS?$|_PWD$|_SK$|_DSN$|JWT|WEBHOOK"
    r"|(AMQP|BROKER|DATABASE|MONGO\w*|POSTGRES\w*|REDIS)_UR[IL]$"
    r"|^(AWS|AZURE|GOOGLE|GCP|GITHUB|GH|GITLAB|NPM|DOCKER|KUBE|VAULT|SSH|GPG|DBUS|XDG_RUNTIME)"
)
"""Pattern for names of environment variables that are removed."""
OURS = "PRIME_"
SECRET_CHARS_MIN = 8
"""Length of a value below which it counts as no secret."""
CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
LIBRARIES = ("CUDA_HOME", "CUDA_PATH", "ROCM_HOME", "ROCM_PATH")
SHARED_LIBRARIES = "LD_LIBRARY_PATH"
SYSFS = ("bus", "class", "dev", "devices", "module", "fs/cgroup", "kernel/mm")
"""Folders of /sys that GPU drivers read: without the debugging and firmware parts, which only root may read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Access that a role needs besides its folder."""

    read: tuple[Path, ...] = ()
    """Models and datasets that its own settings name."""
    environments: bool = False
    """Whether it starts environment processes, which root runs as another user."""
    hands_on_keys: bool = False
    """Whether it will itself pass PRIME_ENVIRONMENT_ variables to processes that it starts later."""
    vllm: bool = False
    """Whether vLLM or torch on a GPU may run: compilers, GPUs, processes that talk over Unix sockets and shared memory."""


def absolute_model(model: str | None) -> str | None:
    """Return a folder as an absolute path, since a role may leave the working folder; a hub name stays as it is."""
    return str(Path(model).resolve()) if model is not None and Path(model).is_dir() else model


def confine_role(settings: SandboxSettings, folder: Path, needs: Needs) -> None:
    """Confine this process irrevocably, and log in one line what the system does not enforce.

    Raises LocalError.

    `folder`, an absolute path, is the role's own: it writes there, and nothing that it writes elsewhere outlives the process.
    """
    if settings.unsafe_off:
        log.warning(
            "NOT CONFINED (sandbox.unsafe_off): a bug in this program would give a hostile run access to your files"
        )
        return
    from prime_node.adapters.environments.variables import module_folders
    from prime_node.adapters.sandbox.confine import confine
    from prime_node.adapters.sandbox.system_paths import homes
    from prime_node.scratch import process_folder

    if any(folder == home or folder in home.parents for home in homes()):
        raise LocalError(
            f"folder {folder} is a home directory, and a role may write everything in its folder: choose a folder inside it"
        )
    if imports := module_folders():
        log.info("this process may read the folders of PYTHONPATH: %s", ", ".join(map(str, imports)))
    kept, scratch = _hub_cache(), process_folder("role")
    scratch.chmod(0o711)  # environments may run as another user, in a subfolder
    rules = role_rules(settings, folder, scratch, needs)
    _import_what_acts()
    forget_secrets(settings.keep_environment, keys_of_judges=not needs.hands_on_keys)
    _move_home(folder, scratch, kept)
    try:
        level = confine(rules)
    except (OSError, RuntimeError) as error:
        raise LocalError(
            f"this process cannot confine itself: {error}. sandbox.unsafe_no_namespaces "
            "needs less of the system, sandbox.unsafe_off nothing"
        ) from None
    (log.info if level.is_full else log.warning)("confined; %s", level.sentence())


def role_rules(settings: SandboxSettings, folder: Path, scratch: Path, needs: Needs) -> SandboxRules:
    """Return what a role's process may do. None of it comes from a run."""
    from prime_node.adapters.sandbox import privileges, system_paths
    from prime_node.adapters.sandbox.rules import NETWORK, Family, ModeChanges, SandboxRules

    read = [*system_paths.system_paths(), Path("/proc"), *system_paths.python_paths(), *_named_by_variables()]
    read += [*needs.read, _hub_cache(), *settings.also_read]
    write, devices, families = [folder, scratch, *settings.also_write], [*system_paths.devices()], NETWORK
    if os.geteuid() != 0:
        read.append(Path("/etc"))  # a user can read no secrets there, and programs replace its files while a role runs
    if needs.vllm:
        read += [Path("/sys") / name for name in SYSFS]
        devices += system_paths.gpu_devices()
        families |= {Family.UNIX}
    capabilities = (*privileges.ORDINARY, *(privileges.GIVES_WORK_AWAY if needs.environments else ()))
    return SandboxRules(
        read=tuple(path.expanduser() for path in read),
        write=tuple(path.expanduser() for path in write),
        devices=tuple(devices),
        hidden=(HOME, folder.parent / "keys"),
        own_root=not settings.unsafe_no_namespaces,
        write_in_shared_root=(Path("/dev/shm"),) if needs.vllm else (),
        families=families,
        mode_changes=ModeChanges.SKIPPED if needs.vllm else ModeChanges.REFUSED,
        shared_ipc=False,
        keep_capabilities=capabilities if os.geteuid() == 0 else (),
    )


def worker_needs(settings: WorkerConfig, grants: EnvironmentSettings, launcher: Launcher | None) -> Needs:
    """Return the access that a worker needs besides its folder."""
    from prime_node.cli.wire_classes import has_gpu_driver

    vllm = settings.engine == "vllm" or (settings.engine == "auto" and has_gpu_driver())
    keys = _hands_on_keys(grants, launcher)
    return Needs(read=_named(settings.base_model, grants), environments=True, hands_on_keys=keys, vllm=vllm)


def validator_needs(settings: ValidatorConfig, grants: EnvironmentSettings, launcher: Launcher | None) -> Needs:
    """Return the access that a validator needs besides its folder."""
    keys = _hands_on_keys(grants, launcher)
    vllm = settings.engine == "vllm" or settings.device != "cpu"
    return Needs(read=_named(settings.base_model, grants), environments=True, hands_on_keys=keys, vllm=vllm)


def _hands_on_keys(grants: EnvironmentSettings, launcher: Launcher | None) -> bool:
    """Return whether the process must keep the keys of judges: a launcher has its own copy of the variables."""
    return launcher is None and bool(grants.unsafe_network)


def _named(model: str | None, grants: EnvironmentSettings) -> tuple[Path, ...]:
    """Return the paths in this machine's own settings: the base model if it is a folder, where its links lead, and datasets."""
    base = () if model is None else (Path(model), *(one.resolve() for one in Path(model).glob("*.safetensors*")))
    data = tuple(folder for folder in (grants.data_folder, grants.code_folder) if folder is not None)
    return (*base, *data, *grants.readable)


def level_here() -> SandboxLevel:
    """Return what this system would enforce for a role, tried in a child process."""
    import json

    from prime_node.adapters.sandbox.confine import confine
    from prime_node.adapters.sandbox.rules import Restriction, SandboxLevel
    from prime_node.config import SandboxSettings

    with tempfile.TemporaryDirectory(prefix="prime-doctor-") as folder:
        place = Path(folder).resolve()
        rules = role_rules(SandboxSettings(), place, place, Needs(vllm=True))
        _import_what_acts()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                restrictions = [
                    (restriction.what, restriction.up, restriction.why) for restriction in confine(rules).restrictions
                ]
            except (OSError, RuntimeError) as error:
                restrictions = [("files", False, str(error))]
            os.write(writer, json.dumps(restrictions).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            answer = file.read()
        os.waitpid(child, 0)
    return SandboxLevel(tuple(Restriction(*restriction) for restriction in json.loads(answer or b"[]")))


def forget_secrets(kept: Iterable[str], *, keys_of_judges: bool) -> None:
    """Remove environment variables whose names look like secrets, and overwrite their initial values in the process's memory.

    `keys_of_judges`: also remove PRIME_ENVIRONMENT_ variables.
    """
    from prime_node.adapters.environments import variables

    secret = [name for name in os.environ if SECRETS.search(name.upper()) and not name.startswith(OURS)]
    names = [*secret, *(variables.keys_of_judges() if keys_of_judges else [])]
    variables.forget(name for name in names if name not in kept)


def judge_variables() -> list[str]:
    """Return the names of the variables here that hold keys of judges."""
    from prime_node.adapters.environments import variables

    return variables.keys_of_judges()


def secret_values() -> set[str]:
    """Return the values of environment variables whose names look like secrets, and of those for environments."""
    return {
        value
        for name, value in os.environ.items()
        if len(value) >= SECRET_CHARS_MIN and (SECRETS.search(name.upper()) or name.startswith(f"{OURS}ENVIRONMENT_"))
    }


def _move_home(folder: Path, scratch: Path, hub_cache: Path) -> None:
    """Move the libraries' caches to the role's folder, so that a hostile run that poisons one affects no other program."""
    home = folder / "home"
    home.mkdir(exist_ok=True, mode=0o700)
    for name in [name for name in os.environ if name.startswith("XDG_")]:
        del os.environ[name]
    os.environ |= {
        "HOME": str(home),
        "TMPDIR": str(scratch),
        "HF_HUB_CACHE": str(hub_cache),
        "HF_HOME": str(home / ".cache" / "huggingface"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / ".cache" / "torchinductor"),
    }
    tempfile.tempdir = None  # otherwise the old folder stays cached


def _hub_cache() -> Path:
    """Return the folder of the user's downloads from the hub. Its token is next to that folder, not in it."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()


def _named_by_variables() -> list[Path]:
    found = [os.environ[name] for name in (*CERTIFICATES, *LIBRARIES) if os.environ.get(name)]
    found += [entry for entry in os.environ.get(SHARED_LIBRARIES, "").split(":") if entry]
    return [Path(entry) for entry in found]


def _import_what_acts() -> None:
    """Import the sandbox modules while files may still be opened: they are otherwise imported on use."""
    for name in ("landlock", "namespaces", "privileges", "seccomp"):
        with suppress(ImportError):  # a module that the system does not support is not needed
            importlib.import_module(f"prime_node.adapters.sandbox.{name}")
