"""`prime-node replay`: does a policy follow from its recipe, its batch and the state before it? docs/replaying.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from prime_node.cli.lifetime import INTERRUPTED
from prime_node.cli.options import AsJson, ConfigFile, ExpectedRun, Options, Set, StopWithParent, TrustedCode
from prime_node.cli.ranks import OutcomeFile, launch_ranks, run_as_rank
from prime_node.cli.replay_target import ReplayOptions, replay_target
from prime_node.cli.say import say
from prime_node.ports.clock import Clock

if TYPE_CHECKING:
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.replay.finding import StepFinding
    from prime_node.replay.material import ReplayProgress


def replay(
    target: Annotated[
        str, typer.Argument(help="Join link, URL, run directory, published folder, or evidence of `replay`.")
    ],
    step: Annotated[
        list[int], typer.Option("--step", min=0, help="Re-execute this step, which made policy N + 1; repeatable.")
    ] = [],  # noqa: B006 - typer reads it, nothing changes it
    sample: Annotated[
        int,
        typer.Option("--sample", min=0, show_default=False, help="Re-execute this many steps, drawn at random here."),
    ] = 0,
    genesis: Annotated[
        bool, typer.Option("--genesis", help="Make policy 0 again: the seed's weights and the supervised phase.")
    ] = False,
    batches_only: Annotated[
        bool,
        typer.Option("--batches-only", help="Check batches, bundles, rewards and ledger; train nothing. No torch."),
    ] = False,
    bound_only: Annotated[
        bool,
        typer.Option("--bound-only", help="Check learning rates, and how far each weight moved. No torch, no bundles."),
    ] = False,
    tolerance: Annotated[
        bool, typer.Option("--tolerance", help="On other arithmetic, compare the fp32 weights within measured bounds.")
    ] = False,
    no_rewards: Annotated[
        bool, typer.Option("--no-rewards", help="Do not compute rewards again; needs no environments here.")
    ] = False,
    evidence: Annotated[
        Path | None,
        typer.Option("--evidence", help="Keep in this new folder what a third party needs to repeat it offline."),
    ] = None,
    code: TrustedCode = [],  # noqa: B006 - typer reads it, nothing changes it
    key: Annotated[
        Path | None, typer.Option("--key", help="Auditor's private key, for a run that gives bundles to auditors only.")
    ] = None,
    run: ExpectedRun = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", min=1, help="Compute in this many processes, on CPUs, as a trainer of so many ranks did."
        ),
    ] = None,
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    stop_with_parent: StopWithParent = False,
    outcome_file: OutcomeFile = None,
    as_json: AsJson = False,
) -> None:
    """Train published steps again, and compare the result with the published policies bit for bit.

    Begins at the newest training state before each step. Without --step, --sample and --genesis: one step, drawn at random;
    with --batches-only or --bound-only: all steps. A fault of the run does not show in steps that are not re-executed.

    \b
    Exit codes:
      0    exact: every policy follows bit for bit, or every check asked for holds
      1    the weights or the training state do not follow, or a signed statement contradicts another (weights, statement)
      2    wrong usage
      3    cannot say: this machine's arithmetic is another one, or this machine is at fault
      4    refused: the run promises no re-execution, or gives its bundles to others only
      6    this machine is at fault, and it may pass: a full disk
      7    follows within the tolerance only
      8    withheld: the source lacks what the RunSpec promises, or no longer has it
      9    a reward, or the prompt it is for, does not follow (reward)
      10   a batch lacks groups, or is not the one that the policy was computed from (batch)
      11   a learning rate or a number of optimizer steps does not follow (learning_rate)
      12   a training state is not that of its policy, run or recipe (state)
      13   the ledger contradicts itself or a batch (ledger)
      130  interrupted

    \b
    --json prints one object: ok, outcome, fault (the name in brackets above), exit_code, run, pinned, options, notes,
    numerics: {committed, here} if they matter, and steps: [{step, outcome, fault, detail, established, seconds}]; step -1 is
    policy 0 (--genesis).
    """
    from prime_node.cli import wire_training
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.patience import unless
    from prime_node.replay.finding import EXIT_CODES, ReplayOutcome
    from prime_node.trainer.config import TrainerConfig

    if batches_only and bound_only:
        raise typer.BadParameter("choose one of --batches-only and --bound-only")
    options = ReplayOptions(
        run=run, steps=tuple(step), sample=sample, genesis=genesis, batches_only=batches_only, bound_only=bound_only,
        tolerance=tolerance, rewards=not no_rewards, evidence=evidence, key=key, code=frozenset(code),
    )  # fmt: skip
    settings = Options(config, assignments, reads=("environments",)).load(EnvironmentSettings)
    if nproc is None or nproc == 1 or batches_only or bound_only:
        exit_with_report(target, options, settings, as_json=as_json)
    if not wire_training.is_under_torchrun():
        # A process that is killed, for example for lack of memory, accuses no trainer.
        cannot_say = EXIT_CODES[ReplayOutcome.OTHER_NUMERICS]
        raise typer.Exit(launch_ranks("replay", sys.argv[2:], nproc, unfinished=INTERRUPTED, failed=cannot_say))
    ranks = wire_training.trainer_ranks(TrainerConfig())

    async def lead(stop: asyncio.Event) -> int:
        here = replace(options, ranks=ranks)
        code = await unless(stop.wait(), replay_report(target, here, settings, as_json=as_json))
        return INTERRUPTED if code is None else code

    run_as_rank(
        ranks, lead, command="replay", stop_with_parent=stop_with_parent, grace_s=10.0, outcome_file=outcome_file
    )


def exit_with_report(target: str, options: ReplayOptions, settings: EnvironmentSettings, *, as_json: bool) -> NoReturn:
    """Re-execute steps in this process, print what is found, and exit with its code. A bug of this program accuses no trainer."""
    from prime_node.cli.outcome import outcome_of
    from prime_node.replay.finding import EXIT_CODES, ReplayOutcome

    try:
        code = asyncio.run(replay_report(target, options, settings, as_json=as_json))
    except Exception as error:
        if outcome_of(error) is not None:
            raise
        traceback.print_exc()
        code = EXIT_CODES[ReplayOutcome.OTHER_NUMERICS]  # Python's own, 1, would mean that the weights do not follow
    raise typer.Exit(code)


async def replay_report(target: str, options: ReplayOptions, settings: EnvironmentSettings, *, as_json: bool) -> int:
    """Re-execute steps, print what is found, and return its exit code."""
    from prime_node.cli import wire
    from prime_node.cli.kernels import ready_kernels
    from prime_node.patience import unless
    from prime_node.replay.material import ReplayProgress

    console = None if as_json else Console(highlight=False, soft_wrap=True)

    def show(finding: StepFinding) -> None:
        for line in lines_of(finding) if console is not None else ():
            say(line, console=console)

    if not options.batches_only:  # it decodes no weights
        await asyncio.to_thread(ready_kernels, Console(stderr=True, highlight=False).print)
    progress = ReplayProgress()
    work = replay_target(target, options, settings, show, progress)
    report = await (work if console is None else unless(show_progress(progress, console, wire.clock()), work))
    assert report is not None, "progress is shown until the work ends"
    if console is None:
        print(json.dumps(report.as_fields()))
    else:
        for note in report.notes:
            say(f"note {note}", console=console)
        numerics = "".join(f"; {where}: {name}" for where, name in report.numerics.items() if name)
        say(f"{len(report.steps)} steps: {report.outcome}{numerics}", console=console)
        if advice := _other_ranks(report.numerics.get("committed", ""), report.numerics.get("here", "")):
            say(advice, console=console)
    return report.exit_code


def lines_of(finding: StepFinding) -> list[str]:
    """Return what was found of a step, as lines for people."""
    from prime_node.replay.finding import ReplayOutcome

    name = "policy 0" if finding.step < 0 else f"step {finding.step}"
    held = finding.outcome in (ReplayOutcome.EXACT, ReplayOutcome.TOLERATED)
    mark = "ok  " if held else "?   " if finding.outcome is ReplayOutcome.OTHER_NUMERICS else "FAIL"
    lines = [f"{mark} {name}: {finding.outcome} ({finding.seconds:.1f} s) {finding.detail}".rstrip()]
    return [*lines, *(f"       {text}" for text in finding.established)]


def _other_ranks(committed: str, here: str) -> str:
    """Return what to do where the arithmetic differs only in the number of processes; nothing elsewhere."""
    theirs, ours = (re.sub(r"/ranks\d+/", "/*/", name) for name in (committed, here))
    found = re.search(r"/ranks(\d+)/", committed)
    if found is None or theirs != ours or committed == here:
        return ""
    return f"the trainer computed on {found[1]} ranks: repeat with --nproc {found[1]}"


LINE_S, LOOK_S = 30.0, 0.5
"""Seconds between two lines, and between two looks."""


async def show_progress(progress: ReplayProgress, console: Console, clock: Clock) -> NoReturn:
    """Show where a re-execution is, until cancelled."""
    status = console.status("") if console.is_terminal else None
    said_s = clock.monotonic_s()
    with status or contextlib.nullcontext():
        while True:
            await clock.sleep(LOOK_S)
            text, now_s = progress.text, clock.monotonic_s()
            if status is not None:
                status.update(Text(text))
            elif text and now_s >= said_s + LINE_S:
                say(f"now  {text}", console=console)
                said_s = now_s
