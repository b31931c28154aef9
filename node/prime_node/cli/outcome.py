"""Conversion of errors to exit codes and messages, for every command.

Exit codes: 0 done; 1 a check did not hold (verify); 2 wrong usage; 3 this machine or its settings are at fault; 4 the other
side refused (banned, wrong run, ...); 5 a trainer was asked to stop before the run was over; 130 interrupted.
"""

from __future__ import annotations

import errno

from rich.console import Console

from prime_node.cli.say import say
from prime_node.patience import causes_of
from prime_protocol.errors import LocalError, PrimeError

DISK_FAULTS = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
    errno.EROFS: "choose another folder",
    errno.EACCES: "choose another folder, or change who may use this one",
}
"""Disk errors and the advice for each."""


def tell(error: BaseException) -> int:
    """Print an expected error as one line and return the exit code. Raise any other error again."""
    known = outcome_of(error)
    if known is None:
        raise error
    code, line = known
    say(*f"prime-node: {line}".replace("\n", "\n  ").split("\n"), console=Console(stderr=True))
    return code


def outcome_of(error: BaseException) -> tuple[int, str] | None:
    """Return the exit code and line of an expected error; None if the error contains a bug.

    The tasks of a role run in groups, so their errors arrive as exception groups.
    """
    causes = [_local(cause) or cause for cause in causes_of(error)]
    if not all(isinstance(cause, PrimeError) for cause in causes):
        return None
    local = next((cause for cause in causes if isinstance(cause, LocalError)), None)
    return (4, f"refused by the other side: {causes[0]}") if local is None else (3, str(local))


def _local(error: BaseException) -> LocalError | None:
    """Return the LocalError for an error of the disk, which is no bug in this program."""
    if not isinstance(error, OSError) or error.errno not in DISK_FAULTS:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return LocalError(f"{where}{error.strerror}; {DISK_FAULTS[error.errno]}, then start again")
