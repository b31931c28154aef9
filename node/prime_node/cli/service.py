"""`prime-node service`: a role as a service of systemd or launchd, so that it starts with the machine."""

from __future__ import annotations

import math
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from prime_node.cli.options import READ_BY_ROLE, Options, command_group
from prime_node.cli.place import given_link, is_url, parse_link
from prime_node.cli.run_dir import RunDir
from prime_node.cli.say import say
from prime_node.cli.service_manager import call_in_turn, call_manager
from prime_node.config import calling_user, our_variables
from prime_node.files import write_durably
from prime_protocol.errors import LocalError

if TYPE_CHECKING:
    from prime_node.cli.service_manager import Manager
    from prime_node.config import Settings

service = command_group(
    "Run a role as a service that starts with the machine (systemd) or with your session (systemd, launchd)."
)
Role = Literal["worker", "coordinator", "gateway", "trainer", "validator", "seed"]
COMMANDS: dict[str, str] = {"worker": "join"}
"""Command of a role, where it has another name."""
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
SHARED_TMP = (Path("/tmp"), Path("/var/tmp"))
VARIABLES_TEXT = "# Secrets of this service, one NAME=VALUE a line. The service reads them when it starts."
INVITE_VARIABLE = "PRIME_WORKER_INVITE"
MARGIN_S = 5.0
"""Time between the moment when a role ends by itself at the latest, and the moment when the manager kills it."""

Name = Annotated[str, typer.Argument(help="Name of the service: its role, unless --name was given.")]


