"""`prime-node verify`: is a published checkpoint what it claims to be? Offline on a folder, online on a URL, without torch.

The checks are in broadcast/ (audit, one_tensor, compare, export), api.verify_checkpoint connects them, and the output is in
verify_output.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from prime_node.cli.options import AsJson, EvidenceFolder, ExpectedRun
from prime_node.cli.say import say

if TYPE_CHECKING:
    from rich.progress import Progress

    from prime_node.broadcast.audit.audit_report import Check
    from prime_node.cli.verify_output import Verification

DOES_NOT_HOLD = 1
"""Exit code if a check fails or the weights of --against differ; 0 if all holds."""


def verify(
    target: Annotated[str, typer.Argument(help="Join link, URL, run directory or published folder.")],
    chain: Annotated[
        bool, typer.Option("--chain", help="Verify every policy from the first to the newest, not only the newest.")
    ] = False,
    policy: Annotated[
        int | None,
        typer.Option("--policy", min=0, help="Verify this policy instead of the newest, and the chain between them."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            help="A safetensors file, or a folder of them: check that these are the policy's weights, bit for bit.",
        ),
    ] = None,
    tensor: Annotated[
        str | None, typer.Option("--tensor", help="Prove one tensor; fetch and decode only what it needs.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", help="Write the policy to this new folder as a Hugging Face model with PROVENANCE.json."
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            help="Folder of the base model, for a run whose policies are adapters. The export is then the merged model.",
        ),
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign", help="Sign the export's provenance with this key file: an in-toto statement in DSSE, Ed25519."
        ),
    ] = None,
    evidence: EvidenceFolder = None,
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory",
            min=0.001,
            help="Memory for decoded policies, in GiB.",
            show_default="nine tenths of what is available",
        ),
    ] = None,
    run: ExpectedRun = None,
    as_json: AsJson = False,
) -> None:
    """Check signatures, chain and every byte of a published checkpoint, and compare, prove or export its content.

    \b
    Nine checks: (1) run, (2) signatures, (3) manifests, (4) chain, (5) parts, (6) chunks, (7) tensors,
    (8) model files, (9) freshness. The first one that does not hold ends it. --tensor leaves out (5) and (8).
    A URL must show an unexpired timestamp of its newest policy; for a folder, its date is only shown.
    A source that sends less than 32 KiB a second on average, or is too busy for a minute, is abandoned.

    \b
    Exit codes:
      0    everything asked for holds
      1    a check does not hold, or the weights of --against differ
      2    wrong usage, or no tensor of that name
      3    this machine is at fault: no such folder, a file that is no safetensors file, a full disk, too
           little memory
      130  interrupted

    \b
    --json prints one object. Fields may be added, none is renamed:
      ok              everything asked for holds
      checks          [{number, title, passed, detail}] in order; a failed one is the last
      run             digest of the RunSpec, null if it did not verify
      pinned          whether you named the run, by its link or by --run; a folder's own link does not count
      policy_version  the newest policy, -1 if none was verified
      key_ring        version of the newest key ring that was verified, 0 if the keys are the RunSpec's
      timestamp       null, or the coordinator's statement on what is newest:
                      {policy_version, key_ring, issued_at_ms, expires_at_ms}
      num_manifests   manifests that were verified
      num_policies    policies whose every byte was verified
      num_bytes       bytes that were hashed
      seconds         how long the checks took
      policy          the policy asked for, or null:
                      {policy_version, manifest, state_root, encodings, step, created_at_ms, signers}
      against         null, or {path, equal, num_tensors,
                      differences: [{tensor, fault, detail, num_elements, largest}]}
      tensor          null, or {name, dtype, shape, digest, index, num_tensors,
                      policy_version, manifest, state_root, num_policies, num_bytes}
      export          null, or {path, files: {name: sha256}}
    """
    from prime_node.broadcast.audit.one_tensor import NoSuchTensor
    from prime_node.cli.api import OptionConflict
    from prime_node.cli.verify_output import as_fields, as_lines, keep_evidence

    console = None if as_json else Console(highlight=False, soft_wrap=True)
    options: dict[str, Any] = {"chain": chain, "policy": policy, "against": against, "tensor": tensor}
    options |= {"export": export, "sign": sign, "base": base, "memory": memory}
    try:
        found = asyncio.run(_verify(target, console, run=run, **options))
    except NoSuchTensor as error:
        raise typer.BadParameter(str(error), param_hint="--tensor") from None
    except OptionConflict as error:
        raise typer.BadParameter(error.reason, param_hint=f"--{error.option}") from None
    if evidence is not None:
        keep_evidence(found.report.evidence, evidence)
    if console is None:
        print(json.dumps(as_fields(found)))
    else:
        for line in as_lines(found):
            say(line, console=console)
    raise typer.Exit(0 if found.ok else DOES_NOT_HOLD)


async def _verify(target: str, console: Console | None, **options: Any) -> Verification:
    from prime_node.broadcast.audit.verified_parts import bound_threads
    from prime_node.cli.api import verify_checkpoint
    from prime_node.cli.verify_output import as_line

    def show(check: Check) -> None:
        if console is not None:
            say(as_line(check), console=console)

    bound_threads()
    with _progress(console) as progress:
        task = progress.add_task("checking", total=None)
        return await verify_checkpoint(
            target,
            **options,
            on_check=show,
            on_notice=Console(stderr=True, highlight=False).print,
            on_progress=lambda stage, done, total: progress.update(
                task, description=stage, completed=done, total=total
            ),
        )


def _progress(console: Console | None) -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=console is None or not console.is_terminal,
    )
