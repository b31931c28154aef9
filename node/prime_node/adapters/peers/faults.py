"""Log failures at the edge to libp2p: a peer's failures quietly, bugs loudly but once for each place.

The library raises many kinds of exceptions for what a peer does. The kinds below mean that a program is wrong, ours or the
library's: such an error must not be taken for a peer that does not answer.
"""

from __future__ import annotations

import logging
import traceback

BUGS = (TypeError, AttributeError, NameError, LookupError, AssertionError, ArithmeticError, ImportError, RecursionError)
PLACES_MAX = 256
"""Places that are remembered, so that a peer that can trigger a bug cannot fill the log."""

_told: set[tuple[type[BaseException], str]] = set()


def note(log: logging.Logger, what: str, error: BaseException) -> None:
    """Log a failure of `what`: at debug level if a peer may have caused it; a bug as a warning, once for each place."""
    bug = next((one for one in _leaves(error) if isinstance(one, BUGS)), None)
    if bug is None:
        log.debug("%s: %r", what, error)
        return
    place = (type(bug), str(traceback.extract_tb(bug.__traceback__)[-1:]))
    if place in _told or len(_told) >= PLACES_MAX:
        log.debug("%s: %r", what, error)
        return
    _told.add(place)
    log.warning("%s failed by a bug, not by the peer; please report it: %r", what, bug, exc_info=bug)


def _leaves(error: BaseException) -> list[BaseException]:
    """Return the errors inside a group, and their causes."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for one in error.exceptions for leaf in _leaves(one)]
    return [error] if error.__cause__ is None else [error, *_leaves(error.__cause__)]
