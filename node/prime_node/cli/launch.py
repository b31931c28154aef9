"""`prime-node trainer --nproc N`: torchrun with what this machine needs, and an end in order.

Who waits for whom: this process waits for torchrun, torchrun for the ranks. A request to stop goes to torchrun alone (its ranks
are in a session of their own), which hands it on; rank 0 finishes its step, saves, publishes and dismisses the others. If this
process dies, the pipe that is the ranks' standard input ends, and rank 0 stops likewise. A rank that dies makes torchrun
start all of them again. What rank 0 ends with on purpose, an error in its settings for example, would be the same
again: it leaves that code in a file and ends without a failure.
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
"""Ranks that have not ended so long after the request are killed."""


def torchrun_command(nproc: int, *, restarts_max: int, arguments: Sequence[str]) -> list[str]:
    """torch's own launcher, on this machine alone. Example: torchrun_command(2, restarts_max=3, arguments=["runs/demo"])."""
    return [
        *(sys.executable, "-P", "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(nproc), "--max-restarts", str(restarts_max)),
        *("--shutdown-timeout", str(SHUTDOWN_S), "-m", "prime_node", "trainer"),
        *arguments,
    ]


async def launch(command: Sequence[str], stop: asyncio.Event, *, unfinished: int) -> int:
    """Run it to its end. Returns the exit code that rank 0 has left, or torchrun's; `unfinished` after a request to stop."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome"
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--stop-with-parent", "--outcome-file", str(outcome)),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            # Three of six restarts failed with the store that torchrun shares with its ranks, none of six without.
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
            if process.returncode is None:  # cancelled: the grace period was not enough
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError, ValueError):
            return int(outcome.read_text(encoding="utf-8"))
        return unfinished if stop.is_set() else code
