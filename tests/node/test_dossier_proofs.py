"""A dossier for `copied` or `equivocation` holds what shows it: the other bundle, or the second signed header."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    VALIDATOR,
    World,
    folder_parts,
    make_parcel,
    make_run,
    running,
)
from tests.node.dossiers_world import BY_ROLLOUT, TEXTS_RUN, case_in, check, rollouts_of, upload_texts

from prime_protocol.copies import fingerprints
from prime_protocol.digest import digest_of
from prime_protocol.dossier import BanStatement
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json, seal
from prime_protocol.replies import CheckTask
from prime_protocol.requests import CheckResultRequest
from prime_protocol.verdict import RejectReason, Verdict


async def say(world: World, task: CheckTask, names: tuple[str, ...], reason: RejectReason | None = None) -> None:
    """Give a verdict with the fingerprints of these texts, as a validator computes them."""
    found = rollouts_of(task.lease, names)
    marks = fingerprints(found, task.lease.sampling)
    result = CheckResultRequest(
        bundle=task.bundle,
        verdict=Verdict.refuse(reason) if reason else Verdict.accept(),
        rewards=() if reason else (1.0, 0.0),
        fingerprints=() if reason else tuple((int(found.slots_N[index]), mark) for index, mark in marks),
    )
    await world.client(VALIDATOR).check_result(result)


def lines_of(file: Path) -> list[Envelope]:
    return [open_envelope(line) for line in file.read_bytes().splitlines()]


def changed(file: Path, change: Callable[[Envelope], Envelope | None]) -> str:
    """Return the fault of the dossier after a change of its lines; None leaves one out."""
    before = file.read_bytes()
    file.write_bytes(b"\n".join(one.to_bytes() for one in map(change, lines_of(file)) if one))
    code, report = check(file)
    file.write_bytes(before)
    assert code == 1
    return str(report["fault"])


@pytest.mark.parametrize(
    ("names", "holds"), [(("a", "a"), True), (("a", "b"), False)], ids=["one text twice", "two texts"]
)
async def test_a_ban_for_copies_within_a_bundle_holds_where_it_repeats_a_text(
    tmp_path: Path, names: tuple[str, ...], holds: bool
) -> None:
    """Any validator may say `copied`; the bundle's own bytes tell whether it is so."""
    async with running(await folder_parts(TEXTS_RUN, tmp_path), ANNA) as world:
        for _ in range(2):
            await upload_texts(world, ANNA, names)
            await say(world, await world.take_task(VALIDATOR), names, RejectReason.COPIED)
        file = await case_in(world, tmp_path)
    code, report = check(file, "--run", TEXTS_RUN.digest)
    fault = "the bundle was rejected as copied, but it repeats no text of its own, and the ban names no other bundle"
    assert (code, report["fault"], report["bundle"]) == (
        (0, "", "copied by its own bytes") if holds else (1, fault, "")
    )
    next(file.parent.glob("*.parcel")).unlink()
    code, report = check(file)
    assert code == 1
    assert "parcel is not in the dossier's folder" in str(report["fault"])


@pytest.mark.parametrize("copies_first", [False, True], ids=["judged after the original", "judged before it"])
async def test_a_ban_for_a_copy_of_another_bundle_needs_that_bundle(tmp_path: Path, copies_first: bool) -> None:
    async with running(await folder_parts(TEXTS_RUN, tmp_path), ANNA, BEN) as world:
        original = await upload_texts(world, BEN, BY_ROLLOUT)
        for _ in range(2):
            await upload_texts(world, ANNA, BY_ROLLOUT)
        tasks = [await world.take_task(VALIDATOR) for _ in range(3)]
        for task in tasks[1:] + tasks[:1] if copies_first else tasks:
            await say(world, task, BY_ROLLOUT)
        file = await case_in(world, tmp_path)
    code, report = check(file, "--run", TEXTS_RUN.digest)
    name = digest_of(original)
    said = f"copied: text of it is in bundle {name[:12]}, which came first as the coordinator says"
    assert (code, report["fault"], report["bundle"]) == (0, "", said)

    def names(original: str | None, one: Envelope) -> Envelope:
        if one.payload_type != PayloadType.BAN:
            return one
        statement = parse_json(one.payload, BanStatement)
        return seal(statement.model_copy(update={"original": original}), PayloadType.BAN, COORDINATOR)

    assert "the ban names no other bundle" in changed(file, lambda one: names(None, one))
    other = make_parcel(tasks[0].lease, BEN)
    (file.parent / f"{digest_of(other)}.parcel").write_bytes(other)
    assert "has no text of it for another slot" in changed(file, lambda one: names(digest_of(other), one))
    (file.parent / f"{name}.parcel").unlink()
    code, report = check(file)
    assert (code, report["fault"]) == (
        1,
        f"the bundle was rejected as copied, but the bundle that it copies, {name}.parcel, is not in the dossier's folder",
    )


def damage_headers(folder: Path) -> None:
    """Damage what the intake kept of a strike."""
    (path,) = folder.rglob("equivocation-*.jsonl")
    path.write_bytes(b"\xff")


async def test_a_header_that_rots_before_the_ban_is_named_and_ends_no_coordinator(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(await folder_parts(make_run(), tmp_path), ANNA) as world:
        for strike in range(2):
            lease = await world.lease(ANNA, rollouts_max=2)
            await world.client(ANNA).upload(make_parcel(lease, ANNA))
            await world.client(ANNA).upload(make_parcel(lease, ANNA, created_at_ms=1))
            if strike == 0:
                damage_headers(tmp_path)
        file = await case_in(world, tmp_path)
    assert "evidence of a ban, are lost" in caplog.text
    assert check(file)[0] == 1, "what is left does not convict"


async def test_a_ban_for_equivocation_needs_two_headers_that_its_worker_signed(tmp_path: Path) -> None:
    """Otherwise the coordinator alone decides it, and no one can disprove it."""
    async with running(await folder_parts(make_run(), tmp_path), ANNA) as world:
        for _ in range(2):
            lease = await world.lease(ANNA, rollouts_max=2)
            await world.client(ANNA).upload(make_parcel(lease, ANNA))
            await world.client(ANNA).upload(make_parcel(lease, ANNA, created_at_ms=1))
        file = await case_in(world, tmp_path)
    code, report = check(file)
    assert (code, report["fault"], report["bundle"]) == (0, "", "equivocation by two signed headers")
    headers = [one for one in lines_of(file) if one.payload_type == PayloadType.ROLLOUT]
    assert len({one.digest for one in headers}) == 4, "two for each strike"
    for left_out in headers:
        fault = changed(file, lambda one: None if one.digest == left_out.digest else one)  # noqa: B023
        assert "but two different headers for its lease are missing" in fault
    forged = seal(headers[-1].payload, PayloadType.ROLLOUT, BEN)
    assert "trusted signatures" in changed(file, lambda one: forged if one.digest == forged.digest else one)
