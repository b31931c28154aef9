"""An exported ledger: one file with everything needed to check it, one JSON text a line.

It holds the RunSpec's envelope, the key rings' envelopes in order, the ledger's lines, and the head's envelope.

Nothing in it is trusted. Lines are read one after another, so a long ledger needs little memory: what the audit counts, about
200 bytes for each accepted bundle. A ledger of a run that the user has not named is read up to UNPINNED_DOSSIER_BYTES_MAX.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from prime_node.inside import open_regular
from prime_node.ports.transport import LedgerSource
from prime_protocol import limits
from prime_protocol.envelope import Envelope, PayloadType, open_envelope
from prime_protocol.errors import ErrorCode, LimitExceeded, LocalError, RemoteError
from prime_protocol.ledger import open_ledger_head
from prime_protocol.run_spec import PinnedRun, open_run_spec

_LINE_BYTES_MAX = 2 * limits.RUN_SPEC_BYTES_MAX
_ENVELOPE_START = b'{"payload":'


async def export_ledger(source: LedgerSource, run: PinnedRun, path: Path) -> int:
    """Write the file, whole or not at all. Return the number of entries. Raises LocalError and RemoteError."""
    signed = await source.ledger_head()
    wanted, written = open_ledger_head(signed, run).num_entries, 0
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            for envelope in (run.envelope, *(ring for _, ring in run.keys.rings)):
                file.write(envelope.to_bytes() + b"\n")
            while written < wanted:
                lines = (await source.ledger(written))[: wanted - written]
                if not lines:
                    raise RemoteError(
                        ErrorCode.NOT_FOUND, f"the ledger's head counts {wanted} entries, but {written} were written"
                    )
                file.writelines(line + b"\n" for line in lines)
                written += len(lines)
            file.write(signed.to_bytes() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}; choose another file with --out") from None
    finally:
        partial.unlink(missing_ok=True)
    return written


@contextlib.contextmanager
def open_ledger_file(path: Path, *, pinned: str | None) -> Iterator[LedgerFile]:
    """Open an exported ledger.

    `pinned` is the expected run. Raises LocalError for the disk, RemoteError for the file's content.
    """
    try:
        with os.fdopen(open_regular(path.resolve(), os.O_RDONLY), "rb") as file:
            yield LedgerFile(file, pinned=pinned)
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}; name an exported ledger, a run directory or a join link") from None


class LedgerFile:
    """Implementation of ports.transport.LedgerSource for an exported file; read once, from its beginning."""

    def __init__(self, file: BinaryIO, *, pinned: str | None) -> None:
        """Read the RunSpec and the key rings. Raises as open_ledger_file does."""
        self._file = file
        self._head = _last_line(file)
        file.seek(0)
        self._line = self._read()
        spec = self._take_envelope()
        self.run = open_run_spec(spec, pinned=pinned or spec.digest)
        while self._line.startswith(_ENVELOPE_START):
            envelope = open_envelope(self._line)
            if envelope.payload_type != PayloadType.KEY_RING:
                break
            self.run.keys.add(self._take_envelope())
        self._next = 0

    async def ledger_head(self) -> Envelope:
        """Return the signed head, unverified."""
        return open_envelope(self._head, bytes_max=2 * limits.LEDGER_LINE_BYTES_MAX)

    async def ledger(self, start: int) -> list[bytes]:
        """Return the next lines. `start` must be the number of lines read so far."""
        assert start == self._next, "a ledger file is read in order"
        lines = list(self._lines())
        self._next += len(lines)
        return lines

    def _lines(self) -> Iterator[bytes]:
        for _ in range(limits.LEDGER_LINES_MAX):
            if not self._line or self._line.startswith(_ENVELOPE_START):
                return
            yield self._line
            self._line = self._read()

    def _take_envelope(self) -> Envelope:
        envelope = open_envelope(self._line)
        self._line = self._read()
        return envelope

    def _read(self) -> bytes:
        line = self._file.readline(_LINE_BYTES_MAX + 1)
        if len(line) > _LINE_BYTES_MAX:
            raise LimitExceeded("a line of an exported ledger", len(line), _LINE_BYTES_MAX)
        return line.removesuffix(b"\n")


class UnpinnedLedger:
    """Implementation of ports.transport.LedgerSource for a ledger of a run that the user has not named."""

    def __init__(self, source: LedgerSource) -> None:
        self._source = source
        self._left = limits.UNPINNED_DOSSIER_BYTES_MAX

    async def ledger_head(self) -> Envelope:
        """Return the signed head, unverified."""
        return await self._source.ledger_head()

    async def ledger(self, start: int) -> list[bytes]:
        """Return lines as the source does. Raises LocalError if all of them together are too many bytes."""
        lines = await self._source.ledger(start)
        self._left -= sum(len(line) + 1 for line in lines)
        if self._left < 0:
            raise LocalError(
                f"the ledger has more than {limits.UNPINNED_DOSSIER_BYTES_MAX:,} bytes; --run with the run's digest reads it"
            )
        return lines


def _last_line(file: BinaryIO) -> bytes:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 3 * limits.LEDGER_LINE_BYTES_MAX))
    return file.read().rstrip(b"\n").rpartition(b"\n")[2]
