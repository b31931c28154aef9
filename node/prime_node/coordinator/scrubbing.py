"""Reading of the public blobs in the background, so that rot is found before someone needs the blob.

A damaged blob is named in the log and deleted: peers and mirrors serve the part then, and none loses time with bad bytes. What is
put again (a model file at each start, a part that the trainer uploads) heals the place.
"""

from __future__ import annotations

import asyncio
import logging

from prime_node.ports.blobs import Blobs
from prime_node.ports.clock import Clock
from prime_protocol.digest import digest_of

REST_SHARE = 19.0
"""Rest after each blob, relative to the time that reading it took: so 5 % of the time of one disk and one core."""
REST_S_MIN = 0.01
FAULT_S = 60.0
"""Rest after a fault of the disk that may pass, in seconds."""

log = logging.getLogger(__name__)


async def scrub_blobs(public: Blobs, clock: Clock, *, every_s: float) -> None:
    """Read all public blobs again and again, each at most every `every_s` seconds. Never returns, whatever the disk does."""
    while True:
        began_s = clock.monotonic_s()
        try:
            if damaged := await scrub_once(public, clock):
                log.error("%d public blobs were damaged: check the disk", damaged)
        except OSError as error:
            log.warning("the public blobs cannot be listed now: %s", error)
            await clock.sleep(FAULT_S)
        await clock.sleep(max(REST_S_MIN, every_s - (clock.monotonic_s() - began_s)))


async def scrub_once(public: Blobs, clock: Clock) -> int:
    """Read all public blobs, and delete the damaged ones. Return how many these were. Raises OSError if they cannot be listed.

    A blob is damaged if two readings, FAULT_S apart, both give other bytes. One that cannot be read or deleted stays: the fault
    may be of the whole disk, and pass. The log names the first one of such a time.
    """
    damaged, is_faulty = 0, False
    async for digest in public.digests():
        began_s = clock.monotonic_s()
        try:
            if not await _is_whole(public, digest):
                await clock.sleep(FAULT_S)
                began_s = clock.monotonic_s()
                if not await _is_whole(public, digest):
                    damaged += 1
                    log.error("public blob %s is damaged, so peers and mirrors have to serve it", digest)
                    await public.delete(digest)
            is_faulty = False
        except KeyError:  # deleted meanwhile
            continue
        except OSError as error:
            if not is_faulty:
                log.warning("public blob %s cannot be read or deleted now, and stays: %s", digest, error)
            is_faulty = True
            await clock.sleep(FAULT_S)
            continue
        await clock.sleep(max(REST_S_MIN, REST_SHARE * (clock.monotonic_s() - began_s)))
    return damaged


async def _is_whole(public: Blobs, digest: str) -> bool:
    return await asyncio.to_thread(digest_of, await public.get(digest)) == digest
