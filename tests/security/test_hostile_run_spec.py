"""A hostile RunSpec that is signed and pinned by its join link. Only `config.json` and similar names become files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.builder import build_spec, role_keys
from tests.security.hostile_world import NEVER, NO_MODEL_FILES

from prime_node.broadcast.follow import pinned
from prime_node.broadcast.follow.pinned import fetch_model_files, model_files_in
from prime_node.inside import read_inside, write_inside
from prime_protocol import names
from prime_protocol.assignment import Sampling
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, parse_json, seal
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.names import file_name
from prime_protocol.run_spec import EnvironmentSpec, ModelFile, PinnedRun, RunSpec, open_run_spec

ROOT = SigningKey(b"\1" * 32)
CONFIG = b"{}"
DATA = b"#!/bin/sh\necho written by a stranger\n"

MODEL_FILES = [
    "tokenizer.json",
    "chat_template.jinja",
    "merges.txt",
    "tokenizer.model",
    "README.md",
    "_x-1.2.json",
    "console.json",
    "com10.json",
    "x" * 195 + ".json",
    "a..b.json",
]


def spec() -> RunSpec:
    return build_spec(
        role_keys(ROOT, ROOT, ROOT, ROOT),
        {"config.json": CONFIG},
        vocab_size=264,
        environments=(EnvironmentSpec(name="spell", id="reasoning_gym", options={"task": "x", "n": 1, "p": 0.5}),),
        sampling=Sampling(completion_tokens_max=4, stop_token_ids=(1,)),
    )


def opened(fields: Any) -> PinnedRun:
    """Open it as `join` does: it has its root's signature and the link's digest."""
    envelope = seal(json.dumps(fields).encode(), PayloadType.RUN_SPEC, ROOT)
    return open_run_spec(envelope, pinned=envelope.digest)


def with_file(name: str) -> Any:
    fields = spec().model_dump(mode="json")
    fields["model_files"].append({"name": name, "digest": digest_of(DATA), "size": len(DATA)})
    return fields


def unchecked(name: str) -> PinnedRun:
    """A run as it would be if the pattern of ModelFile were not applied."""
    file = ModelFile.model_construct(name=name, digest=digest_of(DATA), size=len(DATA))
    run = opened(spec().model_dump(mode="json"))
    return PinnedRun(run.digest, run.spec.model_copy(update={"model_files": (file,)}), run.envelope)


class Source:
    """Any source of the blob."""

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        return DATA


def all_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", NO_MODEL_FILES)
def test_a_run_with_a_hostile_file_name_is_refused_before_anything_is_fetched(name: str) -> None:
    with pytest.raises(RemoteError) as caught:
        opened(with_file(name))
    assert caught.value.code is ErrorCode.WRONG_TYPE


@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_run_may_have_files_of_plain_names(name: str) -> None:
    assert opened(with_file(name)).spec.model_files[1].name == name


@pytest.mark.parametrize("name", ["Config.json", "CONFIG.JSON", "config.json"])
def test_two_files_whose_names_some_disk_takes_for_one_are_refused(name: str) -> None:
    with pytest.raises(RemoteError):
        opened(with_file(name))


@pytest.mark.parametrize("name", [name for name in NO_MODEL_FILES if set(name) & NEVER or set(name) <= {"."}])
def test_the_one_function_refuses_it_too(name: str) -> None:
    with pytest.raises(RemoteError):
        file_name(name)


@pytest.mark.parametrize("name", [*(n for n in NO_MODEL_FILES if "/" in n or "\0" in n), "..", ".", "/tmp/x.json"])
async def test_without_the_pattern_and_the_one_function_still_nothing_is_written_outside(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_node.inside.file_name", lambda name: name)
    model = tmp_path / "home" / "state" / "model"
    model.mkdir(parents=True)
    before = all_below(tmp_path)
    with pytest.raises((RemoteError, OSError)):
        await fetch_model_files([Source()], unchecked(name), model)  # type: ignore[list-item]
    assert all_below(tmp_path) == before


@pytest.mark.parametrize("name", ["../x.json", "x.py", "con.json"])
async def test_without_the_pattern_the_writer_refuses_the_name(name: str, tmp_path: Path) -> None:
    """`x.py` is a name of one file, so the pattern alone keeps it out; the others the writer knows itself."""
    fetching = fetch_model_files([Source()], unchecked(name), tmp_path / "model")  # type: ignore[list-item]
    if name == "x.py":
        assert (await fetching / name).read_bytes() == DATA
    else:
        with pytest.raises(RemoteError):
            await fetching
        assert all_below(tmp_path) <= {"model"}


async def test_a_file_that_is_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "authorized_keys"
    outside.write_text("mine")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").symlink_to(outside)
    await fetch_model_files([Source()], unchecked("tokenizer.json"), tmp_path / "model")  # type: ignore[list-item]
    assert outside.read_text() == "mine"
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == DATA
    assert not (tmp_path / "model" / "tokenizer.json").is_symlink()


async def test_no_model_file_of_another_run_that_used_the_folder_before_stays(tmp_path: Path) -> None:
    """Before, its chat template, which the run does not list, made the prompts of the next run."""
    model = tmp_path / "model"
    for name in ("chat_template.jinja", "added_tokens.json", "tokenizer.json"):
        await fetch_model_files([Source()], unchecked(name), model)  # type: ignore[list-item]
    (model / "model.safetensors.index.json").write_text("{}")  # no run lists it
    (model / "weights").mkdir()
    await fetch_model_files([Source()], unchecked("tokenizer.json"), model)  # type: ignore[list-item]
    assert all_below(model) == {"tokenizer.json", "model.safetensors.index.json", "weights"}


async def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "home"
    outside.mkdir()
    (tmp_path / "model").symlink_to(outside)
    with pytest.raises(OSError, match=r".+"):
        await fetch_model_files([Source()], unchecked("tokenizer.json"), tmp_path / "model")  # type: ignore[list-item]
    assert not list(outside.iterdir())


def test_a_model_file_is_read_only_if_it_is_a_file_of_the_run(tmp_path: Path) -> None:
    run = opened(spec().model_dump(mode="json"))
    secret = tmp_path / "secret"
    secret.write_bytes(CONFIG)
    (tmp_path / "config.json").symlink_to(secret)
    with pytest.raises(LocalError, match="is not the file that the run names"):
        model_files_in(tmp_path, run)
    (tmp_path / "config.json").unlink()
    write_inside(tmp_path, "config.json", b"other")
    with pytest.raises(LocalError):
        model_files_in(tmp_path, run)
    write_inside(tmp_path, "config.json", CONFIG)
    assert model_files_in(tmp_path, run) == {"config.json": CONFIG}
    assert read_inside(tmp_path, "config.json", bytes_max=1) is None


class HostileCoordinator(BaseHTTPRequestHandler):
    run = b""

    def do_GET(self) -> None:
        body = self.run if self.path.startswith("/v1/run") else DATA
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Do nothing: this is the attacker's."""


