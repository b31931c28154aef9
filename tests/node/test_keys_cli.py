"""`prime-node keys`: the root changes a run's keys, in one place or with a file that passes from key to key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.node.coordinator_world import (
    COORDINATOR,
    ROOT,
    TRAINER,
    VALIDATOR,
    folder_parts,
    make_manifest,
    make_run,
    running,
)
from tests.node.operator_world import write_key
from typer.testing import CliRunner

from prime_node.cli.key_request import known_of
from prime_node.cli.main import app
from prime_node.cli.run_dir import RunDir
from prime_node.folder_lock import FolderLock
from prime_node.keyfile import load_key
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.key_ring import KeyChain, Role
from prime_protocol.run_spec import JoinLink

ROLE_KEYS = {"root": ROOT, "coordinator": COORDINATOR, "trainer": TRAINER, "validator": VALIDATOR}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run as `prime-node new` makes it, with policy 0 published and no coordinator running."""
    run, place = make_run(), RunDir(tmp_path / "run")
    for role, key in ROLE_KEYS.items():
        write_key(place.key(role), key)
    place.run_spec.write_bytes(run.envelope.to_bytes())
    place.join_link_file.write_text(f"http://127.0.0.1:9/#{run.digest}\n")
    (place.public / "manifests").mkdir(parents=True)
    (place.public / "run.json").write_bytes(run.envelope.to_bytes())
    signed, _ = make_manifest(run, None)
    for name in ("head.json", "manifests/00000000.json"):
        (place.public / name).write_bytes(signed.envelope.to_bytes())
    return place


