"""A contributor's control of a running worker: pause, resume, finish, and limits."""

from __future__ import annotations

import asyncio
import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.node.memory_coordinator import WorkerWorld
from tests.node.table_engine import TableEngine
from tests.node.together_world import Together
from tests.time_world import until
from typer.testing import CliRunner, Result

from prime_node.cli import control as command
from prime_node.cli.main import app
from prime_node.folder_lock import FolderLock
from prime_node.power import PowerSupply
from prime_node.worker.control import (
    CONTROL,
    Control,
    Wanted,
    WorkLimits,
    pause_reason,
    read_control,
    write_control,
)
from prime_node.worker.loop import run_worker
from prime_node.worker.worker import Ending, Equipment
from prime_protocol.errors import LocalError
from prime_protocol.requests import WorkerState

MORNING, NOON, NIGHT = (dt.datetime(2026, 11, 24, hour, 30, tzinfo=dt.UTC) for hour in (6, 12, 23))


@dataclass(frozen=True)
class Around:
    """What else happens on a machine."""

    battery: bool = False
    busy: bool = False
    gpu_busy: bool = False
    in_use: bool = False

    def on_battery(self) -> bool:
        return self.battery

    def is_busy(self) -> bool:
        return self.busy

    def is_gpu_busy(self) -> bool:
        return self.gpu_busy

    def is_in_use(self) -> bool:
        return self.in_use


NIGHTS, DAYS = WorkLimits(hours="22:00-07:00"), WorkLimits(hours="07:00-22:00")
ON_MAINS = WorkLimits(on_battery=False)


@pytest.mark.parametrize(
    ("wanted", "limits", "now", "on_battery", "reason"),
    [
        (Wanted.RUN, WorkLimits(), NOON, True, ""),
        (Wanted.PAUSE, WorkLimits(), NOON, False, "on request, until `prime-node resume`"),
        (Wanted.RUN, NIGHTS, NOON, False, "until 22:00, as its hours are 22:00-07:00"),
        (Wanted.RUN, NIGHTS, NIGHT, False, ""),
        (Wanted.RUN, NIGHTS, MORNING, False, ""),
        (Wanted.RUN, NIGHTS, NOON.replace(hour=7, minute=0), False, "until 22:00, as its hours are 22:00-07:00"),
        (Wanted.RUN, NIGHTS, NOON.replace(hour=22, minute=0), False, ""),
        (Wanted.RUN, DAYS, NIGHT, False, "until 07:00, as its hours are 07:00-22:00"),
        (Wanted.RUN, DAYS, NOON, False, ""),
        (Wanted.RUN, ON_MAINS, NOON, True, "until this machine has mains power"),
        (Wanted.RUN, ON_MAINS, NOON, False, ""),
        (Wanted.FINISH, NIGHTS, NOON, True, ""),
    ],
)
def test_why_a_worker_must_not_compute(
    wanted: Wanted, limits: WorkLimits, now: dt.datetime, on_battery: bool, reason: str
) -> None:
    assert pause_reason(Control(wanted=wanted), limits, now=now, around=Around(battery=on_battery)) == reason


@pytest.mark.parametrize(
    ("limits", "around", "reason"),
    [
        (WorkLimits(), Around(busy=True, gpu_busy=True), ""),
        (WorkLimits(when_busy=False), Around(gpu_busy=True), ""),
        (WorkLimits(when_busy=False), Around(busy=True), "until other programs leave the processor idle for a minute"),
        (
            WorkLimits(when_gpu_busy=False),
            Around(gpu_busy=True),
            "until other programs leave the GPU idle for a minute",
        ),
        (WorkLimits(when_busy=False), Around(in_use=True), ""),
        (WorkLimits(when_in_use=False), Around(in_use=True), "until this machine's desktop says that no one uses it"),
    ],
)
def test_a_worker_waits_for_other_programs_if_its_owner_wants_that(
    limits: WorkLimits, around: Around, reason: str
) -> None:
    assert pause_reason(Control(), limits, now=NOON, around=around) == reason


@pytest.mark.parametrize(
    "hours", ["22-7", "24:00-07:00", "22:60-07:00", "07:00-07:00", "22:00-07:00 ", "\u0660\u0667:00-08:00"]
)
def test_hours_that_are_none_are_refused(hours: str) -> None:
    with pytest.raises(ValueError, match="not hours of the day"):
        WorkLimits(hours=hours)


def supplies(folder: Path, **each: dict[str, str]) -> Path:
    for name, files in each.items():
        (folder / name).mkdir(parents=True)
        for file, text in files.items():
            (folder / name / file).write_text(f"{text}\n")
    return folder


def test_a_laptop_that_is_unplugged_runs_on_battery(tmp_path: Path) -> None:
    folder = supplies(
        tmp_path,
        AC={"type": "Mains", "online": "1"},
        BAT0={"type": "Battery", "status": "Charging"},
        mouse={"type": "Battery", "scope": "Device", "status": "Discharging"},
    )
    power = PowerSupply(folder)
    assert not power.on_battery()
    (folder / "AC/online").write_text("0\n")
    assert power.on_battery()
    power.close()


