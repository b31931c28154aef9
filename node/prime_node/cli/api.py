"""The Python API: what `prime_node` offers to other programs. The commands `join` and `verify` call these functions.

`prime_node.join` is `join_run`, and `prime_node.verify` is `verify_checkpoint`. Both are imported on first use, so that
`import prime_node` loads nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_node.cli.options import SECTIONS
from prime_node.cli.place import HOME, invite_for, is_url, named_in, parse_link
from prime_node.cli.target import expected_run, open_source, published_folder

if TYPE_CHECKING:
    from prime_node.broadcast.audit.audit import Verified
    from prime_node.broadcast.audit.audit_report import Check
    from prime_node.broadcast.follow.follower import DownloadProgress
    from prime_node.cli.node_screen import NodeScreen
    from prime_node.cli.verify_output import Verification
    from prime_node.cli.wire_environments import Launcher
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.other_programs import ThisMachine
    from prime_node.worker.config import WorkerConfig
    from prime_node.worker.worker import Ending
    from prime_protocol.identity import SigningKey
    from prime_protocol.run_spec import JoinLink, PinnedRun

log = logging.getLogger(__name__)

TIMELINE_BYTES_MAX = 2**24
"""Size limit of a worker's timeline.jsonl. A full file is kept next to its successor."""


async def join_run(
    link: str,
    *,
    folder: str | Path | None = None,
    identity: str | Path | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    stop: asyncio.Event | None = None,
    on_download: Callable[[DownloadProgress], None] = lambda progress: None,
) -> Ending:
    """Lend this machine to a run: fetch the newest policy, generate, upload, until the run is over.

    `folder` and `identity` have the defaults of `prime-node join`. `settings` has the tables of its config file, for
    example {"worker": {"engine": "transformers"}}. Once `stop` is set, the worker finishes its leases, uploads and leaves.
    Cancelling ends it at once; its finished bundles stay in the folder and are uploaded next time.

    This confines the whole process irrevocably, unless [worker.sandbox] unsafe_off is set. So call it from the main thread
    of a process of its own, before other threads start. It blocks the event loop until then.

    Raises LocalError if this machine or its settings are at fault, RemoteError if the run refuses the worker.
    """
    # Importing numpy would start threads that cannot be confined any more.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from prime_node.config import check_sections
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.worker.config import WorkerConfig

    tables = dict(settings or {})
    check_sections(tables, SECTIONS, path=Path("settings"))
    worker = confined_worker(
        link,
        WorkerConfig.load(tables),
        EnvironmentSettings.load(tables),
        folder=None if folder is None else Path(folder),
        identity=None if identity is None else Path(identity),
    )
    return await run_confined(worker, stop or asyncio.Event(), on_download)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfinedWorker:
    """A worker's parts that are made before its process is confined."""

    link: JoinLink
    settings: WorkerConfig
    grants: EnvironmentSettings
    launcher: Launcher | None
    load_kernels: Callable[[], None]
    """Function that waits until the codec's kernels are compiled, and loads them."""
    folder: Path
    key: SigningKey
    delegation: str
    """Delegation by its person's key; empty for a machine without one."""
    machine: ThisMachine
    cheat: tuple[str, int] | None
    """A cheat of worker/cheats.py, and the number of policies to serve honestly first."""


