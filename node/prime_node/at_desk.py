"""Whether a person uses this machine's keyboard and mouse, as systemd-logind says.

A confined process cannot reach logind. So a child is started before: a shell that asks logind whenever it gets a line, and ends
with its standard input. logind calls a seat idle if all its sessions are: a desktop says so itself, after the delay in its
settings; a text console counts after logind's IdleActionSec without a key. Sessions over a network have no seat.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from pathlib import Path

log = logging.getLogger(__name__)

LOGINCTL = Path("/usr/bin/loginctl")
SEATS = Path("/run/systemd/seats")
"""Folder that logind makes where there is a seat."""
ASK = 'while read -r line; do "$0" show-seat seat0 --property=IdleHint 2>/dev/null || echo; done'
ANSWERS_BYTES_MAX = 4_096
END_S = 1.0


class Desk:
    """The child, and its last answer. Without logind, on another system, or if it does not answer, no use is seen."""

    def __init__(self, loginctl: Path = LOGINCTL, seats: Path = SEATS) -> None:
        """Start the child, if this machine has a seat."""
        self._child: subprocess.Popen[bytes] | None = None
        self._last = b""
        if not (loginctl.exists() and seats.is_dir()):
            return
        try:
            self._child = subprocess.Popen(
                ["/bin/sh", "-c", ASK, str(loginctl)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={},
                start_new_session=True,  # Ctrl-C is for the worker
            )
        except OSError as error:
            log.warning("cannot ask whether this machine is in use: %s", error)
            return
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def is_known(self) -> bool:
        """Return whether logind can be asked."""
        return self._child is not None

    def ask(self) -> None:
        """Ask again. The answer comes within milliseconds."""
        if self._child is not None and self._child.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended, or has many questions to answer
                os.write(self._child.stdin.fileno(), b"\n")

    def is_in_use(self) -> bool:
        """Return whether a person used the machine at the last answer."""
        if self._child is not None and self._child.stdout is not None:
            with contextlib.suppress(BlockingIOError):
                answers = os.read(self._child.stdout.fileno(), ANSWERS_BYTES_MAX).split()
                self._last = answers[-1] if answers else b""
        return self._last == b"IdleHint=no"

    def close(self) -> None:
        """End the child. Idempotent."""
        child, self._child = self._child, None
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
