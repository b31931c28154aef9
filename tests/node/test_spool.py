"""Finished work survives every failure until the coordinator has it."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tests.builder import build_header, build_lease
from tests.node.spool_world import Receiver, flush_all, make_spool
from tests.node.worker_world import WORKER, make_run, names_in
from tests.time_world import VirtualClock

from prime_node.ports.transport import Unreachable
from prime_node.worker.spool import REFUSED_LINES_MAX, Spool
from prime_protocol.assignment import GroupAssignment, Problem
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.parcel import pack_parcel
from prime_protocol.replies import UploadReply
from prime_protocol.verdict import RejectReason, Verdict

LEASE = digest_of(b"lease")


async def test_bundles_go_out_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    spool, receiver = make_spool(tmp_path), Receiver()
    for number in range(20):
        await spool.put(b"bundle %d" % number, LEASE)
    await flush_all(spool, receiver)
    assert receiver.taken == [b"bundle %d" % number for number in range(20)]
    assert spool.num_bundles == 0
    assert names_in(tmp_path, "*.parcel") == []


async def test_a_new_process_uploads_what_the_last_one_left_in_the_same_order(tmp_path: Path) -> None:
    first = make_spool(tmp_path)
    for number in range(12):
        await first.put(b"%d" % number, LEASE)
    second = make_spool(tmp_path)
    await second.put(b"new", LEASE)
    receiver = Receiver()
    await flush_all(second, receiver)
    assert receiver.taken == [*(b"%d" % number for number in range(12)), b"new"]


async def test_a_coordinator_that_is_away_loses_nothing(tmp_path: Path) -> None:
    spool = make_spool(tmp_path)
    faults = [Unreachable("refused")] * 50 + [RemoteError(ErrorCode.UNAVAILABLE, "starting")] * 3
    receiver = Receiver(*faults)
    await spool.put(b"a", LEASE)
    await spool.put(b"b", LEASE)
    await flush_all(spool, receiver)
    assert receiver.taken == [b"a", b"b"]


async def test_the_server_says_for_how_long_to_wait(tmp_path: Path) -> None:
    clock = VirtualClock()
    spool = Spool(tmp_path, bytes_max=100, clock=clock, rng=random.Random(1))
    await spool.put(b"a", LEASE)
    began = clock.monotonic_s()
    await flush_all(spool, Receiver(RemoteError(ErrorCode.TOO_MANY_REQUESTS, "slower", retry_after_s=20.0)))
    assert clock.monotonic_s() - began >= 20.0


async def test_a_refused_bundle_is_dropped_with_its_reason_and_the_next_one_goes_out(tmp_path: Path) -> None:
    spool, receiver = make_spool(tmp_path), Receiver(RemoteError(ErrorCode.LEASE_UNKNOWN, "no such lease"))
    await spool.put(b"bad", LEASE)
    await spool.put(b"good", LEASE)
    await flush_all(spool, receiver)
    assert receiver.taken == [b"good"]
    [line] = (tmp_path / "refused.jsonl").read_text().splitlines()
    assert json.loads(line)["reason"] == "lease_unknown"
    assert LEASE in json.loads(line)["bundle"]


async def test_a_verdict_in_the_answer_is_noted(tmp_path: Path) -> None:
    async def upload(parcel: bytes) -> UploadReply:
        return UploadReply(bundle=digest_of(parcel), verdict=Verdict.refuse(RejectReason.STALE, "step 3 is trained"))

    spool = make_spool(tmp_path)
    await spool.put(b"late", LEASE)
    await flush_all(spool, upload)
    assert '"stale"' in (tmp_path / "refused.jsonl").read_text()


async def test_a_bundle_of_another_run_that_used_the_folder_before_is_not_sent_to_this_one(tmp_path: Path) -> None:
    """Before, the next run's coordinator got it, and the work was lost for the run that it was made for."""
    own, other = make_run(), make_run(name="other")
    group = GroupAssignment(slot=0, problem=Problem(environment="letters", index=0), prompt_token_ids=(1,), seeds=(0,))
    parcels = [
        pack_parcel(build_header(build_lease(run, WORKER, [group]), b"body", 4), b"body", PayloadType.ROLLOUT, WORKER)
        for run in (own, other)
    ]
    before = make_spool(tmp_path)
    for parcel in (parcels[1], parcels[0]):
        await before.put(parcel, LEASE)
    spool = Spool(tmp_path, bytes_max=2**20, clock=VirtualClock(), rng=random.Random(1), run=own.digest)
    assert (spool.num_bundles, spool.num_bytes) == (1, len(parcels[0])), "the other run's takes no room of this one's"
    receiver = Receiver()
    await flush_all(spool, receiver)
    assert receiver.taken == [parcels[0]]
    assert make_spool(tmp_path).num_bytes == len(parcels[1]), "it waits for its own run"


