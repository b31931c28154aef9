"""Each kind of tampering is caught by the check that is meant for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.builder import rows_of
from tests.node.table_engine import table_weights
from tests.node.worker_world import MODEL_FILES, ROOT, STRANGER, MemorySource, make_run

from prime_node.adapters.storage.folder_source import FolderSource
from prime_node.broadcast.audit.audit import audit
from prime_node.broadcast.audit.audit_report import AuditReport, Check
from prime_protocol.checkpoint import encode_checkpoint, tensor_table
from prime_protocol.chunk_index import pack_index
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import PartEntry
from prime_protocol.weights import root_of

RUN = make_run()


def published(*, policies: int = 4, deltas: bool = False) -> MemorySource:
    source = MemorySource(RUN)
    last = None
    for version in range(policies):
        weights = table_weights(version)
        base = (last, table_weights(version - 1)) if deltas and last is not None else None
        last = source.publish(weights, base=base)
    return source


async def failure(source: MemorySource, *, chain: bool = True, run: str | None = RUN.digest) -> Check:
    """Return the only failed check."""
    report = await audit(source, run, chain=chain)
    assert not report.passed
    found = report.failure
    assert found is not None
    assert report.checks[-1] is found
    assert [check.number for check in report.checks] == list(range(1, found.number + 1))
    return found


@pytest.mark.parametrize("deltas", [False, True], ids=["anchors", "deltas"])
@pytest.mark.parametrize("chain", [False, True], ids=["head", "chain"])
async def test_an_honest_publication_passes_all_nine_checks(*, deltas: bool, chain: bool) -> None:
    source = published(deltas=deltas)
    reported: list[Check] = []
    num_bytes: list[int] = []
    report = await audit(source, RUN.digest, chain=chain, on_check=reported.append, on_bytes=num_bytes.append)
    assert report.passed
    assert report.policy_version == 3
    assert report.run == RUN.digest
    assert [check.number for check in reported] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert report.num_policies == (4 if chain or deltas else 1)
    assert sum(num_bytes) == report.num_bytes > 0


async def test_two_policies_may_be_deltas_of_the_same_one() -> None:
    source = published(policies=1)
    first = source.signed(0)
    for version in (1, 2, 3):
        source.publish(table_weights(version), base=(first, table_weights(0)))
    report = await audit(source, RUN.digest, chain=True)
    assert report.passed, report.failure
    assert report.num_policies == 4


async def test_a_copy_on_a_disk_is_verified_offline(tmp_path: Path) -> None:
    published().save(tmp_path / "public")
    report = await audit(FolderSource(tmp_path / "public"), RUN.digest, chain=True)
    assert report.passed, report.failure


async def test_one_flipped_bit_in_a_file_is_caught(tmp_path: Path) -> None:
    source = published()
    source.save(tmp_path)
    digest = source.signed(2).manifest.encodings[0].parts[0].digest
    path = tmp_path / "blobs" / digest[:2] / digest
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    report = await audit(FolderSource(tmp_path), RUN.digest, chain=True)
    assert report.failure is not None
    assert report.failure.number == 5
    assert "policy 2" in report.failure.detail


async def test_the_report_names_a_missing_pinned_digest() -> None:
    report = await audit(published(), None)
    assert report.passed
    assert "not pinned" in report.checks[0].detail


async def test_1_another_run_is_caught() -> None:
    assert (await failure(published(), run=make_run(name="other").digest)).number == 1


async def test_1_a_run_that_its_root_did_not_sign_is_caught() -> None:
    source = published()
    forged = seal(RUN.envelope.payload, PayloadType.RUN_SPEC, STRANGER)
    source.run = type(RUN)(RUN.digest, RUN.spec, forged)
    assert (await failure(source)).number == 1


async def test_2_a_head_signed_by_a_stranger_is_caught() -> None:
    source = published()
    source.publish(table_weights(9), key=STRANGER)
    assert (await failure(source)).number == 2


async def test_2_an_older_manifest_signed_by_the_wrong_role_is_caught() -> None:
    source = published()
    source.manifests[1] = seal(source.manifests[1].payload, PayloadType.MANIFEST, ROOT)
    assert (await failure(source)).number == 2


async def test_2_a_changed_byte_in_a_manifest_is_caught() -> None:
    source = published()
    envelope = source.manifests[2]
    changed = envelope.payload.replace(b'"software":"test"', b'"software":"tesT"')
    source.manifests[2] = type(envelope)(envelope.payload_type, changed, envelope.signatures)
    assert (await failure(source)).number == 2


async def test_2_nothing_published_yet_does_not_pass() -> None:
    assert (await failure(MemorySource(RUN))).number == 2


CONTENT_FAULTS: dict[str, dict[str, object]] = {
    "another run": {"run": digest_of(b"other")},
    "another architecture": {"model_config_digest": digest_of(b"other")},
    "a root that is not the table's": {"state_root": digest_of(b"other")},
    "a version beyond the run": {"policy_version": 5_000},
    "two encodings with one base": {"encodings": 2 * (encode_checkpoint(table_weights(9)).encoding,)},
}


@pytest.mark.parametrize("changes", CONTENT_FAULTS.values(), ids=CONTENT_FAULTS)
async def test_3_a_signed_manifest_with_impossible_content_is_caught(changes: dict[str, object]) -> None:
    source = published()
    source.shown_head = source.publish(table_weights(9), **changes).envelope  # type: ignore[arg-type]
    assert (await failure(source, chain=False)).number == 3


async def test_3_a_manifest_under_another_number_is_caught() -> None:
    source = published()
    source.manifests[1] = source.manifests[2]
    assert (await failure(source)).number == 3


async def test_3_a_missing_manifest_is_caught() -> None:
    source = published()
    del source.manifests[1]
    found = await failure(source)
    assert found.number == 2
    assert "no manifest 1" in found.detail


async def test_4_a_replaced_manifest_in_the_middle_breaks_the_chain() -> None:
    source = published()
    original = source.signed(2)
    other = source.publish(table_weights(77), previous=source.signed(1))
    assert other.manifest.policy_version == original.manifest.policy_version
    source.shown_head = source.manifests[3]
    assert (await failure(source)).number == 4


async def test_4_a_chain_that_begins_at_another_root_is_caught() -> None:
    source, other = published(), published(policies=0)
    root = other.publish(table_weights(5))
    source.manifests[0] = root.envelope
    source.blobs |= other.blobs
    assert (await failure(source)).number == 4


@pytest.mark.parametrize("chain", [False, True])
async def test_4_two_heads_for_one_policy_are_a_fork(*, chain: bool) -> None:
    source = published()
    honest = source.manifests[3]
    source.publish(table_weights(66), previous=source.signed(2))
    source.shown_head, source.manifests[3] = source.manifests[3], honest
    found = await failure(source, chain=chain)
    assert found.number == 4
    assert "two signed manifests" in found.detail


async def test_4_a_delta_whose_base_is_another_policy_is_caught() -> None:
    source = published(policies=1)
    wrong = table_weights(50)
    base = MemorySource(RUN).publish(wrong)
    source.publish(table_weights(1), base=(base, wrong))
    assert (await failure(source, chain=False)).number == 4


TAMPERINGS: dict[str, Callable[[bytes], bytes]] = {
    "a flipped bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "the last byte": lambda data: data[:-1] + bytes([data[-1] ^ 0x80]),
    "truncated": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("tamper", TAMPERINGS.values(), ids=TAMPERINGS)
@pytest.mark.parametrize("policy_version", [0, 2, 3])
async def test_5_a_tampered_part_is_caught(tamper: Callable[[bytes], bytes], policy_version: int) -> None:
    source = published()
    digest = source.signed(policy_version).manifest.encodings[0].parts[0].digest
    source.blobs[digest] = tamper(source.blobs[digest])
    found = await failure(source)
    assert found.number == 5
    assert f"policy {policy_version}" in found.detail


async def test_5_a_part_of_the_head_that_is_not_there_is_caught() -> None:
    source = published()
    del source.blobs[source.signed(3).manifest.encodings[0].parts[0].digest]
    assert (await failure(source)).number == 5


async def test_5_older_policies_that_are_no_longer_kept_are_counted() -> None:
    source = published()
    del source.blobs[source.signed(1).manifest.encodings[0].parts[0].digest]
    report = await audit(source, RUN.digest, chain=True)
    assert report.passed
    assert report.num_policies == 3
    assert "1 earlier policies are no longer kept" in report.checks[4].detail


async def test_5_what_the_head_is_built_on_must_be_kept() -> None:
    source = published(deltas=True)
    del source.blobs[source.signed(1).manifest.encodings[0].parts[0].digest]
    assert (await failure(source)).number == 5


def with_index(source: MemorySource, index: bytes, *, parts: bytes | None = None) -> None:
    """Publish policy 0 with a custom index, and optionally a custom part."""
    honest = encode_checkpoint(table_weights(0))
    data = honest.parts[0] if parts is None else parts
    blobs = {digest_of(blob): blob for blob in (index, data)}
    entries = [PartEntry(digest=digest, size=len(blob)) for digest, blob in blobs.items()]
    lied = honest.encoding.model_copy(update={"index": entries[0], "parts": (entries[1],)})
    source.publish(table_weights(0), encodings=(lied,))
    source.blobs |= blobs


async def test_5_an_index_that_leaves_out_an_element_is_caught() -> None:
    honest = encode_checkpoint(table_weights(0))
    [row] = rows_of(honest.index)
    source = MemorySource(RUN)
    with_index(source, pack_index([(row[0], row[1] - 1, row[2])]))
    assert (await failure(source)).number == 5


async def test_6_chunks_with_other_digests_than_signed_are_caught() -> None:
    honest = encode_checkpoint(table_weights(0))
    source = MemorySource(RUN)
    with_index(source, pack_index([(size, count, digest_of(b"other")) for size, count, _ in rows_of(honest.index)]))
    assert (await failure(source)).number == 6


async def test_7_bytes_that_decode_to_other_weights_are_caught() -> None:
    source = MemorySource(RUN)
    other = table_weights(5)
    source.publish(table_weights(0), tensors=tensor_table(other), state_root=root_of(other))
    assert (await failure(source)).number == 7


async def test_7_a_chunk_signed_over_nonsense_is_caught() -> None:
    source = MemorySource(RUN)
    junk = b"\xff" * 100
    [(_, count, _)] = rows_of(encode_checkpoint(table_weights(0)).index)
    with_index(source, pack_index([(len(junk), count, digest_of(junk))]), parts=junk)
    assert (await failure(source)).number == 7


@pytest.mark.parametrize("name", MODEL_FILES)
async def test_8_a_swapped_model_file_is_caught(name: str) -> None:
    source = published()
    source.blobs[digest_of(MODEL_FILES[name])] = b"x" * len(MODEL_FILES[name])
    found = await failure(source)
    assert found.number == 8
    assert name in found.detail


async def test_a_source_that_goes_away_is_a_failure_and_no_exception() -> None:
    source = published()

    def leave(_: str) -> None:
        source.away = True

    source.before_blob = leave
    found = await failure(source)
    assert found.number == 5
    assert "does not answer" in found.detail


async def test_a_folder_that_is_not_there_fails_the_first_check(tmp_path: Path) -> None:
    report = await audit(FolderSource(tmp_path / "nothing"), RUN.digest)
    assert isinstance(report, AuditReport)
    assert [check.number for check in report.checks] == [1]


async def test_a_folder_without_a_head_has_none(tmp_path: Path) -> None:
    source = FolderSource(tmp_path)
    assert await source.head() is None
    with pytest.raises(RemoteError) as caught:
        await source.manifest(0)
    assert caught.value.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize("digest", ["", "../../../etc/passwd", "ab/../cd", "A" * 64])
async def test_a_folder_is_never_left(tmp_path: Path, digest: str) -> None:
    with pytest.raises(RemoteError) as caught:
        await FolderSource(tmp_path).blob(digest)
    assert caught.value.code is ErrorCode.NOT_FOUND


async def test_a_range_beyond_the_end_is_refused(tmp_path: Path) -> None:
    source = published(policies=1)
    source.save(tmp_path)
    part = source.signed(0).manifest.encodings[0].parts[0]
    folder = FolderSource(tmp_path)
    assert await folder.blob(part.digest, start=2, end=5) == source.blobs[part.digest][2:5]
    with pytest.raises(RemoteError) as caught:
        await folder.blob(part.digest, start=0, end=part.size + 1)
    assert caught.value.code is ErrorCode.BAD_RANGE
