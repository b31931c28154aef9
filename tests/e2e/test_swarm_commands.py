"""A run continues through its swarm when its coordinator serves no checkpoint bytes; `seed` and `fetch` as a user runs them.

The run ends by Ctrl-C while its roles are suspended.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.e2e.conftest import Up, read, until_found

from prime_node.cli.supervisor import last_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

LOCAL = ("--set", "worker.swarm.host=127.0.0.1", "--set", "worker.swarm.p2p=off")


def test_workers_seeders_and_downloads_do_without_the_coordinators_chunks(up: Up, tmp_path: Path) -> None:
    up.start("up.unsafe_cheaters={}", "up.num_workers=2", "run.max_steps=5000")
    up.until(lambda status: status["step"] >= 2, timeout_s=180, what="step 2")
    with (up.directory / "config.toml").open("a") as config:
        config.write("\n[coordinator]\nserve_chunks = false\n")
    os.kill(up.process_of("coordinator"), signal.SIGKILL)  # `up` starts it again, with the file's new settings
    cut_at = up.until(lambda status: gives_no_chunks(up, status["head"]), timeout_s=60, what="the cut")["step"]

    # A step is trained on rollouts of policies at most two steps old: so the workers hold policies from after the cut.
    up.until(lambda status: status["step"] >= cut_at + 6, timeout_s=120, what="six steps after the cut")

    link = (up.directory / "join-link").read_text().strip()
    log = tmp_path / "seed.log"
    command = [sys.executable, "-m", "prime_node", "seed", link, "--folder", str(tmp_path / "seed"), *LOCAL]
    with log.open("wb") as output:
        seeder = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        head = until_found(lambda: head_of_seeder(log), what=f"a policy at the seeder; its log: {log}")
        assert head > cut_at
        exported = tmp_path / "exported"
        fetched = subprocess.run(
            [sys.executable, "-m", "prime_node", "fetch", link, "--out", str(exported), "--log-level", "INFO",
             "--folder", str(tmp_path / "fetch"), *LOCAL],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert fetched.returncode == 0, fetched.stdout + fetched.stderr
        assert str(exported) in fetched.stdout
        assert policy_in((exported / "provenance" / "manifest.json").read_bytes()) >= head
        assert (exported / "model.safetensors").stat().st_size > 100_000
        seeder.send_signal(signal.SIGINT)
        assert seeder.wait(timeout=30) == 0, log.read_text()
    finally:
        seeder.kill()
        seeder.wait()
    # Ctrl-C ends `up` soon even if no role listens: the limits of SIGTERM would add up to 85 s.
    with up.suspended("join", "validator", "trainer"):
        up.interrupt()
        assert up.finish(timeout_s=30) == 130, up.everything()
    assert up.processes() == []


def head_of_seeder(log: Path) -> int | None:
    """Return the newest policy that it shows on its own port."""
    port = re.search(r"serving peers on port (\d+)", last_lines(log, 100))
    if port is None:
        return None
    envelope = read(f"http://127.0.0.1:{port[1]}/v1/head")  # nothing where it has no head yet
    return policy_in(envelope) if envelope else None


def policy_in(envelope: bytes) -> int:
    """Return what a caller without a key can read."""
    payload = json.loads(base64.b64decode(json.loads(envelope)["payload"]))
    version: int = payload["policy_version"]
    return version


def gives_no_chunks(up: Up, head: int) -> bool:
    """The coordinator refuses the first part of the newest policy."""
    url = (up.directory / "join-link").read_text().strip().partition("#")[0]
    manifest = json.loads(base64.b64decode(json.loads(read(f"{url}v1/manifests/{head}"))["payload"]))
    try:
        urllib.request.urlopen(f"{url}v1/blobs/{manifest['encodings'][0]['parts'][0]['digest']}", timeout=5).close()
    except urllib.error.HTTPError as error:
        with error:
            return error.code == 404 and b"serves no chunks" in error.read()
    return False
