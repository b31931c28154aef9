"""Pictures of each view of the coordinator's page at three sizes, for docs/page/, with the invented run of page_server.py.

    python scripts/bench/page_pictures.py [docs/page] [--operator]

`--operator` takes the operator's page alone.

It needs Chromium. Colours are reduced until a picture has at most 60 kB.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from page_server import PageServer, page_server
from PIL import Image
from tests.chromium_world import MISSING, Browser, chromium_program, running_chromium
from tests.node.coordinator_world import COORDINATOR
from tests.node.operator_world import write_key
from tests.page_world import VIEWS

from prime_node.cli.operate_page.serving import serve_page
from prime_node.cli.operator import Operator
from prime_node.cli.run_dir import RunDir

BYTES_MAX = 60_000
SIZES = ((1280, 800, False), (1920, 1080, True), (390, 844, False))
"""Width, height, and whether the colours are dark."""
HEIGHT_MAX = 1_500
"""Height of the pictures of a phone, on which a view is long."""
NUM_WORKERS = 400
READY = {"workers": "document.querySelectorAll('.win .wrow:not([hidden])').length > 5"}


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


async def take_operator(server: PageServer, browser: Browser, folder: Path) -> None:
    """Take the operator's page, with an invitation that was just made."""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):  # so that the page shows a short path
        run_dir = RunDir(Path("runs") / "sums")
        write_key(run_dir.key("coordinator"), COORDINATOR)
        run_dir.run_spec.write_bytes(server.run_spec)
        run_dir.join_link_file.write_text(f"{server.url}/#{server.digest}\n")
        for width, height, dark in SIZES:
            stop, lines = asyncio.Event(), asyncio.Queue[str]()
            serving = asyncio.create_task(
                serve_page(Operator.of(run_dir.path), stop, port=0, socket=None, shown=lines.put_nowait)
            )
            async with browser.tab(width=width, height=height, dark=dark) as tab:
                await tab.go(re.findall(r"http://\S+", await lines.get())[0])
                await tab.until("document.querySelectorAll('#o-workers, tbody tr').length > 5")
                await tab.evaluate("document.querySelector('#i-days').form.requestSubmit()")
                await tab.until("document.querySelector('.qr')")
                path = folder / f"operate-{width}.png"
                path.write_bytes(small(await tab.picture(tall=HEIGHT_MAX if width < 1000 else None)))
                print(path, path.stat().st_size, tab.errors)
            stop.set()
            await serving


async def take(server: PageServer, browser: Browser, folder: Path) -> None:
    for width, height, dark in SIZES:
        for view in VIEWS:
            async with browser.tab(width=width, height=height, dark=dark) as tab:
                await tab.go(server.url + ("/" if view == "run" else f"/?view={view}"))
                await tab.until(READY.get(view, "document.querySelector('main .card')"))
                await asyncio.sleep(1.5)
                path = folder / f"{view}-{width}.png"
                path.write_bytes(
                    small(await tab.picture(tall=HEIGHT_MAX if width < 1000 and view != "workers" else None))
                )
                print(path, path.stat().st_size)


def main() -> None:
    program = chromium_program()
    if program is None:
        sys.exit(MISSING)
    places = [argument for argument in sys.argv[1:] if argument != "--operator"]
    folder = Path(places[0]) if places else Path(__file__).resolve().parents[2] / "docs" / "page"
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with page_server(NUM_WORKERS, hostile=False) as server:
        server.ask("changes")

        async def run() -> None:
            async with running_chromium(program) as browser:
                await asyncio.sleep(6.0)  # something happens in the newest seconds
                if "--operator" not in sys.argv:
                    await take(server, browser, folder)
                await take_operator(server, browser, folder)

        asyncio.run(run())


if __name__ == "__main__":
    main()
