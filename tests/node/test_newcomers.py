"""A key costs nothing, so a thousand keys gain no more than one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    ENGINE,
    ROOT,
    TRAINER,
    World,
    make_run,
    memory_parts,
    running,
)
from tests.node.newcomers_world import request
from tests.node.scheduler_world import RULES, Run

from prime_node.coordinator.assembly import open_coordinator
from prime_node.coordinator.state import endings, invariants, newcomers, scheduler, snapshot
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import BundleForgotten
from prime_node.coordinator.state.records import LeaseRecord, WorkerRecord
from prime_node.coordinator.state.scheduler import NothingToLease, fair_share
from prime_protocol import limits
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.evidence import Moments
from prime_protocol.identity import SigningKey
from prime_protocol.invite import Invite
from prime_protocol.requests import AdminRequest, LeaveRequest
from prime_protocol.telemetry import Hardware
from prime_protocol.verdict import RejectReason

LIMITED = {"trusted_networks": ()}
CROWDED = dataclasses.replace(RULES, groups_per_step=64, workers_max=2_000, max_steps=50, newcomer_bundles=8)
THOUSAND = [f"key {number}" for number in range(1_000)]


def world_of(keys: list[str]) -> Run:
    """Return an honest worker that is known, and some keys of one other network."""
    run = Run(CROWDED, workers=("honest",))
    run.join(*keys, network="theirs")
    return run


def play(run: Run, keys: list[str], judge: Callable[[Run, str], object], rounds: int) -> tuple[int, int]:
    """Run rounds in which every key takes, uploads and gets verdicts. Return the most groups held at once, and the total."""
    most = judged = 0
    for _ in range(rounds):
        leases = []
        for key in keys:
            worker = run.state.workers.get(key)
            if worker is None or not worker.active:
                continue
            while isinstance(lease := run.lease(key, run.state.head), LeaseRecord):
                leases.append(lease)
        most = max(most, sum(len(lease.slots) for lease in leases))
        for lease in leases:
            judged += len(lease.slots)
            judge(run, run.upload(lease))
        invariants.check_invariants(run.state)
    return most, judged


def test_a_thousand_keys_that_cheat_get_no_more_than_one() -> None:
    def refuse(run: Run, bundle: str) -> None:
        run.refuse(bundle, RejectReason.SEED_MISMATCH)

    most, judged = play(world_of(THOUSAND), THOUSAND, refuse, rounds=3)
    assert (most, judged) == (1, 3), "one group at a time, as one newcomer would"


def test_a_thousand_keys_that_work_get_what_one_would_get_for_the_same_work() -> None:
    def accept(run: Run, bundle: str) -> None:
        run.accept(bundle)

    rounds = 3  # no key has passed all its audits yet
    thousand = play(world_of(THOUSAND), THOUSAND, accept, rounds=rounds)
    one = play(world_of(["key 0"]), ["key 0"], accept, rounds=rounds)
    assert thousand == one


def test_a_thousand_idle_keys_leave_the_others_their_share() -> None:
    run = world_of(THOUSAND)
    assert run.state.num_active == 1_001
    assert fair_share(run.state) == 32, "they count as one"
    run.join(*(f"elsewhere {number}" for number in range(2)), network="another")
    assert fair_share(run.state) == 22


def test_a_key_that_has_passed_its_audits_counts_separately() -> None:
    run = world_of(["anna", "ben"])
    while run.state.workers["anna"].audit_score < CROWDED.newcomer_bundles:
        run.accept(run.upload(run.granted("anna", 0, rollouts_max=2)))
    assert newcomers.budget(run.state, run.state.workers["anna"]) is None
    assert newcomers.budget(run.state, run.state.workers["ben"]) == newcomers.Budget(leases=1, groups=1)
    run.granted("ben", 0)
    refusal = run.lease("ben", 0)
    assert isinstance(refusal, NothingToLease)
    assert "newcomers of your network" in refusal.reason
    invariants.check_invariants(run.state)


async def test_a_run_admits_its_number_of_workers_and_one_that_leaves_makes_room() -> None:
    async with running(memory_parts(make_run(limits=limits.Limits(workers_max=1)))) as world:
        await world.join(ANNA)
        await world.join(ANNA)
        await turned_away(world, BEN, ErrorCode.UNAVAILABLE)
        await world.client(ANNA).leave(LeaveRequest())
        await world.join(BEN)


def test_new_keys_of_a_network_wait_longer_after_each_ban() -> None:
    run = world_of(["anna", "ben"])
    pauses = []
    for name in ("anna", "ben"):
        for _ in range(CROWDED.strikes_max):
            run.refuse(run.upload(run.granted(name, 0)), RejectReason.LOGPROB_MISMATCH)
        pauses.append(newcomers.pause_ms(run.state, "theirs", run.now_ms))
    assert pauses == [60_000, 120_000]
    assert newcomers.pause_ms(run.state, "theirs", run.now_ms + 120_000) == 0
    assert newcomers.pause_ms(run.state, "another", run.now_ms) == 0
    for bans, pause_ms in ((11, 61_440_000), (12, 86_400_000), (60, 86_400_000)):
        run.state.networks["theirs"].bans = bans
        assert newcomers.pause_ms(run.state, "theirs", run.now_ms) == pause_ms, "a day at most"


async def turned_away(world: World, key: SigningKey, code: ErrorCode, **changes: object) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        await world.client(key).join(request(**changes))
    assert caught.value.code is code, caught.value
    return caught.value


def invitation(world: World, key: SigningKey = COORDINATOR, **changes: object) -> str:
    fields: dict[str, object] = {"run": world.run.digest, "invite": "ab" * 16, "keys_max": 1, "expires_at_ms": 2**50}
    return seal(Invite.model_validate(fields | changes), PayloadType.INVITE, key).to_base64()


async def test_an_invitation_admits_its_number_of_keys() -> None:
    async with running(memory_parts(make_run(), invites_needed=True)) as world:
        await turned_away(world, ANNA, ErrorCode.NOT_INVITED)
        await turned_away(world, ANNA, ErrorCode.MALFORMED, invite="let me in")
        await turned_away(world, ANNA, ErrorCode.BAD_SIGNATURE, invite=invitation(world, TRAINER))
        await turned_away(world, ANNA, ErrorCode.WRONG_RUN, invite=invitation(world, run="00" * 32))
        await turned_away(world, ANNA, ErrorCode.NOT_INVITED, invite=invitation(world, expires_at_ms=1))
        await world.client(ANNA).join(request(invite=invitation(world)))
        await world.client(ANNA).join(request())  # it is known from now on
        await turned_away(world, BEN, ErrorCode.NOT_INVITED, invite=invitation(world))
        await world.client(BEN).join(request(invite=invitation(world, ROOT, invite="cd" * 16)))


async def test_a_list_of_keys_keeps_all_others_out() -> None:
    async with running(memory_parts(make_run(), allowed_workers=[ANNA.key_id])) as world:
        await world.client(ANNA).join(request())
        refusal = await turned_away(world, BEN, ErrorCode.NOT_INVITED)
        assert BEN.key_id in refusal.detail


async def test_an_unseeded_engine_takes_part_only_where_the_run_says_so_and_the_status_names_it() -> None:
    unseeded = ENGINE.model_copy(update={"seeded": False})
    async with running(memory_parts(make_run())) as world:
        refusal = await turned_away(world, ANNA, ErrorCode.NOT_INVITED, engine=unseeded)
        assert "worker.seeded" in refusal.detail
    async with running(memory_parts(make_run(checks=CheckPolicy(unseeded=True)))) as world:
        await world.client(ANNA).join(request(engine=unseeded))
        await world.client(BEN).join(request())
        engines = {worker["worker"]: worker["engine"] for worker in (await world.status())["workers"]}
        assert engines[ANNA.key_id] == engines[BEN.key_id] + " unseeded"


async def test_old_software_must_upgrade_and_other_software_is_not_compared() -> None:
    async with running(memory_parts(make_run(), software_min="0.10")) as world:
        refusal = await turned_away(world, ANNA, ErrorCode.VERSION_UNSUPPORTED, software="prime-node 0.9.3")
        assert "run `prime-node upgrade`, or install the release" in refusal.detail
        await world.client(ANNA).join(request(software="prime-node 0.10"))
        await world.client(ANNA).join(request(software="prime-node 0.10.0.dev1"))
        await world.client(BEN).join(request(software="another client 0.1"))


async def test_an_engine_without_a_calibration_gets_a_notice_when_it_joins() -> None:
    moments = Moments(cap=1.0, lambdas=(1.0,), log_moments=(0.001,), num_tokens=1_000)
    known = PairMoments(worker="vllm/bf16/cuda", validator="transformers/fp32/cpu", moments={"margin": moments})
    spec = make_run(checks=CheckPolicy(calibration=Calibration(pairs=(known,))))
    async with running(memory_parts(spec)) as world:
        assert "has no calibration for toy/fp32/cpu" in (await world.client(ANNA).join(request())).notice
        engine = ENGINE.model_copy(update={"name": "vllm", "dtype": "bf16", "device": "cuda"})
        assert (await world.client(BEN).join(request(engine=engine))).notice == ""


async def test_a_network_has_room_for_so_many_and_new_keys_wait_after_a_ban(caplog: pytest.LogCaptureFixture) -> None:
    async with running(memory_parts(make_run(), workers_per_network_max=1, **LIMITED)) as world:
        await world.client(ANNA).join(request(hardware=Hardware(device="x86_64", cores=8, memory_bytes=2**34)))
        refusal = await turned_away(world, BEN, ErrorCode.TOO_MANY_REQUESTS)
        assert "your network has 1 worker here, which is the limit" in refusal.detail
        assert "operator to raise coordinator.workers_per_network_max or to trust your network" in refusal.detail
        assert "network 127.0.0.0/24 has 1 worker, which is the limit, and further ones wait" in caplog.text
        await world.client(ANNA).join(request())
        (shown,) = (await world.status())["workers"]
        assert (shown["newcomer"], shown["hardware"]) == (True, "")
        await world.client(ROOT).admin(AdminRequest(action="ban", worker=ANNA.key_id))
        refusal = await turned_away(world, BEN, ErrorCode.TOO_MANY_REQUESTS)
        assert refusal.retry_after_s == pytest.approx(60, abs=2)


@pytest.mark.parametrize(("trusted", "joined", "leased"), [((), 64, 1), (("127.0.0.1/32",), 80, 80)])
async def test_a_laboratory_behind_one_address_works_at_once_if_the_operator_trusts_the_address(
    trusted: tuple[str, ...], joined: int, leased: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(groups_per_step=1_024, limits=limits.Limits(workers_max=1_000))
    async with running(memory_parts(run, trusted_networks=trusted)) as world:
        await world.publish()
        found, granted = [], 0
        for key in (SigningKey(bytes([number]) * 32) for number in range(100, 180)):
            with contextlib.suppress(RemoteError):
                await world.join(key)
                found.append(key)
        for key in found:
            with contextlib.suppress(AssertionError):  # there is nothing for it now
                await world.lease(key, rollouts_max=2)
                granted += 1
    assert (len(found), granted) == (joined, leased)
    assert ("add their address to coordinator.trusted_networks" in caplog.text) == (not trusted)


async def test_networks_are_distinguished_by_prefixes_and_trusted_ones_have_no_name() -> None:
    admission = (await open_coordinator(memory_parts(make_run()))).handlers.admission

    def name(address: str) -> str:
        return admission.name_of_network(address)

    assert name("203.0.113.5") == name("203.0.113.200") == name("::ffff:203.0.113.9")
    assert name("2001:db8:1::1") == name("2001:db8:1:9::2")
    assert name("203.0.114.5") != name("203.0.113.5")
    assert [name(address) for address in ("127.0.0.1", "::1", "192.168.3.4", "fd00::1%eth0")] == [""] * 4
    assert name("") == name("somewhere") != "", "unknown addresses are one network"
    assert "203.0" not in name("203.0.113.5")


def test_a_newcomer_that_sits_on_its_leases_does_not_hold_up_the_run() -> None:
    run = Run(workers=("honest",))
    first = run.granted("honest", 0, rollouts_max=2)
    run.now_ms += 20
    run.accept(run.upload(first))  # a rollout takes 10 ms
    run.join("hoarder")
    hoarded = run.granted("hoarder", 0)
    while isinstance(lease := run.lease("honest", 0), LeaseRecord):
        run.accept(run.upload(lease))
    run.now_ms += scheduler.SILENCE_MS_MIN
    assert isinstance(run.lease("honest", 0), NothingToLease), "nobody is hurried"
    run.now_ms += 1
    taken_over = run.granted("honest", 0)
    assert taken_over.slots == hoarded.slots
    invariants.check_invariants(run.state)
    run.accept(run.upload(taken_over))
    hoarder = run.state.workers["hoarder"]
    assert (hoarder.leases, hoarder.wasted, hoarder.abandoned) == ((), 1, 1)
    assert run.state.is_ready(0)
    invariants.check_invariants(run.state)


class Counted(dict[str, WorkerRecord]):
    """Dictionary that counts reads of workers."""

    looked_at = 0

    def __getitem__(self, key: str) -> WorkerRecord:
        self.looked_at += 1
        return super().__getitem__(key)

    def values(self) -> Any:
        self.looked_at += len(self)
        return super().values()

    def items(self) -> Any:
        self.looked_at += len(self)
        return super().items()


def workers_looked_at(num_keys: int) -> dict[str, int]:
    """Return the cost of each request that a key can make, with that many active and as many absent keys of its network."""
    run = Run(dataclasses.replace(CROWDED, workers_max=num_keys // 3))  # so that some are forgotten, too
    run.publish()
    for number in range(num_keys):
        run.join(f"away {number}", network="theirs")
        run.granted(f"away {number}", 0)
        run.do(ev.WorkerLeft(f"away {number}"))
    run.join(*(f"key {number}" for number in range(num_keys)), network="theirs")
    scenes: dict[str, Callable[[], object]] = {
        "join": lambda: run.join("another", network="theirs"),
        "lease": lambda: run.granted("key 1", 0),
        "upload": lambda: run.upload(next(iter(run.state.leases.values()))),
        "judge": lambda: run.refuse("bundle-0", RejectReason.SEED_MISMATCH),
        "leave": lambda: run.do(ev.WorkerLeft("key 1")),
    }
    found = {}
    for name, scene in scenes.items():
        run.state.workers = counted = Counted(run.state.workers)
        scene()
        found[name] = counted.looked_at
        run.state.workers = dict(counted)
        invariants.check_invariants(run.state)
    return found


def test_nothing_takes_longer_with_more_keys() -> None:
    assert workers_looked_at(9) == workers_looked_at(300)


def test_a_network_that_floods_the_memory_pushes_out_its_own_keys() -> None:
    run = Run(dataclasses.replace(CROWDED, workers_max=4))
    run.join("anna", network="honest")
    run.publish()
    run.accept(run.upload(run.granted("anna", 0)))
    run.do(ev.WorkerLeft("anna"))
    for number in range(100):
        run.join(f"key {number}", network="theirs")
        run.granted(f"key {number}", 0)
        run.do(ev.WorkerLeft(f"key {number}"))
        invariants.check_invariants(run.state)
    assert len(run.state.workers) == endings.WORKERS_REMEMBERED_FACTOR * 4
    assert run.state.workers["anna"].accepted == 2
    assert snapshot.state_from_json(snapshot.state_to_json(run.state)) == run.state


def test_a_banned_key_is_forgotten_with_its_evidence_and_its_network_stays_limited() -> None:
    run = Run(dataclasses.replace(CROWDED, workers_max=2, strikes_max=1, groups_per_step=1, max_steps=100))
    run.join("cheat", "named", "invited", network="theirs")
    run.do(ev.WorkerJoined("invited", "invited", "1", "engine", 64, "theirs", invite="ab" * 16))
    run.publish()
    deciding = run.upload(run.granted("cheat", 0))
    run.refuse(deciding, RejectReason.SEED_MISMATCH)
    assert run.state.evidence == [deciding]
    run.do(ev.WorkerBanned("named", "by hand"))
    run.do(ev.WorkerLeft("invited"))
    pause_ms = newcomers.pause_ms(run.state, "theirs", run.now_ms)
    forgotten = []
    for number in range(20):
        run.join(f"key {number}", network="theirs")
        run.granted(f"key {number}", 0)
        forgotten += run.do(ev.WorkerLeft(f"key {number}"))
        invariants.check_invariants(run.state)
    assert "cheat" not in run.state.workers
    assert run.state.evidence == []
    assert BundleForgotten(deciding) not in forgotten, "it is deleted with its step"
    assert {"named", "invited"} <= run.state.workers.keys(), "whom the operator named or let in"
    assert newcomers.pause_ms(run.state, "theirs", run.now_ms) == pause_ms > 0
    assert run.state.invites == {"ab" * 16: 1}
