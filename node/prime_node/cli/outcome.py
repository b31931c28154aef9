"""Conversion of errors to exit codes and messages, for every command.

Exit codes: 0 done; 1 a check did not hold (verify); 2 wrong usage; 3 this machine or its settings are at fault; 4 the other
side refused (banned, wrong run, ...); 5 a trainer was asked to stop before the run was over; 6 a fault
that may pass, such as a database that cannot be reached, a full disk, or environments that start too slowly; 130 interrupted.
"""

from __future__ import annotations

import errno

from rich.console import Console

from prime_node.cli.missing_extra import missing_module
from prime_node.cli.say import say
from prime_node.files import DISK_FAULTS, disk_fault
from prime_node.patience import causes_of
from prime_protocol.errors import LocalError, PrimeError, TransientFault

REFUSED = 4
"""Exit code after a RemoteError."""
MAY_PASS = 6
"""Exit code after a TransientFault: a service manager and `up` start the role again."""


def tell(error: BaseException, command: str = "") -> int:
    """Print an expected error of a command as one line and return the exit code. Raise any other error again."""
    known = outcome_of(error, command)
    if known is None:
        raise error
    code, line = known
    say(*f"prime-node: {line}".replace("\n", "\n  ").split("\n"), console=Console(stderr=True))
    return code


def outcome_of(error: BaseException, command: str = "") -> tuple[int, str] | None:
    """Return the exit code and line of an expected error; None if the error contains a bug.

    The tasks of a role run in groups, so their errors arrive as exception groups.
    """
    causes = [_local(cause, command) or cause for cause in causes_of(error)]
    if not all(isinstance(cause, PrimeError) for cause in causes):
        return None
    local = [cause for cause in causes if isinstance(cause, LocalError)]
    if not local:
        return REFUSED, f"refused by the other side: {causes[0]}"
    final = next((cause for cause in local if not isinstance(cause, TransientFault)), None)
    return (MAY_PASS, str(local[0])) if final is None else (3, str(final))


def _local(error: BaseException, command: str) -> LocalError | None:
    """Return the LocalError for an error of the disk, or for a missing extra: neither is a bug in this program."""
    if isinstance(error, ModuleNotFoundError):
        return missing_module(error, command)
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.EHOSTUNREACH:  # of S3Blobs
        where = f"{error.filename}: " if error.filename else ""
        return TransientFault(f"{where}{error.strerror}; check the storage service, then start again")
    return disk_fault(error) if error.errno in DISK_FAULTS else None
