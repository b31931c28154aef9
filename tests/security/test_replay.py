"""No signed request is accepted twice, whatever happens to the coordinator in between. Real coordinator processes, killed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import re
import shutil
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import aiohttp
import pytest
from tests.node.coordinator_process import Daemon, crash_run, start
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    ENGINE,
    HEARTBEAT,
    ROOT,
    TRAINER,
    VALIDATOR,
    World,
    make_run,
    memory_parts,
    refused,
    running,
)
from tests.node.http_server import served

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.coordinator.api.clock_readings import ClockReading, read_clocks
from prime_node.coordinator.api.nonces import MEMORY_S, Epochs, Nonces
from prime_node.coordinator.api.routes import ENDPOINTS
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.parcel import pack_parcel
from prime_protocol.replies import ErrorBody
from prime_protocol.requests import (
    AdminRequest,
    BatchRequest,
    BlobHeader,
    BundleRequest,
    CheckRequest,
    CheckResultRequest,
    HoldingRequest,
    JoinRequest,
    LeaseRequest,
    LeaveRequest,
    PeersRequest,
    ReceiptsRequest,
    Request,
    ReturnLeaseRequest,
    RevokeRequest,
    UploadUrlRequest,
)
from prime_protocol.verdict import Verdict

HOUR_S = 3_600.0
BAN = AdminRequest(action="ban", worker=ANNA.key_id)
UNBAN = AdminRequest(action="unban", worker=ANNA.key_id)
JOIN = JoinRequest(name="anna", software="1", engine=ENGINE, rollouts_max=8)
EVERY_REQUEST: tuple[tuple[Request, SigningKey], ...] = (
    (JOIN, ANNA),
    (HEARTBEAT, ANNA),
    (LeaseRequest(policy_version=0, policy_digest="0" * 64, rollouts_max=8), ANNA),
    (ReturnLeaseRequest(lease_id="0" * 64), ANNA),
    (UploadUrlRequest(lease_id="0" * 64, body_bytes=1, body_sha256="0" * 64), ANNA),
    (LeaveRequest(), ANNA),
    (ReceiptsRequest(), ANNA),
    (PeersRequest(), ANNA),
    (CheckRequest(policy_versions=()), VALIDATOR),
    (HoldingRequest(session="0" * 32, bundles=()), VALIDATOR),
    (CheckResultRequest(bundle="0" * 64, verdict=Verdict.accept(), rewards=(1.0,)), VALIDATOR),
    (BundleRequest(bundle="0" * 64), VALIDATOR),
    (BatchRequest(step=0, durable_step=0), TRAINER),
    (BundleRequest(bundle="0" * 64), TRAINER),
    (BAN, ROOT),
    (UNBAN, COORDINATOR),
    (RevokeRequest(machine=ANNA.key_id), BEN),
    (AdminRequest(action="drain"), COORDINATOR),
)
"""Requests of every role. `drain` is the last one: the run ends with it."""


@dataclass
class Site:
    """A folder, and the process that serves it at the moment."""

    folder: Path
    process: Daemon
    port: int
    world: World

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def again(self, *, clock_ahead_s: float = 0.0, folder: Path | None = None) -> None:
        """Kill with SIGKILL, then start another process from the same folder, or from another one."""
        await self.kill()
        self.process, self.port = await start(folder or self.folder, self.port, clock_ahead_s=clock_ahead_s)
        self.world.clock_ahead_ms = round(1_000 * clock_ahead_s)

    async def ask(self, request: Request, key: SigningKey, /, **changes: object) -> tuple[int, bytes, str]:
        """Sign in the present epoch and send; return the status, the bytes, and the path."""
        await self.world.learn_epoch()
        body = self.world.signed(request, key, **changes)
        path = path_of(request)
        return (await self.world.post(path, body))[0], body, path


def path_of(request: Request) -> str:
    return "/v1/admin" if isinstance(request, AdminRequest) else f"/v1/{request.action}"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    folder = tmp_path / "run"
    folder.mkdir()
    async with site_in(folder) as made:
        yield made


@contextlib.asynccontextmanager
async def site_in(folder: Path) -> AsyncIterator[Site]:
    process, port = await start(folder, 0)
    run = make_run(**crash_run())
    async with aiohttp.ClientSession() as session:
        made = Site(folder, process, port, World(run, memory_parts(run), f"http://127.0.0.1:{port}", session))
        try:
            yield made
        finally:
            for client in made.world.clients.values():
                await client.close()
            await made.kill()


async def ban_and_forgive(site: Site) -> bytes:
    """Return the bytes of an accepted ban that is stamped ahead of the clock and then lifted."""
    await site.world.join(ANNA)
    ahead_ms = site.world.parts.clock.now_ms() + 100_000
    status, ban, _ = await site.ask(BAN, COORDINATOR, issued_at_ms=ahead_ms)
    assert status == 204
    assert (await site.ask(UNBAN, COORDINATOR))[0] == 204
    return ban


async def is_banned(site: Site) -> bool:
    return bool((await site.world.status())["workers"][0]["banned"])


@pytest.mark.parametrize("clock_ahead_s", [0.0, -100.0, -HOUR_S, HOUR_S])
async def test_a_lifted_ban_is_not_taken_again_after_kill_9(site: Site, clock_ahead_s: float) -> None:
    ban = await ban_and_forgive(site)
    await site.again(clock_ahead_s=clock_ahead_s)
    await refused(site.world, ErrorCode.WRONG_EPOCH, "/v1/admin", ban)
    assert not await is_banned(site)


async def test_a_lifted_ban_is_not_taken_again_when_the_clock_returns_to_its_moment(site: Site) -> None:
    ban = await ban_and_forgive(site)
    for clock_ahead_s in (HOUR_S, 0.0, -HOUR_S, 0.0):
        await site.again(clock_ahead_s=clock_ahead_s)
        await refused(site.world, ErrorCode.WRONG_EPOCH, "/v1/admin", ban)
    assert not await is_banned(site)


async def test_a_restored_older_backup_takes_no_request_again(site: Site, tmp_path: Path) -> None:
    await site.world.join(ANNA)
    await site.again()  # kill -9 and a start: the files in the folder are whole
    await site.kill()
    shutil.copytree(site.folder, tmp_path / "backup")
    site.process, _ = await start(site.folder, site.port)
    ban = await ban_and_forgive(site)
    await site.again(folder=tmp_path / "backup")
    assert not await is_banned(site)
    await refused(site.world, ErrorCode.WRONG_EPOCH, "/v1/admin", ban)
    assert not await is_banned(site)


async def test_of_two_coordinators_started_one_after_another_neither_takes_the_others_requests(site: Site) -> None:
    first = await ban_and_forgive(site)
    await site.again()
    second = await ban_and_forgive(site)
    await site.again()
    for ban in (first, second):
        await refused(site.world, ErrorCode.WRONG_EPOCH, "/v1/admin", ban)
    assert not await is_banned(site)


def test_every_action_of_every_role_is_tried_below() -> None:
    tried = {(request.action, key.key_id) for request, key in EVERY_REQUEST}
    named = {endpoint.path.removeprefix("/v1/") for endpoint in ENDPOINTS if endpoint.message is not None}
    assert {action for action, _ in tried} == named - {"admin"} | {
        "ban",
        "unban",
        "drain",
    }
    assert {VALIDATOR.key_id, TRAINER.key_id} <= {key for action, key in tried if action == "bundle"}


async def test_no_request_of_any_role_is_taken_again_by_the_next_process(site: Site) -> None:
    sent = [await site.ask(request, key) for request, key in EVERY_REQUEST]
    header = BlobHeader(
        body_digest=digest_of(b"part"),
        body_bytes=4,
        run=site.world.run.digest,
        issued_at_ms=site.world.parts.clock.now_ms(),
        epoch=site.world.epoch,
    )
    blob = pack_parcel(header, b"part", PayloadType.BLOB, TRAINER)
    assert (await site.world.post("/v1/blobs", blob))[0] == 200
    await site.again()
    assert (await site.ask(JOIN, ANNA))[0] == 200  # so that no replay fails because a role is missing
    before = await site.world.status()
    for _, body, path in [*sent, (200, blob, "/v1/blobs")]:
        await refused(site.world, ErrorCode.WRONG_EPOCH, path, body)
    after = await site.world.status()
    assert [{**one, "silent_s": 0} for one in after["workers"]] == [{**one, "silent_s": 0} for one in before["workers"]]


@pytest.mark.timeout(120)
async def test_kill_9_at_any_moment_lets_no_request_be_taken_twice(site: Site) -> None:
    chance = random.Random(1)
    await site.world.join(ANNA)
    sent: list[bytes] = []

    async def keep_sending() -> None:
        while True:
            body = site.world.signed(chance.choice([BAN, UNBAN]), COORDINATOR)
            sent.append(body)
            with contextlib.suppress(aiohttp.ClientError):
                await site.world.post("/v1/admin", body)
                await site.world.learn_epoch()

    for _ in range(3):
        await site.world.learn_epoch()
        sending = asyncio.create_task(keep_sending())
        await asyncio.wait({sending}, timeout=chance.uniform(0.05, 0.3))
        site.process.kill()
        await asyncio.wait({sending}, timeout=0.02)  # the last one may be in progress
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await site.again()
        for body in sent[-20:]:
            assert (await site.world.post("/v1/admin", body))[0] == 409
    assert len(sent) >= 3  # one in each process at least, however slow the machine


async def outcomes(world: World, endpoint: str) -> dict[str, int]:
    """Return the answers so far, by outcome."""
    text = (await world.get("/metrics"))[1].decode()
    found = re.findall(rf'^prime_requests_total{{endpoint="{endpoint}",outcome="(\w+)"}} (\S+)$', text, re.MULTILINE)
    return {outcome: round(float(count)) for outcome, count in found}


async def test_a_restart_costs_an_honest_client_one_more_round_trip(site: Site) -> None:
    client = site.world.client(ANNA)
    await client.join(JOIN)
    await client.heartbeat(HEARTBEAT)
    await site.again(clock_ahead_s=-30.0)
    for _ in range(3):
        await client.heartbeat(HEARTBEAT)
    assert await outcomes(site.world, "/v1/heartbeat") == {"wrong_epoch": 1, "ok": 3}


async def test_many_requests_under_way_at_a_restart_cost_one_more_round_trip_each(site: Site) -> None:
    client = site.world.client(ANNA)
    await client.join(JOIN)
    await site.again()
    await asyncio.gather(*(client.receipts(ReceiptsRequest()) for _ in range(8)))
    assert (await outcomes(site.world, "/v1/receipts"))["ok"] == 8
    assert (await outcomes(site.world, "/v1/receipts"))["wrong_epoch"] <= 8


async def test_replays_of_a_workers_requests_use_up_nothing_of_its_rate() -> None:
    async with running(memory_parts(make_run(), requests_per_second=1.0)) as world:
        await world.join(ANNA)
        recorded, fresh = world.signed(HEARTBEAT, ANNA, epoch="0" * 32), world.signed(HEARTBEAT, ANNA)
        assert (await world.post("/v1/heartbeat", fresh))[0] == 200
        for _ in range(20):
            await refused(world, ErrorCode.WRONG_EPOCH, "/v1/heartbeat", recorded)
            await refused(world, ErrorCode.REPLAYED, "/v1/heartbeat", fresh)
        await world.client(ANNA).heartbeat(HEARTBEAT)


async def test_a_client_is_not_led_round_in_circles_by_a_server_that_names_ever_other_epochs() -> None:
    async with served() as server:
        body = ErrorBody(code=ErrorCode.WRONG_EPOCH, detail="again", epoch="e" * 32)
        server.says(body.model_dump_json().encode(), status=409)
        async with HttpClient(server.url, run=make_run().digest, clock=SystemClock(), key=ANNA) as client:
            for number in (1, 2):
                with pytest.raises(RemoteError) as caught:
                    await client.heartbeat(HEARTBEAT)
                assert caught.value.is_transient, "it waits, as for a server that is busy"
                assert len(server.seen) == 2 * number


class SetClock(SystemClock):
    """A wall clock that changes while the process runs."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


