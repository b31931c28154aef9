"""Pictures of the coordinator's, the operator's and a worker's pages at three sizes, for docs/page/, from a run that works now.

    prime-node up runs/demo --config configs/demo.toml
    python scripts/bench/page_pictures.py runs/demo --worker runs/demo/worker-1 [docs/page]

The second command needs the first one to run. `--worker` is the folder of a worker on this machine. It needs Chromium. Colours
are reduced until a picture has at most 60 kB. In those of docs/page/ three more machines, of one person, had joined the run
(docs/several-machines.md).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from PIL import Image
from tests.chromium_world import MISSING, Browser, Tab, chromium_program, running_chromium
from tests.page_world import VIEWS

from prime_node.cli.operate_page.serving import serve_page
from prime_node.cli.operator import Operator
from prime_node.cli.run_dir import RunDir

BYTES_MAX = 60_000
SIZES = ((1280, 800, False), (1920, 1080, True), (390, 844, False))
"""Width, height, and whether the colours are dark."""
HEIGHT_MAX = 1_500
"""Height of the pictures of a phone, on which a view is long."""
SETTLE_S = 1.5
"""Seconds for the page's first events and charts."""
ROWS = {"workers": "document.querySelectorAll('.win .wrow:not([hidden])').length"}


def small(picture: bytes) -> bytes:
    """Return a PNG of at most BYTES_MAX bytes."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    while True:
        for num_colours in (256, 128, 64, 40):
            packed = io.BytesIO()
            image.quantize(num_colours, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE).save(
                packed, "PNG", optimize=True
            )
            if packed.tell() <= BYTES_MAX:
                return packed.getvalue()
        image = image.resize((image.width * 4 // 5, image.height * 4 // 5), Image.Resampling.LANCZOS)


async def store(tab: Tab, path: Path, *, tall: int | None = None) -> None:
    picture = small(await tab.picture(tall=tall))
    await asyncio.to_thread(path.write_bytes, picture)
    print(path, len(picture), *tab.errors)


async def take(run_dir: RunDir, browser: Browser, folder: Path, worker: Path) -> None:
    """Take all pages at all sizes."""
    url = run_dir.join_link().url
    for width, height, dark in SIZES:
        tall = HEIGHT_MAX if width < 1000 else None
        for view in VIEWS:
            async with browser.tab(width=width, height=height, dark=dark) as tab:
                await tab.go(url + ("/" if view == "run" else f"/?view={view}"))
                await tab.until(ROWS.get(view, "document.querySelector('main .card')"))
                await asyncio.sleep(SETTLE_S)
                await store(tab, folder / f"{view}-{width}.png", tall=None if view == "workers" else tall)
        async with browser.tab(width=width, height=height, dark=dark) as tab:
            page = json.loads((worker / "page.json").read_text())
            await tab.go(f"{page['address']}#{page['key']}")  # each key opens the page once
            await tab.until("document.querySelector('#c-about')")
            await asyncio.sleep(SETTLE_S)
            await store(tab, folder / f"node-{width}.png", tall=tall)
            if width == SIZES[0][0]:
                await tab.evaluate("document.querySelector('#c-verdicts').closest('.card').scrollIntoView()")
                await store(tab, folder / f"node-machines-{width}.png")
        async with browser.tab(width=width, height=height, dark=dark) as tab:
            await take_operator(run_dir, tab, folder / f"operate-{width}.png", tall)


async def take_operator(run_dir: RunDir, tab: Tab, path: Path, tall: int | None) -> None:
    """Take the operator's page, with an invitation that was just made."""
    stop, lines = asyncio.Event(), asyncio.Queue[str]()
    serving = asyncio.create_task(
        serve_page(Operator.of(run_dir.path), stop, port=0, socket=None, shown=lines.put_nowait)
    )
    await tab.go(re.findall(r"http://\S+", await lines.get())[0])
    await tab.until("document.querySelector('#o-workers, tbody tr')")
    await tab.evaluate("document.querySelector('#i-days').form.requestSubmit()")
    await tab.until("document.querySelector('.qr')")
    await store(tab, path, tall=tall)
    stop.set()
    await serving


async def run(options: argparse.Namespace, program: str) -> None:
    run_dir = RunDir(options.run)
    async with running_chromium(program) as browser:
        await take(run_dir, browser, options.folder.resolve(), options.worker)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/page"))
    parser.add_argument("--worker", type=Path, required=True, help="folder of the worker whose page is shown")
    program = chromium_program()
    if program is None:
        sys.exit(MISSING)
    asyncio.run(run(parser.parse_args(), program))


if __name__ == "__main__":
    main()
