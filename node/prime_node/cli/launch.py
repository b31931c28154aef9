"""`--nproc N` of `prime-node trainer` and `prime-node replay`: torchrun with this machine's settings, and an orderly shutdown.

Concurrency: this process waits for torchrun, and torchrun for the ranks. A stop request goes only to torchrun (its ranks are in
their own session), which forwards it; rank 0 finishes its step, saves, publishes and dismisses the other ranks. If this process
dies, the pipe on the ranks' standard input closes, and rank 0 stops in the same way. If a rank dies, torchrun restarts all of
them. A restart would only repeat an intentional exit of rank 0, for example for an error in its settings. Rank 0 then writes
its exit code to a file and exits with success.
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
        *(sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(nproc), "--max-restarts", str(restarts_max)),
        # After "--" no abbreviation is taken for an option of torchrun.
        *("--shutdown-timeout", str(SHUTDOWN_S), "-m", "--", "prime_node", command),
    ]


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
            # With the store that torchrun shares with its ranks three of six restarts failed, without it none of six.
            # PYTHONSAFEPATH is -P for the ranks.
            env={
                "OMP_NUM_THREADS": "1",
                **os.environ,
                "PYTHONSAFEPATH": "1",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            },
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
