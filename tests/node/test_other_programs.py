"""What other programs do on this machine: processor time by /proc, GPU processes by the driver's table, and when they count."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.time_world import VirtualClock, wait_until

from prime_node.other_programs import (
    LOOK_S,
    QUIET_S,
    OtherPrograms,
    ThisMachine,
    gpu_users,
    nvidia_table,
    own_processes,
)
from prime_node.power import PowerSupply

TABLE = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       1001     C     45     10      -      -      -      -    python
    0       1002     G      3      1      -      -      -      -    Xorg
    1       1003     G     60     20      -      -      -      -    game
    1       1004   C+G      -      -      -      -      -      -    python
    2          -     -      -      -      -      -      -      -    -
"""
OWN = "# gpu pid type sm\n 0 {} C 99\n"
BUSY_LOOP = "import sys\nprint(flush=True)\nwhile True: pass"


def proc(folder: Path, *, total: int, idle: int, processes: dict[int, tuple[int, int, int]]) -> Path:
    """Write files as those of /proc: processes by id, each with its parent, its ticks, and those of its ended children."""
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"cpu  {total - idle} 0 0 {idle - 1} 1 0 0 0 0 0\ncpu0 1 2 3\n")
    for pid, (parent, ticks, ended) in processes.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        (folder / str(pid) / "stat").write_text(
            f"{pid} (a) b ( c) S {parent} {'0 ' * 9}{ticks} 0 {ended} 0 20 0 1 0 1 1"
        )
    return folder


def test_only_what_is_left_after_the_own_processes_counts(tmp_path: Path) -> None:
    before = {1: (0, 50, 0), 7: (1, 100, 5), 8: (7, 10, 0), 9: (8, 3, 0), 20: (1, 900, 0)}
    others = OtherPrograms(proc(tmp_path, total=10_000, idle=9_000, processes=before), own_pid=7)
    assert others.processor_share() is None
    now = {1: (0, 50, 0), 7: (1, 300, 105), 8: (7, 30, 0), 9: (8, 83, 0), 20: (1, 1_200, 0)}
    proc(tmp_path, total=11_000, idle=9_300, processes=now)
    assert others.processor_share() == pytest.approx((700 - 400) / 1_000)
    assert others.processor_share() is None, "no time has passed"
    assert own_processes(tmp_path, 7) == {7, 8, 9}


def test_a_system_without_these_files_shows_no_other_programs(tmp_path: Path) -> None:
    others = OtherPrograms(tmp_path / "none")
    assert others.processor_share() is None
    assert others.processor_share() is None
    assert own_processes(tmp_path / "none", 7) == {7}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_program_that_computes_is_seen_on_this_machine() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY_LOOP], stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        of_all, others = OtherPrograms(own_pid=2**30), OtherPrograms(own_pid=os.getpid())
        assert of_all.processor_share() is None
        assert others.processor_share() is None
        ticks = Path(f"/proc/{busy.pid}/stat")
        begin = int(ticks.read_text().split()[13])
        wait_until(lambda: int(ticks.read_text().split()[13]) > begin + 20)
        with_busy, without_it = of_all.processor_share(), others.processor_share()
        assert busy.pid in own_processes()
        busy.kill()
    assert with_busy is not None
    assert without_it is not None
    assert 0.0 <= without_it < with_busy <= 1.0


def test_programs_that_compute_on_a_gpu_or_draw_much_use_it() -> None:
    assert gpu_users(TABLE) == {1001, 1003, 1004}
    assert gpu_users("") == set()
    assert gpu_users("# gpu pid type sm\n 0 12 C\n 0 x C 1\n 0 13 G 99\nno processes") == {12, 13}


def test_use_counts_for_a_minute_and_is_looked_at_from_time_to_time(tmp_path: Path) -> None:
    clock, total, busy = VirtualClock(), 1_000, 0

    def run(seconds: float, share: float) -> None:
        nonlocal total, busy
        clock.seconds += seconds
        total, busy = total + round(200 * seconds), busy + round(200 * seconds * share)
        proc(tmp_path, total=total, idle=total - busy, processes={})

    run(0.0, 0.0)
    machine = ThisMachine(PowerSupply(tmp_path / "none"), clock, others=OtherPrograms(tmp_path, own_pid=1))
    assert not machine.is_busy()
    run(LOOK_S, 0.2)
    assert not machine.is_busy()
    run(LOOK_S / 2, 1.0)
    assert not machine.is_busy(), "not looked at yet"
    run(LOOK_S / 2, 1.0)
    assert machine.is_busy()
    run(QUIET_S - 1, 0.0)
    assert machine.is_busy()
    run(1.0, 0.0)
    assert not machine.is_busy()
    machine.close()


def test_the_gpu_is_looked_at_in_a_thread(tmp_path: Path) -> None:
    clock, tables = VirtualClock(), [TABLE, OWN.format(os.getpid()), "", None]
    shown: list[str | None] = []
    may_look = threading.Event()  # a thread that is quick ends before the call that started it

    def table() -> str | None:
        may_look.wait()
        shown.append(tables[len(shown)])
        return shown[-1]

    machine = ThisMachine(PowerSupply(tmp_path), clock, gpu_table=table)
    assert not machine.is_gpu_busy()
    may_look.set()
    wait_until(machine.is_gpu_busy)
    for looks in (2, 3, 4):
        clock.seconds += QUIET_S
        wait_until(lambda looks=looks: not machine.is_gpu_busy() and len(shown) == looks)
    machine.close()


def test_a_machine_without_the_driver_s_program_has_an_idle_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_node.other_programs.GPU_COMMAND", (str(tmp_path / "nvidia-smi"), "pmon"))
    clock = VirtualClock()
    machine = ThisMachine(PowerSupply(tmp_path), clock)
    assert not machine.is_gpu_busy()
    assert nvidia_table() is None
