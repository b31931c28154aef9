"""Observations of a run of the arena from outside: bundles with their verdicts, answers to workers, and each worker's outcome."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_lab.adversaries.engine import Means
from prime_lab.adversaries.table import Adversary
from prime_node.adapters.web.http_client import HttpClient
from prime_node.worker.worker import Worker
from prime_protocol.assignment import Lease
from prime_protocol.envelope import Envelope
from prime_protocol.errors import RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.replies import CheckTask, NotYet, TrainBatch, UploadReply
from prime_protocol.requests import BundleRequest, CheckRequest, CheckResultRequest, LeaseRequest
from prime_protocol.verdict import Receipt, Verdict


@dataclass
class Judged:
    """One bundle as the validator had it."""

    worker: str
    lease: Lease
    parcel: bytes = b""
    audited: bool = True
    verdict: Verdict | None = None


@dataclass
class Part:
    """One worker and its outcome."""

    key: SigningKey
    adversary: Adversary | None
    means: Means
    worker: Worker | None = None
    replies: Counter[str] = field(default_factory=Counter)
    """Uploads that were rejected at once, by the verdict's reason or the error's code."""
    waits: list[str] = field(default_factory=list)
    """Reasons for no lease, one for each request."""


@dataclass
class Outcome:
    """Outcome of a run."""

    parts: Sequence[Part]
    """Cheats in the order of their names, then their accomplices, then the honest."""
    judged: list[Judged]
    batches: list[TrainBatch]
    status: Mapping[str, Any]
    """The status of each worker, by key."""
    receipts: Mapping[str, list[Receipt]]
    """By key, in the order of the last change."""

    def worker(self, part: Part) -> Any:
        return self.status[part.key.key_id]

    def receipts_of(self, part: Part) -> list[Receipt]:
        return self.receipts[part.key.key_id]


class Watched:
    """Implements ports.transport.ValidatorPort around a real one, and keeps what passes."""

    def __init__(self, port: HttpClient, judged: list[Judged], passed: Counter[str], news: asyncio.Event) -> None:
        self._port, self._judged, self._passed, self._news = port, judged, passed, news
        self._of: dict[str, Judged] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    async def check(self, request: CheckRequest) -> CheckTask | NotYet:
        task = await self._port.check(request)
        if isinstance(task, CheckTask):
            self._of[task.bundle] = Judged(task.lease.worker, task.lease, audited=task.audit)
        return task

    async def bundle(self, request: BundleRequest) -> bytes:
        parcel = await self._port.bundle(request)
        self._of[request.bundle].parcel = parcel
        return parcel

    async def check_result(self, request: CheckResultRequest) -> None:
        await self._port.check_result(request)
        judged = self._of.pop(request.bundle)
        judged.verdict = request.verdict
        self._judged.append(judged)
        self._passed[judged.worker] += judged.audited and request.verdict.accepted
        self._news.set()


class Noting:
    """Implementation of ports.transport.WorkerPort around a real one, which records its refusals."""

    def __init__(self, port: HttpClient, part: Part, news: asyncio.Event) -> None:
        self._port, self._part, self._news = port, part, news

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
        answer = await self._port.lease(request)
        if isinstance(answer, NotYet):
            self._part.waits.append(answer.reason)
            self._news.set()
        return answer

    async def upload(self, parcel: bytes) -> UploadReply:
        try:
            reply = await self._port.upload(parcel)
        except RemoteError as error:
            self._count(str(error.code))
            raise
        if reply.verdict is not None and reply.verdict.reason is not None:
            self._count(str(reply.verdict.reason))
        return reply

    def _count(self, reason: str) -> None:
        self._part.replies[reason] += 1
        self._news.set()
