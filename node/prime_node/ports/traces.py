"""Spans of the journeys of a rollout and of a checkpoint (docs/architecture.md), for a collector of the operator's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

Attributes = Mapping[str, int | str]
"""Numbers, digests and names of ours: never text from outside."""


class OpenSpan(Protocol):
    """A span that ends elsewhere than where it began."""

    def end(self) -> None:
        """End the span. Idempotent."""


class Traces(Protocol):
    """Sink of spans. Spans of one subject, such as `lease 4f0c...`, are one trace, in whichever process they are made."""

    def span(self, name: str, subject: str, attributes: Attributes, *, is_root: bool) -> AbstractContextManager[None]:
        """Return the span of a block. It is what `header` names within the block. A subject has one root."""

    def begin(self, name: str, subject: str, attributes: Attributes) -> OpenSpan:
        """Begin a span that `end` ends."""

    def header(self) -> str:
        """Return the present span as a `traceparent` of W3C Trace Context; empty if there is none."""

    def within(self, traceparent: str) -> AbstractContextManager[None]:
        """Return a block for a request: spans of the subject that its header's trace is of have the header's span as parent.

        The header may be any text of a stranger's.
        """

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
