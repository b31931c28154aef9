"""The processes of `prime-node up`: started, watched and stopped in the order that loses no data.

Start order: coordinator, then trainer, validators and workers together. Stop order: workers, validators, trainer, coordinator,
so that all finished work is accepted. After Ctrl-C all but the coordinator stop together, and what they compute is given up. A
child that dies unexpectedly is restarted; each resumes from its own disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from prime_node.cli.gpu_plan import GpuPlan, RoleShare
from prime_node.cli.lifetime import FINAL_CODES
from prime_node.cli.options import READ_BY_ROLE, section_of
from prime_node.cli.run_dir import RunDir
from prime_node.cli.run_status import status_at
from prime_node.cli.say import say
from prime_node.cli.screen import RunProgress, one_line, render
from prime_node.cli.supervisor import Child, ChildState, Supervisor, last_lines
from prime_node.cli.up_config import UpConfig
from prime_node.observe import JsonLinesReader
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import JoinLink, PinnedRun

log = logging.getLogger(__name__)

COORDINATOR, TRAINER, VALIDATOR = "coordinator", "trainer", "validator"
WORKERS_WITHOUT_GPU = 3
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
REFRESH_S = 0.5
LINE_S = 5.0
"""Interval between lines without a terminal."""
START_S_MAX = 300.0
"""Limit on the time until the coordinator answers. A failure is noticed at once; on a busy machine, imports take minutes."""
LEAVE_S_MAX = 10.0
"""Time for workers to leave after the last step."""
GRACE_S = {"worker": 15.0, VALIDATOR: 10.0, TRAINER: 60.0, COORDINATOR: 15.0}
INTERRUPTED_S, HANDED_BACK_S, INTERRUPTED_COORDINATOR_S = 2.5, 1.5, 1.2
"""The same after Ctrl-C, for the roles that stop together; the time for workers to hand leases back; and the coordinator's, which
begins then. Killing a role takes a second or two where gigabytes of memory are freed."""


class UpSession:
    """One session of a run: from `up` to its end or to Ctrl-C."""

    def __init__(
        self,
        run_dir: RunDir,
        run: PinnedRun,
        link: JoinLink,
        settings: UpConfig,
        engine: str | None,
        assignments: list[str],
        plan: GpuPlan | None = None,
    ) -> None:
        self._run_dir, self._run, self._link = run_dir, run, link
        self._settings, self._engine, self._assignments, self._plan = settings, engine, assignments, plan
        self._supervisor = Supervisor(log_bytes_max=settings.log_bytes_max)
        self._metrics = JsonLinesReader(run_dir.trainer_metrics)
        self._began = time.monotonic()
        planned = len(plan.workers) if plan is not None and plan.workers else WORKERS_WITHOUT_GPU
        count = planned if settings.num_workers is None else settings.num_workers
        self._workers = [f"worker-{number}" for number in range(1, count + 1)]
        self.status: dict[str, Any] = {}
        self.progress = RunProgress("starting", 0, run.spec.max_steps, 0.0)

    async def start(self) -> None:
        """Start all children.

        For a finished run start only the coordinator, to show its result. Raises LocalError with the end of the coordinator's
        log if it does not start.
        """
        host, port = self._settings.host, self._link.url.rpartition(":")[2]
        await self._start(COORDINATOR, "--set", f"coordinator.host={host}", "--set", f"coordinator.port={port}")
        compiling = asyncio.create_task(compile_for_children())
        try:
            self.status = await self._until_healthy()
            await compiling
        finally:
            compiling.cancel()
        if self.status.get("complete"):
            return
        # One machine has no NAT to traverse: libp2p would cost every process a second without any benefit.
        await self._start(TRAINER, "--set", f"trainer.swarm.host={host}", "--set", "trainer.swarm.p2p=off")
        await self._start(VALIDATOR, "--set", "validator.swarm.p2p=off")
        for number, name in enumerate(self._workers, start=1):
            arguments = [
                str(self._link),
                "--folder",
                str(self._run_dir.worker(number)),
                "--name",
                name,
                "--set",
                f"worker.swarm.host={host}",
                "--set",
                "worker.swarm.p2p=off",
            ]
            if self._engine is not None:
                arguments += ["--engine", self._engine]
            cheat = self._settings.unsafe_cheaters.get(str(number))
            if cheat is not None:
                arguments += ["--unsafe-cheat", cheat, "--unsafe-cheat-after", str(self._settings.cheat_after_policies)]
            await self._start(name, *arguments, command="join", positional=False)

    async def watch(self, console: Console, stop: asyncio.Event) -> bool:
        """Show progress until the trainer is done (True), or until `stop` or a failure (False)."""
        if TRAINER not in self._supervisor.children:
            return True
        trainer = asyncio.create_task(self._supervisor.wait(TRAINER))
        stopping = asyncio.create_task(stop.wait())
        with contextlib.ExitStack() as stack:
            live = stack.enter_context(Live(console=console, refresh_per_second=4)) if console.is_terminal else None
            line_at = 0.0
            while not (trainer.done() or stopping.done() or self._given_up()):
                await self._refresh()
                if live is not None:
                    live.update(render(self.progress))
                elif time.monotonic() >= line_at:
                    say(one_line(self.progress))
                    line_at = time.monotonic() + LINE_S
                await asyncio.wait({trainer, stopping}, timeout=REFRESH_S, return_when=asyncio.FIRST_COMPLETED)
            await self._refresh()
            if live is not None:
                live.update(render(self.progress))
        stopping.cancel()
        trainer.cancel()
        is_done = trainer.done() and trainer.result() is not None  # raises an error of the supervisor
        failed = self._given_up()
        if failed is not None:
            log.error("%s ended with code %s and is not restarted", failed.name, failed.exit_code)
            end = last_lines(failed.log_file, 15).splitlines()
            say(f"the {failed.name} failed; the end of {failed.log_file}:", *end, console=console)
        return is_done and failed is None

    async def until_workers_left(self) -> None:
        """Wait a few seconds for the workers: the coordinator tells each of them, on any machine, that the run is over."""
        if TRAINER not in self._supervisor.children:
            return
        deadline = time.monotonic() + LEAVE_S_MAX
        while time.monotonic() < deadline:
            status = await self._get_status()
            if status is None or not status.get("num_workers"):
                return
            await asyncio.sleep(REFRESH_S)

    def _given_up(self) -> Child | None:
        """Return a child of an essential role that is not restarted, if there is one."""
        for name in (COORDINATOR, TRAINER, VALIDATOR):
            child = self._supervisor.children.get(name)
            if child is not None and (
                child.state is ChildState.FAILED or (child.state is ChildState.DONE and child.exit_code != 0)
            ):
                return child
        return None

    async def stop(self) -> None:
        """Stop all children in the order that loses no data."""
        await asyncio.gather(*(self._supervisor.stop(name, grace_s=GRACE_S["worker"]) for name in self._workers))
        for name in (VALIDATOR, TRAINER, COORDINATOR):
            await self._supervisor.stop(name, grace_s=GRACE_S[name])

    async def interrupt(self) -> None:
        """Stop all children within 5 s, whatever they compute. Each resumes from its own disk."""
        stopping = {
            name: asyncio.create_task(self._supervisor.stop(name, grace_s=INTERRUPTED_S, number=signal.SIGINT))
            for name in (*self._workers, VALIDATOR, TRAINER)
        }
        await asyncio.wait([stopping[name] for name in (*self._workers, VALIDATOR)], timeout=HANDED_BACK_S)
        coordinator = self._supervisor.stop(COORDINATOR, grace_s=INTERRUPTED_COORDINATOR_S, number=signal.SIGINT)
        await asyncio.gather(*stopping.values(), coordinator)

    async def _start(self, name: str, *arguments: str, command: str | None = None, positional: bool = True) -> None:
        # A worker gets only the link.
        where = [str(self._run_dir.path)] if positional else ["--config", str(self._run_dir.config)]
        share = None if self._plan is None else self._plan.of(name)
        for assignment in [*self._assignments, *([] if share is None else share.assignments())]:
            if section_of(assignment) in READ_BY_ROLE[command or name]:
                where += ["--set", assignment]
        await self._supervisor.start(
            Child(
                name,
                ["-m", "prime_node", command or name, *where, *arguments, "--stop-with-parent"],
                self._run_dir.log(name),
                environment=_environment(self._settings.threads) | ({} if share is None else _visible(share)),
                final_codes=FINAL_CODES,
            )
        )

    async def _until_healthy(self) -> dict[str, Any]:
        """Wait for the coordinator's first status and return it."""
        child = self._supervisor.children[COORDINATOR]
        deadline = time.monotonic() + START_S_MAX
        while (status := await self._get_status()) is None:
            if self._given_up() is not None or time.monotonic() > deadline:
                raise LocalError(
                    f"the coordinator did not start; the end of {child.log_file}:\n{last_lines(child.log_file, 15)}"
                )
            await asyncio.sleep(0.05)
        return status

    async def _refresh(self) -> None:
        from prime_node.cli.gather import progress_of

        await asyncio.to_thread(self._supervisor.rotate_logs)
        self.status = await self._get_status() or self.status
        self.progress = await asyncio.to_thread(
            progress_of,
            self._run_dir,
            self._run,
            await asyncio.to_thread(self._metrics.read),
            self.status,
            {child.name: child.state for child in self._supervisor.children.values()},
            elapsed_s=time.monotonic() - self._began,
        )

    async def _get_status(self) -> dict[str, Any] | None:
        """Return the status of this machine's coordinator; None if it does not answer."""
        try:
            return await status_at(self._link.url)
        except LocalError:
            return None


async def compile_for_children() -> None:
    """Compile the kernels before the children do so all at once, in a separate process that alone imports numba."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-m", "prime_node.cli.kernels")
    try:
        if await process.wait() != 0:
            log.warning("the codec's kernels could not be compiled; each child process tries again")
    finally:
        if process.returncode is None:
            process.kill()


def _environment(threads: int) -> dict[str, str]:
    """Return the variables that the children's libraries read on import."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "NUMBA_NUM_THREADS": str(threads),
        # By default glibc returns blocks of a megabyte to the kernel and faults them in again at each forward pass. Keeping those
        # of a small model saves a fifth of its time. Larger ones are returned: kept, they cost a gigabyte a role of a real model.
        "MALLOC_MMAP_THRESHOLD_": str(2**25),
        "MALLOC_TRIM_THRESHOLD_": str(2**27),
    }


def _visible(share: RoleShare) -> dict[str, str]:
    """Return the variable that shows a role its GPUs only."""
    named = os.environ.get(GPUS_VARIABLE)
    names = named.split(",") if named else None
    return {GPUS_VARIABLE: ",".join(str(index) if names is None else names[index].strip() for index in share.gpus)}