@pytest.mark.timeout(240)  # a home without compiled kernels: they are compiled first
@pytest.mark.parametrize("name", ["../../x.json", "/x.json"])
def test_join_writes_nothing_for_a_hostile_run(name: str, tmp_path: Path) -> None:
    """The attack as it was found, by a real server and a real process."""
    if name.startswith("/"):
        name = f"{tmp_path}{name}"
    envelope = seal(json.dumps(with_file(name)).encode(), PayloadType.RUN_SPEC, ROOT)
    handler = type("Handler", (HostileCoordinator,), {"run": envelope.to_bytes()})
    home = tmp_path / "a" / "b" / "home"
    home.mkdir(parents=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = subprocess.run(
            [sys.executable, "-m", "prime_node", "join", f"http://127.0.0.1:{server.server_port}/#{envelope.digest}"],
            capture_output=True, check=False, timeout=200, text=True, stdin=subprocess.DEVNULL, cwd=home,
            env={**os.environ, "HOME": str(home)},
        )  # fmt: skip
        server.shutdown()
    assert done.returncode == 4, done.stderr
    assert "RunSpec.model_files.1.name" in done.stderr
    outside = {place for place in all_below(tmp_path) if not place.startswith("a/b/home/.")}
    assert outside == {"a", "a/b", "a/b/home"}
    assert not [place for place in all_below(home) if place.endswith((".py", "x.json", ".bashrc"))]


def test_the_spec_states_the_patterns_of_the_code() -> None:
    text = (Path(__file__).parents[2] / "protocol" / "SPEC.md").read_text(encoding="utf-8")
    for pattern in (names.FILE_NAME, names.MODEL_FILE_NAME):
        assert f"`{pattern[1:-1]}`" in text


ODD: list[Any] = [
    None, True, -1, 0, 1.5, 10**400, -(10**400), 1e308, -1e308, 2**53 + 1, "", "\x00", "\x1b[31m", "../../x", "x" * 100_000,
    "\u202e", "NaN", [], {}, [[]], [{}], {"": None}, {"x": {"x": {}}}, [None] * 300, {str(n): n for n in range(300)},
]  # fmt: skip


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, (*path, number))


def fault_of(fields: Any) -> str:
    """Return the error about a RunSpec; empty if it is accepted. Any other error than RemoteError fails the test."""
    try:
        parse_json(json.dumps(fields).encode(), RunSpec)
    except RemoteError as error:
        return error.detail
    return ""


def test_any_value_anywhere_in_a_run_spec_is_refused_or_read_without_another_error() -> None:
    fields = json.loads(spec().model_dump_json())
    fields |= {
        "schedule": {"preset": "areal", "max_head_offpolicyness": 1, "partial_rollout": True},
        "seed_chain": {"end": "ab" * 32, "length": 10},
        "adapters": {"base": "x", "base_root": "ab" * 32, "rank": 8, "alpha": 16.0},
    }
    fields["limits"]["extra"] = 1
    tried = 0
    for path in list(places(fields))[1:]:
        for odd in ODD:
            changed = json.loads(json.dumps(fields))
            target = changed
            for step in path[:-1]:
                target = target[step]
            target[path[-1]] = odd
            assert fault_of(changed).isprintable()
            tried += 1
    assert tried > 1_000


def test_pinned_writes_by_no_other_way() -> None:
    """The module that puts a run's files on a disk knows one writer."""
    source = Path(pinned.__file__).read_text(encoding="utf-8")
    assert "folder / file.name" not in source.replace('f"{folder / file.name} is not', "")
    for other in (".open(", "write_bytes", "write_text", "write_durably"):
        assert other not in source
