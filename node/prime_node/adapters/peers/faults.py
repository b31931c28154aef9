"""Log failures at the edge to libp2p: a peer's failures quietly, bugs loudly but once for each place.

The library raises many kinds of exceptions for what a peer does. Some kinds mean that a program is wrong, ours or the
library's. So does any error that our own code raises, unless its kind says that a peer or the network failed. Such an error
must not be taken for a peer that does not answer.
"""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

import trio

import prime_node
import prime_protocol
from prime_node.ports.transport import Unreachable
from prime_protocol.errors import PrimeError

BUGS = (TypeError, AttributeError, NameError, LookupError, AssertionError, ArithmeticError, ImportError, RecursionError)
EXPECTED = (
    *(PrimeError, Unreachable, OSError),
    *(trio.TooSlowError, trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel),
)
"""Kinds that our own code raises for a failure of a peer or of the network; libp2p's own kinds too."""
OURS = tuple(str(Path(package.__file__ or "").parent) + "/" for package in (prime_node, prime_protocol))
PLACES_MAX = 256
"""Places that are remembered, so that a peer that can trigger a bug cannot fill the log."""

_told: set[tuple[type[BaseException], str]] = set()


def note(log: logging.Logger, what: str, error: BaseException) -> None:
    """Log a failure of `what`: at debug level if a peer may have caused it; a bug as a warning, once for each place."""
    bug = next((one for one in _leaves(error) if _is_bug(one)), None)
    if bug is None:
        log.debug("%s: %r", what, error)
        return
    place = (type(bug), str(traceback.extract_tb(bug.__traceback__)[-1:]))
    if place in _told or len(_told) >= PLACES_MAX:
        log.debug("%s: %r", what, error)
        return
    _told.add(place)
    log.warning(
        "%s failed because of a bug in this program, not because of the peer; please report it: %r",
        what,
        bug,
        exc_info=bug,
    )


def _is_bug(error: BaseException) -> bool:
    """Return whether a program is wrong: by the kind of error, or because our own code raised one that it does not expect."""
    if isinstance(error, BUGS) or not isinstance(error, Exception):
        return isinstance(error, BUGS)
    if isinstance(error, EXPECTED) or any(kind.__module__.startswith("libp2p.") for kind in type(error).__mro__):
        return False
    return any(frame.filename.startswith(OURS) for frame in traceback.extract_tb(error.__traceback__)[-1:])


def _leaves(error: BaseException) -> list[BaseException]:
    """Return the errors inside a group, and their causes."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in _leaves(one)]
    return [error] if error.__cause__ is None else [error, *_leaves(error.__cause__)]
