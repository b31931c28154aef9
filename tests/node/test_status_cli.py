"""`prime-node status`: the first screen of operators and contributors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from tests.node.coordinator_world import ANNA, BEN, HEARTBEAT, ROOT, folder_parts, make_run, memory_parts, running
from tests.node.operator_world import operate, run_dir_of
from typer.testing import CliRunner, Result

from prime_node.cli import place, run_status, status_view
from prime_node.cli import status as status_file
from prime_node.cli.main import app
from prime_node.cli.run_dir import RunDir
from prime_node.folder_lock import FolderLock
from prime_node.worker.status import Status, write_status
from prime_protocol.errors import LocalError
from prime_protocol.requests import WorkerState


def shown(*arguments: object) -> Result:
    """Return the command's output on a wide terminal. Raises what it raises."""
    words = ["status", *map(str, arguments)]
    return CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "240"})


async def text_of(*arguments: object) -> str:
    result = await asyncio.to_thread(shown, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


async def test_a_run_is_shown_by_its_folder_its_link_and_its_url(tmp_path: Path) -> None:
    async with running(memory_parts(make_run()), ANNA) as world:
        await world.client(ANNA).heartbeat(HEARTBEAT)
        for target in (run_dir_of(world, tmp_path).path, f"{world.url}/#{world.run.digest}", world.url):
            text = await text_of(target)
            assert "step 0 of" in text
            assert "policy 0" in text
            assert ANNA.key_id[-8:] in text
            assert "workers to request leases" in text


async def test_each_step_shows_how_long_its_policy_took_to_be_usable() -> None:
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        for worker, after_ms in ((ANNA, 1_200), (BEN, 3_400), (ROOT, 2_300)):
            await world.join(worker)
            beat = HEARTBEAT.model_copy(update={"policy_version": 0, "usable_after_ms": after_ms})
            await world.client(worker).heartbeat(beat)
        (line,) = [line.split() for line in (await text_of(world.url)).splitlines() if line.split()[:1] == ["0"]]
        assert line[-4:] == ["2.3", "to", "2.3", "s"]


async def test_a_ban_is_seen_at_once_with_its_reason(tmp_path: Path) -> None:
    async with running(memory_parts(make_run()), ANNA) as world:
        await world.join(BEN)
        place = run_dir_of(world, tmp_path)
        await operate("ban", place.path, BEN.key_id, "--reason", "noise in the cellar")
        text = await text_of(place.path)
        assert "was banned at step 0: noise in the cellar" in text
        raw = json.loads(await text_of(place.path, "--json"))
        assert [worker["worker"] for worker in raw["workers"] if worker["banned"]] == [BEN.key_id]
    with pytest.raises(LocalError, match="is the coordinator running") as away:
        await text_of(place.path)
    assert str(away.value).endswith(f"`prime-node coordinator {place.path}` starts it here")


async def test_the_folder_of_a_coordinator_that_does_not_run_is_read(tmp_path: Path) -> None:
    place = RunDir(tmp_path / "run")
    async with running(await folder_parts(make_run(), place.coordinator), ANNA, BEN) as world:
        run_dir_of(world, tmp_path)
        await operate("ban", place.path, BEN.key_id, "--reason", "noise in the cellar")
        await world.fill(0)
        await world.publish()
        shown_by_it = json.loads(await text_of(world.url, "--json"))
        assert shown_by_it["learning"]["step"] == 0
    raw = json.loads(await text_of(place.path, "--json"))
    assert raw["stopped"]
    own = {"stopped", "workers", "num_workers", "draining"}
    assert {name: value for name, value in raw.items() if name not in own} == {
        name: shown_by_it[name] for name in raw.keys() - own
    }
    text = await text_of(place.path)
    for line in ("not running here", "reward", "in step 0", "was banned at step 0: noise in the cellar", "to resume"):
        assert line in text
    async with running(memory_parts(make_run(name="another"))) as world:  # another run took its port
        place.join_link_file.write_text(f"{world.url}/#{make_run().digest}", encoding="utf-8")
        assert "not running here" in await text_of(place.path)
    lock = FolderLock(place.coordinator)
    place.join_link_file.write_text(f"http://127.0.0.1:9/#{make_run().digest}", encoding="utf-8")
    with pytest.raises(LocalError, match="is the coordinator running"):
        await text_of(place.path)
    lock.release()


async def test_another_run_at_the_address_of_a_link_is_reported_and_not_shown() -> None:
    async with running(memory_parts(make_run())) as world:
        with pytest.raises(LocalError, match="serves another run than the link names"):
            await text_of(f"{world.url}/#{'0' * 64}")


@contextlib.contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve requests by this handler; yield the server's URL."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def server_that_answers(
    body: bytes, *, is_http: bool = True, code: int = 200, date: str = "", location: str = ""
) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if is_http:
                self.send_response_only(code)
                self.send_header("Date", date or self.date_time_string())
                self.send_header("Content-Length", str(len(body)))
                if location:
                    self.send_header("Location", location)
                self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    with listening(Handler) as url:
        yield url


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b"[" * 100_000, b"\xff\xfe", b'{"run": 5}', b'{"workers": 3}'])
def test_an_answer_that_is_no_status_is_reported(body: bytes) -> None:
    with (
        server_that_answers(body) as url,
        pytest.raises(LocalError, match=r"cannot read a status|the status from .* is invalid"),
    ):
        shown(url)


