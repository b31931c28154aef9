"""`--nproc N` of `prime-node trainer` and `prime-node replay`: torchrun with this machine's settings, and an orderly shutdown.

Concurrency: this process waits for torchrun, and torchrun for the ranks. A stop request goes only to torchrun (its ranks are in
their own session), which forwards it; rank 0 finishes its step, saves, publishes and dismisses the other ranks. If this process
dies, the pipe on the ranks' standard input closes, and rank 0 stops in the same way. If a rank dies, torchrun restarts all of
them. A restart would only repeat an intentional exit of rank 0, for example for an error in its settings. Rank 0 then writes
its exit code to a file and exits with success.

A TCP store of torch listens on all addresses, without authentication, and torchrun unpickles what it holds: a stranger could
run code as this user. So torchrun and the ranks share files in a private folder instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SHUTDOWN_S = 60
"""Time after the stop request before remaining ranks are killed."""


def torchrun_command(nproc: int, *, restarts_max: int, command: str = "trainer") -> list[str]:
    """Return the torchrun command for this machine, up to the command's own arguments.

    Example: torchrun_command(2, restarts_max=3).
    """
    return [
        *(sys.executable, "-P", "-m", "torch.distributed.run"),
        *("--nproc-per-node", str(nproc), "--max-restarts", str(restarts_max)),
        # After "--" no abbreviation is taken for an option of torchrun.
        *("--shutdown-timeout", str(SHUTDOWN_S), "-m", "--", "prime_node", command),
    ]


def rank_variables(folder: Path) -> dict[str, str]:
    """Return the environment of torchrun and its ranks, which share files in a new private folder."""
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        **os.environ,
        "PYTHONSAFEPATH": "1",  # -P for the ranks
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ID": "ranks",
        "PET_RDZV_CONF": "store_type=file",
        "PET_RDZV_ENDPOINT": str(folder / "rendezvous"),
        # With the store that torchrun shares with its ranks three of six restarts failed, without it none of six.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def meeting_place() -> str | None:
    """Return the file in which this rank meets the others, as torch names it; None if a user started torchrun."""
    path = os.environ.get("PET_RDZV_ENDPOINT")
    if path is None or os.environ.get("PET_RDZV_CONF") != "store_type=file":
        return None
    rank, count, restart = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    return f"file://{path}-{restart}?rank={rank}&world_size={count}"


async def launch(
    command: Sequence[str],
    arguments: Sequence[str],
    stop: asyncio.Event,
    *,
    unfinished: int,
    failed: int | None = None,
) -> int:
    """Run the command with its arguments to its end and return an exit code.

    It is rank 0's code if there is one; else `unfinished` after a stop request; else `failed`; None: torchrun's.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome"
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--stop-with-parent", "--outcome-file", str(outcome)),  # first: behind a "--" they would be no options
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=rank_variables(Path(folder)),
        )
        ending, stopping = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((ending, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                process.send_signal(signal.SIGTERM)
            code = await ending
        finally:
            for task in (ending, stopping):
                task.cancel()
            if process.returncode is None:  # cancelled: the grace period was too short
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError, ValueError):
            return int(outcome.read_text(encoding="utf-8"))
        if stop.is_set():
            return unfinished
        return code if failed is None else failed
