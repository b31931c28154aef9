"""A folder or a link of a stranger neither hangs a command, nor fills the memory, nor leads it to other files."""

from __future__ import annotations

import contextlib
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.builder import build_spec, pinned, role_keys
from tests.cases_world import check_each
from tests.node.coordinator_world import COORDINATOR, ROOT, TRAINER, VALIDATOR, memory_parts, running
from tests.node.operator_world import make_run_folder
from tests.security.planted_world import PLANTED, plant
from typer.testing import CliRunner

from prime_node import memory
from prime_node.cli import run_trial
from prime_node.cli.doctor import findings_of_child
from prime_node.cli.evidence import repeat_finding
from prime_node.cli.main import app
from prime_node.cli.options import Options
from prime_node.cli.place import named_in
from prime_node.cli.run_dir import RunDir
from prime_node.cli.service_unit import RoleService
from prime_node.cli.support_bundle import without_secrets
from prime_node.cli.timeline import read_timeline
from prime_node.cli.wire_new import make_model_files
from prime_node.cli.wire_store import store_setting
from prime_node.coordinator.new_run import TinyModel
from prime_node.envs.settings import EnvironmentSettings
from prime_node.keyfile import load_key
from prime_node.replay.finding import FINDING
from prime_node.worker.config import WorkerConfig
from prime_node.worker.control import read_control
from prime_node.worker.status import read_status
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import EnvironmentSpec, JoinLink

READ: dict[str, Callable[[RunDir], object]] = {
    "config.toml": lambda run: store_setting(run.path),
    "overrides": lambda run: Options.of_run(str(run.path), None, []),
    "keys/trainer.key": lambda run: load_key(run.key("trainer")),
    "status.json": lambda run: read_status(run.path / "status.json"),
    "control.json": lambda run: read_control(run.path),
    "join-link": lambda run: run.join_link(),
}
"""Files of a folder, and what a command does with each."""


def test_no_file_of_a_folder_of_others_hangs_a_command_or_fills_the_memory(tmp_path: Path) -> None:
    """Before, `status` and others waited for a pipe in the place of config.toml, and read all of /dev/zero."""

    def check(case: tuple[str, str]) -> None:
        name, kind = case
        run = RunDir(make_run_folder(tmp_path / f"{name.replace('/', '-')}-{kind}"))
        file = run.path / name
        file.parent.mkdir(exist_ok=True)
        plant(file, kind)
        with pytest.raises(LocalError):
            READ[name](run)

    cases = [(name, kind) for name in READ for kind in PLANTED]
    check_each([(" ".join(case), case) for case in cases], check)
    for name in ("coordinator/timeline.jsonl", "trainer/metrics.jsonl"):
        for kind in PLANTED:
            run = RunDir(make_run_folder(tmp_path / f"{name.replace('/', '-')}-{kind}"))
            (run.path / name).parent.mkdir(exist_ok=True)
            plant(run.path / name, kind)
            with pytest.raises(LocalError, match="no timeline"):  # before, `trace` read all of it
                read_timeline(run)


JUNK = (
    b"",
    b"\xff\xfe\0",
    b"{",
    b"[]",
    b"null",
    b"[" * 100_000,
    b"9" * 5_000,
    b"\x1b[2J",
    b"http://[x",
    b"[run]\nname = 5\n",
)

ROWS = (
    '{"publish_seconds": "x"}',
    '{"publish_seconds": 1, "policy_version": "x", "time": 9}',
    '{"publish_seconds": 1, "policy_version": 1.5, "time": 9}',
    *(f'{{"publish_seconds": 1, "policy_version": 1, "time": {time}}}' for time in ("1e999", "NaN", "-9", "9" * 400)),
)


def test_no_content_of_a_folder_of_others_gives_a_traceback(tmp_path: Path) -> None:
    """Before, six commands failed at a join link that is none, and `evidence verify` at a step of infinite number."""
    run = RunDir(make_run_folder(tmp_path / "run"))

    def check(case: tuple[str, bytes]) -> None:
        name, junk = case
        file = run.path / name
        whole = file.read_bytes() if file.exists() else None
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(junk)
        file.chmod(0o600)
        with contextlib.suppress(LocalError):
            READ[name](run)
        file.unlink() if whole is None else file.write_bytes(whole)

    check_each([(f"{name} {junk[:10]!r}", (name, junk)) for name in READ for junk in JUNK], check)
    for name in ("worker-1/status.json", "worker-1/timeline.jsonl", "trainer/metrics.jsonl"):
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(LocalError, match="no timeline"):
        read_timeline(run)
    for row in ROWS:
        run.trainer_metrics.write_text(row + "\n")
        with pytest.raises(LocalError, match="has another form"):
            read_timeline(run)
    (run.path / FINDING).write_text('{"steps": [{"step": 1e999}]}')
    with pytest.raises(LocalError, match="no readable"):
        repeat_finding(run.path, None, as_json=True)
    with pytest.raises(LocalError, match="is not an address"):
        named_in("http://[x")


