"""The files that environments may open follow from the machine's own settings: nothing in a RunSpec adds to them (finding E2)."""

from __future__ import annotations

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from prime_node.adapters.environments.data_files import find_file, hub_file
from prime_node.cli.wire_environments import start_environments, with_file_at_hand
from prime_node.envs.grants import grant_of, is_granted
from prime_node.envs.settings import EnvironmentSettings
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import EnvironmentSpec

ROWS = "".join(f'{{"question": "{n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(50))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with one dataset, next to a key."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "sums.jsonl").write_text(ROWS)
    (tmp_path / "trainer.key").write_text("secret")
    return folder


def spec_of(path: str, text: str = ROWS, **options: str) -> EnvironmentSpec:
    return EnvironmentSpec(
        name="sums", id="jsonl", options={"path": path, "digest": digest_of(text.encode()), **options}
    )


def test_a_dataset_is_found_below_the_data_folder_of_the_machine(data: Path) -> None:
    settings = EnvironmentSettings(data_folder=data)
    assert with_file_at_hand(spec_of("sums.jsonl"), settings).options["path"] == str(data / "sums.jsonl")
    with pytest.raises(LocalError, match=r"set environments\.data_folder"):
        with_file_at_hand(spec_of("sums.jsonl"), EnvironmentSettings())


@pytest.mark.parametrize(
    "path", ["../trainer.key", "x/../../trainer.key", "link", "folder-link/trainer.key", "{root}/trainer.key"]
)
def test_a_path_out_of_the_data_folder_is_refused(data: Path, path: str) -> None:
    (data / "x").mkdir()
    (data / "link").symlink_to("../trainer.key")
    (data / "folder-link").symlink_to(data.parent)
    with pytest.raises(ValueError, match="leads out of"):
        find_file(path.format(root=data.parent), data)


@pytest.mark.parametrize("path", ["", ".", "loop", "pipe", "nul\0", "missing"])
def test_a_path_that_is_no_file_is_refused(data: Path, path: str) -> None:
    (data / "loop").symlink_to("loop")
    os.mkfifo(data / "pipe")
    with pytest.raises((ValueError, OSError)):
        find_file(path, data)


def test_a_data_folder_that_holds_keys_does_not_give_them(data: Path) -> None:
    with pytest.raises(ValueError, match="holds keys"):
        find_file("trainer.key", data.parent, hidden=[data.parent / "trainer.key"])


def test_a_file_is_granted_only_to_a_run_that_knows_its_bytes(data: Path) -> None:
    (data / "diary.txt").write_text("dear diary")
    with pytest.raises(LocalError, match="has digest"):
        with_file_at_hand(spec_of("diary.txt", "what the run's maker guesses"), EnvironmentSettings(data_folder=data))


def test_options_of_other_implementations_grant_nothing(data: Path) -> None:
    spec = EnvironmentSpec(name="gym", id="reasoning_gym", options={"task": "spell_backward", "path": str(data.parent)})
    assert with_file_at_hand(spec, EnvironmentSettings()) == spec


def test_a_second_environment_with_a_wide_path_ends_the_start(data: Path, tmp_path: Path) -> None:
    wide = EnvironmentSpec(name="wide", id="jsonl", options={"path": "/", "digest": "0" * 64})
    with pytest.raises(LocalError, match="leads out of"):
        start_environments(
            [spec_of("sums.jsonl"), wide], tmp_path, hidden=[], settings=EnvironmentSettings(data_folder=data)
        )


@pytest.mark.parametrize(
    "path",
    [
        "hf://datasets/us/../../x",
        "hf://datasets/../us/x",
        "hf://datasets/us/sums/../../../../token",
        "hf://datasets/us/sums@../x",
        "hf://datasets/us/sums/.hidden",
        "hf://datasets/us/sums//etc/passwd",
        "hf://datasets/us/sums/a\nb",
    ],
)
def test_a_path_of_the_hub_is_made_of_plain_names(path: str) -> None:
    with pytest.raises(ValueError, match="without leading dots"):
        hub_file(path, bytes_max=1)


def test_a_file_of_the_hub_is_not_fetched_where_the_settings_forbid_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[str | None] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            tokens.append(self.headers.get("authorization"))
            self.send_response(200)
            for name, value in (("ETag", '"x"'), ("X-Repo-Commit", "0" * 40), ("Content-Length", str(2**40))):
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as hub:
        Thread(target=hub.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{hub.server_port}"
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        with pytest.raises(ValueError, match="hub_file_bytes_max"):
            hub_file("hf://datasets/us/sums/train.jsonl", bytes_max=2**30)
        hub.shutdown()
    assert tokens == [None], "the user's token stays here"


def test_a_relative_data_folder_is_refused() -> None:
    with pytest.raises(LocalError, match="absolute"):
        EnvironmentSettings.load({"environments": {"data_folder": "data"}})


SEARCH = EnvironmentSpec(
    name="search", id="verifiers", options={"taskset": "web_search", "judge": "https://judge.example"}
)


@pytest.mark.parametrize(
    "change",
    [
        {"id": "python"},
        {"options": {"taskset": "web_search", "judge": "https://thief.example"}},
        {"options": {"taskset": "other", "judge": "https://judge.example"}},
        {"options": {**SEARCH.options, "code_digest": "0" * 64}},
    ],
)
def test_a_grant_holds_for_no_other_environment_of_the_same_name(change: dict[str, object]) -> None:
    grants = (grant_of(SEARCH),)
    assert is_granted(SEARCH, grants, "unsafe_network")
    other = SEARCH.model_copy(update=change)
    with pytest.raises(LocalError, match=f"if you trust this one with it, write {grant_of(other)}"):
        is_granted(other, grants, "unsafe_network")
    assert is_granted(other, (*grants, grant_of(other)), "unsafe_network")
    assert not is_granted(other.model_copy(update={"name": "quiet"}), grants, "unsafe_network")


def test_a_name_alone_grants_nothing_and_the_error_says_what_to_write(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    settings = EnvironmentSettings(unsafe_network=("search",))
    with pytest.raises(
        LocalError, match=r"environments\.unsafe_network names search, and .* write search@[0-9a-f]{24}$"
    ):
        start_environments([SEARCH], tmp_path / "model", hidden=[], settings=settings)


def test_a_grant_outlives_new_rows_and_another_share_of_the_problems(data: Path) -> None:
    sums = spec_of("sums.jsonl")
    assert grant_of(spec_of("sums.jsonl", "other rows")) == grant_of(sums)
    assert grant_of(sums.model_copy(update={"weight": 2.0, "seed": 7})) == grant_of(sums)
    assert grant_of(spec_of("other.jsonl")) == grant_of(sums)
    assert grant_of(spec_of("sums.jsonl", compare="number")) != grant_of(sums)
