"""`prime-node service`: the files that it writes, without a service manager."""

from __future__ import annotations

import os
import plistlib
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cases_world import check_each
from tests.node.operator_world import make_run_folder
from typer.testing import CliRunner

from prime_node.cli.main import FINAL_AS_0, app
from prime_node.cli.outcome import MAY_PASS
from prime_node.cli.place import given_link, parse_link
from prime_node.cli.service_manager import Launchd, Systemd
from prime_node.cli.service_unit import RoleService, launchd_plist, systemd_unit
from prime_node.keyfile import keep_secret
from prime_node.worker.config import WorkerConfig
from prime_protocol.errors import LocalError

LINK = f"http://run.example.org:8400/#{'0' * 64}"
EXPOSURE_MAX = 30
"""Tenths of the scale of `systemd-analyze security`, which ends at 10."""
ROLES = ("worker", "coordinator", "gateway", "trainer", "validator", "seed")


def made(role: str, *, user: str | None = "prime", words: tuple[str, ...] = ("join", LINK)) -> RoleService:
    return RoleService(
        name=role,
        role=role,
        command=("/opt/prime/bin/python", "-P", "-m", "prime_node", *words),
        directory=Path("/home/prime"),
        writes=(Path("/home/prime/.prime-node"),),
        stop_s=50,
        stopped_codes=(130,),
        user=user,
    )


