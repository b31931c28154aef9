"""The parsers of prime_node: HTTP in both directions, what peers announce, a run's model files, datasets and settings."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError, HttpRequestParser
from fuzz_parser import Parser
from valid_messages import VECTORS, example

from prime_node.adapters.models.hf_tokenizer import chat_template, tokenizer_at_fault
from prime_node.adapters.models.model_folder import read_config, read_tokenizer
from prime_node.adapters.models.regex_cost import regex_fault
from prime_node.adapters.models.tiny_model import tiny_model_files
from prime_node.adapters.peers.mdns import read_records
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_answers import explained
from prime_node.adapters.web.http_ranges import RangeClient
from prime_node.adapters.web.plain_gets import BulkRoutes
from prime_node.adapters.web.request_head import find_end, read_request_head
from prime_node.broadcast.audit.safetensors_file import read_weights, write_safetensors
from prime_node.broadcast.swarm.network_peer import PeerQuestion
from prime_node.config import parse_overrides, read_toml
from prime_node.coordinator.api.documents import preferred_wait_s
from prime_node.envs.dataset import rows_of_json_lines
from prime_node.ports.peer_network import PeerAddress
from prime_node.ports.transport import Unreachable
from prime_node.ports.web import Request, Response, Route, parse_range
from prime_protocol.envelope import parse_json
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.weights import WeightTensor

PEER = SigningKey(bytes(32)).key_id
ANSWER = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\nContent-Range: bytes 0-3/9\r\nConnection: keep-alive\r\n\r\nabcd"
ASKED = b"GET /v1/blobs/abc HTTP/1.1\r\nHost: a:1\r\nAccept-Encoding: identity\r\nRange: bytes=0-9\r\n\r\n"
POSTED = b"POST /v1/join HTTP/1.1\r\nHost: a\r\nContent-Length: 12\r\nExpect: 100-continue\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n"
BLOB_BYTES_MAX = 1_000


def node_parsers() -> list[Parser]:
    """Those of prime_node."""
    return [*_http(), *_peers(), *_files()]


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _http() -> list[Parser]:
    async def refuse(_: Request) -> Response:
        raise AssertionError("nothing is answered here")

    routes = [Route("GET", "/v1/blobs/{digest}", refuse, is_bulk=True)]
    bulk = BulkRoutes(routes, idle_s_max=1.0, is_host=lambda _, __: True, hand_over=lambda _, __: asyncio.Protocol())

    def asked(data: bytes) -> None:
        found = bulk.find(data, "192.0.2.1")
        if found is not None:
            assert set(found[1].params) == {"digest"}
            assert "/" not in found[1].params["digest"]

    def head(data: bytes) -> None:
        """The framework must find the same end in what was let through, or refuse it."""
        end = find_end(data, 0) if data else -1
        if end < 0:
            return
        found = read_request_head(data[:end])
        framework = HttpRequestParser(ResponseHandler(_loop()), _loop(), 2**16)
        try:
            read, is_upgraded, _ = framework.feed_data(data[:end])
        except (HttpProcessingError, ValueError):
            return
        assert len(read) == 1, "the framework reads another number of requests"
        message = read[0][0]
        assert not any((message.chunked, message.upgrade, is_upgraded)), "the framework reads a body without a length"
        assert int(message.headers.get("Content-Length", "0")) == found.body_bytes, "the framework reads another length"

    async def served(data: bytes) -> None:
        """A server on loopback that answers with these bytes and closes."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(data)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = RangeClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", stall_s=2.0, connections_max=1)
        try:
            answer = await client.get("/v1/blobs/a", {}, bytes_max=BLOB_BYTES_MAX)
            assert len(answer.body) <= max(BLOB_BYTES_MAX, 16 * 2**10)
            assert answer.body in data
        finally:
            client.close()
            server.close()
            await server.wait_closed()

    def sent(text: str) -> None:
        start, end = parse_range(text, 100)
        assert 0 <= start < end <= 100

    def error(data: bytes) -> None:
        found = explained(400, data, "Sun, 22 Nov 2026 19:00:00 GMT", SystemClock())
        assert isinstance(found, RemoteError)

    refusal = json.dumps({"code": "expired", "detail": "x", "retry_after_s": 1.0}).encode()
    return [
        Parser("http_request", asked, [ASKED]),
        Parser("http_head", head, [ASKED, POSTED]),
        Parser(
            "http_answer",
            lambda data: _loop().run_until_complete(served(data)),
            [ANSWER, ANSWER.replace(b"206 Partial Content", b"404 x"), b"HTTP/1.1 204 No Content\r\n\r\n"],
            refusals=(RemoteError, Unreachable),
        ),
        Parser("http_error", error, [refusal, b"<html>busy</html>"]),
        Parser(
            "http_error_date",
            lambda data: explained(401, refusal, data.decode("latin-1"), SystemClock()),
            [b"Sun, 22 Nov 2026 19:00:00 GMT"],
        ),
        Parser("http_range", lambda data: sent(data.decode("latin-1")), [b"bytes=0-9", b"bytes=-5", b"bytes=7-"]),
        Parser(
            "http_prefer", lambda data: preferred_wait_s(data.decode("latin-1")), [b"wait=10", b"respond-async, wait=5"]
        ),
    ]


