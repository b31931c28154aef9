"""Each ban is a file that a stranger can check again: written by the daemon, read by `prime-node evidence verify`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.node.coordinator_world import (
    ANNA,
    COORDINATOR,
    ROOT,
    LongTexts,
    folder_parts,
    make_parcel,
    make_run,
    running,
)
from tests.node.dossiers_world import CALIBRATED, CLASS, case_in, check, judge, judged
from tests.node.ledger_world import receipts_of
from tests.node.rotten_world import be_bad_sector
from typer.testing import CliRunner

from prime_node.cli.deciding_bundle import compared, confirmed
from prime_node.cli.dossier_file import LINE_BYTES_MAX
from prime_node.cli.main import app
from prime_node.ports.store import StoredReceipt
from prime_protocol.dossier import BanStatement
from prime_protocol.envelope import PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.evidence import BundleEvidence, Sums
from prime_protocol.requests import AdminRequest
from prime_protocol.verdict import Receipt, RejectReason, Verdict


async def test_a_statistical_ban_can_be_checked_by_a_stranger(tmp_path: Path) -> None:
    async with running(await folder_parts(make_run(checks=CALIBRATED), tmp_path), ANNA) as world:
        for nats in (-0.5, 4.0, 11.0):
            await judged(world, nats=nats)
        file, digest = await case_in(world, tmp_path), world.run.digest
    code, report = check(file, "--run", digest)
    assert (code, report["ok"], report["kind"], report["num_receipts"]) == (0, True, "statistical", 3)
    assert report["worker"] == ANNA.key_id
    assert report["bundle"] == "well-formed; --model repeats the forward pass"
    repeated = CliRunner().invoke(app, ["evidence", "verify", str(file), "--model", str(tmp_path)])
    assert isinstance(repeated.exception, LocalError)
    assert f"a validator of class {CLASS} judged" in str(repeated.exception)
    shown = CliRunner().invoke(app, ["evidence", "verify", str(file)])
    assert "ok   the ban follows from the evidence in these receipts" in shown.stdout
    assert "not pinned" in shown.stdout


async def test_a_ban_by_bundles_of_long_prompts_can_be_checked(tmp_path: Path) -> None:
    """The line of their lease was longer than a reader took."""
    run = make_run(groups_per_step=64, rollouts_per_group=1)
    parts = replace(await folder_parts(run, tmp_path), environments={"letters": LongTexts()})
    async with running(parts, ANNA) as world:
        for _ in range(2):
            lease = await world.lease(ANNA, rollouts_max=24)
            await world.client(ANNA).upload(make_parcel(lease, ANNA))
            await judge(world, reason=RejectReason.SEED_MISMATCH)
        file = await case_in(world, tmp_path)
    assert max(map(len, file.read_bytes().splitlines())) > LINE_BYTES_MAX
    code, report = check(file, "--run", run.digest)
    assert (code, report["kind"], report["fault"]) == (0, "hard", "")
    rings = [seal(b"1" * LINE_BYTES_MAX, kind, ANNA).to_bytes() for kind in (PayloadType.KEY_RING, PayloadType.RECEIPT)]
    file.write_bytes(b"\n".join([file.read_bytes().splitlines()[0], *rings]))
    assert "line_bytes_max" in str(check(file)[1]["fault"])


async def test_a_deciding_bundle_that_the_disk_cannot_read_costs_no_dossier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start tried to write it, and failed."""
    async with running(await folder_parts(make_run(), tmp_path), ANNA) as world:
        await judged(world, reason=RejectReason.SEED_MISMATCH)
        parcel = make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA)
        bundle = (await world.client(ANNA).upload(parcel)).bundle
        be_bad_sector(monkeypatch, tmp_path / "bundles" / bundle[:2] / bundle)
        await judge(world, reason=RejectReason.SEED_MISMATCH)
        file = await case_in(world, tmp_path)
    assert check(file)[0] == 0


async def test_a_ban_by_strikes_can_be_checked_and_an_operators_ban_is_reported_as_such(tmp_path: Path) -> None:
    async with running(await folder_parts(make_run(), tmp_path), ANNA) as world:
        for _ in range(2):
            await judged(world, reason=RejectReason.SEED_MISMATCH)
        file = await case_in(world, tmp_path)
        assert check(file)[1]["kind"] == "hard"
        file.unlink()
        await world.client(ROOT).admin(AdminRequest(action="unban", worker=ANNA.key_id))
        await world.client(ROOT).admin(AdminRequest(action="ban", worker=ANNA.key_id, reason="by hand"))
        code, report = check(await case_in(world, tmp_path))
    assert (code, report["kind"], report["reason"], report["num_receipts"]) == (0, "operator", "by hand", 0)


async def test_a_case_that_a_crash_prevented_is_written_after_the_next_start(tmp_path: Path) -> None:
    run = make_run()
    async with running(await folder_parts(run, tmp_path), ANNA) as world:
        for _ in range(2):
            await judged(world, reason=RejectReason.SEED_MISMATCH)
        file = await case_in(world, tmp_path)
        first = file.read_bytes()
    file.unlink()
    async with running(await folder_parts(run, tmp_path)) as world:
        assert (await case_in(world, tmp_path)).read_bytes() == first
    assert check(file)[0] == 0


