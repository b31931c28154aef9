"""The process that runs environments: `python -m prime_node.cli.environment_process`, started by its host, never by hand.

Invariant: before it loads environment code or starts a thread, this process can access only what its command line names, and it
has never held a key. It therefore imports the rest after it is confined. Input on stdin cannot loosen the sandbox, because the
process applies it before it reads the first line. It ends when its host ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback

from prime_node.cli.wire_restrictions import confined

STDIN = 0
CHUNK_BYTES = 2**16


def first_line() -> bytes:
    """Read the first line of stdin. The host sends nothing more until it gets an answer."""
    found = b""
    while not found.endswith(b"\n"):
        chunk = os.read(STDIN, CHUNK_BYTES)
        if not chunk:
            os._exit(1)  # the host has exited
        found += chunk
    return found


def run_environment_process() -> None:
    """Confine this process, then serve its environments until the host ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the host, which then ends this process
    # Output that an environment prints is not protocol data: it goes to the host's log.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        folder, missing, granted = confined(sys.argv[-1])
        hello = json.loads(first_line())
        from prime_node.cli.environment_service import serve_environments

        asyncio.Runner().run(serve_environments(out, hello, folder=folder, missing=missing, granted=granted))
    except BrokenPipeError:
        os._exit(1)  # the host was killed during the answer: nothing is left to report to
    except BaseException:  # noqa: BLE001 (the process's edge; environments' code may call sys.exit)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without its host it must end, even if threads hang


if __name__ == "__main__":
    run_environment_process()
