"""Spans, for OpenTelemetry, where `PRIME_TRACES` names a collector; else each call here does nothing.

A trace is that of a subject: `lease ID` for a rollout, `step N` for a batch, its training and policy N + 1, which come from it.
Its number is a digest of run and subject, so each process knows it without being sent it, and a stranger cannot choose it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from prime_node.ports.traces import OpenSpan, Traces

HEADER = "traceparent"


class _Nothing:
    def end(self) -> None:
        """Do nothing."""


_OFF, _NO_SPAN = nullcontext(), _Nothing()
_used: list[Traces] = []


def use_traces(traces: Traces | None) -> None:
    """Send the spans of this process there from now on; None: nowhere."""
    _used[:] = [] if traces is None else [traces]


def spanned(name: str, subject: str, *, is_root: bool = False, **attributes: int | str) -> AbstractContextManager[None]:
    """Return the span of a block.

    Example: spanned("generate", of_lease(lease_id), step=3).
    """
    return _used[0].span(name, subject, attributes, is_root=is_root) if _used else _OFF


def begin_span(name: str, subject: str, **attributes: int | str) -> OpenSpan:
    """Begin a span that `end` ends, elsewhere."""
    return _used[0].begin(name, subject, attributes) if _used else _NO_SPAN


def sent_context() -> dict[str, str]:
    """Return the header that our own requests carry: the present span's."""
    return {HEADER: text} if _used and (text := _used[0].header()) else {}


def received_context(headers: Mapping[str, str]) -> AbstractContextManager[None]:
    """Return a block for a request with these headers, whose names are in lower case."""
    return _used[0].within(headers.get(HEADER, "")) if _used else _OFF


def of_lease(lease_id: str) -> str:
    """Return the subject of a lease, its rollouts and their verdict."""
    return f"lease {lease_id}"


def of_step(step: int) -> str:
    """Return the subject of a step: its batch, its training, and policy `step` + 1; -1 for policy 0."""
    return f"step {step}"
