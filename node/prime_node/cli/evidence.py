"""`prime-node evidence`: offline checks, open to anyone: a ban, and a coordinator's contradiction. SPEC.md, sections 21, 22.

A worker's contradiction-LEASE.jsonl has a lease and a receipt of one bundle that do not agree, both signed by the coordinator.
One envelope a line: the RunSpec, the key rings in order, the lease, the receipt. SPEC.md, section 21.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from prime_node.broadcast.audit.ledger_audit import former_key, former_key_notes
from prime_node.cli.deciding_bundle import about_the_bundle
from prime_node.cli.dossier_file import DossierFile, open_lines, read_dossier, read_dossier_part
from prime_node.cli.options import AsJson, ConfigFile, ExpectedRun, Options, Set, TrustedCode, command_group
from prime_node.cli.replay import exit_with_report
from prime_node.cli.replay_target import ReplayOptions
from prime_node.cli.say import say
from prime_node.inside import read_regular
from prime_protocol import limits
from prime_protocol.assigned import SeedRule
from prime_protocol.assignment import Lease
from prime_protocol.dossier import check_dossier
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.ledger import open_ledger_head
from prime_protocol.run_spec import PinnedRun, open_run_spec
from prime_protocol.seed_chain import opened_secrets as chain_opened
from prime_protocol.verdict import BanKind, BundleStatus, Receipt, contradiction

if TYPE_CHECKING:
    from prime_node.envs.settings import EnvironmentSettings


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


DOES_NOT_HOLD = 1
RESTS_ON = {
    BanKind.HARD: "the ban follows from the strikes that these receipts state",
    BanKind.STATISTICAL: "the ban follows from the evidence in these receipts",
    BanKind.OPERATOR: "the operator signed the ban; it rests on no receipt and no bundle",
}
"""Last line of the output by kind: what a ban that holds rests on."""

evidence = command_group("Check the evidence for a ban or against a coordinator.")


FINDING_BYTES_MAX = 2**24
"""Size limit of a finding of `prime-node replay`."""


def repeat_finding(
    folder: Path,
    run: str | None,
    grants: EnvironmentSettings | None = None,
    *,
    as_json: bool,
    rewards: bool = True,
    code: frozenset[str] = frozenset(),
) -> NoReturn:
    """Repeat the checks of a folder of evidence, and exit with the code of what follows. Raises LocalError."""
    from prime_node.cli.replay_target import REPEATED
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.replay.finding import FINDING

    try:
        found = json.loads(read_regular((folder / FINDING).resolve(), bytes_max=FINDING_BYTES_MAX))
        steps = [int(each["step"]) for each in found["steps"]]
        asked: dict[str, Any] = {
            name: bool(found.get("options", {})[name]) for name in REPEATED if name in found.get("options", {})
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise LocalError(f"{folder} has no readable {FINDING}: it is no evidence of `prime-node replay`") from None
    named = tuple(step for step in steps if step >= 0)
    asked["genesis"] = min(steps, default=0) < 0
    if not as_json:
        unusual = [name for name, value in asked.items() if value is (name != "rewards") and name != "genesis"]
        for name in unusual:
            option = "no-rewards" if name == "rewards" else name.replace("_", "-")
            say(f"note the finding was made with --{option}, and is repeated so")
    asked["rewards"] = asked.get("rewards", True) and rewards
    options = ReplayOptions(run=run, steps=named, ledger=False, code=code, **asked)
    exit_with_report(str(folder), options, grants or EnvironmentSettings(), as_json=as_json)


@evidence.command("verify")
def evidence_verify(
    dossier: Annotated[
        Path,
        typer.Argument(
            help="Ban dossier, coordinator/evidence/ban-WORKER-TIME.jsonl in the run's folder; or a folder of `replay`."
        ),
    ],
    run: ExpectedRun = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="The bundle's policy, from `verify --policy N --export`: repeat the forward pass of the deciding bundle, if a "
            "transformers validator made it."
        ),
    ] = None,
    ledger: Annotated[
        str | None,
        typer.Option(
            help="Exported ledger, join link or URL: its key rings count too, and the deciding bundle's problems and "
            "seeds must be those of the run's seed chain."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="The run's model files: render the deciding bundle's prompts again, with the environments that the run names. "
            "Needs --run."
        ),
    ] = None,
    code: TrustedCode = [],  # noqa: B006 - typer reads it, nothing changes it
    no_rewards: Annotated[
        bool, typer.Option("--no-rewards", help="For a folder of `replay`: do not compute rewards again.")
    ] = False,
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    as_json: AsJson = False,
) -> None:
    """Check the evidence for a ban, or of a re-execution.

    It checks signatures, receipts, sums, and the deciding bundle if it is in the same folder.
    Evidence is in nats: an honest worker reaches n nats with a probability of at most e^-n.
    --code and the settings, those of the environments, are for a folder of `replay`.

    \b
    Exit codes: 0 all holds; 1 something does not; 3 this machine is at fault. For a folder of `replay`: its codes and its --json.

    \b
    --json prints one object: ok, run, worker, kind, reason, num_receipts, fault, bundle: what was found about it, and
    seeds: the result of --ledger; prompts: the result of --prompts; notes: statements by former keys.
    """
    if dossier.is_dir():
        from prime_node.envs.settings import EnvironmentSettings

        grants = Options(config, assignments, reads=("environments",)).load(EnvironmentSettings)
        repeat_finding(dossier, run, grants, as_json=as_json, rewards=not no_rewards, code=frozenset(code))
    opened, bundle_finding, seeds, rendered, fault = None, "", "", "", ""
    try:
        opened = read_dossier(dossier, pinned=run)
        if (
            ledger is not None
            and len(rings := asyncio.run(_rings_of(ledger, opened.run.digest))) > opened.run.keys.version
        ):
            opened = read_dossier(dossier, pinned=run, rings=rings)
        check_dossier(opened.statement, opened.receipts, opened.run, headers=opened.headers)
        bundle_finding = about_the_bundle(opened, dossier.parent, model)
        seeds = "" if ledger is None else asyncio.run(_about_the_seeds(opened, ledger))
        rendered = "" if prompts is None else _rendered_again(opened, prompts)
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
                    "prompts": rendered,
                    "notes": opened.notes if opened else [],
                }
            )
        )
    elif opened is not None:
        statement = opened.statement
        say(f"run {opened.run.digest[:12]}{'' if run else ' (not pinned: give --run)'}")
        say(f"worker {statement.worker}, banned at step {statement.step}: {statement.kind}, {statement.reason}")
        if statement.kind is not BanKind.OPERATOR:
            found = f"; deciding bundle: {bundle_finding}" if bundle_finding else ""
            say(f"     {statement.num_receipts} signed receipts{found}")
        for about_lease in filter(None, (seeds, rendered)):
            say(f"     {about_lease}")
        for note in opened.notes:
            say(f"note {note}")
    if not as_json:
        say(f"FAIL {fault}" if fault or opened is None else f"ok   {RESTS_ON[opened.statement.kind]}")
    raise typer.Exit(DOES_NOT_HOLD if fault else 0)


@evidence.command("contradiction")
def evidence_contradiction(
    file: Annotated[Path, typer.Argument(help="A worker's contradiction-LEASE.jsonl.")],
    run: ExpectedRun = None,
    ledger: Annotated[
        str | None,
        typer.Option(help="Exported ledger, join link or URL: its key rings count too, which the file may leave out."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that a coordinator contradicts itself.

    The file holds a lease and a receipt that a worker kept because they do not agree.

    \b
    Exit codes: 0 one of the two statements is false; 1 the file does not prove that; 3 this machine is at fault.

    \b
    --json prints one object: ok, run, worker, bundle, what: what differs, notes: statements by former keys, and fault.
    """
    found, fault = None, ""
    try:
        found = read_contradiction(file, pinned=run)
        if ledger is not None:
            rings = asyncio.run(_rings_of(ledger, found.run.digest))
            found = read_contradiction(file, pinned=run, rings=rings)
    except RemoteError as error:
        found, fault = None, error.detail
    if as_json:
        shown = (
            {"run": found.run.digest, "worker": found.receipt.worker, "bundle": found.receipt.bundle} if found else {}
        )
        said = {"what": found.what, "notes": found.notes} if found else {}
        print(json.dumps({"ok": found is not None, **shown, **said, "fault": fault}))
    elif found is None:
        say(f"FAIL {fault}")
    else:
        say(f"run {found.run.digest[:12]}{'' if run else ' (not pinned: give --run)'}")
        say(f"worker {found.receipt.worker}, bundle {found.receipt.bundle[:12]} of step {found.receipt.step}")
        for note in found.notes:
            say(f"note {note}")
        say(f"ok   the coordinator signed both statements, so one is false: {found.what}")
    raise typer.Exit(0 if found else DOES_NOT_HOLD)


async def _rings_of(ledger: str, run: str) -> list[Envelope]:
    from prime_node.cli.ledger import open_ledger

    async with open_ledger(ledger, run) as source:
        return [ring for _, ring in source.run.keys.rings]


async def _about_the_seeds(dossier: DossierFile, ledger: str) -> str:
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


def _rendered_again(dossier: DossierFile, model: Path) -> str:
    """Compare the lease's prompts with those that this machine renders. Raises LocalError and RemoteError."""
    from prime_node.cli.rendering import about_the_prompts, rendering

    if dossier.lease is None:
        return "there is no lease, so there are no prompts"
    with rendering(dossier.run, model, is_pinned=dossier.is_pinned) as render:
        return about_the_prompts(dossier.lease, render)
