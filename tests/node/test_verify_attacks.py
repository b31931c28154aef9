"""The attacks on checkpoints that SECURITY.md lists in TUF's terms, each against a published folder that is verified offline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.builder import rows_of
from tests.node.table_engine import table_weights
from tests.node.worker_world import COORDINATOR, MODEL_FILES, ROOT, STRANGER, TRAINER, MemorySource, make_run, next_ring
from tests.time_world import VirtualClock

from prime_node.adapters.storage.folder_source import FolderSource
from prime_node.broadcast.audit.audit import audit
from prime_node.broadcast.audit.audit_report import Check
from prime_node.broadcast.audit.paced import PacedSource
from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.chunk_index import pack_index
from prime_protocol.codec import encode_tensor
from prime_protocol.codec.layout import HEAD_BYTES
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import ChainPoint, RoleKeys
from prime_protocol.run_spec import PinnedRun
from prime_protocol.weights import Weights, WeightTensor

RUN = make_run()


def published() -> MemorySource:
    """Publish an anchor and two deltas."""
    source = MemorySource(RUN)
    last = source.publish(table_weights(0))
    for version in (1, 2):
        last = source.publish(table_weights(version), base=(last, table_weights(version - 1)))
    return source


async def found(source: MemorySource, tmp_path: Path, *, run: str = RUN.digest) -> Check:
    """Return the failed check."""
    source.save(tmp_path / "public")
    report = await audit(FolderSource(tmp_path / "public"), run, chain=True)
    assert report.failure is not None
    return report.failure


async def test_what_is_attacked_below_holds_as_it_is(tmp_path: Path) -> None:
    published().save(tmp_path / "public")
    report = await audit(FolderSource(tmp_path / "public"), RUN.digest, chain=True)
    assert report.passed, report.failure


async def test_arbitrary_weights_by_a_stranger(tmp_path: Path) -> None:
    source = published()
    source.publish(table_weights(9), key=STRANGER)
    assert (await found(source, tmp_path)).number == 2


async def test_arbitrary_weights_under_the_honest_manifest(tmp_path: Path) -> None:
    source, other = published(), encode_checkpoint(table_weights(9))
    source.blobs[source.signed(0).manifest.encodings[0].parts[0].digest] = other.parts[0]
    assert (await found(source, tmp_path)).number == 5


async def test_rollback_to_an_older_head_with_the_timestamp_of_the_newest(tmp_path: Path) -> None:
    source = published()
    source.shown_timestamp = await source.timestamp()
    source.shown_head = source.manifests[1]
    failure = await found(source, tmp_path)
    assert (failure.number, "policy 2 is published" in failure.detail) == (9, True)


async def test_rollback_of_a_copy_without_a_timestamp_is_shown_by_the_heads_number(tmp_path: Path) -> None:
    """An old head is a valid head: the report names it, and --policy N reports that N is missing."""
    source = published()
    source.shown_head = source.manifests[1]
    source.save(tmp_path / "public")
    report = await audit(FolderSource(tmp_path / "public"), RUN.digest)
    assert report.passed
    assert report.policy_version == 1
    assert "a newer policy may exist" in report.checks[-1].detail
    asked = await audit(FolderSource(tmp_path / "public"), RUN.digest, policy_version=2)
    assert asked.failure is not None
    assert "the head is 1" in asked.failure.detail


class Slow(MemorySource):
    """Source that answers truthfully, and each time a little too late."""

    clock: VirtualClock
    seconds: float

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        await self.clock.sleep(self.seconds)
        return await super().blob(digest, start=start, end=end)

    async def manifest(self, policy_version: int) -> Envelope:
        await self.clock.sleep(self.seconds)
        return await super().manifest(policy_version)


@pytest.mark.parametrize(("seconds", "holds"), [(0.0, True), (0.4, True), (20.0, False), (1e9, False)])
async def test_slow_retrieval(seconds: float, *, holds: bool) -> None:
    """Whether no answer stalls for long or one stalls without end, the audit ends and reports why."""
    source = Slow(RUN)
    source.clock, source.seconds = VirtualClock(), seconds
    for version in range(8):
        source.publish(table_weights(version))
    report = await audit(PacedSource(source, clock=source.clock), RUN.digest, chain=True)
    assert report.passed == holds, report.failure
    if not holds:
        assert report.failure is not None
        assert "slow retrieval" in report.failure.detail
        assert source.clock.monotonic_s() < 1_000_000 + 200


class Busy(MemorySource):
    """Source that refuses each request for load as often as it is set to."""

    refusals: int

    async def manifest(self, policy_version: int) -> Envelope:
        if self.refusals:
            self.refusals -= 1
            raise RemoteError(ErrorCode.UNAVAILABLE, "more requests than this server can answer", retry_after_s=2.0)
        return await super().manifest(policy_version)


@pytest.mark.parametrize(("refusals", "holds"), [(3, True), (10**6, False)])
async def test_a_busy_source_is_asked_again_and_not_for_ever(refusals: int, *, holds: bool) -> None:
    source, clock = Busy(RUN), VirtualClock()
    source.publish(table_weights(0))
    source.refusals = refusals
    report = await audit(PacedSource(source, clock=clock), RUN.digest, chain=True)
    assert report.passed == holds, report.failure
    if not holds:
        assert report.failure is not None
        assert "does not answer: more requests than this server can answer, for 6" in report.failure.detail


@pytest.mark.parametrize(
    ("age_s", "code"),
    [(700.0, None), (721.0, "has expired"), (-100.0, None), (-121.0, "ahead of this machine's clock")],
)
async def test_freeze(age_s: float, code: str | None) -> None:
    """A source that shows a former newest policy. A clock difference of two minutes is allowed."""
    source = published()
    source.shown_timestamp = source.timestamp_of(source.shown_head, age_s=age_s)
    report = await audit(source, RUN.digest, now_ms=source.now_ms())
    assert report.passed == (code is None)
    if code is not None:
        assert report.failure is not None
        assert (report.failure.number, code in report.failure.detail) == (9, True)


async def test_freeze_by_hiding_the_timestamp(tmp_path: Path) -> None:
    source = published()
    source.save(tmp_path / "public")
    report = await audit(FolderSource(tmp_path / "public"), RUN.digest, now_ms=source.now_ms())
    assert report.failure is not None
    assert report.failure.number == 9


async def test_freeze_is_no_question_once_the_run_is_over(tmp_path: Path) -> None:
    source = MemorySource(make_run(max_steps=1))
    for version in (0, 1):
        source.publish(table_weights(version))
    source.shown_timestamp = source.timestamp_of(source.shown_head, age_s=1e6)
    report = await audit(source, source.run.digest, now_ms=source.now_ms())
    assert report.passed, report.failure


async def test_a_timestamp_by_a_stranger_or_for_another_head() -> None:
    source = published()
    for stamp in (
        source.timestamp_of(source.shown_head, key=STRANGER),
        source.timestamp_of(source.shown_head, key=TRAINER),
        source.timestamp_of(source.shown_head, run=digest_of(b"other")),
        source.timestamp_of(None, head=ChainPoint(policy_version=2, manifest=digest_of(b"other"))),
        source.timestamp_of(source.shown_head, key_ring=1),
    ):
        source.shown_timestamp = stamp
        report = await audit(source, RUN.digest, now_ms=source.now_ms())
        assert report.failure is not None
        assert report.failure.number == 9


async def test_equivocation(tmp_path: Path) -> None:
    source = published()
    honest = source.manifests[2]
    source.publish(table_weights(66), previous=source.signed(1))
    source.shown_head, source.manifests[2] = source.manifests[2], honest
    failure = await found(source, tmp_path)
    assert failure.number == 4
    assert "two signed manifests" in failure.detail


async def test_mix_and_match_of_parts(tmp_path: Path) -> None:
    source = published()
    first, second = (source.signed(version).manifest.encodings[0].parts[0].digest for version in (1, 2))
    source.blobs[first] = source.blobs[second]
    assert (await found(source, tmp_path)).number == 5


async def test_mix_and_match_of_manifests(tmp_path: Path) -> None:
    source, other = published(), MemorySource(RUN)
    for seed in (7, 8):
        other.publish(table_weights(seed))
    source.manifests[1] = other.manifests[1]
    source.blobs |= other.blobs
    assert (await found(source, tmp_path)).number == 4


async def test_wrong_base(tmp_path: Path) -> None:
    source = published()
    elsewhere = MemorySource(RUN).publish(table_weights(50))
    source.publish(table_weights(3), base=(elsewhere, table_weights(50)))
    assert (await found(source, tmp_path)).number == 4


async def test_endless_data(tmp_path: Path) -> None:
    """A blob that continues after its signed size is read no further than that, and its size is then correct."""
    source = published()
    digest = source.signed(2).manifest.encodings[0].parts[0].digest
    source.blobs[digest] += b"\0" * 2**20
    source.save(tmp_path / "public")
    report = await audit(FolderSource(tmp_path / "public"), RUN.digest, chain=True)
    assert report.passed
    assert report.num_bytes == sum(source.signed(version).manifest.encodings[0].sent_bytes for version in range(3))


async def test_truncated_part(tmp_path: Path) -> None:
    source = published()
    digest = source.signed(2).manifest.encodings[0].parts[0].digest
    source.blobs[digest] = source.blobs[digest][:-1]
    assert (await found(source, tmp_path)).number == 5


Rows = list[tuple[int, int, str]]

CHUNK_TABLES: dict[str, Callable[[Rows], Rows]] = {
    "truncated": lambda rows: rows[:1],
    "extra": lambda rows: [*rows, rows[1]],
    "reordered": lambda rows: rows[::-1],
    "shorter than the part": lambda rows: [(rows[0][0] - 1, *rows[0][1:]), rows[1]],
    "beyond the tensor": lambda rows: [rows[0], (rows[1][0], rows[1][1] + 1, rows[1][2])],
    "of the next tensor": lambda rows: [
        (rows[0][0], rows[0][1] + 1, rows[0][2]),
        (rows[1][0], rows[1][1] - 1, rows[1][2]),
    ],
}


@pytest.mark.parametrize("change", CHUNK_TABLES.values(), ids=CHUNK_TABLES)
async def test_truncated_extra_and_reordered_chunks(tmp_path: Path, change: Callable[[Rows], Rows]) -> None:
    weights: Weights = {
        "a": table_weights(0)["table"],
        "b": WeightTensor("bf16", (7,), table_weights(1)["table"].data[:7].copy()),
    }
    source = MemorySource(RUN)
    rows = rows_of(encode_checkpoint(weights).index)
    assert len(rows) == 2
    source.publish_spoilt(weights, pack_index(change(rows)))
    assert (await found(source, tmp_path)).number == 5


async def test_decompression_bomb(tmp_path: Path) -> None:
    """A signed chunk whose zstd frame declares a tebibyte: the decoder knows the expected size, and requests no more."""
    source, weights = MemorySource(RUN), table_weights(0)
    (chunk,) = encode_tensor(weights["table"].data, None, dtype="bf16")
    bomb = chunk.data[: HEAD_BYTES + 1] + b"\x28\xb5\x2f\xfd\xe0" + (2**40).to_bytes(8, "little")
    bomb += chunk.data[len(bomb) :]
    source.publish_spoilt(weights, pack_index([(len(bomb), chunk.count, digest_of(bomb))]), bomb)
    assert (await found(source, tmp_path)).number == 7


async def test_key_compromise_below_the_threshold(tmp_path: Path) -> None:
    """Two root keys must sign; one stolen key alone makes no run."""
    keys = RoleKeys(
        root=(ROOT.key_id, COORDINATOR.key_id),
        coordinator=(COORDINATOR.key_id,),
        trainer=(TRAINER.key_id,),
        validator=(COORDINATOR.key_id,),
    )
    spec = RUN.spec.model_copy(update={"keys": keys})
    signed = seal(spec, PayloadType.RUN_SPEC, ROOT)
    source = MemorySource(PinnedRun(signed.digest, spec, signed))
    source.publish(table_weights(0))
    assert (await found(source, tmp_path, run=signed.digest)).number == 1
    both = seal(spec, PayloadType.RUN_SPEC, ROOT, COORDINATOR)
    source.run = PinnedRun(both.digest, spec, both)
    source.save(tmp_path / "honest")
    assert (await audit(FolderSource(tmp_path / "honest"), both.digest)).passed


async def test_key_compromise_of_a_trainer_that_the_root_has_revoked(tmp_path: Path) -> None:
    """The thief of the old trainer's key continues, rewrites the past, and hides the ring: all of it is refused."""
    new, source = SigningKey(b"\x50" * 32), MemorySource(make_run())
    for version in range(3):
        source.publish(table_weights(version))
    source.key_rings.append(next_ring(source.run.keys, ROOT, trainer=(new,), published=source.signed(2).point))
    source.publish(table_weights(3), key=new)
    source.shown_timestamp = await source.timestamp()
    assert (await audit(source, source.run.digest, chain=True)).passed
    honest = dict(source.manifests)
    source.publish(table_weights(66), previous=source.signed(2), key=TRAINER)
    assert (await found(source, tmp_path / "goes on", run=source.run.digest)).number == 2
    source.manifests = {0: honest[0]}
    for version in (1, 2, 3):
        source.publish(table_weights(60 + version), key=TRAINER if version < 3 else new)
    rewritten = await found(source, tmp_path / "rewrites", run=source.run.digest)
    assert (rewritten.number, "the run's root names" in rewritten.detail) == (2, True)
    source.manifests = {version: honest[version] for version in range(3)}
    source.publish(table_weights(66), previous=source.signed(2), key=TRAINER)
    source.key_rings = []
    hidden = await found(source, tmp_path / "hides", run=source.run.digest)
    assert hidden.number == 9, "the coordinator names another head, and a ring that is not there"


async def test_a_foreign_runs_checkpoint(tmp_path: Path) -> None:
    other = MemorySource(make_run(name="other"))
    other.publish(table_weights(0))
    assert (await found(other, tmp_path / "whole")).number == 1
    mixed = MemorySource(RUN)
    mixed.manifests, mixed.shown_head, mixed.blobs = other.manifests, other.shown_head, other.blobs
    assert (await found(mixed, tmp_path / "mixed")).number == 3


@pytest.mark.parametrize("name", MODEL_FILES)
async def test_config_swap(tmp_path: Path, name: str) -> None:
    source = published()
    source.blobs[digest_of(MODEL_FILES[name])] = b"x" * len(MODEL_FILES[name])
    assert (await found(source, tmp_path)).number == 8


async def test_weights_of_another_architecture(tmp_path: Path) -> None:
    source = published()
    source.publish(table_weights(3), model_config_digest=digest_of(b"{}"))
    assert (await found(source, tmp_path)).number == 3
