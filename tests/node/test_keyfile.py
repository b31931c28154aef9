"""Key files."""

from __future__ import annotations

import contextlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prime_node.folder_lock import FolderLock
from prime_node.keyfile import load_or_create
from prime_protocol.errors import LocalError


def test_first_use_makes_a_key_that_only_its_owner_can_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.key"
    key = load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_create(path).key_id == key.key_id
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["identity.id", "identity.key"]


def test_a_lost_key_is_not_replaced_by_another_identity(tmp_path: Path) -> None:
    path, away = tmp_path / "identity.key", tmp_path / "away"
    key = load_or_create(path)
    path.rename(away)
    for _ in range(2):
        with pytest.raises(LocalError, match=r"identity\.key: is missing, and \S+identity\.id names the key") as raised:
            load_or_create(path)
        assert "\n" not in str(raised.value)
        assert not path.exists()
    away.rename(path)
    assert load_or_create(path).key_id == key.key_id
    path.unlink()
    (tmp_path / "identity.id").unlink()
    assert load_or_create(path).key_id != key.key_id


def test_the_id_next_to_a_key_is_that_of_the_present_one(tmp_path: Path) -> None:
    first, second = load_or_create(tmp_path / "a.key"), load_or_create(tmp_path / "b.key")
    (tmp_path / "b.key").replace(tmp_path / "a.key")
    assert load_or_create(tmp_path / "a.key").key_id == second.key_id
    assert (tmp_path / "a.id").read_text().strip() == second.key_id != first.key_id


def test_two_identities_differ(tmp_path: Path) -> None:
    assert load_or_create(tmp_path / "a").key_id != load_or_create(tmp_path / "b").key_id


def test_processes_that_start_together_agree_on_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        keys = set(pool.map(lambda _: load_or_create(tmp_path / "key").key_id, range(64)))
    assert len(keys) == 1


def test_a_key_that_others_can_read_is_refused_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "key"
    load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(LocalError, match="chmod 600"):
        load_or_create(path)


@pytest.mark.parametrize("text", ["", "not hexadecimal", "ab" * 31, "ab" * 33, "é" * 64])
def test_a_damaged_key_is_never_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(LocalError, match="Put back your copy"):
        load_or_create(path)
    assert path.read_text(encoding="utf-8") == text


def test_no_changed_bit_makes_another_identity(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = load_or_create(path)
    written, found = path.read_bytes(), []
    for bit in range(8 * len(written)):
        changed = bytearray(written)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with contextlib.suppress(LocalError):
            found.append(load_or_create(path).key_id)
    assert set(found) <= {key.key_id}
    assert len(found) < 80, "capital letters and other spaces change nothing"


def test_a_key_that_was_written_without_a_check_is_read(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("ab" * 32 + "\n")
    path.chmod(0o600)
    assert load_or_create(path).to_bytes() == b"\xab" * 32
    assert path.read_text() == "ab" * 32 + "\n", "a key file is never written again"


def test_a_folder_in_place_of_the_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="not a regular file"):
        load_or_create(tmp_path)


def test_a_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    load_or_create(path)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(LocalError, match="another user"):
        load_or_create(path)


def test_a_second_worker_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    with pytest.raises(LocalError, match="already uses it"):
        FolderLock(tmp_path)
    first.release()
    FolderLock(tmp_path).release()
