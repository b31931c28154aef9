"""The public documents: the RunSpec, the head, manifests, key rings, amendments and the ledger."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from prime_node.coordinator.api.amendments import CalibrationIntake
from prime_node.coordinator.api.statements import KeyRings, LedgerSigner
from prime_node.coordinator.manifests import PublishedManifests
from prime_node.coordinator.replay_archive import ReplayArchive
from prime_node.coordinator.state.effects import Topic
from prime_node.coordinator.waiting import Notifications
from prime_node.ports.web import Request, Response
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.run_spec import PinnedRun

HEAD_WAIT_S_MAX = 30.0
"""Maximum time that a reader of /v1/head may wait for the next one."""
BATCH_PIECE_BYTES = 2**20
"""Bytes of a batch that are read and sent at once."""


@dataclass(slots=True)
class PublicDocuments:
    """Documents that anyone may read, by the versions in their paths."""

    run: PinnedRun
    manifests: PublishedManifests
    keys: KeyRings
    calibrations: CalibrationIntake
    ledger: LedgerSigner
    archive: ReplayArchive
    notifications: Notifications

    async def run_spec(self) -> Envelope:
        """Return the signed RunSpec."""
        return self.run.envelope

    async def head(self, request: Request) -> Response:
        """Return the newest manifest. A reader that has it may wait for the next one (`Prefer: wait=10`)."""
        seen = request.headers.get("if-none-match", "")
        shown = await self.notifications.until(
            Topic.HEAD,
            lambda: self.manifests.head,
            is_worth_waiting=lambda head: head is None or head.digest in seen,
            wait_s=preferred_wait_s(request.headers.get("prefer", "")),
        )
        if shown is None:
            return Response(status=204)
        tag = {"ETag": f'"{shown.digest}"'}
        if shown.digest in seen:
            return Response(status=304, headers=tag)
        return Response(shown.envelope.to_bytes(), headers=tag)

    async def manifest(self, request: Request) -> Envelope:
        """Return a published manifest. Raise RemoteError(NOT_FOUND)."""
        return await self.manifests.read(_number(request.params["policy_version"]))

    async def batch(self, request: Request) -> Response:
        """Return the batch behind a published policy. Raise RemoteError(NOT_FOUND).

        It is not parsed: one of 64 MiB would keep all others waiting for a second. Nor is it read whole, as anyone may ask.
        """
        step, part = _number(request.params["step"]), _number(request.params["part"])
        num_bytes = await self.archive.batch_size(step, part)
        if num_bytes <= BATCH_PIECE_BYTES:
            return Response(await self.archive.read_batch(step, part))
        return Response(self._pieces(step, part, num_bytes), headers={"Content-Length": str(num_bytes)})

    async def _pieces(self, step: int, part: int, num_bytes: int) -> AsyncIterator[bytes]:
        for start in range(0, num_bytes, BATCH_PIECE_BYTES):
            end = min(num_bytes, start + BATCH_PIECE_BYTES)
            yield await self.archive.read_batch(step, part, start=start, end=end)

    async def key_ring(self, request: Request) -> Envelope:
        """Return an accepted key ring. Raise RemoteError(NOT_FOUND)."""
        return self.keys.read_key_ring(_number(request.params["version"]))

    async def calibration(self, request: Request) -> Envelope:
        """Return an accepted amendment of the calibration. Raise RemoteError(NOT_FOUND)."""
        return self.calibrations.read_amendment(_number(request.params["version"]))

    async def ledger_lines(self, request: Request) -> Response:
        """Return lines of the ledger."""
        lines = await self.ledger.ledger_lines(_number(request.params["start"]))
        return Response(lines, content_type="application/jsonl")


def preferred_wait_s(text: str) -> float:
    """Return the seconds of `Prefer: wait=10` (RFC 7240), within HEAD_WAIT_S_MAX; 0 if it is absent or invalid."""
    found = re.search(r"(?:^|[,;\s])wait=([0-9]{1,6})(?:$|[,;\s])", text)
    return min(float(found[1]), HEAD_WAIT_S_MAX) if found else 0.0


def _number(text: str) -> int:
    """Return a version from a path. Raise RemoteError(NOT_FOUND)."""
    if not re.fullmatch(r"[0-9]{1,15}", text):
        raise RemoteError(ErrorCode.NOT_FOUND, "the version must be a number")
    return int(text)
