"""The main job, as a newcomer runs it: real processes, real engines, real bytes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import Up, joined
from tests.source_tree import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

JOIN_EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)[1]


def test_up_trains_bans_the_cheater_and_verifies_the_chain(up: Up) -> None:
    up.start("up.cheat_after_policies=1", "run.checks.strikes_max=1", "run.replay.state_every=4", "up.replay_steps=1")
    code = up.finish(timeout_s=300)
    assert code == 0, up.everything()
    summary = up.summary()
    assert summary["verification"]["ok"]
    assert [ban["worker"] for ban in summary["bans"]] == ["worker-3"]
    assert summary["rollouts"]["accepted"] == 8 * 6 * 4
    assert sum(summary["rollouts"]["refused"].values()) > 0
    assert summary["bytes_published"] > 0
    assert (up.directory / "curve.png").stat().st_size > 1_000
    assert up.processes() == []

    verified = subprocess.run(
        [sys.executable, "-m", "prime_node", "verify", str(up.directory), "--chain"], capture_output=True, text=True
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr
    _leased_the_prompts_that_this_machine_renders(up)
    _can_be_re_executed(up)
    _flip_a_byte_of_the_largest_part(up.directory / "coordinator" / "public")
    tampered = subprocess.run(
        [sys.executable, "-m", "prime_node", "verify", str(up.directory), "--chain"], capture_output=True, text=True
    )
    assert tampered.returncode == 1
    assert "FAIL (5)" in tampered.stdout
    _has_a_trace(up)


def _leased_the_prompts_that_this_machine_renders(up: Up) -> None:
    link = (up.directory / "join-link").read_text().strip()
    command = [sys.executable, "-m", "prime_node", "ledger", "verify", str(up.directory)]
    command += ["--prompts", str(up.directory / "model"), "--json"]
    unpinned = subprocess.run(command, capture_output=True, text=True)
    assert (unpinned.returncode, unpinned.stdout) == (3, "")
    assert "name the run by --run" in unpinned.stderr
    pinned = subprocess.run([*command, "--run", link.rpartition("#")[2]], capture_output=True, text=True)
    assert pinned.returncode == 0, pinned.stdout + pinned.stderr
    seeds = json.loads(pinned.stdout)["seeds"]
    assert seeds["num_rendered"] == seeds["num_checked"] + seeds["num_evaluations"] > 0


def _can_be_re_executed(up: Up) -> None:
    """By the summary's line, by a stranger on a copy of the public folder, and from that stranger's evidence."""
    assert up.summary()["replay"]["exit_code"] == 0, up.summary()["replay"]
    run = (up.directory / "join-link").read_text().strip().rpartition("#")[2]
    copy, evidence = up.directory.with_name("copy"), up.directory.with_name("evidence")
    shutil.copytree(up.directory / "coordinator" / "public", copy)
    code, report = _report_of("replay", copy, "--step", 5, "--genesis", "--evidence", evidence, "--run", run)
    assert (code, report["outcome"], [one["step"] for one in report["steps"]]) == (0, "exact", [-1, 4, 5]), report
    assert any("rewards follow from the tokens" in text for text in report["steps"][1]["established"])
    assert json.loads((evidence / "replay-finding.json").read_bytes())["outcome"] == "exact"
    batch = json.loads((evidence / "batches" / "00000005-0000.json").read_bytes())
    bundle = json.loads(base64.b64decode(batch["payload"]))["groups"][0]["bundle"]
    (evidence / "blobs" / bundle[:2] / bundle).unlink()
    code, report = _report_of("evidence", "verify", evidence, "--run", run)
    assert (code, report["outcome"]) == (8, "withheld"), report


def _report_of(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Run a command that prints JSON; return its exit code and what it printed."""
    command = [sys.executable, "-m", "prime_node", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def _has_a_trace(up: Up) -> None:
    """Each role's lane holds what it did, in the same seconds."""
    command = [sys.executable, "-m", "prime_node", "trace", str(up.directory)]
    subprocess.run(command, check=True, timeout=60)
    events = json.loads((up.directory / "trace.json").read_bytes())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    seen = {(names[event["tid"]], event["name"].partition(",")[0]) for event in events if event["ph"] == "X"}
    workers = {(f"worker-{number}", what) for number in (1, 2, 3) for what in ("swap", "generate")}
    assert {("trainer", "train"), ("publisher", "encode"), ("broadcast", "until the slowest could use it")} <= seen
    assert workers <= seen
    steps = [event for event in events if event["ph"] == "X" and event["name"].startswith("train, step")]
    assert len(steps) == 8
    assert max(e["ts"] for e in events if e.get("cat") == "worker-1") > min(step["ts"] for step in steps)


def test_up_stops_cleanly_and_resumes_while_a_trainers_key_is_replaced(up: Up) -> None:
    """Both keys are valid first; when the new one signs, the old one is removed, and the trainer is killed once more.

    The only worker is suspended for the commands on keys, so that the run does not reach its last step before they end.
    """
    up.start("up.unsafe_cheaters={}", "up.num_workers=1", "run.max_steps=14")
    up.until(lambda status: status["step"] >= 3, timeout_s=180, what="step 3")
    with up.suspended("join"):
        old = _keys("show", up.directory).partition("trainer (1 must sign): ")[2].split()[0]
        _keys("rotate", up.directory, "--role", "trainer", "--keep")
        _keys("submit", up.directory / "key-ring-1.json", up.directory)
    up.interrupt()
    assert up.finish(timeout_s=90) == 130, up.everything()
    assert up.processes() == []
    assert "resumes" in up.output

    up.start("trainer.evaluate_at=[13]", new=False)
    step = up.until(lambda status: status["step"] >= 1, timeout_s=90, what="the coordinator")["step"]
    up.until(lambda status: status["step"] >= step + 1, timeout_s=90, what="a policy by the new key")
    with up.suspended("join"):
        _keys("revoke", up.directory, old)
        _keys("submit", up.directory / "key-ring-2.json", up.directory)
        revoked_at = up.status()["head"]
    os.kill(up.process_of("trainer"), signal.SIGKILL)
    assert up.finish(timeout_s=240) == 0, up.everything()
    rows = [json.loads(line) for line in (up.directory / "trainer" / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("step") == 13 and "eval_greedy" in row for row in rows), "the settings of the second start"
    assert up.summary()["verification"]["ok"]
    assert up.summary()["rollouts"]["accepted"] == 14 * 6 * 4
    verified = subprocess.run(
        [sys.executable, "-m", "prime_node", "verify", str(up.directory), "--chain", "--json"], capture_output=True
    )
    report = json.loads(verified.stdout)
    assert (report["ok"], report["key_ring"]) == (True, 2)
    assert report["policy_version"] > revoked_at + 1
    assert old not in report["policy"]["signers"]


def test_ranks_and_roles_may_be_killed_without_loss_and_the_steps_are_exact_on_two_ranks(up: Up) -> None:
    """In a run whose environment answers, so that a rollout has several turns."""
    again = '{name="again", id="reasoning_gym", turns_max=3, options={task="spell_backward", max_word_len=6, partner="retry"}}'
    up.start(
        "up.unsafe_cheaters={}",
        "up.num_workers=1",
        "run.max_steps=12",
        f"run.environments=[{again}]",
        "trainer.ranks.nproc=2",
        "run.replay.state_every=2",
        "up.replay_steps=1",
    )
    up.until(lambda status: status["step"] >= 2, timeout_s=180, what="step 2")
    ranks = up.ranks_of_trainer()
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    for step, role in ((4, "coordinator"), (6, "validator"), (8, "join")):
        up.until(lambda status, step=step: status["step"] >= step, timeout_s=180, what=f"step {step}")
        os.kill(up.process_of(role), signal.SIGKILL)
    assert up.finish(timeout_s=300) == 0, up.everything()
    summary = up.summary()
    assert summary["verification"]["ok"]
    assert summary["rollouts"]["accepted"] == 12 * 6 * 4
    rows = [json.loads(line) for line in (up.directory / "trainer" / "metrics.jsonl").read_text().splitlines()]
    assert max(row.get("turns_max", 0) for row in rows) == 3
    assert up.processes() == []
    assert "--nproc 2" in summary["replay"]["text"]
    code, report = _report_of("replay", up.directory, "--step", 3, "--nproc", 2)
    assert (code, report["outcome"], report["steps"][-1]["step"]) == (0, "exact", 3), report


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_workers_join_by_the_link_until_the_run_is_drained(up: Up, tmp_path: Path) -> None:
    """vLLM on this machine's CPU, alone and then with the program of docs/python.md; their rollouts pass the same checks.

    The run has no other worker while vLLM starts: it would train hundreds of policies and leave vLLM hardly a core.
    """
    up.start("up.unsafe_cheaters={}", "up.num_workers=0", "run.max_steps=5000")
    up.until(lambda status: status["head"] >= 0, timeout_s=180, what="policy 0")
    with joined(up, tmp_path, "guest", "vllm") as guest:
        alone = up.until(lambda status: _accepted(status, "guest") > 0, timeout_s=400, what="a bundle by vLLM")
        with _program(up, tmp_path) as anna:
            before = _accepted(alone, "guest")
            status = up.until(
                lambda status: _accepted(status, "anna") > 0 and _accepted(status, "guest") > before,
                timeout_s=120,
                what="accepted bundles of both workers",
            )
            assert [worker["refused"] for worker in status["workers"]] == [{}, {}]
            guest.send_signal(signal.SIGINT)
            assert guest.wait(timeout=60) in (0, 130), (tmp_path / "guest.log").read_text()  # 130: not in time
            up.until(lambda found: found["step"] >= status["step"] + 2, timeout_s=180, what="two steps by the program")
            subprocess.run([sys.executable, "-m", "prime_node", "operate", "drain", str(up.directory)], check=True)
            printed, errors = anna.communicate(timeout=120)
        assert (anna.returncode, printed) == (0, "drained\n"), errors + up.everything()
    # Ctrl-C ends `up` soon even if no role listens: the limits of SIGTERM would add up to 70 s.
    with up.suspended("validator", "trainer"):
        up.interrupt()
        assert up.finish(timeout_s=30) == 130, up.everything()
    assert up.processes() == []


@contextlib.contextmanager
def _program(up: Up, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the program of docs/python.md, whose worker has the name anna."""
    program = folder / "work.py"
    program.write_text(JOIN_EXAMPLE)
    link = (up.directory / "join-link").read_text().strip()
    command = [sys.executable, str(program), link]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def _accepted(status: dict[str, Any], name: str) -> int:
    """Accepted rollouts of a worker."""
    return next((worker["accepted"] for worker in status["workers"] if worker["name"] == name), 0)


def _flip_a_byte_of_the_largest_part(public: Path) -> None:
    manifests = [json.loads(path.read_bytes())["payload"] for path in (public / "manifests").iterdir()]
    encodings = [each for payload in manifests for each in json.loads(base64.b64decode(payload))["encodings"]]
    largest = max((part for each in encodings for part in each["parts"]), key=lambda part: int(part["size"]))
    path = public / "blobs" / largest["digest"][:2] / largest["digest"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def _keys(*arguments: object) -> str:
    """Output of `prime-node keys`."""
    done = subprocess.run(
        [sys.executable, "-m", "prime_node", "keys", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
