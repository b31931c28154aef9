"""A model that a stranger made costs who reads it no time or memory without bound, and publishes no other file of the machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_node.adapters.models.model_folder import FILE_BYTES_MAX
from prime_node.adapters.models.pretrained_model import folder_weights, pretrained_model_files, pretrained_weights
from prime_node.broadcast.audit.safetensors_file import (
    FILES_MAX,
    HEADER_BYTES_MAX,
    INDEX_BYTES_MAX,
    INDEX_FILE,
    read_weights,
    write_safetensors,
)
from prime_node.cli.wire_sandbox import worker_needs
from prime_node.envs.settings import EnvironmentSettings
from prime_node.worker.config import WorkerConfig
from prime_protocol.errors import LocalError
from prime_protocol.weights import empty_like

ONE = {"a": empty_like("bf16", (1,))}


def sparse(path: Path, num_bytes: int, start: bytes = b"") -> None:
    """Write a file that takes no room on the disk."""
    with path.open("wb") as file:
        file.write(start)
        file.truncate(num_bytes)


def index(folder: Path, files: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files}))


def long_header(folder: Path) -> None:
    num_bytes = HEADER_BYTES_MAX + 1
    sparse(folder / "a.safetensors", 8 + num_bytes, num_bytes.to_bytes(8, "little"))


def deep_header(folder: Path) -> None:
    text = b'{"a":' + b"[" * 60 + b"]" * 60 + b"}"
    (folder / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def two_of_one_name(folder: Path) -> None:
    entry = '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    text = f"{{{entry},{entry}}}".encode()
    (folder / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"x")


def link_out(folder: Path) -> None:
    (folder.parent / "private").mkdir()
    write_safetensors(folder.parent / "private" / "a.safetensors", ONE)
    (folder / "a.safetensors").symlink_to("../private/a.safetensors")


def blobs_elsewhere(folder: Path) -> None:
    """Make it look like a snapshot in the cache of the hub, whose blobs are another folder."""
    (folder.parent / "private").mkdir()
    write_safetensors(folder.parent / "private" / "a.safetensors", ONE)
    (folder.parent.parent / "blobs").symlink_to(folder.parent / "private")
    (folder / "a.safetensors").symlink_to("../../blobs/a.safetensors")


def circle(folder: Path) -> None:
    (folder / "a.safetensors").symlink_to("b.safetensors")
    (folder / "b.safetensors").symlink_to("a.safetensors")


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "an endless index": (lambda at: sparse(at / INDEX_FILE, INDEX_BYTES_MAX + 1), "is not an index .* has more than"),
    "a pipe as an index": (lambda at: os.mkfifo(at / INDEX_FILE), "is not an index .* not a file"),
    "an index that is a device": (lambda at: (at / INDEX_FILE).symlink_to("/dev/zero"), "is a link out of the folder"),
    "an index of too many files": (lambda at: index(at, dict.fromkeys(map(str, range(FILES_MAX + 1)))), "no text"),
    "too many files": (lambda at: index(at, {str(n): str(n) for n in range(FILES_MAX + 1)}), "the most is 4,096"),
    "the folder above": (lambda at: index(at, {"a": ".."}), "outside the folder"),
    "half a name": (lambda at: index(at, {"a": "b\0.safetensors"}), r"b\?\.safetensors is outside"),
    "a pipe": (lambda at: os.mkfifo(at / "a.safetensors"), "is not a safetensors file: .* not a file"),
    "a long header": (long_header, "its header has 16,777,217 bytes"),
    "a deep header": (deep_header, "JSON_DEPTH_MAX"),
    "two tensors of one name": (two_of_one_name, "not valid JSON: duplicate key"),
    "a link to a private file": (link_out, "a.safetensors is a link out of the folder.*`cp -rL`"),
    "a false cache of the hub": (blobs_elsewhere, "a.safetensors is a link out of the folder"),
    "a circle of links": (circle, "a.safetensors"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("make", "why"), FOLDERS.values(), ids=FOLDERS)
def test_a_hostile_folder_of_weights_is_refused(tmp_path: Path, make: Callable[[Path], object], why: str) -> None:
    """Before, an index of any size was read whole, a pipe was waited for, and links led everywhere."""
    folder = tmp_path / "snapshots" / "model"
    folder.mkdir(parents=True)
    make(folder)
    for read in (read_weights, folder_weights):
        with pytest.raises(LocalError, match=why):
            read(folder)


def test_no_word_of_a_file_controls_the_terminal(tmp_path: Path) -> None:
    name = "\x1b]0;owned\x07" + "a" * 1_000
    header = json.dumps({name: {"dtype": "BF16", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"xx")
    with pytest.raises(LocalError, match=r"\?\]0;owned\?a+ has not as many bytes") as refused:
        read_weights(tmp_path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < len(str(tmp_path)) + 400
    for file in ("one", "two"):
        write_safetensors(tmp_path / f"{file}.safetensors", {name: ONE["a"]})
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(LocalError, match="is in two files") as refused:
        read_weights(tmp_path)
    assert str(refused.value).isprintable()


def test_a_snapshot_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    folder.mkdir(parents=True)
    write_safetensors(blobs / "ab", ONE)
    (folder / "model.safetensors").symlink_to("../../blobs/ab")
    (tmp_path / "mine").symlink_to(folder)
    assert read_weights(tmp_path / "mine").keys() == {"a"}
    assert read_weights(folder / "model.safetensors").keys() == {"a"}


def test_no_file_outside_a_model_s_folder_is_published_with_it(tmp_path: Path) -> None:
    """Before, a link named chat_template.jinja put the key that it led to into the run, for all to read."""
    (tmp_path / "id_ed25519").write_text("a private key")
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    assert len(pretrained_model_files(str(folder))) == 3
    (folder / "chat_template.jinja").symlink_to("../id_ed25519")
    with pytest.raises(LocalError, match=r"chat_template\.jinja is a link out of the folder"):
        pretrained_model_files(str(folder))
    (folder / "chat_template.jinja").unlink()
    sparse(folder / "merges.txt", FILE_BYTES_MAX["merges.txt"] + 1)
    with pytest.raises(LocalError, match="has more than 67,108,864 bytes"):
        pretrained_model_files(str(folder))


def test_weights_may_be_on_another_disk_where_nothing_of_the_folder_is_published(tmp_path: Path) -> None:
    """Before, a contributor's own base model was refused too."""
    disk, folder = tmp_path / "disk", tmp_path / "model"
    disk.mkdir()
    folder.mkdir()
    write_safetensors(disk / "one", ONE)
    (folder / "model.safetensors").symlink_to(disk / "one")
    assert pretrained_weights(str(folder), follows_links=True).keys() == {"a"}
    needs = worker_needs(WorkerConfig(base_model=str(folder)), EnvironmentSettings(), None)
    assert {folder, disk / "one"} <= set(needs.read), "the confined worker may read it"
    with pytest.raises(LocalError, match="is a link out of the folder"):
        pretrained_weights(str(folder))
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../disk/one"}}')
    with pytest.raises(LocalError, match="outside the folder"):
        pretrained_weights(str(folder), follows_links=True)


@pytest.mark.timeout(60)
def test_a_shape_of_a_million_dimensions_is_refused_before_they_are_multiplied(tmp_path: Path) -> None:
    """Before, a file of 2 MB took two minutes, and one of 20 MB three hours."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [9] * 1_000_000, "data_offsets": [0, 0]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(LocalError, match="dimensions"):
        read_weights(path)