def keys(*arguments: object) -> str:
    """Return the command's output. Raises what it raises."""
    result = CliRunner().invoke(app, ["keys", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def chain(run_dir: RunDir) -> KeyChain:
    return asyncio.run(known_of(str(run_dir.path))).run.keys


def test_a_trainers_key_is_replaced_in_three_commands(run_dir: RunDir) -> None:
    output = keys("rotate", run_dir.path, "--role", "trainer", "--reason", "laptop lost")
    request = run_dir.path / "key-ring-1.json"
    assert f"next: prime-node keys submit {request} {run_dir.path}" in output
    output = keys("submit", request, run_dir.path)
    assert "start the trainer again" in output
    new = load_key(run_dir.key("trainer"))
    assert chain(run_dir).current.trainer == (new.key_id,)
    assert load_key(run_dir.path / "keys" / "trainer-until-1.key").key_id == TRAINER.key_id
    shown = keys("show", run_dir.path)
    assert "laptop lost" in shown
    assert "manifests up to policy 0" in shown
    assert f"trainer (1 must sign): {new.key_id}" in shown


def test_roots_on_other_machines_sign_a_file(run_dir: RunDir, tmp_path: Path) -> None:
    """The run's one root key is replaced by three of which two must sign; then two of them, and no fewer, revoke a key."""
    files = [tmp_path / f"root-{number}.key" for number in range(3)]
    ids = [keys("make", file).strip() for file in files]
    request = tmp_path / "request.json"
    chosen = [option for one in ids for option in ("--key", one)]
    keys("rotate", run_dir.path, "--role", "root", *chosen, "--threshold", 2, "--out", request)
    with pytest.raises(LocalError, match="0 of the new root keys have signed, 2 must"):
        keys("submit", request, run_dir.path)
    for file in files[:2]:
        assert "(2 must sign)" in keys("sign", request, "--key", file)
    keys("submit", request, run_dir.path)
    assert chain(run_dir).current.root == tuple(ids)

    keys("rotate", run_dir.path, "--role", "validator", "--out", request)
    keys("sign", request, "--key", files[2])
    with pytest.raises(LocalError, match="1 of the present root keys have signed, 2 must"):
        keys("submit", request, run_dir.path)
    keys("sign", request, "--key", files[2])
    with pytest.raises(LocalError, match="1 of the present"):
        keys("submit", request, run_dir.path)
    keys("sign", request, "--key", files[0])
    keys("submit", request, run_dir.path)
    assert chain(run_dir).is_revoked(VALIDATOR.key_id, Role.VALIDATOR)


def test_a_key_is_added_first_and_the_old_one_revoked_later(run_dir: RunDir) -> None:
    keys("rotate", run_dir.path, "--role", "trainer", "--keep")
    keys("submit", run_dir.path / "key-ring-1.json", run_dir.path)
    new = load_key(run_dir.key("trainer")).key_id
    assert chain(run_dir).current.trainer == (TRAINER.key_id, new)
    keys("revoke", run_dir.path, TRAINER.key_id)
    keys("submit", run_dir.path / "key-ring-2.json", run_dir.path)
    assert chain(run_dir).current.trainer == (new,)


def test_an_auditor_is_named_and_the_last_one_revoked(run_dir: RunDir, tmp_path: Path) -> None:
    auditor = keys("make", tmp_path / "auditor.key").strip()
    keys("rotate", run_dir.path, "--role", "auditor", "--keep", "--key", auditor)
    keys("submit", run_dir.path / "key-ring-1.json", run_dir.path)
    assert f"auditor: {auditor}" in keys("show", run_dir.path)
    keys("revoke", run_dir.path, auditor)
    keys("submit", run_dir.path / "key-ring-2.json", run_dir.path)
    assert (chain(run_dir).current.auditor, chain(run_dir).is_revoked(auditor, Role.AUDITOR)) == ((), True)


def test_impossible_changes_are_refused_before_anything_is_written(run_dir: RunDir, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no trainer key would be left"):
        keys("revoke", run_dir.path, TRAINER.key_id)
    with pytest.raises(LocalError, match="none of these keys has a role"):
        keys("revoke", run_dir.path, "12D3KooW")
    with pytest.raises(LocalError, match="root_threshold is above the number"):
        keys("rotate", run_dir.path, "--role", "root", "--threshold", 3)
    with pytest.raises(LocalError, match="trainer"):
        keys("rotate", run_dir.path, "--role", "trainer", "--key", "nonsense")
    with pytest.raises(LocalError, match="is not a key ring request"):
        keys("sign", run_dir.join_link_file, "--key", run_dir.key("root"))
    with pytest.raises(LocalError, match="No such file"):
        keys("submit", tmp_path / "none.json", run_dir.path)
    with pytest.raises(LocalError, match="does not answer"):
        keys("show", "http://127.0.0.1:9/")
    assert not (run_dir.path / "key-ring-1.json").exists()


def test_a_request_of_yesterday_is_no_request_of_today(run_dir: RunDir) -> None:
    keys("rotate", run_dir.path, "--role", "validator", "--out", run_dir.path / "late.json")
    keys("rotate", run_dir.path, "--role", "coordinator")
    keys("submit", run_dir.path / "key-ring-1.json", run_dir.path)
    with pytest.raises(RemoteError) as refusal:
        keys("submit", run_dir.path / "late.json", run_dir.path)
    assert refusal.value.code is ErrorCode.CHAIN_BROKEN


async def test_a_working_coordinator_takes_the_ring_over_http_and_keeps_its_folder_to_itself(run_dir: RunDir) -> None:
    run = make_run()
    (run_dir.coordinator / "public" / "head.json").unlink()  # this coordinator begins the run
    lock = FolderLock(run_dir.coordinator)
    async with running(await folder_parts(run, run_dir.coordinator)) as world:
        link = JoinLink(world.url, run.digest)
        run_dir.join_link_file.write_text(f"{link}\n")
        head = await world.publish()
        request = run_dir.path / "key-ring-1.json"
        await asyncio.to_thread(keys, "rotate", run_dir.path, "--role", "trainer")
        await asyncio.to_thread(keys, "submit", request, run_dir.path)
        assert world.run.keys.published == head.point
        new = load_key(run_dir.key("trainer"))
        assert world.run.keys.current.trainer == (new.key_id,)
        shown = await asyncio.to_thread(keys, "show", link)
        assert new.key_id in shown
        await asyncio.to_thread(keys, "submit", request, link)
        assert world.run.keys.version == 1, "the same ring again is the same ring"
    lock.release()