async def test_a_clock_set_back_in_a_running_coordinator_begins_a_new_epoch() -> None:
    parts = dataclasses.replace(memory_parts(make_run()), clock=SetClock())
    async with running(parts) as world:
        await world.join(ANNA, BEN)
        ban = world.signed(BAN, COORDINATOR)
        assert (await world.post("/v1/admin", ban))[0] == 204
        assert (await world.post("/v1/admin", world.signed(UNBAN, COORDINATOR)))[0] == 204
        assert isinstance(parts.clock, SetClock)
        parts.clock.ahead_ms = -3_600_000
        await refused(world, ErrorCode.WRONG_EPOCH, "/v1/admin", ban)
        await world.client(BEN).heartbeat(HEARTBEAT)  # an honest client signs again and is taken


def test_an_epoch_ends_when_the_clock_falls_behind_and_not_when_it_goes_ahead() -> None:
    epochs, second = Epochs(), 1_000
    first = epochs.present(ClockReading(1_000_000 * second, 0.0))
    assert epochs.present(ClockReading(1_000_010 * second, 10.0)) == first
    assert epochs.present(ClockReading(1_003_610 * second, 10.0)) == first  # an hour ahead: requests expire sooner
    assert epochs.present(ClockReading(1_003_619 * second + 500, 20.0)) == first  # half a second of drift
    second_epoch = epochs.present(ClockReading(1_000_020 * second, 20.0))
    assert second_epoch != first
    assert epochs.present(ClockReading(1_000_030 * second, 30.0)) == second_epoch


