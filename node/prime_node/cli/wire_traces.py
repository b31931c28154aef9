"""The part of wire.py for traces: PRIME_TRACES names a collector, and PRIME_TRACES_SHARE the share of traces that it gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prime_node.cli.missing_extra import needing_extra
from prime_node.observe import wanted_traces
from prime_node.traces import use_traces


@contextlib.contextmanager
def traced(role: str, run: str) -> Iterator[None]:
    """Send the spans of a block of a role to the collector, if one is named. Raises LocalError."""
    wanted = wanted_traces()
    if wanted is None:
        yield
        return
    with needing_extra("traces", "traces"):
        from prime_node.adapters.otlp_traces import OtlpTraces
    traces = OtlpTraces(wanted.url, role=role, run=run, share=wanted.share)
    use_traces(traces)
    try:
        yield
    finally:
        use_traces(None)
        traces.close()
