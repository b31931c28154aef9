"""A dossier holds the lease of its deciding bundle: the receipt agrees with it, and its prompts can be rendered again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, COORDINATOR, Bytes, Letters, folder_parts, running
from tests.node.dossiers_world import case_in, check, judged
from tests.node.seed_chain_world import chained
from typer.testing import CliRunner

from prime_node.cli.dossier_file import read_dossier
from prime_node.cli.main import app
from prime_node.cli.rendering import about_the_prompts
from prime_protocol.assignment import Problem
from prime_protocol.envelope import PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.verdict import Receipt, RejectReason

RUN = chained()


class Flattering(Letters):
    """Environment of a coordinator that leases other prompts."""

    def prompt(self, index: int) -> str:
        return f"flatter the operator, then {super().prompt(index)}"


def rendered(problem: Problem) -> list[int] | None:
    return Bytes().encode_prompt(Letters().prompt(problem.index))


async def banned(folder: Path, environment: Letters) -> Path:
    """Return the dossier of a ban by strikes."""
    parts = replace(await folder_parts(RUN, folder), environments={"letters": environment})
    async with running(parts, ANNA) as world:
        for _ in range(2):
            await judged(world, reason=RejectReason.SEED_MISMATCH)
        return await case_in(world, folder)


async def test_anyone_who_renders_a_dossier_s_prompts_again_finds_a_coordinator_that_leased_others(
    tmp_path: Path,
) -> None:
    """Before, nothing compared them: `evidence verify` reported the ban as right."""
    true = read_dossier(await banned(tmp_path / "true", Letters()), pinned=RUN.digest).lease
    false = read_dossier(await banned(tmp_path / "false", Flattering()), pinned=RUN.digest).lease
    assert true is not None
    assert false is not None
    assert about_the_prompts(true, rendered) == "1 of its 1 prompts are those that this machine renders"
    assert about_the_prompts(false, lambda problem: None) == "0 of its 1 prompts are those that this machine renders"
    with pytest.raises(RemoteError, match="1 of the lease's 1 prompts are not those that this machine renders"):
        about_the_prompts(false, rendered)


async def test_nothing_that_an_unnamed_run_names_is_started(tmp_path: Path) -> None:
    file = await banned(tmp_path, Letters())
    shown = CliRunner().invoke(app, ["evidence", "verify", str(file), "--prompts", str(tmp_path)])
    assert isinstance(shown.exception, LocalError), "main reports it and exits with 3"
    assert "name the run by --run" in str(shown.exception)


async def test_a_dossier_whose_receipt_is_dated_before_its_lease_does_not_hold(tmp_path: Path) -> None:
    file = await banned(tmp_path, Letters())
    lease = read_dossier(file, pinned=RUN.digest).lease
    assert lease is not None
    *others, last = file.read_bytes().splitlines()
    receipt = parse_json(open_envelope(last).payload, Receipt).model_copy(update={"at_ms": lease.issued_at_ms - 1})
    file.write_bytes(b"\n".join([*others, seal(receipt, PayloadType.RECEIPT, COORDINATOR).to_bytes()]))
    fault = "the coordinator contradicts itself: the receipt is dated 1 ms before its lease"
    code, report = check(file, "--run", RUN.digest)
    assert (code, report["fault"]) == (1, fault)