def _peers() -> list[Parser]:
    address = f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}".encode()

    def parse(data: bytes) -> None:
        """A TXT record's entries, one a line."""
        entries = dict(line.partition(b"=")[::2] for line in data.split(b"\n"))
        for found in read_records(cast("dict[bytes, bytes | None]", entries)):
            assert len(found.addresses) <= 8

    return [
        Parser("mdns_record", parse, [b"dnsaddr=" + address, b"dnsaddr=" + address + b"\ndnsaddr1=" + address]),
        Parser(
            "peer_address", lambda data: PeerAddress.parse(data.decode("latin-1")), [address], refusals=(ValueError,)
        ),
        Parser(
            "peer_question",
            lambda data: parse_json(data, PeerQuestion),
            [b'{"path": "/v1/blobs/ab", "start": 0, "end": 9}', json.dumps(example(PeerQuestion)).encode()],
        ),
    ]


def _files() -> list[Parser]:
    folder = Path(tempfile.mkdtemp(prefix="prime-fuzz-"))
    files = tiny_model_files(hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    shard, settings = folder / "model.safetensors", folder / "settings.toml"
    import numpy as np

    write_safetensors(shard, {"w": WeightTensor("bf16", (2, 2), np.zeros(4, np.uint16))})
    tensors = shard.read_bytes()
    numbers = itertools.count()
    templates = [path.read_bytes() for path in sorted(VECTORS.parent.glob("none/*.jinja"))]
    templates += [
        b"{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{% if loop.last %}!{% endif %}{% endfor %}",
        b"{%- set ns = namespace(x='a') -%}{% macro f(a) %}{{ a ~ 'x' * 3 }}{% endmacro %}{{ f(ns.x) }}{{ messages | tojson }}",
        b"{{ messages[0].content.split('a')[-1].replace('b', 'c') + (1 + 2) | string }}{{ [1, 2] | map('string') | join(', ') }}",
    ]

    def through(name: str, read: Callable[[], Any], restore: bytes) -> Callable[[bytes], None]:
        def parse(data: bytes) -> None:
            path = folder / name
            path.write_bytes(data)
            try:
                read()
            finally:
                path.write_bytes(restore)

        return parse

    def rendered() -> None:
        next(numbers)
        with tokenizer_at_fault(folder):
            shown = chat_template(folder)([{"role": "user", "content": "question"}])
            assert len(shown) <= 2**22

    def written(data: bytes) -> None:
        path = folder / "chat_template.jinja"
        path.write_bytes(data)
        try:
            rendered()
        finally:
            path.unlink()

    toml = b'[worker]\nname = "anna"\n[trainer.loss]\ntype = "aipo"\nvalues = [1, 2.5, 1979-05-27]\n'
    return [
        Parser(
            "config_json",
            through("config.json", lambda: read_config(folder), files["config.json"]),
            [files["config.json"]],
            refusals=(LocalError,),
        ),
        Parser(
            "tokenizer_json",
            through("tokenizer.json", lambda: read_tokenizer(folder), files["tokenizer.json"]),
            [files["tokenizer.json"]],
            refusals=(LocalError,),
        ),
        Parser("chat_template", written, templates, refusals=(LocalError,)),
        Parser(
            "tokenizer_regex",
            lambda data: regex_fault(data.decode("latin-1")),
            [rb"\s+(?!\S)|[^\r\n\p{L}]?\p{L}+|(?:a|b)*c{1,3}"],
        ),
        Parser(
            "safetensors",
            through("model.safetensors", lambda: read_weights(shard), tensors),
            [tensors],
            refusals=(LocalError,),
        ),
        Parser(
            "json_lines",
            lambda data: list(rows_of_json_lines(data)),
            [b'{"question": "2 + 2", "answer": "4"}\n'],
            refusals=(ValueError,),
        ),
        Parser("settings", through("settings.toml", lambda: read_toml(settings), toml), [toml], refusals=(LocalError,)),
        Parser(
            "overrides",
            lambda data: parse_overrides([data.decode("latin-1")]),
            [b"worker.name=anna", b"a.b=[1]"],
            refusals=(LocalError,),
        ),
    ]
