"""Commands print strangers' texts only as `say` and JSON escape them, also when a server answers with false data."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.cases_world import check_each
from tests.security.hostile_text_world import HOSTILE, RUN, hostile_status, is_clean

import prime_node


class Liar(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(hostile_status(), ensure_ascii=False).encode("utf-8", "surrogatepass")
        self.send_response(200, HOSTILE.encode("ascii", "ignore").decode().replace("\n", "").replace("\r", ""))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Do nothing: this is the attacker's."""


@pytest.fixture(scope="module")
def liar() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "command",
    [
        ["status", "{url}"],
        ["status", "{url}", "--json"],
        ["doctor", "{url}/#" + RUN],
        ["doctor", "{url}/#" + RUN, "--json"],
        ["keys", "show", "{url}/#" + RUN],
        ["ledger", "verify", "{url}/#" + RUN],
        ["verify", "{url}/#" + RUN],
    ],
    ids=" ".join,
)
def test_a_command_shows_nothing_of_a_false_answer(command: list[str], liar: str, tmp_path: Path) -> None:
    words = [word.format(url=liar) for word in command]
    done = subprocess.run(
        [sys.executable, "-m", "prime_node", *words],
        capture_output=True, check=False, timeout=50, cwd=tmp_path, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    out, err = done.stdout.decode(), done.stderr.decode()
    assert is_clean(out), out
    assert is_clean(err), err
    assert "Traceback" not in err
    assert done.returncode in (0, 1, 3, 4)
    assert out or err


CLI = Path(str(prime_node.__file__)).parent / "cli"
PRINT_THEMSELVES = {"say.py", "main.py", "kernels.py"}
"""Modules that may print: the printing function's own, the version's, and that of a process with our own texts."""


def test_commands_print_by_the_one_function() -> None:
    """Other output to a terminal is JSON, which escapes, or drawings, whose texts the tests above check."""
    check_each(((path.name, path) for path in sorted(CLI.glob("*.py"))), prints_by_the_one_function)


def prints_by_the_one_function(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or path.name in PRINT_THEMSELVES:
            continue
        first = ast.unparse(node.args[0]) if node.args else ""
        if isinstance(node.func, ast.Name) and node.func.id == "print":
            assert first.startswith("json.dumps("), f"{path.name}:{node.lineno}"
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("print", "echo"):
            assert not first.startswith(("f'", "'", '"', 'f"')), f"{path.name}:{node.lineno}"


def test_json_for_programs_is_written_in_ascii() -> None:
    for path in (
        *CLI.rglob("*.py"),
        *(CLI.parent / "worker").rglob("*.py"),
        *(CLI.parent / "coordinator").rglob("*.py"),
    ):
        assert "ensure_ascii=False" not in path.read_text(encoding="utf-8"), path