def test_batteries_tell_if_no_line_is_known_and_a_machine_without_any_has_mains_power(tmp_path: Path) -> None:
    alone = PowerSupply(supplies(tmp_path, BAT0={"type": "Battery", "status": "Discharging"}))
    assert alone.on_battery()
    (tmp_path / "BAT0/status").write_text("Full\n")
    assert not alone.on_battery()
    assert not PowerSupply(tmp_path / "none").on_battery()
    PowerSupply().close()


def order(world: WorkerWorld, wanted: Wanted, **changes: object) -> None:
    control = read_control(world.folder)
    write_control(world.folder, Control.model_validate(control.model_dump() | {"wanted": wanted} | changes))


async def test_a_pause_hands_the_leases_back_at_once_and_nothing_is_leased_until_resume(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path), Together(sequences_max=16)
    worker = world.worker(engine, grace_seconds=0.0)
    working = asyncio.create_task(run_worker(worker, world.stop))
    await until(lambda: len(engine.calls) == 2)
    order(world, Wanted.PAUSE, at_ms=7)
    await until(lambda: not worker.activity.in_hand)
    leased = list(world.coordinator.leases)
    assert sorted(world.coordinator.returned) == sorted(leased)
    assert world.status()["paused"] == "on request, until `prime-node resume`"
    assert world.status()["control_at_ms"] == 7
    assert "paused on request, until `prime-node resume`" in world.said[-1]
    beats = len(world.coordinator.beats)
    await until(lambda: len(world.coordinator.beats) > beats + 5)
    assert list(world.coordinator.leases) == leased
    assert world.coordinator.beats[-1].state is WorkerState.IDLE
    order(world, Wanted.RUN)
    await until(lambda: worker.activity.in_hand)
    assert len(world.coordinator.leases) > len(leased)
    assert world.coordinator.joined == 1
    world.stop.set()
    assert await working is Ending.STOPPED


async def test_a_worker_that_starts_paused_builds_no_engine_before_it_is_resumed(tmp_path: Path) -> None:
    world, built = WorkerWorld(tmp_path), asyncio.Event()

    async def equip() -> Equipment:
        built.set()
        return Equipment(TableEngine())

    order(world, Wanted.PAUSE)
    working = asyncio.create_task(run_worker(world.worker(equip=equip), world.stop))
    await until(lambda: len(world.coordinator.beats) > 3)
    assert not built.is_set()
    order(world, Wanted.RUN)
    await until(lambda: world.coordinator.accepted > 2)
    world.stop.set()
    await working


async def test_a_worker_outside_of_its_hours_waits_for_them(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path), Together(sequences_max=16)
    now = dt.datetime.fromtimestamp(world.clock.now_ms() / 1_000, dt.UTC).astimezone()
    begin, end = (now + dt.timedelta(hours=hours) for hours in (2, 3))
    worker = world.worker(engine, grace_seconds=0.0, limits={"hours": f"{begin:%H:%M}-{end:%H:%M}"})
    began_s = world.clock.monotonic_s()
    working = asyncio.create_task(run_worker(worker, world.stop))
    await until(lambda: len(engine.calls) == 2)
    assert world.clock.monotonic_s() - began_s > 1.9 * 3_600
    assert any(f"paused until {begin:%H:%M}, as its hours are" in line for line in world.said)
    await until(lambda: not worker.activity.in_hand)
    assert world.clock.monotonic_s() - began_s > 2.9 * 3_600
    assert str(world.status()["paused"]).startswith(f"until {begin:%H:%M}")
    order(world, Wanted.RUN, limits=WorkLimits())
    await until(lambda: worker.activity.in_hand)
    world.stop.set()
    await working


async def test_finish_completes_what_is_generated_however_long_it_takes(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path), Together(sequences_max=16)
    working = asyncio.create_task(run_worker(world.worker(engine, grace_seconds=0.0), world.stop))
    await until(lambda: len(engine.calls) == 2)
    begun = list(world.coordinator.leases)[:2]
    order(world, Wanted.FINISH)
    beats = len(world.coordinator.beats)
    await until(lambda: len(world.coordinator.beats) > beats + 5)
    assert not working.done()
    engine.release_all()
    assert await working is Ending.STOPPED
    assert world.coordinator.accepted == 2
    assert not set(begun) & set(world.coordinator.returned)
    assert world.coordinator.left
    assert read_control(tmp_path).wanted is Wanted.RUN, "the next start computes"


