"""The file of a ban dossier (SPEC.md, section 22): read within bounds, and every signature in it verified."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from prime_node.inside import open_regular
from prime_protocol import limits
from prime_protocol.assignment import Lease
from prime_protocol.dossier import BanStatement
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, LocalError, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.rollout import RolloutHeader
from prime_protocol.run_spec import PinnedRun, open_run_spec
from prime_protocol.verdict import Receipt

LINE_BYTES_MAX = 2 * limits.RUN_SPEC_BYTES_MAX
"""A line that is not a lease."""


@dataclass(frozen=True, slots=True)
class DossierFile:
    """A ban dossier whose signatures all verify."""

    run: PinnedRun
    is_pinned: bool
    """Whether the user named the run, so that its limits hold."""
    statement: BanStatement
    lease: Lease | None
    lease_digest: str
    """Digest of the lease's payload; empty without a lease."""
    headers: dict[str, RolloutHeader]
    """Headers that the banned worker signed for rejections as `equivocation`, by the digest of their payload."""
    receipts: list[Receipt]
    notes: list[str]
    """Statements by former keys, as text for people."""


def read_dossier(path: Path, *, pinned: str | None, rings: Sequence[Envelope] = ()) -> DossierFile:
    """Read a dossier. `rings` are key rings of the run that the file may lack.

    Raises LocalError for disk errors and RemoteError for faults in the file's content.
    """
    try:
        data = read_dossier_part(path, None if pinned else limits.UNPINNED_DOSSIER_BYTES_MAX)
    except OSError as error:
        raise LocalError(
            f"{path}: {error.strerror}; a ban dossier is a file in the run's coordinator/evidence/"
        ) from None
    envelopes = open_lines(data)
    if not envelopes:
        raise RemoteError(ErrorCode.MALFORMED, "an empty file is not a ban dossier")
    run = open_run_spec(envelopes[0], pinned=pinned or envelopes[0].digest)
    found: dict[str, list[Envelope]] = {}
    for envelope in envelopes[1:]:
        found.setdefault(envelope.payload_type, []).append(envelope)
    for ring in found.pop(PayloadType.KEY_RING, []):
        run.keys.add(ring)
    for ring in rings[run.keys.version :]:
        run.keys.add(ring)
    for amendment in found.pop(PayloadType.CALIBRATION, []):
        run.calibrations.add(amendment)
    kinds = (PayloadType.BAN, PayloadType.LEASE, PayloadType.RECEIPT)
    signed = {kind: found.pop(kind, []) for kind in kinds}
    opened = {kind: [run.keys.verify_kept(one, kind, Role.COORDINATOR) for one in signed[kind]] for kind in kinds}
    headers = found.pop(PayloadType.ROLLOUT, [])
    if found or len(opened[PayloadType.BAN]) != 1 or len(opened[PayloadType.LEASE]) > 1:
        raise RemoteError(
            ErrorCode.MALFORMED, "a ban dossier holds one ban, at most one lease, headers of bundles, and receipts"
        )
    leases = [parse_json(payload, Lease) for payload in opened[PayloadType.LEASE]]
    statement = parse_json(opened[PayloadType.BAN][0], BanStatement)
    receipts = [parse_json(payload, Receipt) for payload in opened[PayloadType.RECEIPT]]
    dated = [
        (signed[PayloadType.BAN][0], statement.at_ms),
        *zip(signed[PayloadType.LEASE], (one.issued_at_ms for one in leases), strict=True),
        *zip(signed[PayloadType.RECEIPT], (one.at_ms for one in receipts), strict=True),
    ]
    by_worker = (statement.worker,)
    return DossierFile(
        run=run,
        is_pinned=pinned is not None,
        statement=statement,
        lease=leases[0] if leases else None,
        lease_digest="".join(one.digest for one in signed[PayloadType.LEASE]),
        headers={
            one.digest: parse_json(one.verify(PayloadType.ROLLOUT, trusted=by_worker), RolloutHeader) for one in headers
        },
        receipts=receipts,
        notes=_former_keys(run, dated),
    )


def _former_keys(run: PinnedRun, dated: list[tuple[Envelope, int]]) -> list[str]:
    """Return notes on statements by former keys; the first one is the ban.

    Raises RemoteError if one is dated after the ring that replaced its key. A ban by a later key vouches for the receipts
    that it counts: between a ring's date and its arrival at the coordinator, the former key signed them.
    """
    from prime_node.broadcast.audit.ledger_audit import former_key, former_key_notes

    formers = [former_key(run, envelope, at_ms) for envelope, at_ms in dated]
    ban = formers[0]
    for former in formers:
        if former is not None and former.is_void and ban is not None and ban.ring <= former.ring:
            raise RemoteError(ErrorCode.REVOKED, f"a statement is {former.text}")
    return former_key_notes(formers)


def open_lines(data: bytes) -> list[Envelope]:
    """Open a file with one envelope a line. Only a lease may be longer than a RunSpec, as it holds prompts.

    The first broken line ends it, before the others take memory. Raises RemoteError.
    """
    found = []
    for line in BytesIO(data):
        found.append(open_envelope(line.rstrip(b"\n"), bytes_max=limits.WORK_BYTES_MAX))
        if len(line) > LINE_BYTES_MAX and found[-1].payload_type != PayloadType.LEASE:
            raise LimitExceeded("line_bytes_max", len(line), LINE_BYTES_MAX)
    return found


def read_dossier_part(path: Path, bytes_max: int | None) -> bytes:
    """Read a file. Raises OSError, and RemoteError if it has more than `bytes_max` bytes."""
    data = bytearray()
    with os.fdopen(open_regular(path.resolve(), os.O_RDONLY), "rb") as file:
        while piece := file.read(2**20):  # read(n) would allocate n bytes at once
            data += piece
            if bytes_max is not None and len(data) > bytes_max:
                raise too_large(path.name, bytes_max)
    return bytes(data)


def too_large(what: str, bytes_max: int) -> RemoteError:
    """Return the error for a file or bundle beyond the limit that applies while the run is not named."""
    return RemoteError(
        ErrorCode.TOO_LARGE,
        f"{what} has more than {bytes_max:,} bytes; --run with the run's digest applies the run's own limits",
    )