def test_a_support_bundle_follows_no_link_out_of_the_folder(tmp_path: Path) -> None:
    """Before, a planted link `logs` put other programs' logs into the file that its owner sends to others."""
    outside, folder = tmp_path / "outside", make_run_folder(tmp_path / "run")
    outside.mkdir()
    for name in ("a.log", "metrics.jsonl", "status.json"):
        (outside / name).write_text("LEAK")
    for name in ("logs", "trainer", "worker-1"):
        (folder / name).symlink_to(outside)
    made = tmp_path / "made.tar.gz"
    assert CliRunner().invoke(app, ["support-bundle", str(folder), "--out", str(made)]).exit_code == 0
    with tarfile.open(made) as archive:
        names = archive.getnames()
    assert names == ["support/versions.json", "support/run.json"]


def test_secrets_are_removed_from_a_line_of_many_quotes_in_linear_time() -> None:
    """Before, a megabyte of escaped quotes after `token=[` took an hour, and one of a key's header without an end too."""
    header = "-----BEGIN " + "PRIVATE KEY" * 2**16
    for line in ('token = ["' + '\\"' * 2**19, "token = [" + "'\"\\" * 2**18, f"{header}\ntoken = "):
        assert "LEAK" not in without_secrets(f"{line}LEAK", [])


def test_a_child_of_the_doctor_cannot_hold_it_fill_its_memory_or_end_it() -> None:
    program = """if True:
        import json, os, sys, time
        if os.fork() == 0:
            time.sleep(600)  # keeps the output open
        for found in ({"what": 1}, {"what": "engine", "ok": True, "seen": "x", "tokens_per_s": "many"}):
            print(json.dumps(found), flush=True)
        print(json.dumps({"what": "engine", "ok": True, "seen": "slow"}), flush=True)
        if sys.argv[1:]:
            while True:
                sys.stdout.write("x" * 2**16)
    """
    for arguments in ((), ("endless",)):
        found = list(findings_of_child([sys.executable, "-P", "-c", program, *arguments]))
        assert [one.what for one in found if one.ok] == ["engine"]


@pytest.mark.slow
async def test_the_doctor_loads_no_model_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it said so, and then loaded the model."""
    pytest.importorskip("torch")
    model = tmp_path / "run-model"
    made = make_model_files(TinyModel(), model)
    files = {path.name: path.read_bytes() for path in sorted(model.iterdir())}
    spec = build_spec(
        role_keys(ROOT, COORDINATOR, TRAINER, VALIDATOR),
        files,
        vocab_size=made.vocab_size,
        environments=(EnvironmentSpec(name="letters", id="letters"),),
        sampling=Sampling(completion_tokens_max=4, stop_token_ids=(0,)),
    )
    run = pinned(spec, ROOT)
    parts = memory_parts(run)
    for data in files.values():
        await parts.public.put(data)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**10)
    settings = WorkerConfig.load({}, {"swarm": {"enabled": False}})
    async with running(parts) as world:
        link = JoinLink.parse(f"{world.url}/#{run.digest}")
        trial = run_trial.try_run(link, tmp_path / "trial", settings, EnvironmentSettings.load())
        found = [one async for one in trial]
    assert (found[-1].what, found[-1].ok) == ("model", False)


def test_the_name_of_a_folder_adds_no_line_to_the_file_of_a_service() -> None:
    """Before, a folder `run\\nExecStartPre=+/bin/...` made systemd run that program as root."""
    for name in ("run\nExecStartPre=+/bin/true", "a\rb", "a\x85b", "a\\"):
        with pytest.raises(LocalError, match="rename it"):
            RoleService(
                name="worker",
                role="worker",
                command=("python",),
                directory=Path("/home/prime") / name,
                writes=(),
                stop_s=1,
                stopped_codes=(),
            )