async def test_a_request_to_stop_ends_a_worker_that_finishes_within_its_grace_period(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world, engine = WorkerWorld(tmp_path), Together(sequences_max=16)
    working = asyncio.create_task(run_worker(world.worker(engine, grace_seconds=1.0), world.stop))
    await until(lambda: len(engine.calls) == 2)
    order(world, Wanted.FINISH)
    await until(lambda: world.status()["state"] == WorkerState.DRAINING)
    world.stop.set()
    assert await working is Ending.STOPPED
    assert world.coordinator.accepted == 0
    assert sorted(world.coordinator.returned) == sorted(world.coordinator.leases)
    assert caplog.text.count("the worker leaves; handing it back") == len(world.coordinator.returned) > 0


async def test_a_start_after_a_worker_was_killed_while_it_finished_computes(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    order(world, Wanted.FINISH)
    world.stop_when(lambda: world.coordinator.accepted > 2)
    assert await run_worker(world.worker(), world.stop) is Ending.STOPPED
    assert world.coordinator.accepted > 2


@pytest.mark.parametrize("content", [b"", b"{", b'{"wanted": "dance"}', b'{"wanted": "run", "more": 1}', b"\xff" * 99])
async def test_a_damaged_control_file_pauses_the_worker_and_resume_writes_it_again(
    tmp_path: Path, content: bytes
) -> None:
    world = WorkerWorld(tmp_path)
    (tmp_path / CONTROL).write_bytes(content)
    working = asyncio.create_task(run_worker(world.worker(status_seconds=0.1), world.stop))
    await until(lambda: "is damaged" in world.said[-1] if world.said else False)
    assert not world.coordinator.leases
    ran = await ordered("resume", tmp_path)
    assert "is damaged" in ran.stdout
    await until(lambda: world.coordinator.accepted > 2)
    world.stop.set()
    await working


_THREAD = ThreadPoolExecutor(1)
"""Runs commands. The virtual clock moves on meanwhile, unlike during `asyncio.to_thread`."""


async def ordered(*words: object) -> Result:
    ran = await asyncio.wrap_future(_THREAD.submit(CliRunner().invoke, app, [*map(str, words)], catch_exceptions=False))
    assert ran.exit_code == 0, ran.output
    return ran


async def test_the_commands_show_what_a_running_worker_then_does(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path), Together(sequences_max=16)
    worker = world.worker(engine, grace_seconds=0.0)
    working = asyncio.create_task(run_worker(worker, world.stop))
    await until(lambda: len(engine.calls) == 2)
    assert "| paused on request" in (await ordered("pause", tmp_path)).stdout
    await until(lambda: not worker.activity.in_hand)
    assert "paused" not in (await ordered("resume", tmp_path)).stdout
    assert "those of its settings" in (await ordered("limit", tmp_path)).stdout
    now = dt.datetime.fromtimestamp(world.clock.now_ms() / 1_000, dt.UTC).astimezone()
    hours = f"{now - dt.timedelta(hours=2):%H:%M}-{now - dt.timedelta(hours=1):%H:%M}"
    assert (
        f"| paused until {hours[:5]}" in (await ordered("limit", tmp_path, f"hours={hours}", "on_battery=false")).stdout
    )
    assert f"hours={hours}, on_battery=false" in (await ordered("limit", tmp_path)).stdout
    assert "paused" not in (await ordered("limit", tmp_path, "hours=")).stdout
    await until(lambda: worker.activity.in_hand)
    assert "it finishes its leases" in (await ordered("finish", tmp_path)).stdout
    engine.release_all()
    assert await working is Ending.STOPPED


def test_commands_for_a_worker_that_does_not_run_hold_for_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_node.cli.place.HOME", tmp_path)
    for words in (["pause", str(tmp_path / "none")], ["limit", str(tmp_path / "none")]):
        with pytest.raises(LocalError, match="no worker has run in"):
            CliRunner().invoke(app, words, catch_exceptions=False)
    with pytest.raises(LocalError, match="no worker runs here"):
        command.pause_worker()
    (folder := tmp_path / "runs" / "one").mkdir(parents=True)
    (folder / "status.json").write_text("{}")
    command.pause_worker(folder)
    assert read_control(folder).wanted is Wanted.PAUSE
    command.limit_worker([str(folder), "hours=22:00-07:00"])
    assert read_control(folder) == Control(wanted=Wanted.PAUSE, limits=NIGHTS, at_ms=read_control(folder).at_ms), (
        "a pause and a limit do not disturb each other"
    )
    with pytest.raises(LocalError, match="nothing to finish"):
        command.finish_worker(folder)
    command.resume_worker(folder)
    assert read_control(folder).wanted is Wanted.RUN
    assert read_control(folder).limits == NIGHTS
    for wrong, why in (
        ("hours", "is no limit"),
        ("sleep=1", "is no limit"),
        ("hours=7", "not hours of the day"),
        ("threads=0", "threads: "),
    ):
        with pytest.raises(LocalError, match=why):
            command.limit_worker([str(folder), wrong])
    command.limit_worker([str(folder), "hours=", "threads=3", "upload_mbit_per_s=2.5"])
    assert read_control(folder).limits == WorkLimits(threads=3, upload_mbit_per_s=2.5)
    command.limit_worker([str(folder), "threads=", "upload_mbit_per_s="])
    assert read_control(folder).limits == WorkLimits()
    with pytest.raises(LocalError, match="no worker runs here"):
        command.limit_worker(["threads=1"])
    lock = FolderLock(folder)
    monkeypatch.setattr(command, "ANSWER_S", 0.0)
    command.limit_worker(["threads=1"])
    assert read_control(folder).limits == WorkLimits(threads=1)
    (folder / "status.json").unlink()
    with pytest.raises(LocalError, match="no worker has run"):
        command.pause_worker(folder)
    lock.release()
