"""The patches of docs/upstream apply to the installed libraries, and change what they say."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from tests.source_tree import ROOT

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
import trio.testing
from libp2p.stream_muxer.yamux import yamux as library
from tests.node.libp2p_world import sessions

from prime_node.adapters.peers.libp2p_noise import Noise

PATCHES = ROOT / "docs" / "upstream"
QUIET_S = 0.1
"""Time without a step of any task after which none of them polls: the library does each 0.01 s."""


def patched(path: str, module: ModuleType, folder: Path, patch: str) -> ModuleType:
    """Return a module of its own from a patched copy of the source at `path`."""
    copy = folder / path
    copy.parent.mkdir(parents=True)
    shutil.copy(str(module.__file__), copy)
    subprocess.run(["git", "apply", str(PATCHES / patch)], cwd=folder, check=True)
    spec = importlib.util.spec_from_file_location("patched_copy", copy)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


async def waits_quietly(muxers: ModuleType) -> bool:
    """Return whether nothing runs while a writer waits for its window. All bytes arrive in any case."""
    sent = bytes(3 * library.DEFAULT_WINDOW_SIZE)
    dialled, listened = await sessions(Noise, Noise)
    one = muxers.Yamux(dialled, dialled.get_remote_peer(), is_initiator=True)
    other = muxers.Yamux(listened, listened.get_remote_peer(), is_initiator=False)
    async with trio.open_nursery() as nursery:
        for end in (one, other):
            nursery.start_soon(end.start)
            await end.event_started.wait()
        opened = await one.open_stream()
        accepted = await other.accept_stream()
        nursery.start_soon(opened.write, sent)
        while opened.send_window:
            await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(1.0) as waiting:
            await trio.testing.wait_all_tasks_blocked(cushion=QUIET_S)
        received = b""
        while len(received) < len(sent):
            received += await accepted.read(len(sent) - len(received))
        assert received == sent
        nursery.cancel_scope.cancel()
    return not waiting.cancelled_caught


def test_a_yamux_writer_without_credit_is_woken_and_does_not_poll(tmp_path: Path) -> None:
    path = "libp2p/stream_muxer/yamux/yamux.py"
    made = patched(path, library, tmp_path, "yamux-window.patch")
    assert trio.run(waits_quietly, made)
    assert not trio.run(waits_quietly, library), "this release has the change: drop the patch"