async def test_the_log_of_refusals_is_bounded(tmp_path: Path) -> None:
    notes = tmp_path / "refused.jsonl"
    notes.write_text("".join(f'{{"old": {number}}}\n' for number in range(REFUSED_LINES_MAX)))
    spool = make_spool(tmp_path)
    await spool.put(b"bad", LEASE)
    await flush_all(spool, Receiver(RemoteError(ErrorCode.WRONG_RUN, "another run")))
    lines = notes.read_text().splitlines()
    assert len(lines) == REFUSED_LINES_MAX
    assert "wrong_run" in lines[-1]
    assert '"old": 1}' in lines[0]


async def test_a_damaged_log_of_refusals_keeps_its_lines_and_ends_no_worker(tmp_path: Path) -> None:
    notes = tmp_path / "refused.jsonl"
    notes.write_bytes(b'{"old": "\xa2"}\n')
    spool = make_spool(tmp_path)
    await spool.put(b"bad", LEASE)
    await flush_all(spool, Receiver(RemoteError(ErrorCode.WRONG_RUN, "another run")))
    old, new = notes.read_bytes().splitlines()
    assert old == b'{"old": "\xa2"}'
    assert b"wrong_run" in new


async def test_a_full_spool_makes_the_generator_wait(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, bytes_max=100)
    await spool.put(b"x" * 80, LEASE)
    await spool.put(b"x" * 20, LEASE)
    waiting = asyncio.create_task(spool.put(b"y", LEASE))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    receiver = Receiver()
    await flush_all(spool, receiver)
    await waiting
    assert receiver.taken[0] == b"x" * 80


async def test_a_bundle_larger_than_the_bound_still_goes_into_an_empty_spool(tmp_path: Path) -> None:
    spool = make_spool(tmp_path, bytes_max=10)
    await spool.put(b"z" * 1_000, LEASE)
    assert spool.num_bytes == 1_000


async def test_half_a_bundle_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / "000000000001-0123456789abcdef.partial").write_bytes(b"half")
    spool = make_spool(tmp_path)
    assert spool.num_bundles == 0
    assert names_in(tmp_path) == []


async def test_other_errors_end_the_flush_and_keep_the_bundle(tmp_path: Path) -> None:
    class FaultError(Exception):
        pass

    spool = make_spool(tmp_path)
    await spool.put(b"kept", LEASE)
    with pytest.raises(FaultError):
        await flush_all(spool, Receiver(FaultError()))
    assert make_spool(tmp_path).num_bundles == 1


def test_a_spool_that_cannot_be_written_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LocalError, match="choose another folder"):
        make_spool(tmp_path / "file")


KILLED = """
import asyncio, os, random, signal, sys
from pathlib import Path
from prime_node.adapters.system_clock import SystemClock
from prime_node.worker.spool import Spool

async def main():
    spool = Spool(Path(sys.argv[1]), bytes_max=2**30, clock=SystemClock(), rng=random.Random(1))
    for number in range(1_000_000):
        await spool.put(b"%d" % number, "0" * 64)
        print(number, flush=True)

asyncio.run(main())
"""


def test_what_was_put_survives_kill_9(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    promised = [int(child.stdout.readline()) for _ in range(20)]
    child.kill()
    promised += [int(line) for line in child.stdout.read().split()]
    child.wait()
    child.stdout.close()
    receiver = Receiver()

    async def flush() -> None:
        await flush_all(make_spool(tmp_path, bytes_max=2**30), receiver)

    asyncio.run(flush())
    uploaded = [int(parcel) for parcel in receiver.taken]
    assert uploaded[: len(promised)] == promised
    assert uploaded == sorted(set(uploaded))


async def test_the_leases_that_wait_are_known_even_after_a_restart(tmp_path: Path) -> None:
    leases = [digest_of(b"%d" % number) for number in range(3)]
    spool = make_spool(tmp_path)
    for lease in leases:
        await spool.put(b"bundle of " + lease.encode(), lease)
    assert make_spool(tmp_path).lease_ids == leases
