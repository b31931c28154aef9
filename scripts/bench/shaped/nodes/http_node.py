"""The common baseline: each receiver downloads the whole file from the origin over one aiohttp connection."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from types import SimpleNamespace

import aiohttp
from aiohttp import web
from marks import description, mark, until_go


async def serve(node: SimpleNamespace) -> None:
    app = web.Application()

    async def give(request: web.Request) -> web.FileResponse:
        return web.FileResponse(node.file)  # by sendfile

    app.router.add_get("/file", give)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", node.port).start()
    mark("ready")
    await asyncio.Event().wait()


async def receive(node: SimpleNamespace) -> None:
    mark("ready")
    await until_go(node)
    digest = hashlib.sha256()
    url = f"http://{node.origin}:{node.port}/file"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as session, session.get(url) as answer:
        with Path(node.out).open("wb") as file:  # noqa: ASYNC230 - nothing else runs here
            async for piece in answer.content.iter_chunked(2**18):
                digest.update(piece)
                file.write(piece)
    assert digest.hexdigest() == node.digest
    mark("done")


if __name__ == "__main__":
    node = description()
    asyncio.run(serve(node) if node.role == "origin" else receive(node))