async def test_a_case_that_was_touched_does_not_hold(tmp_path: Path) -> None:
    async with running(await folder_parts(make_run(checks=CALIBRATED), tmp_path), ANNA) as world:
        for nats in (4.0, 11.0):
            await judged(world, nats=nats)
        file = await case_in(world, tmp_path)
    lines = file.read_bytes().splitlines()
    kinds = [open_envelope(line).payload_type for line in lines]
    assert kinds == [PayloadType.RUN_SPEC, PayloadType.BAN, PayloadType.LEASE, *[PayloadType.RECEIPT] * 2]

    def fault(*changed: bytes) -> object:
        file.write_bytes(b"\n".join(changed))
        code, report = check(file)
        assert code == 1
        return report["fault"]

    assert "receipts instead of the statement's" in str(fault(*lines[:-1]))
    statement = open_envelope(lines[1])
    forged = seal(statement.payload.replace(b"statistical", b"hard"), PayloadType.BAN, ANNA)
    assert "trusted signatures" in str(fault(lines[0], forged.to_bytes(), *lines[2:]))
    signed = seal(statement.payload.replace(b'"statistical"', b'"hard"'), PayloadType.BAN, COORDINATOR)
    assert "strikes" in str(fault(lines[0], signed.to_bytes(), *lines[2:]))
    assert "one ban" in str(fault(lines[0], *lines[2:]))
    parcel = next(file.parent.glob("*.parcel"))
    whole = parcel.read_bytes()
    parcel.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "does not belong to the deciding bundle" in str(fault(*lines))
    parcel.write_bytes(whole)
    assert check(file)[0] == 0
    assert check(file, "--run", "0" * 64)[0] == 1
    parcel.unlink()
    repeated = CliRunner().invoke(app, ["evidence", "verify", str(file), "--model", str(tmp_path)])
    assert isinstance(repeated.exception, LocalError)


BY_BYTES = ("malformed", "wrong_assignment", "token_out_of_range", "wrong_policy")


@pytest.mark.parametrize("reason", BY_BYTES)
async def test_a_ban_for_malformed_bytes_does_not_hold_where_the_bundle_is_well_formed(
    tmp_path: Path, reason: str
) -> None:
    async with running(await folder_parts(make_run(), tmp_path), ANNA) as world:
        for _ in range(2):
            await judged(world, reason=RejectReason(reason))
        file, digest = await case_in(world, tmp_path), world.run.digest
    code, report = check(file, "--run", digest)
    assert (code, report["ok"]) == (1, False)
    assert report["fault"] == f"the bundle is well-formed, but was rejected as {reason}"


async def test_a_ban_for_malformed_bytes_holds_where_they_are_malformed(tmp_path: Path) -> None:
    async with running(await folder_parts(make_run(), tmp_path), ANNA) as world:
        for _ in range(2):
            lease = await world.lease(ANNA, rollouts_max=2)
            await world.client(ANNA).upload(make_parcel(lease, ANNA, body=b"garbage"))
            await judge(world, reason=RejectReason.MALFORMED)
        file = await case_in(world, tmp_path)
    code, report = check(file)
    assert (code, report["fault"], report["bundle"]) == (0, "", "malformed by its own bytes")


async def test_a_worker_that_equivocates_with_malformed_bytes_leaves_no_fault_in_its_dossier(tmp_path: Path) -> None:
    """The second header decides, before a validator reads the first bundle's bytes."""
    async with running(await folder_parts(make_run(), tmp_path), ANNA) as world:
        for _ in range(2):
            lease = await world.lease(ANNA, rollouts_max=2)
            await world.client(ANNA).upload(make_parcel(lease, ANNA, body=b"garbage"))
            await world.client(ANNA).upload(make_parcel(lease, ANNA, created_at_ms=1))
        file = await case_in(world, tmp_path)
    code, report = check(file)
    assert (code, report["fault"]) == (0, "")
    assert report["bundle"] == "equivocation by two signed headers"


async def test_a_dossier_without_its_lease_fails_and_one_without_its_bundle_says_so(tmp_path: Path) -> None:
    async with running(await folder_parts(make_run(), tmp_path), ANNA) as world:
        for _ in range(2):
            other = await judged(world, reason=RejectReason.SEED_MISMATCH)
        file = await case_in(world, tmp_path)
    parcel = next(file.parent.glob("*.parcel"))
    parcel.unlink()
    code, report = check(file)
    assert (code, report["bundle"]) == (0, f"not checked, because {parcel.name} is not in the dossier's folder")
    lines = file.read_bytes().splitlines()
    kinds = [open_envelope(line).payload_type for line in lines]
    place = kinds.index(PayloadType.LEASE)
    file.write_bytes(b"\n".join([*lines[:place], *lines[place + 1 :]]))
    code, report = check(file)
    assert (code, report["fault"]) == (1, "ban dossier: the lease of the deciding bundle is missing")
    moved = seal(other.model_copy(update={"policy_version": 1}), PayloadType.LEASE, COORDINATOR).to_bytes()
    file.write_bytes(b"\n".join([*lines[:place], moved, *lines[place + 1 :]]))
    code, report = check(file)
    assert (code, report["fault"]) == (1, "the lease does not belong to the deciding bundle")