@service.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def install(
    role: Annotated[Role, typer.Argument(help="What the service does.")],
    arguments: Annotated[
        list[str], typer.Argument(help="Arguments of `prime-node join` for a worker, else of the role's command.")
    ],
    of_user: Annotated[
        bool, typer.Option("--user", help="A service of your session, without root and with fewer restrictions.")
    ] = False,
    run_as: Annotated[str | None, typer.Option("--as", help="User of the service [the one who called sudo].")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name, if a role runs twice on this machine.")] = None,
    shown: Annotated[bool, typer.Option("--print", help="Print the file and install nothing.")] = False,
) -> None:
    """Write the service's file and let it start with the machine. `service start` starts it now.

    Options of `service install` come before the role, those of the role after it.
    """
    from prime_node.cli.lifetime import INTERRUPTED
    from prime_node.cli.service_unit import RoleService
    from prime_node.cli.trainer import UNFINISHED

    chosen = _checked_name(name or role)
    account = _account(of_user=of_user, run_as=run_as, only_shown=shown)
    words, params = _parsed(role, arguments)
    manager = _manager(of_user=of_user, home=account.home)
    variables = manager.variables_file(chosen)
    settings = _settings(role, params, variables)
    link_file = manager.link_file(chosen)
    words, secret = _without_invitation(role, words, params, link_file)
    writes = (*_state_folders(role, params, account.home), account.home / ".cache")
    described = RoleService(
        name=chosen,
        role=role,
        command=(sys.executable, "-P", "-m", "prime_node", *words),
        directory=Path.cwd(),
        writes=writes,
        stop_s=_stop_s(role, settings),
        stopped_codes=(INTERRUPTED, UNFINISHED) if role == "trainer" else (INTERRUPTED,),
        user=account.user,
    )
    content = manager.content(described)
    if shown:
        say(*content.decode().splitlines(), *([f"# {link_file or variables} has the invitation"] if secret else []))
        return
    _check_interpreter(account)
    for folder in writes:
        _make(folder, account)
    file = manager.file(chosen)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_durably(file, content, mode=0o600)
    if link_file is not None and secret:
        link_file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(link_file, f"{secret}\n".encode(), mode=0o600)
        os.chown(link_file, account.uid, account.gid)
    if variables is not None and (secret or not variables.exists()):
        variables.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = variables.read_text().splitlines() if variables.exists() else [VARIABLES_TEXT]
        kept = [line for line in kept if not (secret and line.startswith(f"{INVITE_VARIABLE}="))]
        write_durably(variables, "".join(f"{line}\n" for line in (*kept, *secret.splitlines())).encode(), mode=0o600)
    log = manager.log_file(chosen)
    if log is not None:
        _make(log.parent, account)
    call_in_turn(manager.enable(chosen))
    if variables is not None:
        say(f"secrets of the service, such as AWS_SECRET_ACCESS_KEY or PGPASSWORD, belong into {variables}")
    say(f"installed {file}", f"start it now: prime-node service start {chosen}")
    if of_user and sys.platform != "darwin":
        say("it runs while you are logged in; to start it with the machine: loginctl enable-linger")


@service.command()
def start(name: Name) -> None:
    """Start a service now."""
    manager = _installed(name)
    call_in_turn([manager.start(name)])
    say(f"started {name}; `prime-node service logs --follow {name}` shows what it does")


@service.command()
def stop(name: Name) -> None:
    """Stop a service: it finishes its work in progress.

    It starts again with the machine or the session; `uninstall` ends that.
    """
    call_in_turn([_installed(name).stop(name)])
    say(f"stopped {name}")


@service.command("status")
def service_status(name: Name) -> None:
    """Show what the service manager knows of a service."""
    raise typer.Exit(call_manager(_installed(name).show(name)))


@service.command()
def logs(
    name: Name, follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new lines until Ctrl-C.")] = False
) -> None:
    """Show a service's log."""
    raise typer.Exit(call_manager(_installed(name).logs(name, follow=follow)))


@service.command()
def uninstall(name: Name) -> None:
    """Stop a service and remove its file. Keys, policies and runs stay where they are."""
    manager = _installed(name)
    for command in manager.disable(name):
        call_manager(command)  # it may not run
    manager.file(name).unlink()
    for written in (manager.log_file(name), manager.link_file(name)):
        if written is not None:
            written.unlink(missing_ok=True)
    call_in_turn(manager.forgotten())
    say(f"removed {manager.file(name)}; keys, policies and runs stay where they are")
    variables = manager.variables_file(name)
    if variables is not None and variables.exists():
        say(f"{variables} stays too: remove it if no service of this name needs its secrets")


@dataclass(frozen=True, slots=True)
class _Account:
    """The user that a service runs as."""

    user: str | None
    """Name, for a service of the whole machine."""
    home: Path
    uid: int
    gid: int


def _account(*, of_user: bool, run_as: str | None, only_shown: bool) -> _Account:
    """Return the user of the service. Raises LocalError."""
    if of_user:
        entry = pwd.getpwuid(os.getuid())
        return _Account(None, Path(entry.pw_dir), entry.pw_uid, entry.pw_gid)
    if os.geteuid() != 0 and not only_shown:
        raise LocalError(
            "a service of the whole machine needs root: call it with sudo, or give --user for one of your own"
        )
    chosen = run_as or calling_user() or pwd.getpwuid(os.getuid()).pw_name
    try:
        entry = pwd.getpwnam(chosen)
    except KeyError:
        raise LocalError(
            f"--as {chosen}: this machine has no such user; `useradd --create-home NAME` makes one"
        ) from None
    if entry.pw_uid == 0:
        raise LocalError(
            "a service does not run as root: name its user with --as; `useradd --create-home NAME` makes one"
        )
    return _Account(chosen, Path(entry.pw_dir), entry.pw_uid, entry.pw_gid)


def _parsed(role: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Check the role's arguments as its command does. Return its command line with absolute paths, and the values.

    Raises click's UsageError, which the command line shows.
    """
    from prime_node.cli.coordinator import ServeOrCommand
    from prime_node.cli.main import Commands

    name = COMMANDS.get(role, role)
    command = Commands()[name]
    if isinstance(command, ServeOrCommand):
        command = command.commands[command.default_command]
    params = command.make_context(f"prime-node {name}", list(arguments)).params
    if "link" in params:
        params["link"] = str(parse_link(given_link(params["link"])))
    words, options = [name], []
    for parameter in command.params:
        value = params[parameter.name or ""]
        if value in (parameter.default, None, False, (), []):
            continue
        params[parameter.name or ""] = value = _absolute(parameter.name, value)
        if parameter.param_type_name == "argument":
            words.append(str(value))
        elif value is True:
            options.append(parameter.opts[0])
        else:
            options += [
                word
                for one in (value if isinstance(value, list | tuple) else [value])
                for word in (parameter.opts[0], str(one))
            ]
    return [*words, *options], params


def _without_invitation(
    role: str, words: list[str], params: dict[str, Any], link_file: Path | None
) -> tuple[list[str], str]:
    """Return the command line without a link's invitation, which other users would see, and the line that has it instead.

    The line is one of `link_file`, which takes the link's place, or else one of the file of variables.
    """
    given = str(params.get("link") or params.get("run", ""))
    link = parse_link(given) if is_url(given) else None
    if link is None or not link.invite:
        return words, ""
    plain, line = str(replace(link, invite="")), f"{INVITE_VARIABLE}={link.invite}"
    if link_file is not None and role == "worker":
        plain, line = str(link_file), str(link)
    return [plain if word == given else word for word in words], line if role == "worker" else ""


def _absolute(name: str | None, value: Any) -> Any:
    """Make a path absolute: a service has another working folder. A run is a path or a join link."""
    is_path = isinstance(value, Path) or (name == "run" and not is_url(str(value)))
    return Path(value).expanduser().resolve() if is_path else value


def _settings(role: str, params: dict[str, Any], variables: Path | None) -> Settings:
    """Load the settings as the role will. Raises LocalError for a bad one, and for one that the service would not see."""
    from prime_node.cli.gateway import secret_of_gateways
    from prime_node.cli.wire_sandbox import judge_variables
    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.coordinator.gateway.config import GatewayConfig
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.trainer.config import TrainerConfig
    from prime_node.validator.config import ValidatorConfig
    from prime_node.worker.config import WorkerConfig

    classes: dict[str, type[Settings]] = {
        "coordinator": CoordinatorConfig,
        "gateway": CoordinatorConfig,
        "trainer": TrainerConfig,
        "validator": ValidatorConfig,
    }
    if ours := our_variables():
        is_secret = variables is not None and ours[0] in judge_variables()
        place = f"into {variables}" if is_secret else "as --set or into the file of --config"
        raise LocalError(
            f"{ours[0]} is set here, and a service does not see it: write it {place}, and `unset {ours[0]}`"
        )
    reads = READ_BY_ROLE[COMMANDS.get(role, role)]
    options = Options.of_run(str(params.get("run", "")), params["config"], list(params["assignments"]), reads=reads)
    options.load(EnvironmentSettings)
    if role == "gateway":
        gateway = options.load(GatewayConfig)
        secret_of_gateways(gateway, None if is_url(str(params["run"])) else RunDir(params["run"]))
        _require_seen(Path(gateway.key).absolute())
    return options.load(classes.get(role, WorkerConfig))


def _state_folders(role: str, params: dict[str, Any], home: Path) -> tuple[Path, ...]:
    """Return the folders that the role writes in; a gateway writes in none.

    Raises LocalError for a folder that a service cannot use, or for no run.
    """
    if params.get("folder") is not None:
        identity = params.get("identity")
        folders = (params["folder"], *(() if identity is None else (identity.parent,)))
    elif role in ("worker", "seed"):
        folders = (home / ".prime-node",)
    elif role == "gateway" and is_url(str(params["run"])):
        folders = ()
    elif is_url(str(params["run"])):
        raise LocalError(f"with a join link, {role} needs --key FILE and --folder DIR")
    else:
        RunDir(params["run"]).load_run()
        folders = (params["run"],)
    for path in (*folders, *(value for value in params.values() if isinstance(value, Path))):
        _require_seen(path)
    return () if role == "gateway" else folders


def _require_seen(path: Path) -> None:
    """Raise LocalError for a path that a service does not see."""
    if _is_in_tmp(path):
        raise LocalError(f"{path}: a service has a /tmp of its own, so this must be elsewhere")


def _is_in_tmp(path: Path) -> bool:
    return any(path.is_relative_to(shared) for shared in SHARED_TMP)


def _stop_s(role: str, settings: Settings) -> int:
    """Return the time after which the role has ended by itself, and a margin."""
    from prime_node.cli import launch, seed, trainer, validator
    from prime_node.cli.lifetime import TERMINATED_END_S
    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.worker.config import WorkerConfig

    if role == "trainer":
        grace_s = max(trainer.GRACE_S, launch.SHUTDOWN_S + 10.0)
    elif role == "validator":
        grace_s = validator.GRACE_S
    elif role == "seed":
        grace_s = seed.GRACE_S
    else:
        assert isinstance(settings, CoordinatorConfig | WorkerConfig)
        grace_s = settings.grace_seconds + 5.0
    return math.ceil(grace_s + TERMINATED_END_S + MARGIN_S)


def _checked_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise LocalError(f"{name!r} is no name of a service: take lower-case letters, digits and hyphens")
    return name


def _manager(*, of_user: bool, home: Path) -> Manager:
    from prime_node.cli.service_manager import Launchd, Systemd

    return (Launchd if sys.platform == "darwin" else Systemd)(of_user, home)


def _installed(name: str) -> Manager:
    """Return the manager that has the service, the user's own first. Raises LocalError."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for of_user in (True, False):
        manager = _manager(of_user=of_user, home=home)
        if manager.file(_checked_name(name)).is_file():
            return manager
    raise LocalError(f"no service {name} is installed here: there is no {manager.file(name)}")


def _check_interpreter(account: _Account) -> None:
    """Check that the service, as its user, can run this Python. Raises LocalError."""
    python = sys.executable
    if _is_in_tmp(Path(python)):
        raise LocalError(f"{python}: a service has a /tmp of its own, so install prime-node elsewhere")
    if os.geteuid() != 0:
        return
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", "import prime_node"], user=account.uid, group=account.gid, extra_groups=[],
            cwd="/", env={}, check=True, capture_output=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        raise LocalError(
            f"{account.user} cannot run {sys.executable}: install prime-node where that user may read it, /opt for example"
        ) from None


def _make(folder: Path, account: _Account) -> None:
    """Make a folder and those above it for the user, and change none that exists."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(one, account.uid, account.gid, follow_symlinks=False)