@pytest.mark.parametrize(
    "date", ["now", "Mon, 01 Jan 99999999999999999999 00:00:00 GMT", f"1 Jan 2026 0:0 +{'9' * 30}"]
)
def test_doctor_shows_nothing_that_steers_a_terminal_and_takes_no_date_that_is_none(date: str) -> None:
    status = {"run": "0" * 64, "name": "\x1b[2Jred", "step": 1, "head": 1, "max_steps": 5}
    with server_that_answers(json.dumps(status).encode(), date=date) as url:
        ran = CliRunner().invoke(app, ["doctor", "--no-measure", f"{url}/#{'0' * 64}"])
    assert "ok  coordinator    run 000000000000 '?[2Jred', step 1 of 5" in ran.stdout
    assert "clock" not in ran.stdout
    assert (ran.exit_code, ran.exception) == (0, None)


@pytest.mark.parametrize(
    "changes", [{"workers": [{"worker": "x", "refused": {"\x1b[2J": "many"}}]}, {"run": "\x1b[2J" + "0" * 60}]
)
def test_a_fault_of_a_status_is_reported_without_control_characters(changes: dict[str, object]) -> None:
    body = json.dumps({"run": "0" * 64, "step": 1, "head": 1, "max_steps": 5, **changes}).encode()
    with server_that_answers(body) as url, pytest.raises(LocalError) as caught:
        shown(f"{url}/#{'0' * 64}")
    assert str(caught.value).isprintable()
    assert "?[2J" in str(caught.value)


def test_a_server_that_is_no_coordinator_is_named_by_its_answer() -> None:
    with (
        server_that_answers(b"", code=404) as url,
        pytest.raises(LocalError, match=r"HTTP 404 .*: is it the address of a"),
    ):
        shown(url)
    with (
        server_that_answers(b"<html>") as url,
        pytest.raises(LocalError, match="not valid: is it the address of a"),
    ):
        shown(url)


def test_a_redirect_is_not_followed() -> None:
    """It could lead to the router or the metadata service of the machine that asks."""
    genuine = json.dumps({"run": "0" * 64, "step": 0, "head": 0, "max_steps": 1}).encode()
    with (
        server_that_answers(genuine) as other,
        server_that_answers(b"", code=302, location=f"{other}/v1/status") as url,
        pytest.raises(LocalError, match="redirects"),
    ):
        shown(url)