def printed(*arguments: object) -> list[str]:
    command = ["service", "install", "--print", *map(str, arguments)]
    ran = CliRunner().invoke(app, command, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.stdout.splitlines()


def setting(lines: list[str], name: str) -> list[str]:
    return [line.removeprefix(f"{name}=") for line in lines if line.startswith(f"{name}=")]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("role", ROLES)
def test_systemd_finds_no_fault_in_a_unit_and_little_exposure(role: str, tmp_path: Path) -> None:
    file = tmp_path / f"prime-node-{role}.service"
    # No user `prime` and no /opt/prime exist here, and `verify` looks for both.
    file.write_text(
        systemd_unit(made(role)).replace("User=prime", "User=daemon").replace("/opt/prime/bin/python", sys.executable)
    )
    checked = subprocess.run(["systemd-analyze", "verify", "--man=no", str(file)], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr.strip()) == (0, "")
    arguments = ("--offline=true", f"--threshold={EXPOSURE_MAX}", "--no-pager", str(file))
    rated = subprocess.run(["systemd-analyze", "security", *arguments], capture_output=True, text=True)
    assert rated.returncode == 0, rated.stdout


def test_a_unit_keeps_arguments_that_systemd_would_change() -> None:
    unit = systemd_unit(made("worker", words=("join", LINK, "--name", 'a "b" $HOME 50%', "--set", "worker.threads=2")))
    (line,) = setting(unit.splitlines(), "ExecStart")
    assert line.endswith(f'join {LINK} --name "a \\"b\\" $$HOME 50%%" --set worker.threads=2')


def test_a_property_list_holds_the_command_and_restarts_after_failures(tmp_path: Path) -> None:
    found = plistlib.loads(launchd_plist(made("worker", user=None), log=tmp_path / "worker.log"))
    assert found["ProgramArguments"] == list(made("worker").command)
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert found["ExitTimeOut"] == 50
    assert "UserName" not in found
    assert plistlib.loads(launchd_plist(made("worker"), log=tmp_path / "worker.log"))["UserName"] == "prime"


def test_a_service_of_the_user_and_one_of_the_machine_have_files_of_their_own() -> None:
    home = Path("/home/prime")
    assert Systemd(True, home).file("worker") == home / ".config/systemd/user/prime-node-worker.service"
    assert Systemd(False, home).file("worker") == Path("/etc/systemd/system/prime-node-worker.service")
    assert Launchd(True, home).file("worker") == home / "Library/LaunchAgents/org.prime-node.worker.plist"
    assert Launchd(False, home).file("worker") == Path("/Library/LaunchDaemons/org.prime-node.worker.plist")


def test_paths_of_the_arguments_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run_folder(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("prime_node.cli.service.SHARED_TMP", ())
    (tmp_path / "own.toml").write_text("[coordinator]\ngrace_seconds = 20\n")
    lines = printed("--user", "coordinator", "run", "-c", "own.toml", "-s", "coordinator.port=0")
    (command,) = setting(lines, "ExecStart")
    assert command.endswith(
        f" -P -m prime_node coordinator {tmp_path}/run --config {tmp_path}/own.toml --set coordinator.port=0"
    )
    assert setting(lines, "TimeoutStopSec") == ["40"], "20 s of grace, 5 s more, 10 s to end, and a margin"
    assert setting(lines, "WorkingDirectory") == [f"-{tmp_path}"]


def test_a_unit_restarts_what_failed_and_nothing_that_ended_for_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run_folder(tmp_path / "run")
    monkeypatch.setattr("prime_node.cli.service.SHARED_TMP", ())
    trainer, worker = printed("--user", "trainer", run), printed("--user", "worker", LINK)
    assert setting(trainer, "RestartPreventExitStatus") == ["2 3 4"]
    assert setting(trainer, "SuccessExitStatus") == ["5 130"]
    assert setting(worker, "SuccessExitStatus") == ["130"]
    assert setting(worker, "User") == []
    assert setting(printed("--as", "daemon", "worker", LINK), "User") == ["daemon"]


def test_a_gateway_writes_nothing_and_ends_within_the_time_of_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_node.cli.service.SHARED_TMP", ())
    run = make_run_folder(tmp_path / "run")
    keep_secret(tmp_path / "gateway.key", bytes(32))
    key = f"gateway.key={tmp_path}/gateway.key"
    for place in (LINK, run):
        unit = printed("--user", "gateway", place, "--set", key, "--set", "coordinator.grace_seconds=20")
        (command,) = setting(unit, "ExecStart")
        assert command.endswith(f" gateway {place} --set {key} --set coordinator.grace_seconds=20")
        assert setting(unit, "TimeoutStopSec") == ["40"]
        system = printed("--as", "daemon", "gateway", place, "--set", key)
        assert setting(system, "ReadWritePaths") == [f"{pwd.getpwnam('daemon').pw_dir}/.cache"]


def test_an_install_that_could_not_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_node.cli.service.SHARED_TMP", (Path("/tmp"), tmp_path))
    keep_secret(tmp_path / "secret", bytes(32))
    (tmp_path / "own.toml").touch()
    own, key = ("--config", tmp_path / "own.toml"), ("--set", f"gateway.key={tmp_path}/secret")
    cases = {
        "the user root": (("--as", "root", "worker", LINK), "does not run as root"),
        "no such user": (("--as", "no-such-user", "worker", LINK), "no such user"),
        "a bad name": (("--name", "../x", "--user", "worker", LINK), "is no name of a service"),
        "a bad link": (("--user", "worker", "http://no.digest"), "link"),
        "a bad setting": (("--user", "worker", LINK, "--set", "worker.thread=2"), "did you mean threads"),
        "a setting of another role": (("--user", "worker", LINK, "--set", "trainer.seed=1"), "would be ignored"),
        "no run": (("--user", "coordinator", tmp_path), "holds no run"),
        "a folder in /tmp": (("--user", "worker", LINK, "--folder", "/tmp/x"), "/tmp/x: .* must be elsewhere"),
        "a link without a key": (("--user", "trainer", LINK), "needs --key FILE and --folder DIR"),
        "a gateway without the secret": (("--user", "gateway", LINK), "needs --set gateway.key=FILE"),
        "settings in /tmp": (("--user", "worker", LINK, *own), "own.toml: .* must be elsewhere"),
        "a key in /tmp": (
            ("--user", "trainer", LINK, "--key", "/tmp/k", "--folder", "/srv/t"),
            "/tmp/k: .* must be elsewhere",
        ),
        "a secret in /tmp": (("--user", "gateway", LINK, *key), "secret: .* must be elsewhere"),
        "a secret that is not there": (("--user", "gateway", LINK, "--set", "gateway.key=no"), "key no: no such file"),
    }

    def refused(arguments: tuple[object, ...], message: str) -> None:
        with pytest.raises(LocalError, match=message):
            printed(*arguments)

    check_each(cases.items(), lambda case: refused(*case))
    monkeypatch.setenv("PRIME_WORKER_THREADS", "2")
    refused(("--user", "worker", LINK), "PRIME_WORKER_THREADS is set here")
    monkeypatch.setenv("PRIME_ENVIRONMENT_JUDGE_KEY", "secret")
    refused(("--user", "worker", LINK), "PRIME_ENVIRONMENT_JUDGE_KEY is set here.*write it into .*/worker.env")


def test_a_unit_reads_secrets_from_a_file_and_only_users_of_a_bucket_reach_the_keys_of_a_cloud() -> None:
    home = Path("/home/prime")
    units = [Systemd(of_user, home).content(made("seed")).decode().splitlines() for of_user in (True, False)]
    files = ["-/home/prime/.config/prime-node/seed.env", "-/etc/prime-node/seed.env"]
    assert [setting(unit, "EnvironmentFile") for unit in units] == [[file] for file in files]
    denied = {role: setting(systemd_unit(made(role)).splitlines(), "IPAddressDeny") for role in ROLES}
    assert [role for role, addresses in denied.items() if not addresses] == ["coordinator", "gateway"]


@pytest.mark.skipif(sys.platform == "darwin", reason="launchd reads no file of variables")
def test_only_their_owner_reads_a_unit_and_its_file_of_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = pwd.struct_passwd((*pwd.getpwuid(os.getuid())[:5], str(tmp_path), "/bin/sh"))  # another home
    monkeypatch.setattr("pwd.getpwuid", lambda _: entry)
    monkeypatch.setattr("prime_node.cli.service.SHARED_TMP", ())
    monkeypatch.setenv("PATH", str(tmp_path))  # no systemctl
    install = ["service", "install", "--user", "worker", LINK]
    secrets = tmp_path / ".config/prime-node/worker.env"
    with pytest.raises(LocalError, match="has no systemctl"):
        CliRunner().invoke(app, install, catch_exceptions=False)
    for file in (tmp_path / ".config/systemd/user/prime-node-worker.service", secrets):
        assert file.stat().st_mode & 0o777 == 0o600
    secrets.write_text("PGPASSWORD=kept\n")
    with pytest.raises(LocalError, match="has no systemctl"):
        CliRunner().invoke(app, install, catch_exceptions=False)
    assert secrets.read_text() == "PGPASSWORD=kept\n"
    for invite in ("A" * 40, "B" * 40):  # before, every user of the machine saw it in the service's arguments
        with pytest.raises(LocalError, match="has no systemctl"):
            CliRunner().invoke(app, [*install[:-1], f"{LINK}.{invite}"], catch_exceptions=False)
        assert secrets.read_text() == f"PGPASSWORD=kept\nPRIME_WORKER_INVITE={invite}\n"
        unit = (tmp_path / ".config/systemd/user/prime-node-worker.service").read_text()
        assert LINK in unit
        assert invite not in unit
        assert secrets.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("PRIME_WORKER_INVITE", "B" * 40)
    assert WorkerConfig.load({}).invite == "B" * 40


def test_launchd_gets_an_invitation_in_a_file_of_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the property list had it among the arguments, which `ps` and `launchctl print` show to every user."""
    entry = pwd.struct_passwd((*pwd.getpwuid(os.getuid())[:5], str(tmp_path), "/bin/sh"))
    monkeypatch.setattr("pwd.getpwuid", lambda _: entry)
    monkeypatch.setattr("prime_node.cli.service.SHARED_TMP", ())
    printed("--user", "worker", LINK)  # imports what it needs before the platform changes
    monkeypatch.setattr("sys.platform", "darwin")
    (tmp_path / "link").write_text(f"{LINK}.{'A' * 40}\n")
    for given in (f"{LINK}.{'A' * 40}", str(tmp_path / "link")):
        ran = CliRunner().invoke(app, ["service", "install", "--user", "worker", given], catch_exceptions=False)
        assert ran.exit_code == 0, ran.output
        manager = Launchd(True, tmp_path)
        plist = manager.file("worker").read_bytes()
        assert b"A" * 40 not in plist
        assert plistlib.loads(plist)["ProgramArguments"][-2:] == ["join", str(manager.link_file("worker"))]
        assert manager.link_file("worker").stat().st_mode & 0o777 == 0o600
        assert str(parse_link(given_link(str(manager.link_file("worker"))))) == f"{LINK}.{'A' * 40}"
    with pytest.raises(LocalError, match="no launchctl"):
        CliRunner().invoke(app, ["service", "uninstall", "worker"], catch_exceptions=False)
    assert "A" * 40 not in "".join(printed("--user", "worker", f"{LINK}.{'A' * 40}"))


def test_no_role_has_an_invitation_in_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a seed's and a gateway's unit had it, and a setting of the command line too."""
    monkeypatch.setattr("prime_node.cli.service.SHARED_TMP", ())
    keep_secret(tmp_path / "gateway.key", bytes(32))
    invited = f"{LINK}.{'A' * 40}"
    key = ("--set", f"gateway.key={tmp_path}/gateway.key")
    for arguments in (("worker", invited), ("seed", invited), ("gateway", invited, *key)):
        unit = "\n".join(printed("--user", *arguments))
        assert (LINK in unit, "A" * 40 in unit) == (True, False), arguments
    with pytest.raises(LocalError, match="other users of this machine see what --set holds"):
        printed("--user", "worker", LINK, "--set", f"worker.invite={'A' * 40}")


def test_launchd_is_asked_to_restart_nothing_that_ended_for_a_reason(tmp_path: Path) -> None:
    """Before, a banned worker asked its coordinator each minute."""
    variables = plistlib.loads(launchd_plist(made("worker"), log=tmp_path / "log"))["EnvironmentVariables"]
    join = (sys.executable, "-m", "prime_node", "join", "no link")
    for more, code in (({}, 3), (variables, 0)):
        ran = subprocess.run(join, capture_output=True, text=True, env={**os.environ, **more}, timeout=120)
        assert (ran.returncode, "a join link looks like" in ran.stderr) == (code, True), ran.stderr


def test_what_a_role_starts_keeps_its_exit_codes() -> None:
    """Before, a rank of a trainer under launchd ended with 0 for a final code, and torchrun took it for finished."""
    program = (
        "import os, sys; from prime_node.cli.main import FINAL_AS_0, main; sys.argv[1:] = ['version']\n"
        "try: main()\nfinally: print(FINAL_AS_0 in os.environ)"
    )
    environment = {**os.environ, FINAL_AS_0: "1"}
    ran = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, env=environment, timeout=120)
    assert ran.stdout.split()[-1:] == ["False"], ran.stderr


def test_a_role_whose_database_does_not_answer_is_started_again(tmp_path: Path) -> None:
    run = make_run_folder(tmp_path / "run")
    (run / "coordinator").mkdir()
    (run / "coordinator" / "state.db").touch()
    command = (sys.executable, "-m", "prime_node", "coordinator", "move", run, "postgresql://127.0.0.1:1/x")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, "127.0.0.1:1/x cannot be reached" in ran.stderr) == (MAY_PASS, True), ran.stderr
    assert str(MAY_PASS) not in setting(systemd_unit(made("coordinator")).splitlines(), "RestartPreventExitStatus")[0]


def test_arguments_are_checked_as_the_role_checks_them() -> None:
    ran = CliRunner().invoke(app, ["service", "install", "--print", "--user", "worker", LINK, "--no-such-option"])
    assert (ran.exit_code, "No such option: --no-such-option" in ran.output) == (2, True)


def test_a_service_that_is_not_installed_is_not_started() -> None:
    with pytest.raises(LocalError, match="no service no-such-service is installed here"):
        CliRunner().invoke(app, ["service", "start", "no-such-service"], catch_exceptions=False)
