"""`prime-node evidence`: offline check, open to anyone, of the evidence for a ban. SPEC.md, section 22."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prime_node.cli.say import say
from prime_node.inside import place
from prime_protocol import limits
from prime_protocol.assigned import SeedRule
from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.dossier import BanStatement, check_dossier
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.evidence import BundleEvidence
from prime_protocol.key_ring import Role
from prime_protocol.ledger import open_ledger_head
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX, open_parcel
from prime_protocol.reward_ranks import REWARD_RANKS
from prime_protocol.rollout import RolloutHeader
from prime_protocol.run_spec import PinnedRun, open_run_spec
from prime_protocol.seed_chain import opened_secrets as chain_opened
from prime_protocol.shading import SHADING_BY_REWARD
from prime_protocol.verdict import BanKind, Receipt, RejectReason, Verdict

if TYPE_CHECKING:
    from prime_node.validator.judge import OpenedBundle

DOES_NOT_HOLD = 1
BY_FORWARD_PASS = frozenset(
    {
        RejectReason.LOGPROB_MISMATCH,
        RejectReason.SEED_MISMATCH,
        RejectReason.BAD_TERMINATION,
        RejectReason.IMPLAUSIBLE,
        RejectReason.PROOF_MISMATCH,
    }
)
"""Reasons that a forward pass finds in a well-formed bundle. Other checks find copies, equivocation and bad contexts."""
BY_BYTES = frozenset(
    {
        RejectReason.MALFORMED,
        RejectReason.WRONG_ASSIGNMENT,
        RejectReason.TOKEN_OUT_OF_RANGE,
        RejectReason.WRONG_POLICY,
    }
)
"""Reasons that the lease and the bundle's own bytes alone decide, so that a well-formed bundle disproves them."""

