"""The process in which environments run: `python -m prime_node.cli.environment_process`, started by their host, never by hand.

The invariant: before any environment's code is loaded, and before the first thread is started, this process can do nothing but
what its command line names, and it has never heard of a key. So it imports the rest when it is confined. A writer to its
stdin cannot widen its walls, because it builds them before it reads the first line. It ends with its host.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback

from prime_node.cli.wire_walls import confined

STDIN = 0
CHUNK_BYTES = 2**16


def first_line() -> bytes:
    """Of stdin; the host says nothing more before it is answered."""
    found = b""
    while not found.endswith(b"\n"):
        chunk = os.read(STDIN, CHUNK_BYTES)
        if not chunk:
            os._exit(1)  # the host is gone
        found += chunk
    return found


def run_environment_process() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the host, who ends us when its own work is done
    # What an environment prints is no answer of ours: it goes to the host's log.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        folder, missing = confined(sys.argv[-1])
        hello = json.loads(first_line())
        from prime_node.cli.environment_service import serve_environments

        asyncio.Runner().run(serve_environments(out, hello, folder=folder, missing=missing))
    except BrokenPipeError:
        os._exit(1)  # the host was killed while it was answered: nobody is left to tell
    except BaseException:  # noqa: BLE001 (the process's edge; environments' code may call sys.exit)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without its host it must end, whatever hangs in its threads


if __name__ == "__main__":
    run_environment_process()
