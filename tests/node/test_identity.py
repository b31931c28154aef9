"""`prime-node identity`: a person's key, delegations, revocation, backups, and a key that moves."""

from __future__ import annotations

import asyncio
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.node.coordinator_world import ENGINE, make_run, memory_parts, running
from typer.testing import CliRunner

from prime_node.adapters.key_backup import decrypt_key, encrypt_key
from prime_node.cli import identity, wire_identity
from prime_node.cli.main import app
from prime_node.cli.wire_identity import delegation_file, delegation_for, read_backup
from prime_node.folder_lock import FolderLock
from prime_node.keyfile import load_key, load_or_create
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.requests import JoinRequest

PASSPHRASE = "correct horse battery"


def call(*words: object) -> str:
    result = CliRunner().invoke(app, ["identity", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(autouse=True)
def _quick_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_node.adapters.key_backup.LOG_COST", 14)


def test_a_key_that_is_backed_up_comes_back_with_its_passphrase_alone(tmp_path: Path) -> None:
    own, file, secret = tmp_path / "identity.key", tmp_path / "backup.json", tmp_path / "passphrase"
    secret.write_text(f"{PASSPHRASE}\n")
    key = load_or_create(own)
    assert key.key_id in call("backup", file, "--key", own, "--passphrase-file", secret)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key.to_bytes().hex() not in file.read_text()
    with pytest.raises(LocalError, match="exists already"):
        call("backup", file, "--key", own, "--passphrase-file", secret)
    restored = tmp_path / "elsewhere" / "identity.key"
    call("restore", file, "--key", restored, "--passphrase-file", secret)
    assert load_key(restored).to_bytes() == key.to_bytes()
    call("restore", file, "--key", restored, "--passphrase-file", secret)
    other = tmp_path / "other.key"
    load_or_create(other)
    with pytest.raises(LocalError, match="another key"):
        call("restore", file, "--key", other, "--passphrase-file", secret)
    secret.write_text("correct horse batterz")
    with pytest.raises(LocalError, match="passphrase is wrong"):
        call("restore", file, "--key", tmp_path / "new.key", "--passphrase-file", secret)
    secret.write_text("too short")
    with pytest.raises(LocalError, match="12 characters"):
        call("backup", tmp_path / "weak.json", "--key", own, "--passphrase-file", secret)


def test_a_file_of_any_size_is_no_backup_and_fills_no_memory(tmp_path: Path) -> None:
    """Before, the whole file was read first."""
    file = tmp_path / "backup.json"
    with file.open("wb") as made:
        made.truncate(2**40)
    with pytest.raises(LocalError, match="cannot be read as a key backup"):
        read_backup(file, PASSPHRASE)


LITTLE_MEMORY = """
import resource, sys
from prime_node.adapters.key_backup import decrypt_key
from prime_protocol.errors import LocalError
resource.setrlimit(resource.RLIMIT_AS, (900_000_000, 900_000_000))
try:
    decrypt_key(sys.stdin.buffer.read(), "a passphrase")
except LocalError as error:
    print(error)
"""


def test_a_backup_that_takes_more_memory_than_there_is_gives_no_traceback() -> None:
    data = re.sub(rb'(?<="log_cost": )[0-9]+', b"20", encrypt_key(SigningKey(bytes(range(32))), PASSPHRASE))
    ran = subprocess.run([sys.executable, "-c", LITTLE_MEMORY], input=data, capture_output=True, check=True)
    assert b"require 1024MB of memory" in ran.stdout


def test_a_backup_that_was_changed_opens_nothing() -> None:
    key = SigningKey(bytes(range(32)))
    data = encrypt_key(key, PASSPHRASE)
    assert decrypt_key(data, PASSPHRASE).to_bytes() == key.to_bytes()
    assert encrypt_key(key, PASSPHRASE) != data, "salt and nonce are new each time"
    other = SigningKey(bytes(32)).key_id.encode()
    changed = {
        "names another key": data.replace(key.key_id.encode(), other),
        "another nonce": data.replace(b'"nonce": "', b'"nonce": "00')[:-4],
        "cut": data[:-20],
        "more memory than any machine has": data.replace(b'"log_cost": 14', b'"log_cost": 40'),
        "no JSON": b"64 hexadecimal digits",
    }
    for what, bad in changed.items():
        with pytest.raises(LocalError):
            decrypt_key(bad, PASSPHRASE)
        assert bad != data, what


def test_a_key_that_moves_is_on_one_machine_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, file, secret = tmp_path / "identity.key", tmp_path / "moving.json", tmp_path / "passphrase"
    secret.write_text(PASSPHRASE)
    key = load_or_create(own)
    monkeypatch.setattr(identity, "worker_folders", lambda: [tmp_path])
    lock = FolderLock(tmp_path)
    with pytest.raises(LocalError, match="a worker runs"):
        call("move", file, "--key", own, "--passphrase-file", secret)
    lock.release()
    assert own.exists()
    call("move", file, "--key", own, "--passphrase-file", secret)
    assert not list(tmp_path.glob("identity.*")), "a later worker may begin with a new identity"
    call("restore", file, "--key", own, "--passphrase-file", secret)
    assert load_key(own).key_id == key.key_id


def test_a_person_authorises_this_machine_and_another_one(tmp_path: Path) -> None:
    person, own, there = tmp_path / "person.key", tmp_path / "identity.key", tmp_path / "there.key"
    call("new", person)
    call("authorise", "--person", person, "--identity", own)
    key, run = load_key(own), "1" * 64
    assert delegation_for(own, key, run)
    assert "works for person" in call("show", "--identity", own, "--person", person)
    link = f"http://host:1/#{run}"
    shown = call("authorise", load_or_create(there).key_id, "--run", link, "--person", person)
    text = shown.split()[-1]
    assert "until" in call("accept", text, "--identity", there)
    assert delegation_for(there, load_key(there), run) == text
    assert delegation_for(there, load_key(there), "2" * 64) == "", "elsewhere it takes part without a person"
    with pytest.raises(LocalError, match="cannot be used here"):
        call("accept", text, "--identity", own)
    with pytest.raises(LocalError, match="at most 400"):
        call("authorise", "--days", "401", "--person", person, "--identity", own)
    with pytest.raises(LocalError, match="key id of another machine"):
        call("authorise", load_key(person).key_id, "--person", person)


def test_a_delegation_that_cannot_be_used_stops_the_start_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "identity.key"
    key = load_or_create(own)
    assert delegation_for(own, key, "1" * 64) == ""
    text = wire_identity.delegation_text(SigningKey(bytes(32)), key.key_id, days=1, run=None)
    wire_identity.keep_delegation(own, text)
    later_ms = wire_identity.now_ms() + 2 * wire_identity.DAY_MS
    monkeypatch.setattr(wire_identity, "now_ms", lambda: later_ms)
    with pytest.raises(LocalError, match=r"expired.*identity authorise"):
        delegation_for(own, key, "1" * 64)
    delegation_file(own).write_text("rubbish")
    with pytest.raises(LocalError, match="delete it"):
        delegation_for(own, key, "1" * 64)


async def test_a_person_revokes_a_machine_in_a_run(tmp_path: Path) -> None:
    person, own = tmp_path / "person.key", tmp_path / "identity.key"
    call("new", person)
    call("authorise", "--person", person, "--identity", own)
    async with running(memory_parts(make_run())) as world:
        key, link = load_key(own), f"{world.url}/#{world.run.digest}"
        text = delegation_for(own, key, world.run.digest)
        request = JoinRequest(name="rig", software="1", engine=ENGINE, rollouts_max=8, delegation=text)
        await world.client(key).join(request)
        assert "revoked in run" in await asyncio.to_thread(call, "revoke", key.key_id, link, "--person", person)
        with pytest.raises(RemoteError) as caught:
            await world.client(key).join(request)
        assert caught.value.code is ErrorCode.REVOKED
        words = ["identity", "revoke", load_key(person).key_id, link, "--person", str(person)]
        refused = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert (refused.exit_code, "has not joined" in refused.output) == (4, True)


async def test_no_run_keeps_a_revocation_from_the_others(tmp_path: Path) -> None:
    """Before, a run that refused, or a coordinator that was down, ended the command with a traceback before the next run."""
    person, own = tmp_path / "person.key", tmp_path / "identity.key"
    call("new", person)
    call("authorise", "--person", person, "--identity", own)
    async with running(memory_parts(make_run())) as world, running(memory_parts(make_run())) as stranger:
        key, links = load_key(own), [f"{each.url}/#{each.run.digest}" for each in (stranger, world)]
        text = delegation_for(own, key, world.run.digest)
        request = JoinRequest(name="rig", software="1", engine=ENGINE, rollouts_max=8, delegation=text)
        await world.client(key).join(request)
        words = ["identity", "revoke", key.key_id, f"http://127.0.0.1:1/#{'0' * 64}", *links, "--person", str(person)]
        result = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert result.exit_code == 6
        assert sorted(line.partition(" ")[0] for line in result.output.splitlines()) == ["NOT", "NOT", "revoked"]
        with pytest.raises(RemoteError) as caught:
            await world.client(key).join(request)
        assert caught.value.code is ErrorCode.REVOKED
