"""Pictures of the worker's page at three sizes, for docs/page/, with the figures of an invented worker.

    python scripts/bench/node_pictures.py [docs/page]

It needs Chromium.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

from page_pictures import HEIGHT_MAX, small
from tests.chromium_world import MISSING, chromium_program, running_chromium
from tests.node.memory_coordinator import WorkerWorld
from tests.node.node_page_world import PageClient
from tests.node.worker_world import make_run

from prime_node.cli.wire_node import node_page
from prime_node.worker.control import ON_REQUEST, Wanted, WorkLimits
from prime_node.worker.receipts import Tally
from prime_node.worker.recent import FILE, MINUTE_MS, RecentMinutes
from prime_node.worker.status import Traffic
from prime_node.worker.worker import Worker
from prime_protocol.identity import SigningKey
from prime_protocol.replies import MachineStanding, Standing
from prime_protocol.requests import WorkerState

SIZES = ((1280, 800, False), (1920, 1080, True), (390, 844, False))
"""Width, height, and whether the worker is paused, which is shown in dark colours."""
MINUTES = 800
LIMITS = WorkLimits(hours="22:00-07:00", on_battery=False, upload_mbit_per_s=5.0)


def invented_minutes(last: int) -> RecentMinutes:
    """Return the minutes of a worker that did not run for an hour, and was paused for another one."""
    draw, found = random.Random(3), RecentMinutes()
    for ago in range(MINUTES, 0, -1):
        if 420 < ago < 500:
            continue
        working = 0 if 200 < ago < 260 else 1
        speed = working * abs(draw.gauss(812 + 80 * math.sin(ago / 70), 40))
        found.minute.append(last - ago)
        found.tokens.append(int(60 * speed))
        found.accepted.append(working * int(abs(draw.gauss(96, 20))))
        found.rejected.append(working * (8 if draw.random() < 0.03 else 0))
        found.down_bytes.append(2_200_000 if draw.random() < 0.4 else 0)
        found.up_bytes.append(int(1.1e6 * draw.random()))
    return found


def invented_standing(here: str) -> Standing:
    """Return the standing of a person with three machines."""
    keys = [SigningKey(bytes([number]) * 32).key_id for number in (71, 72, 73)]
    rows = (
        (here, "attic-4090", "generating", 71_680, 136, 453_120),
        (keys[0], "office-3090", "generating", 40_960, 64, 258_900),
        (keys[1], "old-laptop", "away", 5_120, 0, 31_480),
    )
    machines = tuple(
        MachineStanding(worker=key, name=name, state=state, accepted=accepted, refused=refused, tokens=tokens)
        for key, name, state, accepted, refused, tokens in rows
    )
    tokens = sum(one.tokens for one in machines)
    return Standing(
        contributor=keys[2], rank=3, contributors=41, tokens=tokens, all_tokens=9_600_000, machines=machines
    )


def invented_worker(folder: Path, *, is_paused: bool) -> Worker:
    """Return a worker that generates, or is paused."""
    now_s = time.time()
    (folder / FILE).write_text(invented_minutes(int(now_s * 1_000) // MINUTE_MS).model_dump_json())
    about = {"title": "Two-digit sums", "description": "A small public model learns to add two numbers of two digits."}
    world = WorkerWorld(folder, pinned=make_run(**about))
    world.clock.seconds = now_s
    worker = world.worker(name="attic-4090", threads=2)
    tally = Tally(71_680, 453_120, 128, {"stale": 96, "lease_expired": 32, "unverifiable": 8})
    setattr(worker.receipts, "tally", lambda: tally)  # noqa: B010 - a method of this one object
    worker.links = lambda: Traffic(4, 397_000_000, 120_500_000, "4 peers, 120.5 MB sent, port 40123, libp2p reachable")
    worker.loaded.version = 40
    worker.standing = invented_standing(worker.key.key_id)
    activity = worker.activity
    activity.state, activity.pace.tokens_per_s = WorkerState.GENERATING, 812.4
    if is_paused:
        activity.paused, activity.wanted, activity.limits = ON_REQUEST, Wanted.PAUSE, LIMITS
    return worker


async def take(folder: Path, program: str) -> None:
    async with running_chromium(program) as browser:
        for width, height, is_paused in SIZES:
            with tempfile.TemporaryDirectory() as place:
                worker = invented_worker(Path(place), is_paused=is_paused)
                await worker.session.join()
                worker.session.step = worker.session.head = 41
                async with (
                    node_page(worker, f"http://203.0.113.5:8400/#{worker.run.digest}"),
                    browser.tab(width=width, height=height, dark=is_paused) as tab,
                ):
                    found = PageClient(Path(place)).address()
                    await tab.go(f"{found['address']}#{found['key']}")
                    await tab.until("document.querySelector('#c-about')")
                    await asyncio.sleep(1.0)
                    path = folder / f"node-{width}.png"
                    path.write_bytes(small(await tab.picture(tall=HEIGHT_MAX if width < 1000 else None)))
                    if width == 1280:
                        await tab.evaluate("document.querySelector('#c-verdicts').closest('.card').scrollIntoView()")
                        (folder / "node-machines-1280.png").write_bytes(small(await tab.picture()))
                    print(path, path.stat().st_size)
                worker.lock.release()


def main() -> None:
    program = chromium_program()
    if program is None:
        sys.exit(MISSING)
    asyncio.run(take(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/page"), program))


if __name__ == "__main__":
    main()