def test_an_answer_that_arrives_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_status, "WHOLE_S_MAX", -1.0)
    with server_that_answers(b"{}") as url, pytest.raises(LocalError, match="took longer than"):
        shown(url)


@contextlib.contextmanager
def server_whose_header_never_ends() -> Iterator[str]:
    """Return the URL of a server that sends one byte of a header line at a time."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nServer: ")
            with contextlib.suppress(OSError):
                while not ended.wait(0.02):
                    self.wfile.write(b"a")

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    with listening(Handler) as url:
        try:
            yield url
        finally:
            ended.set()


def test_a_header_that_drips_for_ever_holds_neither_status_nor_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_status, "ANSWER_S_MAX", 0.2)
    with server_whose_header_never_ends() as url:
        with pytest.raises(LocalError, match="no answer, or an answer without progress"):
            shown(url)
        assert run_status.clock_ahead_s(url) is None


def test_a_server_without_http_is_reported_as_no_status() -> None:
    with (
        server_that_answers(b"SSH-2.0-OpenSSH_9.6\r\n", is_http=False) as url,
        pytest.raises(LocalError, match="cannot read a status"),
    ):
        shown(url)


def test_a_status_beyond_the_bound_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_status, "STATUS_BYTES_MAX", 100)
    body = json.dumps({"run": "0" * 64, "step": 0, "head": 0, "max_steps": 1, "name": "n" * 100}).encode()
    with server_that_answers(body) as url, pytest.raises(LocalError, match="cannot read a status"):
        shown(url)


def test_a_status_of_many_small_parts_does_not_fill_the_memory() -> None:
    """Before, 14 MiB of `{"step":1},` took a gibibyte, also of `doctor`."""
    body = b'{"run": "%b", "step": 0, "head": 0, "max_steps": 1, "steps": [{"step":1}%b]}'
    for copies, is_shown in ((1_000, True), (1_300_000, False)):
        refused = contextlib.nullcontext() if is_shown else pytest.raises(LocalError, match="cannot read a status")
        with server_that_answers(body % (b"0" * 64, b',{"step":1}' * copies)) as url, refused:
            shown(url)


def test_a_hostile_coordinator_controls_no_terminal() -> None:
    worker = {"worker": "1\x1b[2J", "name": "\x1b]0;owned\x07", "waiting_for": "\x1b[31m", "refused": {"\x1b[5m": 1}}
    body = json.dumps(
        {
            "run": "0" * 64, "step": 0, "head": 0, "max_steps": 1, "name": "\x1b[2J", "waiting_for": ["\u202egnal"],
            "rollouts": {"accepted": 1, "refused": {"\x1b[5m": 3}}, "workers": [{**worker, "active": True}], "num_workers": 1,
        }
    ).encode()  # fmt: skip
    with server_that_answers(body) as url:
        result = shown(url)
        raw = shown(url, "--json")
    for text in (result.stdout, raw.stdout):
        assert not set(text) & {"\x1b", "\x07", "\u202e"}
    assert "?]0;owned?" in result.stdout


ONE = Status(
    worker=ANNA.key_id, state=WorkerState.GENERATING, policy_version=41, head=42, step=42, tokens_per_s=812.0,
    rollouts_generated=10, rollouts_accepted=1_024, rollouts_pending=8, tokens_accepted=65_536, refused={"stale": 3},
    bundles_spooled=2, swarm="2 peers", notice="come again",
)  # fmt: skip


def write(folder: Path, status: Status) -> Path:
    folder.mkdir(parents=True)
    write_status(folder / "status.json", status)
    return folder


LONG = 100_000


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": [{"step": 1}] * LONG},
        {"waiting_for": ["nothing"] * LONG},
        {"validators": {"differing": [{"how": "so"}] * LONG}},
        {"rollouts": {"refused": {f"reason {number}": 1 for number in range(LONG)}}},
        {"workers": [{"worker": "key"}] * LONG},
        {"usable": [{"policy_version": 1, "workers": 1, "median_s": 1.0, "most_s": 1.0}] * LONG},
        {"stopped": True, "learning": {"at": math.inf}},
        {"stopped": True, "learning": {"at": math.nan}},
    ],
    ids=["steps", "waits", "validators", "reasons", "workers", "policies", "inf", "nan"],
)
def test_a_coordinator_s_lists_are_shown_as_far_as_a_screen_goes(changes: dict[str, object]) -> None:
    """Before, a status of 16 MiB was laid out for an hour, and a date without a number was a traceback."""
    parsed = run_status.RunStatus.model_validate({"run": "a" * 64, "step": 1, "head": 1, "max_steps": 2} | changes)
    console = Console(file=io.StringIO(), width=100)
    console.print(status_view.of_run(parsed))
    assert isinstance(console.file, io.StringIO)
    assert len(console.file.getvalue().splitlines()) < 200


def test_of_the_steps_that_are_trained_only_the_last_few_are_shown() -> None:
    trained = [{"step": number, "accepted": 4, "trained": 4} for number in range(12)]
    steps = [*trained, {"step": 12, "accepted": 4}, {"step": 13, "open": 3, "leased": 1}]
    run = {"run": "a" * 64, "step": 12, "head": 12, "max_steps": 20, "steps": steps}
    console = Console(file=io.StringIO(), width=100)
    console.print(status_view.of_run(run_status.RunStatus.model_validate(run)))
    assert isinstance(console.file, io.StringIO)
    first = [line.split()[0] for line in console.file.getvalue().splitlines() if line.split()]
    assert [int(word) for word in first if word.isdigit()][:5] == [9, 10, 11, 12, 13]


def test_a_contributor_sees_what_this_machine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_file, "HOME", tmp_path)
    monkeypatch.setattr(place, "HOME", tmp_path)
    with pytest.raises(LocalError, match="no worker has run here"):
        shown()
    now_ms = time.time_ns() // 1_000_000
    placed = dataclasses.replace(ONE, rank=3, contributors=41, share=0.125, person="12D3KooWperson99")
    write(tmp_path / "runs/aaaa", dataclasses.replace(placed, at_ms=now_ms - 2_000))
    write(tmp_path / "runs/bbbb", dataclasses.replace(ONE, at_ms=now_ms - 3 * 3_600_000))
    write(tmp_path / "runs/cccc", dataclasses.replace(ONE, at_ms=now_ms - 3 * 3_600_000, ended="drained"))
    text = shown().stdout
    assert "policy 41 of 42 | 812 tokens/s" in text
    assert "65,536 tokens; 8 rollouts have no verdict yet" in text
    assert "bundles that wait to be uploaded: 2" in text
    assert "place 3 of 41 by tokens, 12.5 % of all; all machines of person person99" in text
    assert "last update 3 h ago" in text
    assert "ended: drained" in text
    one = shown(tmp_path / "runs/aaaa", "--json")
    assert json.loads(one.stdout)[str(tmp_path / "runs/aaaa")]["head"] == 42


def test_a_notice_that_repeats_what_the_worker_waits_for_is_shown_once(tmp_path: Path) -> None:
    status = dataclasses.replace(ONE, at_ms=time.time_ns() // 1_000_000, waiting_for=ONE.notice)
    text = shown(write(tmp_path / "worker", status)).stdout
    assert text.count(ONE.notice) == 1


def test_a_file_that_is_no_status_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "worker", ONE)
    (folder / "status.json").write_text('{"worker": 1}')
    with pytest.raises(LocalError, match="is not a worker's status file"):
        shown(folder)


def test_a_folder_without_a_run_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no run"):
        shown(tmp_path)


def test_watching_needs_a_terminal(tmp_path: Path) -> None:
    folder = write(tmp_path / "worker", ONE)
    with pytest.raises(LocalError, match="needs a terminal"):
        shown(folder, "--watch")
