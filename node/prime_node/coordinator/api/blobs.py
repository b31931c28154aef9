"""Public blobs for readers: whole, or a range of bytes."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from prime_node.ports.blobs import Blobs, DamagedBlob
from prime_node.ports.web import Request, Response, parse_range
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)

BLOB_CHUNK_BYTES = 2**20
"""Bytes read from disk and sent at once."""


@dataclass(slots=True)
class BlobReader:
    """Model files and checkpoint parts, for anyone."""

    run: PinnedRun
    public: Blobs
    serve_chunks: bool
    """Whether parts of checkpoints are served too, and not only model files."""
    _damaged: dict[str, int] = field(default_factory=dict)
    """Place of a block that could not be read after an answer had begun, by blob. It is read first at the next request: the
    client that saw its connection break gets the reason then."""

    async def blob(self, request: Request) -> Response:
        """Return a public blob or a range of it. Uploaded bundles are stored elsewhere and cannot be reached here."""
        digest = request.params["digest"]
        if not self.serve_chunks and all(file.digest != digest for file in self.run.spec.model_files):
            raise RemoteError(
                ErrorCode.NOT_FOUND,
                "this coordinator serves no chunks: fetch them from peers, the trainer's seeder or a mirror",
            )
        try:
            return await self._answer(digest, request)
        except KeyError:
            raise RemoteError(ErrorCode.NOT_FOUND, f"no blob {digest[:64]}") from None

    async def _answer(self, digest: str, request: Request) -> Response:
        size = await self.public.size(digest)
        wanted = request.headers.get("range")
        start, end = parse_range(wanted, size) if wanted else (0, size)
        if start <= self._damaged.get(digest, end) < end:
            await self._block(digest, self._damaged.pop(digest), end)
        headers = {
            "Accept-Ranges": "bytes",
            "Cache-Control": "public, max-age=31536000, immutable",
            "Content-Length": str(end - start),
            "ETag": f'"{digest}"',
        }
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        body: bytes | AsyncIterator[bytes] = self._chunks(digest, start, end)
        if end - start <= BLOB_CHUNK_BYTES:
            body = await self._block(digest, start, end)
        return Response(body, 206 if wanted else 200, "application/octet-stream", headers)

    async def _chunks(self, digest: str, start: int, end: int) -> AsyncIterator[bytes]:
        for offset in range(start, end, BLOB_CHUNK_BYTES):
            yield await self._block(digest, offset, end)

    async def _block(self, digest: str, start: int, end: int) -> bytes:
        try:
            return await self.public.get(digest, start=start, end=min(end, start + BLOB_CHUNK_BYTES))
        except (KeyError, DamagedBlob) as error:
            if isinstance(error, DamagedBlob):
                self._damaged[digest] = start
                log.error("%s", error)
            raise RemoteError(ErrorCode.NOT_FOUND, f"the bytes of blob {digest[:64]} are damaged or deleted") from error
