"""Spans for a collector that speaks OTLP over HTTP, by the OpenTelemetry SDK.

Which traces are kept follows from their numbers, which are digests (traces.py): all processes with one share keep the same ones,
and no header of a stranger's can choose. Of a header only the span's number is used, and only where its trace is the
subject's own. The queue of spans is bounded, and what does not fit is dropped: a run never waits for the collector.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

from blake3 import blake3
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags

from prime_node.ports.traces import Attributes

SPANS_QUEUED_MAX = 2_048
"""Spans that wait for the collector; more are dropped."""
SPANS_SENT_MAX = 512
EXPORT_S = 2.0
"""Interval of sending."""
SEND_S_MAX, CLOSE_S_MAX = 5.0, 3.0
_HEADER = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
HEADER_CHARS = 55


class _Ids(IdGenerator):
    """Random numbers of spans, but for a subject's root, whose numbers every process knows."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.root: ContextVar[tuple[int, int] | None] = ContextVar("root", default=None)

    def generate_trace_id(self) -> int:
        root = self.root.get()
        return self._random.generate_trace_id() if root is None else root[0]

    def generate_span_id(self) -> int:
        root = self.root.get()
        return self._random.generate_span_id() if root is None else root[1]


class _Open:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def end(self) -> None:
        """End the span, once."""
        if self._span.is_recording():
            self._span.end()


class OtlpTraces:
    """Implementation of ports.traces.Traces."""

    def __init__(self, url: str, *, role: str, run: str, share: float) -> None:
        """Send to the collector at `url`, without a path, a share of the traces of a run."""
        self._run, self._share, self._ids = run, share, _Ids()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # what is not kept never gets here
            id_generator=self._ids,
            resource=Resource({"service.name": f"prime-node {role}", "prime.run": run[:12]}),
            span_limits=SpanLimits(max_span_attributes=16, max_span_attribute_length=128),
            shutdown_on_exit=False,
        )
        self._exporter = OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces", timeout=SEND_S_MAX)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=SPANS_QUEUED_MAX,
                max_export_batch_size=SPANS_SENT_MAX,
                schedule_delay_millis=round(EXPORT_S * 1_000),
            )
        )
        self._tracer = self._provider.get_tracer("prime_node")
        self._received: ContextVar[SpanContext | None] = ContextVar("received", default=None)

    @contextmanager
    def _recorded(self, span: trace.Span) -> Iterator[None]:
        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                yield
            except BaseException as error:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))  # its text may be a stranger's
                raise

    def span(self, name: str, subject: str, attributes: Attributes, *, is_root: bool) -> AbstractContextManager[None]:
        """Return the span of a block; one that is not recorded if its trace is not kept."""
        root = self._root(subject)
        if not self._is_kept(root):
            return self._recorded(NonRecordingSpan(trace.INVALID_SPAN_CONTEXT))
        if not is_root:
            return self._recorded(self._tracer.start_span(name, self._parent(root), attributes=dict(attributes)))
        token = self._ids.root.set((root.trace_id, root.span_id))
        try:
            return self._recorded(self._tracer.start_span(name, Context(), attributes=dict(attributes)))
        finally:
            self._ids.root.reset(token)

    def begin(self, name: str, subject: str, attributes: Attributes) -> _Open:
        root = self._root(subject)
        if not self._is_kept(root):
            return _Open(NonRecordingSpan(trace.INVALID_SPAN_CONTEXT))
        return _Open(self._tracer.start_span(name, self._parent(root), attributes=dict(attributes)))

    def header(self) -> str:
        """Return the present span as a header; empty if there is none, or its trace is not kept."""
        found = trace.get_current_span().get_span_context()
        return f"00-{found.trace_id:032x}-{found.span_id:016x}-01" if found.is_valid else ""

    @contextmanager
    def within(self, traceparent: str) -> Iterator[None]:
        """Note a request's header for the spans of its answer."""
        token = self._received.set(context_of(traceparent))
        try:
            yield
        finally:
            self._received.reset(token)

    def close(self) -> None:
        """Send what is left, for CLOSE_S_MAX at most, and end the thread."""
        # The SDK waits for each batch in turn, whatever its own limit says: for 20 seconds if the collector hangs.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_S_MAX)
        if (
            closing.is_alive()
        ):  # it must not try again: the SDK starts a thread in each fork while one of its own is left
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _root(self, subject: str) -> SpanContext:
        digest = blake3(f"{self._run} {subject}".encode(), derive_key_context="prime-node 2026-11-27 trace").digest(24)
        trace_id, span_id = int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big")
        return SpanContext(trace_id or 1, span_id or 1, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def _is_kept(self, root: SpanContext) -> bool:
        return root.trace_id % 2**64 < self._share * 2**64

    def _parent(self, root: SpanContext) -> Context:
        """Return the context of a span's parent: the present span or the request's, if it is of the same trace; else the root."""
        here, received = trace.get_current_span().get_span_context(), self._received.get()
        known = [one for one in (here, received) if one is not None and one.trace_id == root.trace_id]
        return trace.set_span_in_context(NonRecordingSpan(known[0] if known else root), Context())


def context_of(traceparent: str) -> SpanContext | None:
    """Return the span that a header of W3C Trace Context, version 00, names; None for any other text."""
    found = _HEADER.fullmatch(traceparent) if len(traceparent) == HEADER_CHARS else None
    if found is None:
        return None
    context = SpanContext(int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=TraceFlags(1))
    return context if context.is_valid else None