evidence = typer.Typer(
    help="Check the evidence for a ban.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@dataclass(frozen=True, slots=True)
class _Dossier:
    """A ban dossier whose signatures all verify."""

    run: PinnedRun
    is_pinned: bool
    """Whether the user named the run, so that its limits hold."""
    statement: BanStatement
    lease: Lease | None
    receipts: list[Receipt]
    notes: list[str]
    """Statements by former keys, as text for people."""


@evidence.callback()
def _group() -> None:
    """Group of evidence commands. Without this callback, typer would fold its only command into the group."""


@evidence.command("verify")
def evidence_verify(
    dossier: Annotated[
        Path, typer.Argument(help="Ban dossier: coordinator/evidence/ban-WORKER-TIME.jsonl in the run's folder.")
    ],
    run: Annotated[str | None, typer.Option("--run", help="Expected digest of the run.", show_default=False)] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            show_default=False,
            help="The bundle's policy, from `verify --policy N --export`: repeat the forward pass of the deciding bundle, if a "
            "transformers validator made it.",
        ),
    ] = None,
    ledger: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="Exported ledger, join link or URL: are the deciding bundle's problems and seeds those of the run's seed chain?",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Check the evidence for a ban.

    It checks signatures, receipts, sums, and the deciding bundle if it is in the same folder.
    Evidence is in nats: an honest worker reaches n nats with a probability of at most e^-n.

    \b
    Exit codes: 0 all holds; 1 something does not; 3 this machine is at fault.

    \b
    --json prints one object: ok, run, worker, kind, reason, num_receipts, fault, bundle: what was found about it, and
    seeds: the result of --ledger; notes: statements by former keys.
    """
    opened, bundle_finding, seeds, fault = None, "", "", ""
    try:
        opened = _read(dossier, pinned=run)
        check_dossier(opened.statement, opened.receipts, run=opened.run.digest, spec=opened.run.spec)
        bundle_finding = _about_the_bundle(opened, dossier.parent, model)
        seeds = "" if ledger is None else asyncio.run(_about_the_seeds(opened, ledger))
    except RemoteError as error:
        fault = error.detail
    if as_json:
        about = opened.statement.model_dump(mode="json") if opened else {}
        shown = {name: about.get(name) for name in ("run", "worker", "kind", "reason", "num_receipts")}
        print(
            json.dumps(
                {
                    "ok": not fault,
                    **shown,
                    "fault": fault,
                    "bundle": bundle_finding,
                    "seeds": seeds,
                    "notes": opened.notes if opened else [],
                }
            )
        )
    elif opened is not None:
        statement = opened.statement
        say(f"run {opened.run.digest[:12]}{'' if run else ' (not pinned: give --run)'}")
        say(f"worker {statement.worker}, banned at step {statement.step}: {statement.kind}, {statement.reason}")
        say(
            f"     {statement.num_receipts} signed receipts"
            + (f"; deciding bundle: {bundle_finding}" if bundle_finding else "")
        )
        if seeds:
            say(f"     {seeds}")
        for note in opened.notes:
            say(f"note {note}")
    if not as_json:
        say(
            f"FAIL {fault}"
            if fault
            else "ok   the ban follows from them"
            if opened and opened.receipts
            else "ok   signed"
        )
    raise typer.Exit(DOES_NOT_HOLD if fault else 0)


def _read(path: Path, *, pinned: str | None) -> _Dossier:
    """Read a dossier. Raises LocalError for disk errors and RemoteError for faults in the file's content."""
    try:
        data = _read_file(path, None if pinned else limits.UNPINNED_DOSSIER_BYTES_MAX)
    except OSError as error:
        raise LocalError(
            f"{path}: {error.strerror}; a ban dossier is a file in the run's coordinator/evidence/"
        ) from None
    # Line by line: the first broken one ends it, before the others take memory.
    envelopes = [open_envelope(line.rstrip(b"\n"), bytes_max=2 * limits.RUN_SPEC_BYTES_MAX) for line in BytesIO(data)]
    if not envelopes:
        raise RemoteError(ErrorCode.MALFORMED, "an empty file is not a ban dossier")
    run = open_run_spec(envelopes[0], pinned=pinned or envelopes[0].digest)
    found: dict[str, list[Envelope]] = {}
    for envelope in envelopes[1:]:
        found.setdefault(envelope.payload_type, []).append(envelope)
    for ring in found.pop(PayloadType.KEY_RING, []):
        run.keys.add(ring)
    kinds = (PayloadType.BAN, PayloadType.LEASE, PayloadType.RECEIPT)
    signed = {kind: found.pop(kind, []) for kind in kinds}
    opened = {kind: [run.keys.verify_kept(one, kind, Role.COORDINATOR) for one in signed[kind]] for kind in kinds}
    if found or len(opened[PayloadType.BAN]) != 1 or len(opened[PayloadType.LEASE]) > 1:
        raise RemoteError(ErrorCode.MALFORMED, "a ban dossier holds one ban, at most one lease, and receipts")
    leases = [parse_json(payload, Lease) for payload in opened[PayloadType.LEASE]]
    statement = parse_json(opened[PayloadType.BAN][0], BanStatement)
    receipts = [parse_json(payload, Receipt) for payload in opened[PayloadType.RECEIPT]]
    dated = [
        (signed[PayloadType.BAN][0], statement.at_ms),
        *zip(signed[PayloadType.LEASE], (one.issued_at_ms for one in leases), strict=True),
        *zip(signed[PayloadType.RECEIPT], (one.at_ms for one in receipts), strict=True),
    ]
    return _Dossier(
        run, pinned is not None, statement, leases[0] if leases else None, receipts, _former_keys(run, dated)
    )


def _former_keys(run: PinnedRun, dated: list[tuple[Envelope, int]]) -> list[str]:
    """Return notes on statements by former keys; the first one is the ban.

    Raises RemoteError if one is dated after the ring that replaced its key. A ban by a later key vouches for the receipts
    that it counts: between a ring's date and its arrival at the coordinator, the former key signed them.
    """
    from prime_node.broadcast.audit.former_keys import former_key, former_key_notes

    formers = [former_key(run, envelope, at_ms) for envelope, at_ms in dated]
    ban = formers[0]
    for former in formers:
        if former is not None and former.is_void and ban is not None and ban.ring <= former.ring:
            raise RemoteError(ErrorCode.REVOKED, f"a statement is {former.text}")
    return former_key_notes(formers)


def _read_file(path: Path, bytes_max: int | None) -> bytes:
    """Read a file. Raises OSError, and RemoteError if it has more than `bytes_max` bytes."""
    data = bytearray()
    with path.open("rb") as file:
        while piece := file.read(2**20):  # read(n) would allocate n bytes at once
            data += piece
            if bytes_max is not None and len(data) > bytes_max:
                raise _too_large(path.name, bytes_max)
    return bytes(data)


