"""A real systemd installs, runs, stops and forgets real roles, with all restrictions of their units."""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.source_tree import ROOT
from tests.systemd_world import SystemdMachine, systemd_machine, why_not
from tests.time_world import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400), pytest.mark.skipif(bool(why_not()), reason=why_not())]
SMALL = ("run.max_steps=8", "run.heartbeat_seconds=1", "run.calibration=none")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def status_of(url: str) -> dict[str, object]:
    """Return /v1/status; empty while nothing answers."""
    try:
        with urllib.request.urlopen(f"{url}/v1/status", timeout=5) as answer:
            found: dict[str, object] = json.loads(answer.read())
            return found
    except OSError as error:
        getattr(error, "close", lambda: None)()
        return {}


def log_to_file(machine: SystemdMachine, role: str) -> Path:
    """Let a service log to a file, which is returned: no journal runs in the test."""
    folder = machine.folder / "units" / f"prime-node-{role}.service.d"
    folder.mkdir()
    (folder / "log.conf").write_text(f"[Service]\nStandardError=file:/srv/{role}.log\n")
    machine.run("systemctl", "daemon-reload")
    return machine.folder / f"{role}.log"


def test_a_coordinator_and_a_worker_live_as_services(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with systemd_machine(tmp_path) as machine:
        settings = [word for one in SMALL for word in ("--set", one)]
        as_user = ("runuser", "-u", "prime", "--", sys.executable, "-P", "-m", "prime_node")
        machine.run(
            *as_user, "new", "/srv/home/run", "--config", str(ROOT / "configs" / "demo.toml"), "--url", url, *settings
        )
        machine.service("install", "coordinator", "/srv/home/run")
        coordinator_log = log_to_file(machine, "coordinator")
        machine.service("start", "coordinator")
        wait_until(lambda: status_of(url), seconds=120)

        link = (tmp_path / "home" / "run" / "join-link").read_text().strip()
        machine.service("install", "worker", link, "--name", 'an "odd" $name 100%')
        worker_log = log_to_file(machine, "worker")
        machine.service("start", "worker")
        wait_until(lambda: worker_log.exists() and "joined" in worker_log.read_text(), seconds=120)
        assert "confined; enforced: own file system, files" in worker_log.read_text()
        assert [one["name"] for one in status_of(url)["workers"]] == ['an "odd" $name 100%']  # type: ignore[attr-defined]
        assert "active (running)" in machine.service("status", "worker")

        machine.service("stop", "worker")
        assert machine.property("prime-node-worker.service", "Result") == "success", worker_log.read_text()
        assert "stopping in order" in worker_log.read_text()
        machine.service("uninstall", "worker")
        machine.service("uninstall", "coordinator")
        assert "stopping in order" in coordinator_log.read_text()
        assert not status_of(url)
        left = {path.name for path in (tmp_path / "units").iterdir() if path.name.startswith("prime-node")}
        assert left == {"prime-node-worker.service.d", "prime-node-coordinator.service.d"}, "those of this test"
        assert (tmp_path / "home" / "run" / "coordinator" / "state.sqlite").exists()
        assert (tmp_path / "home" / ".prime-node" / "identity.key").exists()
        assert (tmp_path / "home" / ".prime-node").stat().st_uid == (tmp_path / "home").stat().st_uid


def test_a_role_with_a_final_exit_code_is_not_started_again(tmp_path: Path) -> None:
    with systemd_machine(tmp_path) as machine:
        machine.service("install", "seed", f"http://127.0.0.1:1/#{'0' * 64}", "--folder", "/srv/home")
        log = log_to_file(machine, "seed")
        machine.service("start", "seed", code=None)
        wait_until(lambda: machine.property("prime-node-seed.service", "ActiveState") == "failed", seconds=60)
        assert machine.property("prime-node-seed.service", "ExecMainStatus") == "3"
        assert machine.property("prime-node-seed.service", "NRestarts") == "0"
        assert "is a home directory" in log.read_text(), "a fault of the settings, which only the role finds"
