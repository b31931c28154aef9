"""Traces: spans of the journeys reach a real OTLP collector, and no stranger's header decides about them."""

from __future__ import annotations

import asyncio
import gzip
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.node.batch_coordinator import BatchCoordinator
from tests.node.batch_coordinator import make_run as make_batch_run
from tests.node.coordinator_world import ANNA, HEARTBEAT, make_run, memory_parts, running
from tests.node.served_world import RUN, serving_parts, work_through
from tests.node.trainer_world import CONFIG, make_trainer
from tests.node.validator_world import (
    MemoryCheckQueue,
    TableScorer,
    generate,
    make_bundle,
    make_lease,
    make_validator,
)
from tests.time_world import wait_until

from prime_node.adapters import otlp_traces
from prime_node.adapters.otlp_traces import HEADER_CHARS, OtlpTraces, context_of
from prime_node.observe import WantedTraces, wanted_traces
from prime_node.traces import begin_span, of_lease, of_step, received_context, sent_context, spanned, use_traces
from prime_node.trainer.loop import run_trainer
from prime_node.validator.loop import run_validator
from prime_protocol.errors import LocalError


class Collector:
    """A collector of OpenTelemetry: it decodes what the exporter sends."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                sent = ExportTraceServiceRequest.FromString(body)
                for of_resource in sent.resource_spans:
                    named = {one.key: one.value.string_value for one in of_resource.resource.attributes}
                    collector.services.add(named["service.name"])
                    for of_scope in of_resource.scope_spans:
                        collector.spans += of_scope.spans
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def named(self, name: str) -> list[Any]:
        return [one for one in self.spans if one.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    use_traces(None)
    made.close()


def sending_to(collector: Collector, *, share: float = 1.0) -> OtlpTraces:
    traces = OtlpTraces(collector.url, role="test", run=RUN.digest, share=share)
    use_traces(traces)
    return traces


async def test_the_journeys_of_rollouts_and_checkpoints_are_traces(collector: Collector, tmp_path: Path) -> None:
    traces = sending_to(collector)
    async with running(await serving_parts()) as world:
        worker, _ = await work_through(world, tmp_path)
    traces.close()
    assert collector.services == {"prime-node test"}
    leases = {one.trace_id: one for one in collector.named("lease")}
    assert len(leases) == worker.activity.rollouts_generated // 8
    assert all(not one.parent_span_id for one in leases.values()), "the coordinator's grant is the root"
    for name in ("generate", "verdict"):
        found = collector.named(name)
        assert {one.trace_id for one in found} <= leases.keys(), name
        assert {one.parent_span_id for one in found} <= {one.span_id for one in leases.values()}, name
    uploads = collector.named("upload")
    sent = {one.span_id: one for one in uploads if one.parent_span_id in {one.span_id for one in leases.values()}}
    arrived = [one for one in uploads if one.span_id not in sent]
    assert len(sent) == len(arrived) == RUN.spec.max_steps
    for one in arrived:  # the worker's span came in the header of its request
        assert sent[one.parent_span_id].trace_id == one.trace_id
    steps = {one.trace_id for one in collector.named("batch")}
    assert len(steps) == RUN.spec.max_steps
    assert (
        steps
        < {one.trace_id for one in collector.named("publish")}
        == {one.trace_id for one in collector.named("follow")} | {one.trace_id for one in collector.named("publish")}
    )
    assert leases.keys().isdisjoint(steps)
    text = str(collector.spans)
    assert not re.search(r"[0-9a-f]{64}", text), "no lease id, key or digest is sent whole"


def test_a_collector_that_hangs_holds_up_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the SDK waited for each batch in turn, whatever limit it was given."""
    monkeypatch.setattr(otlp_traces, "SEND_S_MAX", 3_600.0)
    monkeypatch.setattr(otlp_traces, "CLOSE_S_MAX", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        traces = OtlpTraces(f"http://127.0.0.1:{silent.getsockname()[1]}", role="test", run=RUN.digest, share=1.0)
        traces.begin("follow", of_step(0), {}).end()
        traces.close()
    wait_until(lambda: not any(thread.name.startswith("OtelBatch") for thread in threading.enumerate()))


async def test_validator_and_trainer_send_their_part(collector: Collector, tmp_path: Path) -> None:
    traces = sending_to(collector)
    stop, lease = asyncio.Event(), make_lease()
    queue = MemoryCheckQueue([(lease, make_bundle(lease, await generate(lease)))], stop)
    await run_validator(make_validator(queue, TableScorer()), stop)
    config = CONFIG.model_copy(update={"sft": CONFIG.sft.model_copy(update={"steps_max": 0}), "evaluate_every": 0})
    coordinator = BatchCoordinator(make_batch_run(max_steps=1))
    assert await run_trainer(make_trainer(tmp_path, coordinator, config=config), asyncio.Event())
    traces.close()
    (check,), (answer,) = collector.named("check"), collector.named("answer")
    assert check.trace_id == answer.trace_id
    assert check.end_time_unix_nano >= answer.end_time_unix_nano
    (step,), (wait,) = collector.named("train step"), collector.named("wait for batch")
    assert (step.parent_span_id, wait.parent_span_id) == (b"", step.span_id)
    published = {one.trace_id for one in collector.named("publish")}
    assert len(published) == 2
    assert step.trace_id in published, "policy 1 comes from step 0"


async def test_a_header_of_a_stranger_chooses_neither_trace_nor_sampling(collector: Collector) -> None:
    """A header counts only for the parent of a span in the subject's own trace."""
    traces = sending_to(collector)
    of_anna = of_lease("a lease of Anna's")
    with spanned("lease", of_anna, is_root=True):
        own = sent_context()["traceparent"]
    trace_id, parent = own.split("-")[1:3]
    foreign = [
        f"00-{'ab' * 16}-{'cd' * 8}-01",  # another trace, flagged as sampled
        own.replace(trace_id, trace_id.upper()) if trace_id.upper() != trace_id else "",
        own[:-1],
        own + "0" * 100_000,
        f"00-{'0' * 32}-{'0' * 16}-01",
        f"01-{trace_id}-{'cd' * 8}-01",
        "\n" * HEADER_CHARS,
        "",
    ]
    for header in foreign:
        with received_context({"traceparent": header}), spanned("upload", of_anna):
            pass
    with received_context({"traceparent": f"00-{trace_id}-{'cd' * 8}-00"}), spanned("own", of_anna):
        pass
    traces.close()
    assert [one.parent_span_id.hex() for one in collector.named("upload")] == [parent] * len(foreign)
    assert {one.trace_id.hex() for one in collector.spans} == {trace_id}
    (own_span,) = collector.named("own")
    assert own_span.parent_span_id.hex() == "cd" * 8
    assert context_of(own) is not None
    collector.spans.clear()
    traces = sending_to(collector, share=0.0)
    with received_context({"traceparent": own}), spanned("upload", of_anna):
        assert sent_context() == {}
    traces.close()
    assert collector.spans == []


async def test_any_header_on_a_signed_request_is_harmless(collector: Collector) -> None:
    traces = sending_to(collector)
    async with running(memory_parts(make_run()), ANNA) as world:
        await world.learn_epoch()
        for header in ("x" * 4_000, "00-" + "f" * 32 + "-" + "f" * 16 + "-01", "é"):
            status, _ = await world.post("/v1/heartbeat", world.signed(HEARTBEAT, ANNA), traceparent=header)
            assert status == 200
        lease = await world.lease(ANNA)
    traces.close()
    (granted,) = collector.named("lease")
    assert not granted.parent_span_id
    assert lease.lease_id not in str(granted)


def test_processes_with_one_share_keep_the_same_traces(collector: Collector) -> None:
    for _ in range(2):
        traces = sending_to(collector, share=0.25)
        for step in range(200):
            with spanned("train step", of_step(step), step=step):
                pass
            begin_span("check", of_step(step)).end()
        traces.close()
    kept = [{one.trace_id for one in collector.named(name)} for name in ("train step", "check")]
    assert kept[0] == kept[1]
    assert len(collector.spans) == 4 * len(kept[0])
    assert 0 < len(kept[0]) < 100


def test_a_failure_is_named_by_its_kind_alone(collector: Collector) -> None:
    traces = sending_to(collector)
    with pytest.raises(ValueError, match="secret"), spanned("upload", of_lease("x")):
        raise ValueError("a secret of a stranger's")
    traces.close()
    (failed,) = collector.spans
    assert (failed.status.code, failed.status.message, list(failed.events)) == (2, "ValueError", [])


def test_nothing_is_imported_and_nothing_done_without_a_collector() -> None:
    assert spanned("lease", of_lease("x"), step=1) is spanned("verdict", of_lease("y"))
    assert begin_span("check", of_step(1)) is begin_span("check", of_step(2))
    assert sent_context() == {}
    program = (
        "import sys, prime_node.cli.wire_rows as it, prime_node.coordinator.assembly, prime_node.worker.loop\n"
        "with it.traced('worker', 'run'): pass\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"PATH": ""})


def test_the_settings_of_traces_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wanted_traces() is None
    monkeypatch.setenv("PRIME_TRACES", "http://127.0.0.1:4318")
    assert wanted_traces() == WantedTraces("http://127.0.0.1:4318", 0.1)
    for share in ("2", "-0.1", "nan", "all"):
        monkeypatch.setenv("PRIME_TRACES_SHARE", share)
        with pytest.raises(LocalError, match="a number from 0 to 1"):
            wanted_traces()
    monkeypatch.setenv("PRIME_TRACES", "collector:4318")
    with pytest.raises(LocalError, match="http://HOST:4318"):
        wanted_traces()
