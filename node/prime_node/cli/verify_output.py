"""The output of `prime-node verify`: one JSON object for programs, lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prime_node.broadcast.audit.audit import Verified
from prime_node.broadcast.audit.audit_report import AuditReport, Check, date_of
from prime_node.broadcast.audit.compare import CheckpointComparison
from prime_node.broadcast.audit.one_tensor import TensorProof
from prime_node.inside import write_inside
from prime_protocol.envelope import Envelope
from prime_protocol.errors import LocalError
from prime_protocol.key_ring import Role

DIFFERENCES_SHOWN = 5
"""Number of differing tensors that are named; --json names all."""


@dataclass(slots=True)
class Verification:
    """Results of `verify`."""

    report: AuditReport
    pinned: bool
    """Whether the user named the run."""
    seconds: float
    """Duration of the checks."""
    policy: dict[str, Any] | None = None
    """Fields that `about` returns for the requested policy, once every check has passed."""
    proof: TensorProof | None = None
    against: Path | None = None
    """Weights with which the policy was to be compared."""
    comparison: CheckpointComparison | None = None
    export: Path | None = None
    """Folder to which the policy was to be written."""
    files: dict[str, str] = field(default_factory=dict)
    """Exported files: name -> SHA-256."""

    @property
    def ok(self) -> bool:
        """Whether everything asked for holds."""
        return self.report.passed and (self.comparison is None or self.comparison.equal)


def about(verified: Verified) -> dict[str, Any]:
    """Return the fields of the requested policy."""
    manifest, trainers = verified.signed.manifest, verified.run.keys.ever(Role.TRAINER)
    return {
        "policy_version": manifest.policy_version,
        "manifest": verified.signed.digest,
        "state_root": manifest.state_root,
        "encodings": [encoding.kind.value for encoding in manifest.encodings],
        "step": manifest.produced_by.step,
        "created_at_ms": manifest.created_at_ms,
        "signers": [item.key_id for item in verified.signed.envelope.signatures if item.key_id in trainers],
    }


def as_fields(found: Verification) -> dict[str, Any]:
    """Return the object that --json prints; the command's help explains each field."""
    report, comparison = found.report, found.comparison
    against, stamp = None, report.timestamp
    if comparison is not None:
        against = {"path": str(found.against), "equal": comparison.equal, **asdict(comparison)}
    return {
        "ok": found.ok,
        "checks": [{"title": check.title, **asdict(check)} for check in report.checks],
        "run": report.run,
        "pinned": found.pinned,
        "policy_version": report.policy_version,
        "key_ring": report.key_ring,
        "timestamp": None
        if stamp is None
        else {
            "policy_version": stamp.policy_version,
            "key_ring": stamp.key_ring,
            "issued_at_ms": stamp.issued_at_ms,
            "expires_at_ms": stamp.expires_at_ms,
        },
        "num_manifests": report.num_manifests,
        "num_policies": report.num_policies,
        "num_bytes": report.num_bytes,
        "seconds": round(found.seconds, 3),
        "policy": found.policy,
        "against": against,
        "tensor": None if found.proof is None else asdict(found.proof),
        "export": None if not found.files else {"path": str(found.export), "files": found.files},
    }


def keep_evidence(statements: Sequence[Envelope], folder: Path) -> None:
    """Write each statement under its digest: the two together convict the signer. Raises LocalError."""
    try:
        for envelope in statements:
            folder.mkdir(parents=True, exist_ok=True)
            write_inside(folder, f"{envelope.digest[:16]}.json", envelope.to_bytes())
    except OSError as error:
        raise LocalError(f"evidence {folder}: {error.strerror}") from None


def as_line(check: Check) -> str:
    """Return the line of one check."""
    return f"{'ok  ' if check.passed else 'FAIL'} ({check.number}) {check.title}: {check.detail}"


def as_lines(found: Verification) -> Iterator[str]:
    """Yield the lines that are printed after the checks."""
    report, comparison, proof = found.report, found.comparison, found.proof
    if not report.passed:
        yield "NOT verified; checks after the failed one were not run"
        if report.evidence:
            yield f"{len(report.evidence)} signed statements contradict each other; --evidence DIR saves them"
        return
    if proof is not None:
        yield (
            f"verified: {proof.name}, {proof.dtype} {list(proof.shape)}, row {proof.index} of {proof.num_tensors} in the "
            f"manifest of policy {proof.policy_version} ({proof.manifest[:12]}), digest {proof.digest}"
        )
        return
    assert found.policy is not None
    rate = report.num_bytes / 1e6 / max(found.seconds, 1e-9)
    version, date = found.policy["policy_version"], date_of(found.policy["created_at_ms"])
    yield (
        f"verified: policy {version} of {date}, {report.num_policies} policies, "
        f"{report.num_bytes:,} bytes in {found.seconds:.1f} s ({rate:,.1f} MB/s)"
    )
    if comparison is not None and comparison.equal:
        yield f"equal: {found.against} holds these {comparison.num_tensors} tensors, bit for bit"
    elif comparison is not None:
        yield f"NOT equal: {len(comparison.differences)} tensors of {found.against} differ"
        for difference in comparison.differences[:DIFFERENCES_SHOWN]:
            yield f"  {difference.tensor}: {difference.detail}"
    if found.files:
        yield f"exported: {len(found.files)} files and PROVENANCE.json in {found.export}"
    elif found.export is not None:
        yield "exported: nothing"
