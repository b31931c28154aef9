"""A machine follows the amendments of its run's calibration that a timestamp names, and keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node.trust_world import CALIBRATED, amend, make_source, make_trust, rotate
from tests.node.worker_world import ROOT, make_run, names_in
from tests.time_world import VirtualClock

from prime_lab.memory_blobs import MemoryDocuments
from prime_node.broadcast.follow.pinned import fetch_amendments
from prime_node.coordinator.api.amendments import restore_amendments
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.rules import rules_of
from prime_node.ports.documents import amendment_name
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.identity import SigningKey

BF16, FP8 = "table/bf16/cpu", "table/fp8/cpu"


async def test_amendments_that_a_timestamp_names_are_followed_and_kept_over_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    source = make_source(clock, checks=CALIBRATED)
    trust = make_trust(tmp_path, clock, source)
    await trust.refresh()
    assert trust.run.calibrations.version == 0
    amend(source, BF16)
    amend(source, FP8)
    clock.seconds += 1
    await trust.refresh()
    assert {BF16, FP8} < trust.run.checks.worker_classes
    assert f"calibration 1 is in force: the run now knows the noise of {BF16}" in caplog.text
    assert names_in(tmp_path / "calibrations") == ["0001.json", "0002.json"]
    again = make_trust(tmp_path, clock, make_source(clock, checks=CALIBRATED))
    assert again.run.checks == trust.run.checks


async def test_an_amendment_that_is_named_and_hidden_stops_no_work(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = make_source(clock, checks=CALIBRATED)
    source.shown_timestamp = source.timestamp_of(source.shown_head, calibration=1)
    trust = make_trust(tmp_path, clock, source)
    await trust.refresh()
    assert (trust.fault(), trust.run.calibrations.version) == ("", 0)


async def test_an_older_calibration_in_a_newer_timestamp_is_a_contradiction(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = make_source(clock, checks=CALIBRATED)
    amend(source, BF16)
    trust = make_trust(tmp_path, clock, source)
    await trust.refresh()
    clock.seconds += 1
    source.shown_timestamp = source.timestamp_of(source.shown_head, calibration=0, amendment=None)
    await trust.refresh()
    assert trust.newest is not None
    assert trust.newest.calibration == 1
    assert len(names_in(tmp_path / "evidence")) == 2


async def test_a_damaged_amendment_is_asked_for_again_and_a_forged_one_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    source = make_source(clock, checks=CALIBRATED)
    good = amend(source, BF16)
    await make_trust(tmp_path, clock, source).refresh()
    (tmp_path / "calibrations" / "0001.json").write_bytes(b"{")
    clock.seconds += 1
    again = make_trust(tmp_path, clock, source)
    assert again.run.calibrations.version == 0

    async def forged(version: int) -> Envelope:
        return Envelope(good.payload_type, good.payload.replace(b"bf16", b"fp16"), good.signatures)

    with monkeypatch.context() as patched:
        patched.setattr(source, "calibration", forged)
        await again.refresh()
    assert again.run.calibrations.version == 0
    with pytest.raises(RemoteError) as caught:
        again.run.calibrations.check(await forged(1))
    assert caught.value.code is ErrorCode.BAD_SIGNATURE
    await again.refresh()
    assert again.run.calibrations.version == 1


async def test_a_thief_of_the_former_roots_keys_can_show_no_other_amendment(tmp_path: Path) -> None:
    """The thief answers as one source, a mirror for example; newcomers accept what a former root has signed."""
    clock, new_root = VirtualClock(), SigningKey(b"\x77" * 32)
    honest, mirror = (make_source(clock, checks=CALIBRATED) for _ in range(2))
    ring = rotate(honest, ROOT, new_root, root=(new_root,))
    mirror.run.keys.add(ring)
    mirror.key_rings.append(ring)
    amend(honest, BF16, new_root)
    amend(mirror, FP8, ROOT)
    mirror.shown_timestamp = honest.timestamp_of(honest.shown_head)
    trust = make_trust(tmp_path, clock, mirror, honest)
    await trust.refresh()
    assert FP8 not in trust.run.checks.worker_classes
    assert BF16 in trust.run.checks.worker_classes
    assert trust.run.calibrations.digest == honest.run.calibrations.digest


async def test_a_forged_amendment_on_the_disk_is_not_taken_at_the_start(tmp_path: Path) -> None:
    """Keys of a former root signed it; a release that compared no digests may have stored it."""
    clock, new_root = VirtualClock(), SigningKey(b"\x77" * 32)
    honest, forger = (make_source(clock, checks=CALIBRATED) for _ in range(2))
    forger.run.keys.add(rotate(honest, ROOT, new_root, root=(new_root,)))
    amend(honest, BF16, new_root)
    forged = amend(forger, FP8, ROOT)
    await make_trust(tmp_path, clock, honest).refresh()
    (tmp_path / "calibrations" / "0001.json").write_bytes(forged.to_bytes())
    again = make_trust(tmp_path, clock, honest)
    assert again.run.calibrations.version == 0, "before, the forged one was in force"
    clock.seconds += 1
    await again.refresh()
    assert BF16 in again.run.checks.worker_classes
    assert FP8 not in again.run.checks.worker_classes
    (tmp_path / "calibrations" / "0001.json").write_bytes(forged.to_bytes())
    (tmp_path / "timestamp.json").unlink()
    assert make_trust(tmp_path, clock, honest).run.calibrations.version == 0, "no timestamp names it"


async def test_amendments_that_are_fetched_are_those_of_the_source_s_timestamp() -> None:
    clock, new_root = VirtualClock(), SigningKey(b"\x77" * 32)
    honest, forger = (make_source(clock, checks=CALIBRATED) for _ in range(2))
    ring = rotate(honest, ROOT, new_root, root=(new_root,))
    forger.run.keys.add(ring)
    amend(honest, BF16, new_root)
    amend(forger, FP8, ROOT)
    stamp = honest.timestamp_of(honest.shown_head)
    for source, is_taken in ((honest, True), (forger, False)):
        source.shown_timestamp = stamp
        run = make_run(checks=CALIBRATED)
        run.keys.add(ring)
        if is_taken:
            await fetch_amendments(source, run)
        else:
            with pytest.raises(RemoteError) as caught:
                await fetch_amendments(source, run)
            assert caught.value.code is ErrorCode.FORK


async def test_a_coordinator_starts_with_no_amendment_of_a_former_root_that_it_has_not_recorded() -> None:
    clock, new_root = VirtualClock(), SigningKey(b"\x77" * 32)
    source = make_source(clock, checks=CALIBRATED)
    ring = rotate(source, ROOT, new_root, root=(new_root,))
    forged = amend(source, FP8, ROOT)
    published = MemoryDocuments()
    await published.write(amendment_name(1), forged.to_bytes())
    state = State(rules_of(source.run))
    run = make_run(checks=CALIBRATED)
    run.keys.add(ring)
    with pytest.raises(LocalError, match=r"calibrations/0001\.json in the published folder"):
        await restore_amendments(run, published, state)
    state.calibrations.append(forged.digest)  # recorded while that root was the present one
    run = make_run(checks=CALIBRATED)
    run.keys.add(ring)
    await restore_amendments(run, published, state)
    assert run.calibrations.version == 1


async def test_two_timestamps_that_name_other_amendments_of_one_version_convict(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = make_source(clock, checks=CALIBRATED)
    amend(source, BF16)
    trust = make_trust(tmp_path, clock, source)
    await trust.refresh()
    clock.seconds += 1
    source.shown_timestamp = source.timestamp_of(source.shown_head, amendment="00" * 32)
    await trust.refresh()
    assert len(names_in(tmp_path / "evidence")) == 2
