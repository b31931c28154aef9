"""Mistakes of users and damaged files end in one line that names the file or the setting."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread

import pytest
from tests.node.coordinator_world import make_run
from typer.testing import CliRunner

from prime_node.adapters.storage.sqlite_store import open_sqlite
from prime_node.cli import doctor
from prime_node.cli.main import app
from prime_node.cli.missing_extra import how_to_install
from prime_node.cli.options import Options
from prime_node.cli.run_dir import RunDir
from prime_node.cli.run_trial import Finding
from prime_node.cli.wire_store import open_blobs, open_database, read_store
from prime_protocol.errors import LocalError

NOWHERE = f"http://127.0.0.1:1/#{'0' * 64}"


def error_of(*arguments: str) -> str:
    """Return the error that ends a command."""
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, LocalError), error
    return str(error)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Folder of a run."""
    found = RunDir(tmp_path / "run")
    found.path.mkdir()
    found.run_spec.write_bytes(make_run().envelope.to_bytes())
    found.config.write_text("[trainer]\nseed = 7\n")
    found.overrides_file.write_text("run.max_steps=3\n")
    return found


@pytest.mark.parametrize("text", ["garbage", '{"x": 1}', ""])
def test_a_damaged_description_of_a_run_is_named(run_dir: RunDir, text: str) -> None:
    run_dir.run_spec.write_text(text)
    with pytest.raises(LocalError, match=r"run\.json is damaged"):
        run_dir.load_run()
    assert f"{run_dir.run_spec} is damaged" in error_of("coordinator", str(run_dir.path))


async def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    path.write_text("garbage " * 100)
    with pytest.raises(LocalError, match=r"state\.sqlite cannot be used \(file is not a database\)"):
        await open_sqlite(path, run="ab" * 32)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("mysql://db/mine", 'expected "sqlite" or "postgresql://user@host/database"'),
        ("postgresql://prime:hunter2@db/mine", "must hold no password: set PGPASSWORD"),
        ("postgresql://db/mine?password=hunter2", "must hold no password: set PGPASSWORD"),
        ("postgresql://db/mine?sslkey=/k&sslpassword=hunter2", "must hold no password: set PGPASSWORD"),
        ("postgresql://db/mine?PassWord=hunter2", "must hold no password: set PGPASSWORD"),
        ("postgresql:prime:hunter2@db/mine", 'expected "sqlite" or "postgresql://user@host/database"'),
        ("postgresql://prime/hunter2@db/mine", 'expected "sqlite" or "postgresql://user@host/database"'),
    ],
)
def test_a_store_that_cannot_be_is_refused_without_showing_a_password(
    run_dir: RunDir, store: str, message: str
) -> None:
    error = error_of("coordinator", str(run_dir.path), "--set", f"coordinator.store={store}")
    assert f"[coordinator] store: {message}" in error.replace("Value error, ", "")
    assert "hunter2" not in error


@pytest.mark.parametrize(
    ("blobs", "message"),
    [
        ("gs://bucket", 'expected "folder" or "s3://bucket/prefix"'),
        ("s3://", 'expected "folder" or "s3://bucket/prefix"'),
        ("s3://key:hunter2@bucket/x", "must hold no credentials: set AWS_ACCESS_KEY_ID"),
    ],
)
def test_blobs_that_cannot_be_are_refused_without_showing_a_secret(run_dir: RunDir, blobs: str, message: str) -> None:
    error = error_of("coordinator", str(run_dir.path), "--set", f"coordinator.blobs={blobs}")
    assert f"[coordinator] blobs: {message}" in error.replace("Value error, ", "")
    assert "hunter2" not in error


async def test_blobs_in_s3_without_its_client_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "prime_node.adapters.storage.s3_blobs", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(LocalError, match="blobs in S3 need the extra 's3'"):
        await open_blobs("s3://bucket/x", make_run(), tmp_path)


async def test_a_store_in_postgresql_without_its_driver_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "prime_node.adapters.storage.postgres_store", raising=False)
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    for opened in (open_database, read_store):
        with pytest.raises(LocalError, match="stores in PostgreSQL need the extra 'postgres'"):
            await opened("postgresql://db/mine", make_run(), tmp_path)


def test_a_setting_of_a_signed_run_is_refused_by_each_role(run_dir: RunDir) -> None:
    with pytest.raises(LocalError, match=r"signed and fixed: --set run\.\*"):
        Options.of_run(str(run_dir.path), None, ["run.max_steps=10"])
    options = Options.of_run(str(run_dir.path), None, ["run.max_steps=3", "trainer.seed=9"])  # as `up` starts them
    assert options.overrides["trainer"] == {"seed": 9}


def test_a_missing_config_of_an_existing_run_is_named(run_dir: RunDir, tmp_path: Path) -> None:
    assert "missing.toml: no such file" in error_of("up", str(run_dir.path), "-c", str(tmp_path / "missing.toml"))


def test_a_trainer_without_a_gpu_says_so_before_it_asks_for_the_run() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert 'trainer.device = "cuda", but torch finds no GPU' in error_of(
        "trainer", NOWHERE, "--set", "trainer.device=cuda"
    )


def test_a_trainer_without_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "prime_node.adapters.hardware", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # Python then raises ImportError
    assert "trainers need the extra 'trainer'" in error_of("trainer", NOWHERE)


def test_a_dead_proxy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    shown = CliRunner().invoke(app, ["doctor", f"http://192.0.2.1:8400/#{'0' * 64}"]).stdout
    assert (
        "http://192.0.2.1:8400 through the proxy http://127.0.0.1:9: Connection refused: is that proxy running" in shown
    )


@pytest.fixture
def http_port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_https_at_a_port_of_http_is_explained(http_port: int) -> None:
    shown = CliRunner().invoke(app, ["doctor", f"https://127.0.0.1:{http_port}/#{'0' * 64}"]).stdout
    assert "that port answers in http, not https" in shown


def test_doctor_contradicts_itself_in_no_line() -> None:
    ran = CliRunner().invoke(app, ["doctor", NOWHERE])
    assert "all features are available" not in ran.stdout
    assert "cannot take part: coordinator" in str(ran.exception)


def test_what_works_only_in_part_has_its_line_with_a_link_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was hidden like a package that is missing, and with it what to do."""
    slow = Finding("disk speed", False, "1 MB/s written", "name a --folder on a faster disk", "quick starts")
    without = Finding("obstore", False, doctor.MISSING, how_to_install("s3"), "buckets")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: slow, lambda: without))
    shown = CliRunner().invoke(app, ["doctor", NOWHERE]).stdout
    assert "--  disk speed     1 MB/s written (for quick starts)   name a --folder on a faster disk" in shown
    assert "--  obstore" not in shown
    assert "not available here: buckets (" in shown


def test_a_machine_without_an_engine_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no torch: fine for a coordinator, but `join` would fail."""
    missing = Finding("torch", False, doctor.MISSING, how_to_install("train"), "generating")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: missing,))
    alone = CliRunner().invoke(app, ["doctor"])
    assert alone.exit_code == 0
    assert "not available here: generating" in alone.stdout
    with_link = CliRunner().invoke(app, ["doctor", NOWHERE])
    assert "cannot take part: torch, coordinator" in str(with_link.exception)
    assert how_to_install("train") in with_link.stdout