class StallingClock(SystemClock):
    """A machine that stops after some readings. `ahead_s`: the lead of its wall clock."""

    def __init__(self, stalls_s: Iterable[float]) -> None:
        self._stalls_s, self._now_s, self.ahead_s = iter(stalls_s), 1.0, 1e6

    def monotonic_s(self) -> float:
        found = self._now_s
        self._now_s += next(self._stalls_s)
        return found

    def now_ms(self) -> int:
        return round(1_000 * (self.monotonic_s() + self.ahead_s))


def test_both_clocks_are_read_again_after_a_stall_between_their_readings() -> None:
    for stalls_s in ([6.0, 0.0, 0.0], [0.0, 6.0, 0.0]):
        read = read_clocks(StallingClock([*stalls_s, 0.0, 0.0, 0.0]))
        assert (read.unix_ms / 1_000 - read.monotonic_s, read.apart_s) == (1e6, 0.0)


def test_no_stall_begins_an_epoch_and_a_clock_set_back_during_stalls_does() -> None:
    """An honest coordinator on a busy machine began a new epoch, and its clients had to sign again."""
    clock, epochs = StallingClock(cycle([0.0, 1.5, 0.0, 3.0, 2.0])), Epochs()
    assert len({epochs.present(read_clocks(clock)) for _ in range(50)}) == 1
    before = epochs.present(read_clocks(clock))
    clock.ahead_s -= 60.0
    assert epochs.present(read_clocks(clock)) != before


def test_drift_that_begins_no_epoch_outlives_no_nonce() -> None:
    """A request stamped as far ahead as allowed, sent again by a clock that drifts as far back as allowed."""
    nonces = Nonces(nonces_max=10)
    nonces.spend("anna", "0" * 32, 0.0)
    nonces.spend("ben", "1" * 32, MEMORY_S - 0.001)
    last_moment_s = 2 * limits.REQUEST_AGE_S_MAX + limits.CLOCK_BACK_S_MAX
    for seconds in (1.0, last_moment_s / 2, last_moment_s):
        with pytest.raises(RemoteError) as caught:
            nonces.spend("anna", "0" * 32, seconds)
        assert caught.value.code is ErrorCode.REPLAYED


def test_no_two_epochs_have_one_name() -> None:
    made: set[str] = {Epochs().present(ClockReading(1, 1.0)) for _ in range(1_000)}
    assert len(made) == 1_000