def confined_worker(
    link: str,
    settings: WorkerConfig,
    grants: EnvironmentSettings,
    *,
    folder: Path | None,
    identity: Path | None,
    cheat: tuple[str, int] | None = None,
) -> ConfinedWorker:
    """Open a worker's folder and key, start its launcher, then confine this process. Raises LocalError."""
    from prime_node.at_desk import Desk
    from prime_node.cli.kernels import begin_kernels
    from prime_node.cli.wire import clock, environment_launcher
    from prime_node.cli.wire_classes import engine_info
    from prime_node.cli.wire_identity import delegation_for
    from prime_node.cli.wire_sandbox import absolute_model, confine_role, worker_needs
    from prime_node.folder_lock import FolderLock
    from prime_node.keyfile import load_or_create
    from prime_node.other_programs import ThisMachine
    from prime_node.power import PowerSupply

    parsed = parse_link(link)
    engine_info(settings)  # fail before anything is made if no engine is installed
    own = {"base_model": absolute_model(settings.base_model), "invite": invite_for(parsed, settings.invite)}
    settings = settings.model_copy(update=own)
    place = (folder or HOME / "runs" / parsed.run[:16]).resolve()
    key_file = identity or (HOME / "identity.key" if folder is None else folder / "identity.key")
    FolderLock(place).release()  # fail early if another worker runs there; the worker takes the lock that is kept
    load_kernels = begin_kernels()
    launcher = environment_launcher(grants, settings.sandbox, folder=place)
    key = load_or_create(key_file)
    delegation = delegation_for(key_file, key, parsed.run)
    machine = ThisMachine(PowerSupply(), clock(), desk=Desk())
    confine_role(settings.sandbox, place, worker_needs(settings, grants, launcher))
    return ConfinedWorker(
        link=parsed,
        settings=settings,
        grants=grants,
        launcher=launcher,
        load_kernels=load_kernels,
        folder=place,
        key=key,
        delegation=delegation,
        machine=machine,
        cheat=cheat,
    )


async def run_confined(
    worker: ConfinedWorker,
    stop: asyncio.Event,
    on_download: Callable[[DownloadProgress], None] = lambda progress: None,
    *,
    screen: NodeScreen | None = None,
) -> Ending:
    """Build the worker's other parts and run it until `stop` is set, the run is over or the worker is banned.

    The engine and the environments take seconds to build, so the worker calls `equip` after it has joined.
    """
    from prime_node.cli import wire, wire_swarm
    from prime_node.cli.lifetime import pause_after_faults
    from prime_node.cli.wire_classes import engine_info
    from prime_node.cli.wire_environments import end_environments
    from prime_node.cli.wire_node import limit_links, limited_settings, links_of, node_page
    from prime_node.observe import BestEffort, JsonLines
    from prime_node.patience import Switch, unless
    from prime_node.worker.loop import run_worker
    from prime_node.worker.worker import Ending, Equipment, Worker

    settings, folder = worker.settings, worker.folder
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(worker.machine.close)
        if worker.launcher is not None:
            stack.callback(worker.launcher.close)
        client = await stack.enter_async_context(wire.client(worker.link, worker.key))

        async def begin() -> PinnedRun:
            await pause_after_faults(folder, wire.clock())
            return await wire.pinned_run(client, worker.link.run, folder, mirrors=settings.mirrors)

        run = await unless(stop.wait(), begin())
        if run is None:
            return Ending.STOPPED
        model = folder / "model"

        async def equip() -> Equipment:
            """Build in threads, so that signals are still handled, and all at once, as each takes long."""
            limited = limited_settings(settings, folder)
            engine, environments, _ = await asyncio.gather(
                asyncio.to_thread(wire.engine, limited, model, run, cheat=worker.cheat),
                asyncio.to_thread(
                    wire.turn_environments, run.spec, model, worker.grants, worker.launcher, folder=folder
                ),
                asyncio.to_thread(worker.load_kernels),
            )
            stack.push_async_callback(engine.close)
            stack.callback(end_environments, environments)
            return Equipment(engine, environments)

        timeline = BestEffort(JsonLines(folder / "timeline.jsonl", bytes_max=TIMELINE_BYTES_MAX))
        try:
            accepted, on_progress = Switch(), on_download if screen is None else screen.show_download
            following = wire_swarm.swarm_follower(
                run,
                worker.key,
                client,
                folder,
                settings,
                accepted=accepted,
                on_progress=on_progress,
            )
            async with following as (follower, trust, peer):
                made = Worker(
                    run=run,
                    config=settings,
                    key=worker.key,
                    delegation=worker.delegation,
                    coordinator=client,
                    engine_info=engine_info(settings),
                    equip=equip,
                    follower=follower,
                    trust=trust,
                    hardware=wire.describe_hardware(),
                    around=worker.machine,
                    limit_links=partial(limit_links, settings, follower, peer),
                    links=partial(links_of, follower, peer),
                    folder=folder,
                    clock=wire.clock(),
                    rng=random.Random(),
                    timeline=timeline,
                    screen=None if screen is None else screen.show,
                    accepted=accepted,
                )
                async with node_page(made, f"{worker.link.url}/#{worker.link.run}"):
                    return await run_worker(made, stop)
        finally:
            timeline.close()