def _require_small(parcel: bytes, bytes_max: int) -> None:
    """Raise RemoteError if the bundle is too large after decompression. `open_bundle` reports a malformed one."""
    try:
        header = parse_json(open_parcel(parcel, body_bytes_max=bytes_max).envelope.payload, RolloutHeader)
    except RemoteError:
        return
    if header.decompressed_bytes > bytes_max:
        raise _too_large("the deciding bundle", bytes_max)


def _too_large(what: str, bytes_max: int) -> RemoteError:
    return RemoteError(
        ErrorCode.TOO_LARGE,
        f"{what} has more than {bytes_max:,} bytes; --run with the run's digest applies the run's own limits",
    )


def _about_the_bundle(dossier: _Dossier, folder: Path, model: Path | None) -> str:
    """Check the lease and the bundle itself, and return the result.

    Raises RemoteError if one of them contradicts the ban or the lease is missing, LocalError for --model without a bundle.
    """
    bundle = dossier.statement.bundle
    if bundle is None:
        if model is not None:
            raise LocalError(
                "the ban is a decision of the operator, so --model has nothing to check; leave --model out"
            )
        return ""
    lease, decided = _deciding_lease(dossier), dossier.receipts[-1]
    file = place(folder, f"{bundle}.parcel")
    if not file.is_file():
        if model is not None:
            raise LocalError(f"{file}: no such bundle, so --model has nothing to check; leave --model out")
        return f"not checked, because {file.name} is not in the dossier's folder"
    bytes_max = dossier.run.spec.limits.rollout_bytes_max + PARCEL_OVERHEAD_BYTES_MAX
    if not dossier.is_pinned:
        bytes_max = min(bytes_max, limits.UNPINNED_DOSSIER_BYTES_MAX)
    parcel = _read_file(file, bytes_max)
    if digest_of(parcel) != bundle:
        raise RemoteError(ErrorCode.DIGEST_MISMATCH, f"{file.name} does not belong to the deciding bundle")
    if not dossier.is_pinned:
        _require_small(parcel, limits.UNPINNED_DOSSIER_BYTES_MAX)
    return _about_the_parcel(parcel, lease, dossier, decided, model)


def _deciding_lease(dossier: _Dossier) -> Lease:
    """Return the lease of the deciding bundle. Raises RemoteError if there is none or if its receipt names another one."""
    lease, decided = dossier.lease, dossier.receipts[-1]
    if lease is None:
        raise RemoteError(ErrorCode.MALFORMED, "ban dossier: the lease of the deciding bundle is missing")
    stated = (lease.run, lease.worker, lease.lease_id, lease.step, lease.policy_version)
    if stated != (decided.run, decided.worker, decided.lease_id, decided.step, decided.policy_version):
        raise RemoteError(ErrorCode.DIGEST_MISMATCH, "the lease does not belong to the deciding bundle")
    return lease


def _about_the_parcel(parcel: bytes, lease: Lease, dossier: _Dossier, decided: Receipt, model: Path | None) -> str:
    """Compare the bundle's own bytes, and with `model` a forward pass, with the reason in its receipt."""
    from prime_node.validator.judge import OpenedBundle, open_bundle

    reason, spans = decided.reason, dossier.run.spec.schedule.swap.spans_policies
    opened = open_bundle(parcel, lease, dossier.run, newest_policy=limits.STEP_MAX)
    found = None if isinstance(opened, OpenedBundle) else opened.verdict.reason
    if found is not None and found is reason:
        return f"{reason} by its own bytes"
    if reason is RejectReason.EQUIVOCATION or (reason is RejectReason.WRONG_POLICY and spans):
        return f"{reason}, which the bundle alone does not show"
    if not isinstance(opened, OpenedBundle) or reason in BY_BYTES:
        raise RemoteError(ErrorCode.MALFORMED, f"the bundle is {found or 'well-formed'}, but was rejected as {reason}")
    if model is None:
        return "well-formed; --model repeats the forward pass"
    judge_class = decided.evidence.validator if decided.evidence else "transformers/fp32/cpu"
    if not judge_class.startswith("transformers/"):
        raise LocalError(
            f"a validator of class {judge_class} judged the deciding bundle, but --model can repeat the forward pass of "
            "transformers only; leave --model out to check everything else"
        )
    return asyncio.run(_judged_again(opened, dossier, model, judge_class))


