"""A key ring whose file rots or goes missing does not put the former keys back in force behind a source that hides the ring."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.node.trust_world import NEW_COORDINATOR, NEW_TRAINER, make_source, make_trust, rotate
from tests.node.worker_world import ROOT, MemorySource, make_run, next_ring
from tests.time_world import VirtualClock

from prime_protocol.key_ring import Role


async def known_once(folder: Path, clock: VirtualClock) -> MemorySource:
    """Let a machine learn of two key rings. Return the source that shows them."""
    source = make_source(clock)
    rotate(source, coordinator=(NEW_COORDINATOR,))
    rotate(source, coordinator=(NEW_COORDINATOR,), trainer=(NEW_TRAINER,))
    source.shown_timestamp = source.timestamp_of(source.shown_head, key=NEW_COORDINATOR)
    await make_trust(folder, clock, source).refresh()
    return source


def rot(folder: Path) -> None:
    path = folder / "keys" / "0001.json"
    path.write_bytes(path.read_bytes().replace(b'"', b"'", 1))


def lose(folder: Path) -> None:
    for path in (folder / "keys").iterdir():
        path.unlink()


def rot_the_newest_and_the_timestamp(folder: Path) -> None:
    (folder / "keys" / "0002.json").write_bytes(b"")
    (folder / "timestamp.json").write_bytes(b"{")


def make_unreadable(folder: Path) -> None:
    (folder / "keys" / "0002.json").unlink()
    (folder / "keys" / "0002.json").mkdir()


@pytest.mark.parametrize("harm", [rot, lose, make_unreadable, rot_the_newest_and_the_timestamp])
async def test_a_lost_key_ring_is_waited_for(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    """Before, the next start trusted the RunSpec's keys: a thief of a replaced key had its timestamps taken again."""
    clock = VirtualClock()
    honest = await known_once(tmp_path, clock)
    harm(tmp_path)
    clock.seconds += 10
    thief = make_source(clock)  # the world before the rings, with the former keys
    again = make_trust(tmp_path, clock, thief)
    lost = again.run.keys.version + 1
    for _ in range(2):
        await again.refresh()
        assert (
            again.fault() == f"key ring {lost} was known here, its file is damaged or missing, and no source shows it"
        )
    assert again.newest is None or again.newest.key_ring == 2
    restarted = make_trust(tmp_path, clock, thief)
    starting = asyncio.ensure_future(restarted.start())
    await clock.sleep(5.0)
    assert not starting.done()
    thief.key_rings.extend(honest.key_rings)
    thief.shown_timestamp = honest.shown_timestamp
    await starting
    assert (restarted.run.keys.version, restarted.fault(), restarted.lost_ring()) == (2, "", 0)
    assert restarted.run.keys.is_revoked(thief.run.keys.first.trainer[0], Role.TRAINER)


async def test_what_was_stored_after_a_lost_ring_is_in_force_as_soon_as_it_is_shown(tmp_path: Path) -> None:
    """A source that shows the lost ring and hides the one after it."""
    clock = VirtualClock()
    honest = await known_once(tmp_path, clock)
    rot(tmp_path)
    hider = make_source(clock)
    hider.key_rings.append(honest.key_rings[0])
    again = make_trust(tmp_path, clock, hider)
    await again.refresh()
    assert again.run.keys.version == 2
    assert again.newest is not None
    assert again.newest.key_ring == 2


async def test_a_damaged_timestamp_and_files_of_another_run_are_not_waited_for(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = make_source(clock)
    await make_trust(tmp_path, clock, source).refresh()
    path = tmp_path / "timestamp.json"
    path.write_bytes(path.read_bytes().replace(b'"signature":"', b'"signature":"0', 1))
    assert make_trust(tmp_path, clock, source).lost_ring() == 0
    other = make_run(max_steps=7)
    (tmp_path / "keys" / "0001.json").write_bytes(next_ring(other.keys, ROOT, published=None).to_bytes())
    again = make_trust(tmp_path, clock, source)
    await again.start()
    assert (again.lost_ring(), again.fault()) == (0, "")
