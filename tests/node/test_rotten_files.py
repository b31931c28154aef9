"""One file of a role's folder rots, is cut short, emptied or removed: the role names it, heals it, or loses nothing by it.

The coordinator's database: test_rotten_database.py. Files of checkpoints and trust, of each role that follows the run:
seeded_swarm_world.py. Bundles at the coordinator: seeded_world.py and test_damaged_bundles.py. Weights: test_checkpointing.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, folder_parts, make_manifest, running
from tests.node.rotten_world import DAMAGES, RUN, copied, damage, kinds_of, run_a_while
from tests.node.spool_world import Receiver, flush_all, make_spool

from prime_node.broadcast.publish.last_signed import LastSigned
from prime_node.keyfile import load_or_create
from prime_node.training_data.feed import KeptBundles
from prime_node.worker.control import read_control
from prime_node.worker.receipts import ReceiptBook
from prime_node.worker.recent import RecentWork
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.replies import ReceiptList

NEEDS_NO_WORD = ("bundles/", "public/blobs/", "public/run.json")
"""Files that a start does not read, or writes again in any case. Bundles and blobs are compared with their digest when read."""


def test_each_kind_of_document_of_a_coordinator_is_named_and_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(run_a_while(tmp_path / "run", tmp_path / "kept"))
    drawn, kinds = random.Random(1), kinds_of(tmp_path / "kept")
    assert {"ledger_head.json", "head.json", "timestamp.json", "run.json"} <= {kind.name for kind in kinds}

    async def started(folder: Path) -> tuple[int, int]:
        async with running(await folder_parts(RUN, folder)) as world:
            return await world.parts.store.ledger_length(), (await world.get("/v1/head"))[0]

    for kind in kinds:
        for how in () if "sqlite" in kind.name else DAMAGES:
            caplog.clear()
            with copied(tmp_path / "kept") as folder:
                damage(folder / kind, how, drawn)
                assert asyncio.run(started(folder)) == (3, 200), f"{kind}: {how}"
            said = caplog.text
            assert "Traceback" not in said, f"{kind}: {how}"
            if how != "remove" and not str(kind).startswith(NEEDS_NO_WORD):
                assert kind.name in said, f"{kind}: {how}"


@pytest.mark.parametrize("how", sorted(set(DAMAGES)))
async def test_a_damaged_bundle_of_a_worker_is_named_and_the_others_are_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    spool = make_spool(tmp_path)
    whole = [bytes([number]) * 99 for number in range(3)]
    for number, parcel in enumerate(whole):
        await spool.put(parcel, digest_of(b"%d" % number))
    again, receiver = make_spool(tmp_path), Receiver()
    path = parcels_in(tmp_path)[1]
    damage(path, how, random.Random(2))

    async def upload(parcel: bytes) -> object:
        if parcel not in whole:
            raise RemoteError(ErrorCode.BAD_SIGNATURE, "does not verify")
        return await receiver(parcel)

    await flush_all(again, upload)  # type: ignore[arg-type]
    assert receiver.taken == [whole[0], whole[2]]
    assert path.stem in caplog.text
    assert not parcels_in(tmp_path)


def parcels_in(folder: Path) -> list[Path]:
    """Return the bundles of a spool."""
    return sorted(folder.glob("*.parcel"))


def readers(folder: Path) -> dict[str, Callable[[], object]]:
    """Return what a worker and a trainer read at their start, by file."""
    return {
        "receipts.cursor": lambda: ReceiptBook(folder, run=RUN, worker=ANNA.key_id).cursor,
        "recent.json": lambda: RecentWork(folder),
        "control.json": lambda: read_control(folder),
        "worker.key": lambda: load_or_create(folder / "worker.key"),
        "signed.json": lambda: LastSigned(folder).unanswered(make_manifest(RUN, None)[0], run=RUN.digest),
    }


@pytest.mark.parametrize("name", ["receipts.cursor", "recent.json", "control.json", "worker.key", "signed.json"])
def test_each_flipped_bit_of_a_small_file_is_named_or_changes_nothing_that_was_promised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    signed, _ = make_manifest(RUN, None)
    LastSigned(tmp_path).note(signed)
    ReceiptBook(tmp_path, run=RUN, worker=ANNA.key_id).add(ReceiptList(receipts=(), next=41), now_ms=0)
    (tmp_path / "recent.json").write_bytes(RecentWork(tmp_path).minutes.model_dump_json().encode())
    (tmp_path / "control.json").write_bytes(read_control(tmp_path).model_dump_json().encode())
    load_or_create(tmp_path / "worker.key")
    path, read = tmp_path / name, readers(tmp_path)[name]
    whole, named = path.read_bytes(), 0
    flips = random.Random(3).sample(range(8 * len(whole)), min(100, 8 * len(whole)))
    for data in (
        b"",
        whole[: len(whole) // 2],
        *(whole[: at // 8] + bytes([whole[at // 8] ^ 1 << at % 8]) + whole[at // 8 + 1 :] for at in flips),
    ):
        path.write_bytes(data)
        caplog.clear()
        try:
            read()
            said = caplog.text
        except LocalError as error:
            said = str(error)
            assert [name in said, "\n" in said] == [True, False], said
        named += name in said
    assert named > 10
    if name == "receipts.cursor":
        assert named == 2 + len(flips), "one that is too high would hide receipts"


def test_each_flipped_bit_of_what_was_signed_last_is_found(tmp_path: Path) -> None:
    """A trainer that believed it could sign a second policy under a used number."""
    signed, _ = make_manifest(RUN, None)
    LastSigned(tmp_path).note(signed)
    path = tmp_path / "signed.json"
    whole = path.read_bytes()
    for at in random.Random(5).sample(range(8 * len(whole)), 200):
        path.write_bytes(whole[: at // 8] + bytes([whole[at // 8] ^ 1 << at % 8]) + whole[at // 8 + 1 :])
        with pytest.raises(LocalError, match=r"signed\.json is damaged"):
            LastSigned(tmp_path).unanswered(signed, run=RUN.digest)


@pytest.mark.parametrize("how", sorted(set(DAMAGES)))
def test_a_damaged_copy_of_a_bundle_is_fetched_again_and_never_read_as_left_out(tmp_path: Path, how: str) -> None:
    """A power loss empties files that were not synced: an empty copy is no statement that the bundle was left out."""
    bundle, left_out = b"a bundle" * 9, digest_of(b"unreadable")
    copies = KeptBundles(tmp_path)
    copies.keep(digest_of(bundle), bundle, 3)
    copies.keep(left_out, b"", 3)
    assert (copies.read(digest_of(bundle), 3), copies.read(left_out, 3)) == (bundle, b"")
    for digest in (digest_of(bundle), left_out):
        damage(tmp_path / digest, how, random.Random(4))
        assert KeptBundles(tmp_path).read(digest, 3) is None