async def _about_the_seeds(dossier: _Dossier, ledger: str) -> str:
    """Check the seeds: step (6) of SPEC.md, section 22. Raises RemoteError if the lease does not match the seed chain."""
    from prime_node.cli.ledger import open_ledger

    lease, chain = dossier.lease, dossier.run.spec.seed_chain
    if chain is None or lease is None or lease.is_evaluation:
        return "the run has no seed chain for its seeds"
    async with open_ledger(ledger, dossier.run.digest) as source:
        secret = open_ledger_head(await source.source.ledger_head(), source.run).secret
    number = chain.number(lease.step)
    secrets = [] if secret is None else chain_opened(chain, secret)
    if number >= len(secrets):
        return f"the secret of step {lease.step} is not published in this ledger yet; check again after the step"
    SeedRule(dossier.run.digest, dossier.run.spec).check_lease(lease, secrets[number])
    return "its problems and seeds match the seed chain"


async def _judged_again(bundle: OpenedBundle, dossier: _Dossier, model: Path, judge_class: str) -> str:
    """Repeat the forward pass. Raises RemoteError if it does not confirm the rejection."""
    from prime_node.cli import wire, wire_scorers
    from prime_node.validator.judge import evidence_in, weigh_bundle
    from prime_node.validator.spans import policies_of
    from prime_protocol.verify import summary, verdict_on

    decided = dossier.receipts[-1]
    if policies_of(bundle.rollouts) != [bundle.lease.policy_version]:
        return "well-formed; several policies sampled it, so --model cannot repeat it"
    spec = dossier.run.spec
    context = max(map(spec.context_tokens_max, spec.environments))
    kind = judge_class.rpartition("/")[0]  # on any device that this machine has
    scorer = wire_scorers.plain_scorer(kind, model, threads=1, context_tokens_max=context)
    try:
        await scorer.load(wire.plain_weights(model, random_seed=None), policy_version=bundle.lease.policy_version)
        found, *_ = await weigh_bundle(bundle, scorer, run=dossier.run)
    finally:
        await scorer.close()
    weighed = evidence_in(bundle, found, dossier.run, judged_by=judge_class)
    if dossier.statement.kind is BanKind.STATISTICAL and decided.evidence is not None:
        return compared(decided.evidence, weighed)
    return confirmed(decided.reason, verdict_on(summary(found), weighed, dossier.run.spec.checks))


def confirmed(reason: RejectReason | None, verdict: Verdict) -> str:
    """Compare a forward pass with a rejection. Raises RemoteError if the pass should have confirmed it and does not."""
    if verdict.reason is reason:
        return f"{reason} by a forward pass"
    if reason in BY_FORWARD_PASS:
        raise RemoteError(ErrorCode.MALFORMED, f"a forward pass gives {verdict.reason or 'accepted'}, not {reason}")
    return f"{reason}, which a forward pass cannot check"


def compared(claimed: BundleEvidence, found: BundleEvidence | None) -> str:
    """Compare the evidence of a bundle with the claim in its receipt. Raises RemoteError if it is much weaker."""
    nats = {name: max(sums.log_e) for name, sums in claimed.sums.items() if sums.log_e}
    mine = {name: max(sums.log_e) for name, sums in found.sums.items() if sums.log_e} if found else {}
    if not nats:
        return "its receipt adds no evidence"
    loudest = max(nats, key=lambda name: nats[name])
    if loudest in REWARD_RANKS and claimed.compared:  # check_dossier has already recomputed it
        return f"{loudest} adds {nats[loudest]:.1f} nats, as the rewards in its receipt do"
    if loudest in REWARD_RANKS:
        return f"{loudest} adds {nats[loudest]:.1f} nats, by the validator's own samples, which a forward pass does not repeat"
    if loudest == SHADING_BY_REWARD:
        return f"{loudest} adds {nats[loudest]:.1f} nats, by rewards, which a forward pass does not repeat"
    if loudest not in mine or mine[loudest] < nats[loudest] - abs(nats[loudest]) / 2:
        raise RemoteError(
            ErrorCode.MALFORMED,
            f"{loudest} adds {mine.get(loudest, 0.0):.1f} nats by a forward pass, not {nats[loudest]:.1f}",
        )
    return f"{loudest} adds {mine[loudest]:.1f} nats by a forward pass, {nats[loudest]:.1f} in the receipt"
