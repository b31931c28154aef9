"""Logging, metrics and progress: one place, one set of names.

Metrics go to a JSONL file (one object per `record`, with the time) and, if prometheus-client is installed, to counters
and gauges that `/metrics` shows. Names are the field's standard terms, with the unit last: `prime_step_seconds`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Protocol, TextIO

from prime_node.inside import open_regular
from prime_node.ports.metrics import Metric, MetricKind, Metrics
from prime_protocol.errors import LocalError
from prime_protocol.visible import printable

LOG_FORMAT = "PRIME_LOG_FORMAT"
"""Environment variable: `json` makes each log record one JSON object. `text` is the default."""
TRACES, TRACES_SHARE = "PRIME_TRACES", "PRIME_TRACES_SHARE"
"""Environment variables: the address of a collector for traces, such as http://127.0.0.1:4318; the share of traces it gets."""
TRACES_SHARE_DEFAULT = 0.1
LINE_CHARS_MAX = 16_384
"""Characters of one record, and of one line of a traceback."""


def setup_logging(role: str, *, level: str = "INFO", file: Path | None = None, bytes_max: int = 16 * 2**20) -> None:
    """Configure logging, one line a record: time, level, role, module, message.

    The output is standard error, or a file with one rotated file of the same size. A terminal shows no role and no module,
    unless `level` is DEBUG.
    """
    layout, dates = f"%(asctime)s %(levelname)-7s {role} %(name)s: %(message)s", None
    handler: logging.Handler
    if file is None:
        handler = _StandardError(sys.stderr)
        if sys.stderr.isatty() and level != "DEBUG":
            layout, dates = "%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_regular(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT))  # not through a link
        handler = RotatingFileHandler(file, maxBytes=bytes_max, backupCount=1, encoding="utf-8")
    handler.setFormatter(_formatter(role, OneLine(layout, dates)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def _formatter(role: str, lines: logging.Formatter) -> logging.Formatter:
    """Return the formatter that PRIME_LOG_FORMAT names. Raises LocalError for an unknown one."""
    wanted = os.environ.get(LOG_FORMAT, "text")
    if wanted not in ("text", "json"):
        raise LocalError(f"{LOG_FORMAT}={wanted}: log lines are text or json")
    return JsonRecords(role) if wanted == "json" else lines


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a progress bar replaces while it is shown: log lines appear above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class OneLine(logging.Formatter):
    """A formatter that puts a record on one line without control characters, whatever untrusted text it holds.

    Lines of a traceback are indented, so none looks like a record.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line, followed by indented lines of its traceback."""
        record.message = printable(record.getMessage(), LINE_CHARS_MAX)
        record.asctime = self.formatTime(record, self.datefmt)
        more = self.formatException(record.exc_info) if record.exc_info else ""
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        behind = [f"    {printable(line, LINE_CHARS_MAX)}" for line in (*more.splitlines(), *stack.splitlines())]
        return "\n".join([printable(self.formatMessage(record), 2 * LINE_CHARS_MAX), *behind])


class JsonRecords(logging.Formatter):
    """A formatter that makes one JSON object a record: time in UTC, level, role, module, message, traceback if there is one."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        shown = {
            "time": at,
            "level": record.levelname,
            "role": self._role,
            "module": record.name,
            "message": printable(record.getMessage(), LINE_CHARS_MAX),
        }
        if record.exc_info:
            lines = self.formatException(record.exc_info).splitlines()
            shown["traceback"] = "\n".join(printable(line, LINE_CHARS_MAX) for line in lines)
        return json.dumps(shown, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class WantedTraces:
    """Where traces go (OTLP over HTTP), and which share of them."""

    url: str
    share: float


def wanted_traces() -> WantedTraces | None:
    """Return what the environment says about traces; None: there are none. Raises LocalError."""
    url, share = os.environ.get(TRACES, ""), os.environ.get(TRACES_SHARE, str(TRACES_SHARE_DEFAULT))
    if not url:
        return None
    if not url.startswith(("http://", "https://")):
        raise LocalError(f"{TRACES}={printable(url, 100)}: name a collector as http://HOST:4318, without a path")
    try:
        found = WantedTraces(url, float(share))
    except ValueError:
        found = WantedTraces(url, math.nan)
    if not 0.0 <= found.share <= 1.0:
        raise LocalError(f"{TRACES_SHARE}={printable(share, 100)}: the share of traces is a number from 0 to 1")
    return found


class Recorder(Protocol):
    """A sink of rows of metrics: a file, gauges, a service."""

    def record(self, **fields: Any) -> None:
        """Record a row.

        Example: record(step=3, reward=0.4).
        """

    def close(self) -> None:
        """Close the sink. Idempotent."""


class Recorders:
    """A recorder that passes every row to several."""

    def __init__(self, *recorders: Recorder) -> None:
        self._recorders = recorders

    def record(self, **fields: Any) -> None:
        """Pass a row to each recorder."""
        for recorder in self._recorders:
            recorder.record(**fields)

    def close(self) -> None:
        """Close each recorder."""
        for recorder in self._recorders:
            recorder.close()


class Headlines:
    """A recorder that logs rows as lines for the user, the newest one every few seconds."""

    def __init__(self, line_of: Callable[[Mapping[str, Any]], str], *, every_s: float = 5.0) -> None:
        """Set up the recorder. `line_of` returns an empty string for a row without a line."""
        self._line_of, self._every_s = line_of, every_s
        self._said_s = -math.inf

    def record(self, **fields: Any) -> None:
        """Log the row's line, unless one was logged less than `every_s` seconds ago."""
        now_s = time.monotonic()
        if now_s - self._said_s >= self._every_s and (line := self._line_of(fields)):
            self._said_s = now_s
            logging.getLogger(__name__).info("%s", line)

    def close(self) -> None:
        """Do nothing: no row is buffered."""


class BestEffort:
    """A recorder for a file that is not essential: if it fails (a full disk), it logs one error and continues."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._failed = False

    def record(self, **fields: Any) -> None:
        """Pass a row on; log the first failure and ignore it."""
        try:
            self._recorder.record(**fields)
        except OSError as error:
            if not self._failed:
                logging.getLogger(__name__).error("cannot write metrics, so rows are lost: %s", error)
            self._failed = True

    def close(self) -> None:
        """Close the recorder."""
        self._recorder.close()


_LABELS = {"lag": "policies", "dropped": "reason", "refused": "reason", "wasted": "outcome"}
"""Label of these names' part after the slash; for other names it is the environment."""
_WHOLE = ("fully_async/", "rollouter/", "trainer/")
"""Names of verl's, whose slashes separate no label."""


class Gauges:
    """The newest row as gauges, one for each name: `loss` becomes prime_trainer_loss.

    A name with a slash gets a label: `reward_mean/words` becomes
    prime_trainer_reward_mean_by_environment{environment="words"}, `lag/2` prime_trainer_lag_by_policies{policies="2"}.
    """

    def __init__(self, metrics: Metrics, *, prefix: str) -> None:
        self._metrics = metrics
        self._prefix = prefix
        self._counted: set[str] = set()
        """Fields with a label that count something. They become 0 if a row counts other labels of their kind."""

    def record(self, **fields: Any) -> None:
        """Set the gauges of a row; ignore values that are not numbers."""
        counts = {field for field in fields if field.partition("/")[0] in _LABELS}
        kinds = {field.partition("/")[0] for field in counts}
        gone = {field: 0 for field in self._counted - counts if field.partition("/")[0] in kinds}
        self._counted |= counts
        for field, value in (fields | gone).items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            base, _, which = (field, "", "") if field.startswith(_WHOLE) else field.partition("/")
            label = _LABELS.get(base, "environment")
            labels = {label: which} if which else {}
            name = self._prefix + re.sub(r"[^a-zA-Z0-9_]", "_", base) + (f"_by_{label}" if which else "")
            self._metrics.declare(Metric(MetricKind.GAUGE, name, f"{base} of the newest row.", tuple(labels)))
            self._metrics.set(name, float(value), **labels)

    def close(self) -> None:
        """Do nothing: gauges are read until the process ends."""


class JsonLines:
    """A file with one JSON object a line. A crash loses at most the last line; a reader skips a broken one."""

    def __init__(self, path: Path, *, bytes_max: int | None = None) -> None:
        """Set up the file, which the first row opens for appending.

        Above `bytes_max` it is renamed to PATH.1, replacing an older one, and a new one begins.
        """
        self._path, self._bytes_max = path, bytes_max
        self._file: TextIO | None = None

    def record(self, **fields: Any) -> None:
        """Append a row. Raises OSError.

        Example: record(step=3, reward=0.4).
        """
        file = self._file = self._file or _appending(self._path)
        if self._bytes_max is not None and file.tell() >= self._bytes_max:
            self.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            file = self._file = _appending(self._path)
        file.write(json.dumps({"time": round(time.time(), 3), **fields}, separators=(",", ":"), default=float) + "\n")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _appending(path: Path) -> TextIO:
    """Open for appending, not through a link: lines hold untrusted text, and a shell may read the link's target."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8", buffering=1)


ROWS_BYTES_MAX = 2**28
"""Bytes of a JSONL file that are read at once: of a longer one, the last. Those of a million steps are fewer."""


class JsonLinesReader:
    """Reader of a JSONL file to which another process appends: it reads each line once and skips broken ones."""

    def __init__(self, path: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self._path = path
        self._offset = 0
        self._said: set[str] = set()

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines so far; none if there is no file, or one that cannot be read."""
        try:
            with os.fdopen(open_regular(self._path, os.O_RDONLY), "rb") as file:
                newest = os.fstat(file.fileno()).st_size - ROWS_BYTES_MAX
                if newest > self._offset:
                    self._offset = newest
                    self._say_once(
                        f"of {self._path} the last {ROWS_BYTES_MAX >> 20} MiB are read; older rows are left out"
                    )
                file.seek(self._offset)
                data = file.read(ROWS_BYTES_MAX)
        except FileNotFoundError:
            return self.rows
        except OSError as error:
            self._say_once(f"the rows of {self._path} are left out: {error}")
            return self.rows
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                self.rows += [row] if isinstance(row, dict) else []
        return self.rows

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            logging.getLogger(__name__).warning("%s", line)


def rows_with(rows: Iterable[Mapping[str, Any]], *names: str) -> list[Mapping[str, Any]]:
    """Return the rows that hold a number under each of these names: a disk may have changed a name in a row, or a value."""
    return [row for row in rows if all(isinstance(row.get(name), int | float) for name in names)]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines of a JSONL file; none if there is no file."""
    return JsonLinesReader(path).read()