class OptionConflict(ValueError):
    """Options of `verify` that exclude each other."""

    def __init__(self, option: str, reason: str) -> None:
        """Name the option that is at fault."""
        super().__init__(f"{option}: {reason}")
        self.option = option
        self.reason = reason


async def verify_checkpoint(
    target: str | Path,
    *,
    run: str | None = None,
    chain: bool = False,
    policy: int | None = None,
    against: Path | None = None,
    tensor: str | None = None,
    export: Path | None = None,
    sign: Path | None = None,
    base: Path | None = None,
    memory: float | None = None,
    on_check: Callable[[Check], None] = lambda check: None,
    on_progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None,
    on_notice: Callable[[str], None] = log.info,
) -> Verification:
    """Check a published checkpoint: signatures, chain and every byte. Return what holds, also if a check fails.

    `target` is a join link, a URL, a run directory or a published folder. The options are those of `prime-node verify`,
    whose help explains them. `on_check` gets each check as it ends, `on_progress` the stage, and its bytes done and in all.
    `on_notice` gets a line before the codec's kernels are compiled: 10 to 60 s, once per installation.

    Raises LocalError if this machine is at fault (no such folder, a full disk, less memory than a policy needs),
    OptionConflict for options that exclude each other, NoSuchTensor if the policy has no tensor of that name.
    """
    from prime_node import __version__
    from prime_node.broadcast.audit.audit import audit
    from prime_node.broadcast.audit.compare import compare
    from prime_node.broadcast.audit.export import check_free, export_checkpoint
    from prime_node.broadcast.audit.one_tensor import prove_tensor
    from prime_node.broadcast.audit.safetensors_file import read_weights
    from prime_node.cli import wire
    from prime_node.cli.kernels import ready_kernels
    from prime_node.cli.verify_output import Verification, about
    from prime_node.keyfile import load_key

    place = str(target)
    if tensor is not None and (chain or against is not None or export is not None):
        raise OptionConflict("tensor", "proves one tensor alone: leave out chain, against, export")
    if sign is not None and export is None:
        raise OptionConflict("sign", "there is nothing to sign without export")
    if base is not None and export is None:
        raise OptionConflict("base", "there is nothing to merge into without export")
    # Find the errors of this machine before spending minutes on the rest.
    if not is_url(place):
        published_folder(place)
    other = None if against is None else read_weights(against)
    merged_into = None if base is None else read_weights(base, follows_links=True)
    key = None if sign is None else load_key(sign)
    memory_bytes_max = None if memory is None else int(memory * 2**30)
    if export is not None:
        check_free(export)
    await asyncio.to_thread(ready_kernels, on_notice)
    named = run or named_in(place)
    run = named or expected_run(place)
    now_ms = time.time_ns() // 1_000_000 if is_url(place) else None  # the age of a copy on a disk is shown, not judged
    kept: list[Verified] = []
    proof = None
    done, total = 0, None
    began_s = time.monotonic()

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        on_progress("checking", done, total)

    def expect(num_bytes: int) -> None:
        nonlocal total
        total = num_bytes
        on_progress("checking", done, total)

    async with open_source(place) as opened:
        source = wire.paced(opened)
        if tensor is not None:
            report, proof = await prove_tensor(
                source,
                run,
                tensor,
                is_pinned=named is not None,
                policy_version=policy,
                now_ms=now_ms,
                memory_bytes_max=memory_bytes_max,
                on_check=on_check,
                on_bytes=advance,
            )
        else:
            report = await audit(
                source,
                run,
                is_pinned=named is not None,
                chain=chain,
                policy_version=policy,
                now_ms=now_ms,
                memory_bytes_max=memory_bytes_max,
                on_check=on_check,
                on_bytes=advance,
                on_total=expect,
                on_verified=kept.append,
            )
    found = Verification(
        report, named is not None, time.monotonic() - began_s, proof=proof, against=against, export=export
    )
    for verified in kept:
        found.policy = about(verified)
        if other is not None:
            on_progress("comparing", done, total)
            found.comparison = compare(verified.weights, other)
        if export is not None and found.ok:
            on_progress("writing", done, total)
            software = f"prime-node {__version__}"
            found.files = export_checkpoint(verified, export, software=software, key=key, base=merged_into)
    return found
