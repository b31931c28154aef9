"""Logging, metrics and progress: one place, one set of names.

Metrics go to a JSONL file (one object per `record`, with the time) and, where prometheus-client is installed, to counters and
gauges that `/metrics` shows. Names are the field's standard terms, with the unit last: `prime_step_seconds`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Protocol, TextIO


def setup_logging(role: str, *, level: str = "INFO", file: Path | None = None, bytes_max: int = 16 * 2**20) -> None:
    """One line a record: time, level, role, module, message. To standard error; or to a file, and one more of that size."""
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = RotatingFileHandler(file, maxBytes=bytes_max, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {role} %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class Recorder(Protocol):
    """Takes rows of numbers: a file, gauges, a service."""

    def record(self, **fields: Any) -> None:
        """Example: record(step=3, reward=0.4)."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Recorders:
    """Gives every row to each of several."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def record(self, **fields: Any) -> None:
        for recorder in self._recorders:
            recorder.record(**fields)

    def close(self) -> None:
        for recorder in self._recorders:
            recorder.close()


class JsonLines:
    """Appends one JSON object a line. A crash loses at most the last line; a reader skips a broken one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)

    def record(self, **fields: Any) -> None:
        """Example: record(step=3, reward=0.4)."""
        self._file.write(
            json.dumps({"time": round(time.time(), 3), **fields}, separators=(",", ":"), default=float) + "\n"
        )

    def close(self) -> None:
        self._file.close()


class JsonLinesReader:
    """Follows a JSONL file that somebody else appends to: each line is read once. A broken line is skipped."""

    def __init__(self, path: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """All whole lines so far; none where there is no file."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                try:
                    self.rows.append(json.loads(line))
                except ValueError:
                    continue
        return self.rows


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSONL file; none where there is no file."""
    return JsonLinesReader(path).read()
