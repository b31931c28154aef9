"""A worker's contradiction-LEASE.jsonl: a lease and a receipt of one bundle that do not agree, both signed by the coordinator.

One envelope a line: the RunSpec, the key rings in order, the lease, the receipt. SPEC.md, section 21.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_node.broadcast.audit.former_keys import former_key, former_key_notes
from prime_node.cli.dossier_file import open_lines, read_dossier_part
from prime_protocol import limits
from prime_protocol.assignment import Lease
from prime_protocol.contradiction import contradiction
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.run_spec import PinnedRun, open_run_spec
from prime_protocol.verdict import BundleStatus, Receipt


@dataclass(frozen=True, slots=True)
class FalseStatement:
    """Two statements of a coordinator of which one is false."""

    run: PinnedRun
    receipt: Receipt
    what: str
    """What differs, as text for people."""
    notes: list[str]
    """Statements by former keys, as text for people."""


def read_contradiction(path: Path, *, pinned: str | None, rings: Sequence[Envelope] = ()) -> FalseStatement:
    """Read and check a file. `rings` are key rings of the run that the file may lack.

    Raises LocalError for disk errors, and RemoteError if it does not prove a false statement.

    A receipt that accepts no bundle repeats what the worker's bundle says of itself, so only its date is a statement of the
    coordinator. A receipt of another lease is no proof either: the file does not show which lease the bundle answers.
    """
    try:
        data = read_dossier_part(path, limits.UNPINNED_DOSSIER_BYTES_MAX)
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}; a worker writes contradiction-LEASE.jsonl to its folder") from None
    envelopes = open_lines(data)
    if len(envelopes) < 3:
        raise RemoteError(ErrorCode.MALFORMED, "expected a RunSpec, key rings, a lease and a receipt")
    first, *own_rings, signed_lease, signed_receipt = envelopes
    run = open_run_spec(first, pinned=pinned or first.digest)
    for ring in (*own_rings, *rings[len(own_rings) :]):
        run.keys.add(ring)
    lease = parse_json(run.keys.verify_kept(signed_lease, PayloadType.LEASE, Role.COORDINATOR), Lease)
    receipt = parse_json(run.keys.verify_kept(signed_receipt, PayloadType.RECEIPT, Role.COORDINATOR), Receipt)
    of_lease = (lease.run, lease.worker, lease.lease_id)
    if lease.run != run.digest or (receipt.run, receipt.worker, receipt.lease_id) != of_lease:
        raise RemoteError(
            ErrorCode.MALFORMED, "the receipt is of another run, worker or lease, so nothing connects the two"
        )
    formers = [former_key(run, signed_lease, lease.issued_at_ms), former_key(run, signed_receipt, receipt.at_ms)]
    for former in formers:
        if former is not None and former.is_void:
            raise RemoteError(ErrorCode.REVOKED, f"a statement is {former.text}")
    what = contradiction(receipt, lease, run.spec)
    if not what:
        raise RemoteError(ErrorCode.MALFORMED, "the receipt agrees with the lease")
    if receipt.status is not BundleStatus.ACCEPTED and receipt.at_ms >= lease.issued_at_ms:
        raise RemoteError(
            ErrorCode.MALFORMED, "the receipt accepts no bundle, so it repeats what the worker's bundle says"
        )
    return FalseStatement(run, receipt, what, former_key_notes(formers))