def test_a_forward_pass_confirms_only_what_it_can_compute() -> None:
    """A wrong prompt of a turn passes it: the answers follow from the prompts that the bundle states."""
    bad = Verdict.refuse(RejectReason.SEED_MISMATCH)
    assert "by a forward pass" in confirmed(RejectReason.SEED_MISMATCH, bad)
    assert "cannot check" in confirmed(RejectReason.WRONG_CONTEXT, Verdict.accept())
    with pytest.raises(RemoteError, match="gives accepted"):
        confirmed(RejectReason.SEED_MISMATCH, Verdict.accept())


def test_the_same_evidence_confirms_itself_whatever_its_sign() -> None:
    def adds(*log_e: float) -> BundleEvidence:
        return BundleEvidence(worker=CLASS, validator=CLASS, sums={"margin": Sums(num_tokens=6, log_e=log_e)})

    for nats in (-0.5, 0.0, 11.0):
        assert "nats by a forward pass" in compared(adds(nats), adds(nats))
    assert compared(adds(), adds()) == "its receipt adds no evidence"
    for found in (adds(2.0), adds(), None):
        with pytest.raises(RemoteError, match="margin adds"):
            compared(adds(11.0), found)


async def test_a_worker_that_equivocates_to_reset_its_evidence_is_banned_by_all_its_bundles(tmp_path: Path) -> None:
    """The receipt of the bundle that the worker contradicted is replaced, and its evidence still counts."""
    async with running(await folder_parts(make_run(checks=CALIBRATED), tmp_path), ANNA) as world:
        first = await judged(world, nats=4.0)
        await world.client(ANNA).upload(make_parcel(first, ANNA, created_at_ms=1))
        (shown,) = (await world.status())["workers"]
        assert (shown["strikes"], shown["refused"]) == (1, {"equivocation": 2})
        assert shown["evidence_nats"] > 1.0
        for nats in (4.0, 11.0):
            await judged(world, nats=nats)
        file = await case_in(world, tmp_path)
    code, report = check(file)
    assert (code, report["kind"], report["num_receipts"], report["fault"]) == (0, "statistical", 3, "")


async def test_a_verdict_that_comes_during_the_check_of_an_equivocation_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(await folder_parts(make_run(checks=CALIBRATED), tmp_path), ANNA) as world:
        lease = await world.lease(ANNA, rollouts_max=2)
        await world.client(ANNA).upload(make_parcel(lease, ANNA))
        look_up = type(world.parts.store).receipt

        async def judged_meanwhile(store: Any, bundle: str) -> StoredReceipt | None:
            found = await look_up(store, bundle)
            monkeypatch.undo()
            await judge(world, nats=4.0)
            return found

        monkeypatch.setattr(type(world.parts.store), "receipt", judged_meanwhile)
        await world.client(ANNA).upload(make_parcel(lease, ANNA, created_at_ms=1))
        await judged(world, nats=11.0)
        file = await case_in(world, tmp_path)
    code, report = check(file)
    assert (code, report["kind"], report["num_receipts"], report["fault"]) == (0, "statistical", 2, "")


async def test_an_operators_ban_carries_no_bundle_and_its_last_line_says_what_it_rests_on(tmp_path: Path) -> None:
    """A receipt of an honest bundle next to it would look like a proof."""
    async with running(await folder_parts(make_run(), tmp_path), ANNA) as world:
        lease = await judged(world)
        (receipt,) = [one for one in await receipts_of(world) if one.payload_type == PayloadType.RECEIPT]
        await world.client(ROOT).admin(AdminRequest(action="ban", worker=ANNA.key_id, reason="by hand"))
        file = await case_in(world, tmp_path)
    shown = CliRunner().invoke(app, ["evidence", "verify", str(file)])
    assert shown.stdout.splitlines()[-1] == "ok   the operator signed the ban; it rests on no receipt and no bundle"
    before, sealed = file.read_bytes(), seal(lease, PayloadType.LEASE, COORDINATOR).to_bytes()
    file.write_bytes(before + sealed)
    assert check(file)[1]["fault"] == "ban dossier: a decision of the operator rests on no bundle"
    bundle = parse_json(receipt.payload, Receipt).bundle
    ban = parse_json(open_envelope(before.splitlines()[1]).payload, BanStatement)
    named = seal(ban.model_copy(update={"bundle": bundle, "num_receipts": 1}), PayloadType.BAN, COORDINATOR)
    lines = [before.splitlines()[0], named.to_bytes(), sealed, receipt.to_bytes()]
    file.write_bytes(b"\n".join(lines))
    code, report = check(file)
    assert (code, report["fault"]) == (1, "ban dossier: a decision of the operator rests on no receipts and no bundle")
