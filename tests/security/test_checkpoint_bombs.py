"""A few kilobytes that decode to gigabytes: refused before anything is allocated, with both sizes and the setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.builder import pinned, provenance
from tests.node.table_engine import table_weights
from tests.node.worker_world import MODEL_FILES, ROOT, TRAINER, MemorySource, make_follower, make_run
from typer.testing import CliRunner

from prime_node import memory
from prime_node.broadcast.audit.audit import audit
from prime_node.broadcast.audit.one_tensor import prove_tensor
from prime_node.cli.main import app
from prime_node.memory import ROOM_PAUSE_S, ROOM_S_MAX, MachineMemory, MemoryShort
from prime_protocol.checkpoint import assemble, encode_checkpoint, root_of_table
from prime_protocol.codec.layout import CHUNK_ELEMENTS, TYPES, Mode, write_chunk
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.manifest import Manifest, TensorEntry, sign_manifest
from prime_protocol.run_spec import ModelFile
from prime_protocol.weights import num_bytes

CHUNKS = 32
RAW_BYTES = CHUNKS * CHUNK_ELEMENTS * 8
NAMED = re.compile(r"needs ([\d,]+) bytes of memory .* more than ([\d,]+) ")


def bomb() -> MemorySource:
    """Publish a policy of 64 MiB in a few kilobytes: each plane of each chunk is one constant byte."""
    source = MemorySource(make_run())
    chunk = write_chunk(Mode.FULL, TYPES["fp64"], CHUNK_ELEMENTS, [bytes((2, 1, 0, 0, 7))] * 8)

    def keep(_: object, part: bytearray) -> None:
        source.blobs[digest_of(part)] = bytes(part)

    encoding, index = assemble(((chunk, CHUNK_ELEMENTS) for _ in range(CHUNKS)), None, keep=keep)
    source.blobs[digest_of(index)] = index
    table = (TensorEntry(name="w", dtype="fp64", shape=(CHUNKS * CHUNK_ELEMENTS,), digest="0" * 64),)
    manifest = Manifest(
        run=source.run.digest,
        policy_version=0,
        previous=None,
        model_config_digest=digest_of(MODEL_FILES["config.json"]),
        state_root=root_of_table(table),
        tensors=table,
        encodings=(encoding,),
        produced_by=provenance(0),
        created_at_ms=0,
    )
    source.manifests[0] = source.shown_head = sign_manifest(manifest, TRAINER).envelope
    assert encoding.sent_bytes + len(index) < 16_384 < RAW_BYTES // 4_000
    return source


async def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    source = bomb()
    with pytest.raises(LocalError, match="--memory") as refused:
        await audit(source, None, memory_bytes_max=RAW_BYTES - 1)
    named = NAMED.search(str(refused.value))
    assert named is not None
    assert [int(number.replace(",", "")) for number in named.groups()] == [RAW_BYTES, RAW_BYTES - 1]
    with pytest.raises(LocalError, match="--memory"):
        await prove_tensor(source, None, "w", memory_bytes_max=RAW_BYTES - 1)
    parts = {part.digest for part in source.signed(0).manifest.encodings[0].parts}
    assert not parts & set(source.blobs_asked), "no part was fetched"


async def test_without_a_setting_the_memory_that_is_available_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    source = bomb()
    # A tenth of it is left to the rest of the process.
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(RAW_BYTES, RAW_BYTES))
    with pytest.raises(LocalError, match="90% of the available memory"):
        await audit(source, None)
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(2 * RAW_BYTES, 2 * RAW_BYTES))
    report = await audit(source, None)
    assert report.failure is not None
    assert "wrong digest" in report.failure.detail, "it fits, is decoded, and is not what its manifest says"


def test_verify_says_what_it_needs_and_ends_with_the_code_of_this_machine(tmp_path: Path) -> None:
    bomb().save(tmp_path / "public")
    shown = CliRunner().invoke(app, ["verify", str(tmp_path / "public"), "--memory", "0.01"])
    assert isinstance(shown.exception, LocalError), "main reports it and exits with 3"
    assert NAMED.search(str(shown.exception)) is not None


async def test_a_follower_refuses_it_too(tmp_path: Path) -> None:
    """Workers, validators, `fetch` and `evaluate` have a follower."""
    source = bomb()
    follower = make_follower(tmp_path, source, policies_bytes_max=RAW_BYTES - 1)
    await follower.heads.look()
    with pytest.raises(LocalError, match="policies_bytes_max") as refused:
        await follower.fetch(0)
    assert NAMED.search(str(refused.value)) is not None


async def test_a_follower_waits_for_memory_that_other_programs_use(tmp_path: Path) -> None:
    """Before, a worker whose machine was short of memory for a moment ended, and `up` did not restart it."""
    source = MemorySource(make_run())
    source.publish(table_weights(0))
    raw = num_bytes(table_weights(0))
    free = [0, 0, 2 * raw]
    follower = make_follower(
        tmp_path, source, measured=lambda: MachineMemory(2 * raw, free.pop(0) if len(free) > 1 else free[0])
    )
    await follower.heads.look()
    began_s = source.clock.monotonic_s()
    assert (await follower.fetch(0)).version == 0
    assert source.clock.monotonic_s() - began_s >= 2 * ROOM_PAUSE_S


async def test_a_follower_does_not_wait_longer_than_its_limit_for_memory(tmp_path: Path) -> None:
    source = MemorySource(make_run())
    source.publish(table_weights(0))
    follower = make_follower(tmp_path, source, measured=lambda: MachineMemory(2**40, 0))
    await follower.heads.look()
    began_s = source.clock.monotonic_s()
    with pytest.raises(MemoryShort, match="of the available memory"):
        await follower.fetch(0)
    assert source.clock.monotonic_s() - began_s >= ROOM_S_MAX


async def test_a_follower_does_not_wait_for_memory_that_the_machine_does_not_have(tmp_path: Path) -> None:
    source = bomb()
    follower = make_follower(tmp_path, source, measured=lambda: MachineMemory(RAW_BYTES, RAW_BYTES))
    await follower.heads.look()
    began_s = source.clock.monotonic_s()
    with pytest.raises(LocalError, match="of the available memory") as refused:
        await follower.fetch(0)
    assert not isinstance(refused.value, MemoryShort)
    assert source.clock.monotonic_s() - began_s < ROOM_PAUSE_S


async def test_model_files_that_do_not_fit_are_not_fetched() -> None:
    """Before, `verify` read each of 64 files of two gigabytes into memory, and with an export kept all of them."""
    files = {"config.json": b"{}", "one.json": bytes(2**16), "two.json": bytes([1]) * 2**16}
    listed = tuple(ModelFile(name=name, digest=digest_of(data), size=len(data)) for name, data in files.items())
    source = MemorySource(pinned(make_run().spec.model_copy(update={"model_files": listed}), ROOT))
    source.blobs |= {digest_of(data): data for data in files.values()}
    source.publish(table_weights(0))
    with pytest.raises(LocalError, match=r"model file one\.json needs 65,536 bytes"):
        await audit(source, None, memory_bytes_max=2**16 - 1)
    assert (await audit(source, None, memory_bytes_max=2**16)).passed, "one after the other"
    source.blobs_asked.clear()
    with pytest.raises(LocalError, match=r"model file two\.json needs 131,"):
        await audit(source, None, memory_bytes_max=2**17, on_verified=lambda _: None)
    assert digest_of(files["two.json"]) not in source.blobs_asked


async def test_policies_that_are_held_count() -> None:
    """A chain of deltas holds a base and a policy at a time: twice a policy's size and its parts are enough."""
    source = MemorySource(make_run())
    last = source.publish(table_weights(0))
    for version in (1, 2, 3):
        last = source.publish(table_weights(version), base=(last, table_weights(version - 1)))
    raw = num_bytes(table_weights(0))
    parts = max(sum(map(len, encode_checkpoint(table_weights(version)).parts)) for version in range(4))
    for chain in (False, True):
        report = await audit(source, None, chain=chain, memory_bytes_max=2 * raw + parts)
        assert report.passed, report.failure
        with pytest.raises(LocalError, match="the limit --memory"):
            await audit(source, None, chain=chain, memory_bytes_max=2 * raw - 1)
