"""Pictures of each view of the coordinator's page at three sizes, for docs/page/, with the invented run of page_server.py.

    python scripts/bench/page_pictures.py [docs/page]

It needs Chromium. Colours are reduced until a picture has at most 60 kB.
"""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from page_server import PageServer, page_server
from PIL import Image
from tests.chromium_world import MISSING, Browser, chromium_program, running_chromium
from tests.page_world import VIEWS

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
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "docs" / "page"
    folder.mkdir(parents=True, exist_ok=True)
    with page_server(NUM_WORKERS, hostile=False) as server:
        server.ask("changes")

        async def run() -> None:
            async with running_chromium(program) as browser:
                await asyncio.sleep(6.0)  # something happens in the newest seconds
                await take(server, browser, folder)

        asyncio.run(run())


if __name__ == "__main__":
    main()
