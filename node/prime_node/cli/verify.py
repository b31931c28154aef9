"""`prime-node verify`: is a published checkpoint what it claims to be? Offline on a folder, online on a URL, without torch.

The checks are in broadcast/ (audit, one_tensor, compare, export), and the output is in verify_output. This module connects
them.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from prime_node import __version__
from prime_node.cli.say import say
from prime_node.cli.target import is_url, open_source, pinned_by, published_folder
from prime_node.keyfile import load_key

if TYPE_CHECKING:
    from rich.progress import Progress

    from prime_node.broadcast.audit.audit import Check, Verified
    from prime_node.cli.verify_output import Found, Wanted

DOES_NOT_HOLD = 1
"""Exit code if a check fails or the weights of --against differ; 0 if all holds."""


def verify(
    target: Annotated[str, typer.Argument(help="Join link, URL, run directory or published folder.")],
    chain: Annotated[
        bool, typer.Option("--chain", help="Every policy from the first to the newest, not only the newest.")
    ] = False,
    policy: Annotated[
        int | None,
        typer.Option(
            "--policy", min=0, show_default=False, help="This policy instead of the newest, and the chain between them."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            show_default=False,
            help="A safetensors file, or a folder of them: are these the policy's weights, bit for bit?",
        ),
    ] = None,
    tensor: Annotated[
        str | None,
        typer.Option("--tensor", show_default=False, help="Prove one tensor; fetch and decode only what it needs."),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export",
            show_default=False,
            help="Write the policy to this new folder as a Hugging Face model with PROVENANCE.json.",
        ),
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            show_default=False,
            help="Of a run whose policies are adapters: the base model's folder. The export is then the merged model.",
        ),
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            "--sign",
            show_default=False,
            help="Sign the export's provenance with this key file: an in-toto statement in DSSE, Ed25519.",
        ),
    ] = None,
    evidence: Annotated[
        Path | None,
        typer.Option(
            "--evidence",
            show_default=False,
            help="Where signed statements contradict each other, two manifests of one policy say, keep them in this folder.",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", help="Digest of the run that you mean; the join link holds it.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Check signatures, chain and every byte of a published checkpoint, and compare, prove or export its content.

    \b
    Nine checks: (1) run, (2) signatures, (3) manifests, (4) chain, (5) parts, (6) chunks, (7) tensors,
    (8) model files, (9) freshness. The first one that does not hold ends it. --tensor leaves out (5) and (8).
    A URL must show an unexpired timestamp of its newest policy; for a folder, its date is only shown.
    A source that sends less than 32 KiB a second on average is abandoned.

    \b
    Exit codes:
      0    everything asked for holds
      1    a check does not hold, or the weights of --against differ
      2    wrong usage, or no tensor of that name
      3    this machine is at fault: no such folder, a file that is no safetensors file, a full disk
      130  interrupted

    \b
    --json prints one object. Fields may be added, none is renamed:
      ok              everything asked for holds
      checks          [{number, title, passed, detail}] in order; a failed one is the last
      run             digest of the RunSpec, null if it did not verify
      pinned          whether you named the run, by its link or by --run
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
    from prime_node.cli.kernels import ready_kernels
    from prime_node.cli.verify_output import Wanted, as_fields, as_lines, keep_evidence

    if tensor is not None and (chain or against is not None or export is not None):
        raise typer.BadParameter(
            "proves one tensor alone: leave out --chain, --against, --export", param_hint="--tensor"
        )
    if sign is not None and export is None:
        raise typer.BadParameter("there is nothing to sign without --export", param_hint="--sign")
    if base is not None and export is None:
        raise typer.BadParameter("there is nothing to merge into without --export", param_hint="--base")
    if not is_url(target):
        published_folder(target)
    wanted = Wanted(chain, policy, against, tensor, export, sign, base)
    console = None if as_json else Console(highlight=False, soft_wrap=True)
    ready_kernels(Console(stderr=True, highlight=False).print)
    try:
        found = asyncio.run(_verify(target, run or pinned_by(target), wanted, console))
    except NoSuchTensor as error:
        raise typer.BadParameter(str(error), param_hint="--tensor") from None
    if evidence is not None:
        keep_evidence(found.report.evidence, evidence)
    if console is None:
        print(json.dumps(as_fields(found, wanted)))
    else:
        for line in as_lines(found, wanted):
            say(line, console=console)
    raise typer.Exit(0 if found.ok else DOES_NOT_HOLD)


async def _verify(target: str, run: str | None, wanted: Wanted, console: Console | None) -> Found:
    from prime_node.broadcast.audit.audit import audit
    from prime_node.broadcast.audit.compare import compare
    from prime_node.broadcast.audit.export import check_free, export_checkpoint
    from prime_node.broadcast.audit.one_tensor import prove_tensor
    from prime_node.broadcast.audit.safetensors_file import read_weights
    from prime_node.broadcast.audit.verified_parts import bound_threads
    from prime_node.cli import wire
    from prime_node.cli.verify_output import Found, about, as_line

    def show(check: Check) -> None:
        if console is not None:
            say(as_line(check), console=console)

    bound_threads()
    # Find the errors of this machine before spending minutes on the rest.
    other = None if wanted.against is None else read_weights(wanted.against)
    base = None if wanted.base is None else read_weights(wanted.base)
    key = None if wanted.sign is None else load_key(wanted.sign)
    if wanted.export is not None:
        check_free(wanted.export)
    now_ms = time.time_ns() // 1_000_000 if is_url(target) else None  # the age of a copy on a disk is shown, not judged
    kept: list[Verified] = []
    proof = None
    began_s = time.monotonic()
    with _progress(console) as progress:
        task = progress.add_task("checking", total=None)

        def advance(num_bytes: int) -> None:
            progress.update(task, advance=num_bytes)

        async with open_source(target) as opened:
            source = wire.paced(opened)
            if wanted.tensor is not None:
                report, proof = await prove_tensor(
                    source,
                    run,
                    wanted.tensor,
                    policy_version=wanted.policy_version,
                    now_ms=now_ms,
                    on_check=show,
                    on_bytes=advance,
                )
            else:
                report = await audit(
                    source,
                    run,
                    chain=wanted.chain,
                    policy_version=wanted.policy_version,
                    now_ms=now_ms,
                    on_check=show,
                    on_bytes=advance,
                    on_total=lambda total: progress.update(task, total=total),
                    on_verified=kept.append,
                )
        found = Found(report, run is not None, time.monotonic() - began_s, proof=proof)
        for verified in kept:
            found.policy = about(verified)
            if other is not None:
                progress.update(task, description="comparing")
                found.comparison = compare(verified.weights, other)
            if wanted.export is not None and found.ok:
                progress.update(task, description="writing")
                software = f"prime-node {__version__}"
                found.files = export_checkpoint(verified, wanted.export, software=software, key=key, base=base)
    return found


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
