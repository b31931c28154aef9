"""Segments of the archived journal: consecutive events, chained by digests, as one compressed text each.

A segment names the digest of the segment before it, the digests of the state before its first event and after its last one, and
how long the ledger was at both. The first segment of a chapter also holds the state before its first event. So a reader
folds each chapter without the ones before it, and chapters can be deleted from the oldest on.

    header (JSON), state (JSON, or empty), then `at_ms event` per event: lines of one text, compressed by zstd, in base64
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from binascii import Error as NoBase64
from collections.abc import Sequence
from dataclasses import dataclass

import zstandard
from pydantic import TypeAdapter, ValidationError

from prime_node.ports.store import LoggedEvent, Segment
from prime_protocol.digest import digest_of

FORMAT = 1
SEGMENT_BYTES_MAX = 2**31
"""Bytes of a segment after decompression. The state of 10,000 workers and 2,000 events take 15 MB."""


class DamagedSegment(ValueError):
    """A segment that no coordinator has written so."""


@dataclass(frozen=True, slots=True)
class LedgerPoint:
    """A length of the ledger, and the digest of its last line; of the run, if it has none."""

    num_lines: int
    digest: str


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a segment says about itself."""

    format: int
    software: str
    """Release that wrote it."""
    first: int
    """Number of its first event."""
    num_events: int
    previous: str
    """Digest of the segment before it; empty if there was none."""
    opening: str
    """Digest of the state before the first event, as JSON."""
    closing: str
    """Digest of the state after the last event."""
    ledger_before: LedgerPoint | None
    """End of the ledger before the first event; None if the archive began in the middle of a run."""
    ledger_after: LedgerPoint


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """A decoded segment."""

    header: SegmentHeader
    state: str
    """State before the first event, as JSON; empty unless the segment begins a chapter."""
    events: tuple[LoggedEvent, ...]
    digest: str
    """Digest that the next segment names."""


_HEADER = TypeAdapter(SegmentHeader)


def encode_segment(header: SegmentHeader, state: str, events: Sequence[LoggedEvent]) -> str:
    """Return the stored text of a segment."""
    lines = [_HEADER.dump_json(header).decode(), state, *(f"{event.at_ms} {event.payload}" for event in events)]
    return b64encode(zstandard.ZstdCompressor(level=3).compress("\n".join(lines).encode())).decode()


def decode_segment(segment: Segment) -> OpenSegment:
    """Open a stored segment. Raises DamagedSegment."""
    try:
        packed = b64decode(segment.payload, validate=True)
        if zstandard.frame_content_size(packed) > SEGMENT_BYTES_MAX:
            raise DamagedSegment("it is larger than any segment")
        text = zstandard.ZstdDecompressor().decompress(packed, max_output_size=SEGMENT_BYTES_MAX).decode()
        head, state, *lines = text.split("\n")
        header = _HEADER.validate_json(head)
        events = tuple(_event(header.first + place, line) for place, line in enumerate(lines))
    except (NoBase64, zstandard.ZstdError, ValidationError, ValueError) as error:
        raise DamagedSegment(f"it cannot be read: {type(error).__name__}") from None
    if header.format != FORMAT:
        raise DamagedSegment(f"its format is {header.format}, this release reads {FORMAT}")
    last = header.first + header.num_events - 1
    if len(events) != header.num_events or (header.first, last) != (segment.first, segment.last):
        raise DamagedSegment(f"it holds {len(events)} events from {header.first} on")
    if bool(state) != (segment.chapter == segment.first) or (state and digest_of(state.encode()) != header.opening):
        raise DamagedSegment("it does not hold the state that it begins with")
    return OpenSegment(header, state, events, digest_of(segment.payload.encode()))


def _event(number: int, line: str) -> LoggedEvent:
    at_ms, payload = line.split(" ", 1)
    return LoggedEvent(number, int(at_ms), payload)
