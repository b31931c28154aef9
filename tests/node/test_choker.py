"""Serving slots: shared by contribution, never empty while a peer waits, and bounded."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from prime_node.broadcast.swarm.choker import Choker, ChokerRules, UploadTurn

MB = 2**20


def serve(choker: Choker, peers: dict[str, bool], *, answers: int, first_s: float = 0.0) -> Counter[str]:
    """Simulate peers that always want more; each answer is 1 MiB and takes 0.1 s. `peers` maps each to whether it is a member."""
    served: Counter[str] = Counter()
    owner = {}
    serving = []
    for number, peer in enumerate(peers):
        for extra in range(4):
            request = number * 1_000 + extra
            owner[request] = peer
            if choker.asked(peer, request, first_s, is_member=peers[peer]) is UploadTurn.NOW:
                serving.append(request)
    fresh = 10**6
    for step in range(answers):
        request = serving.pop(0)
        served[owner[request]] += 1
        now_s = first_s + 0.1 * (step + 1)
        fresh += 1
        owner[fresh] = owner[request]
        turn = choker.asked(owner[request], fresh, now_s, is_member=peers[owner[request]])
        assert turn is UploadTurn.WAIT
        following = choker.done(owner[request], MB, now_s)
        assert following is not None
        serving.append(following)
    return served


def test_peers_that_gave_nothing_get_the_same() -> None:
    served = serve(Choker(ChokerRules(slots=2)), {"a": True, "b": True, "c": True}, answers=90)
    assert max(served.values()) - min(served.values()) <= 4


def test_peers_that_gave_more_get_more_and_all_get_something() -> None:
    choker = Choker(ChokerRules(slots=1))
    choker.gave("giver", 400 * MB, 0.0)
    served = serve(choker, {"giver": True, "taker": True}, answers=100)
    assert served["giver"] > 5 * served["taker"] > 0


def test_strangers_get_little_while_members_ask() -> None:
    served = serve(Choker(ChokerRules(slots=1)), {"member": True, "stranger": False}, answers=100)
    assert served["member"] > 5 * served["stranger"] > 0


def test_what_was_given_is_forgotten_in_time() -> None:
    choker = Choker(ChokerRules(slots=1))
    choker.gave("once", 400 * MB, 0.0)
    served = serve(choker, {"once": True, "other": True}, answers=60, first_s=3_600.0)
    assert abs(served["once"] - served["other"]) <= 4


def test_requests_that_wait_are_bounded_per_peer_and_in_all() -> None:
    choker = Choker(ChokerRules(slots=1, waiting_max=3, waiting_per_peer_max=2))
    turns = [choker.asked(peer, number, 0.0) for number, peer in enumerate("aaaabbb")]
    assert turns == [
        UploadTurn.NOW,
        UploadTurn.WAIT,
        UploadTurn.WAIT,
        UploadTurn.REFUSED,
        UploadTurn.WAIT,
        UploadTurn.REFUSED,
        UploadTurn.REFUSED,
    ]


def test_a_request_that_is_wanted_no_more_gives_its_place_up() -> None:
    choker = Choker(ChokerRules(slots=1))
    choker.asked("a", 1, 0.0)
    choker.asked("b", 2, 0.0)
    choker.asked("c", 3, 0.0)
    choker.withdrawn("b", 2)
    assert choker.done("a", MB, 1.0) == 3
    assert choker.done("c", MB, 2.0) is None
    assert choker.serving == 0


def test_strangers_leave_slots_to_members_however_slowly_they_read() -> None:
    choker = Choker(ChokerRules(slots=4))
    turns = [choker.asked("?", number, 0.0, is_member=False) for number in range(4)]
    assert turns == [UploadTurn.NOW, UploadTurn.NOW, UploadTurn.WAIT, UploadTurn.WAIT]
    assert choker.asked("a", 4, 0.0) is UploadTurn.NOW
    assert choker.done("a", MB, 1.0) is None
    assert choker.done("?", MB, 1.0) == 2


def test_many_members_of_one_network_have_a_share_of_the_slots_and_of_the_room_to_wait() -> None:
    choker = Choker(ChokerRules(slots=8, waiting_max=16, waiting_per_network_max=3))
    turns = [choker.asked(f"a{number}", number, 0.0, network="a") for number in range(7)]
    assert turns == [UploadTurn.NOW] * 2 + [UploadTurn.WAIT] * 3 + [UploadTurn.REFUSED] * 2
    strangers = [choker.asked("?", 10 + number, 0.0, is_member=False) for number in range(5)]
    assert strangers == [UploadTurn.NOW] * 4 + [UploadTurn.WAIT]
    assert choker.asked("b", 20, 0.0, network="b") is UploadTurn.NOW
    assert choker.done("b", MB, 1.0) is None, "the slot stays free for others"
    assert choker.done("a0", MB, 1.0) in (2, 3, 4)
    assert choker.done("a1", MB, 1.0) in (2, 3, 4)
    assert choker.asked("a0", 30, 1.0, network="a") is UploadTurn.WAIT


def test_slow_readers_of_four_networks_leave_slots_to_others() -> None:
    """Before, they held all slots: keys are cheap where a run is open."""
    choker = Choker()
    slots, share = choker.rules.slots, int(choker.rules.slots * choker.rules.network_share)
    flood = [
        choker.asked(f"{place} of {network}", 0, 0.0, network=f"flood {network}")
        for network in range(4)
        for place in range(2 * share)
    ]
    assert flood.count(UploadTurn.NOW) == slots - share + 1, "the fourth network has one slot of the last share"
    turns = [choker.asked(f"friend {number}", 1, 0.0, network=f"home {number}") for number in range(share)]
    assert turns == [UploadTurn.NOW] * (share - 1) + [UploadTurn.WAIT]
    assert choker.done("friend 0", MB, 1.0) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=80))
def test_what_is_counted_by_network_comes_back(events: list[tuple[int, int]]) -> None:
    """This also holds if a peer's network changes while it is served."""
    choker = Choker(ChokerRules(slots=4, waiting_max=8))
    serving: list[str] = []
    waiting: dict[int, str] = {}
    for number, (peer, event) in enumerate(events):
        name = f"peer-{peer}"
        if event < 2:
            turn = choker.asked(name, number, float(number), network=f"net-{(peer + event) % 2}")
            if turn is UploadTurn.NOW:
                serving.append(name)
            elif turn is UploadTurn.WAIT:
                waiting[number] = name
        elif event == 2 and waiting:
            request, name = waiting.popitem()
            choker.withdrawn(name, request)
        elif serving and (following := choker.done(serving.pop(0), MB, float(number))) is not None:
            serving.append(waiting.pop(following))
        assert all(num <= 1 for num in choker.served_in.values())
    while serving:
        following = choker.done(serving.pop(0), MB, 1_000.0)
        if following is not None:
            serving.append(waiting.pop(following))
    assert not choker.served_in
    assert not choker.waiting_in
    assert not waiting


def test_one_answer_at_a_time_goes_to_a_member_and_several_to_strangers() -> None:
    choker = Choker(ChokerRules(slots=4))
    assert [choker.asked("a", number, 0.0) for number in (1, 2)] == [UploadTurn.NOW, UploadTurn.WAIT]
    assert choker.asked("b", 3, 0.0) is UploadTurn.NOW
    assert [choker.asked("?", number, 0.0, is_member=False) for number in (4, 5)] == [UploadTurn.NOW, UploadTurn.NOW]
    assert choker.done("b", MB, 1.0) is None
    assert choker.done("a", MB, 1.0) == 2


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=80), st.integers(1, 4), st.integers(1, 3))
def test_slots_are_never_exceeded_nor_left_empty_while_an_eligible_peer_waits(
    events: list[tuple[int, int]], slots: int, each: int
) -> None:
    choker = Choker(ChokerRules(slots=slots, each_max=each, waiting_max=8))
    owner: dict[int, str] = {}
    serving, waiting = set[int](), set[int]()
    for number, (peer, event) in enumerate(events):
        name = f"peer-{peer}"
        if event < 2:
            turn = choker.asked(name, number, float(number))
            owner[number] = name
            if turn is UploadTurn.NOW:
                serving.add(number)
            elif turn is UploadTurn.WAIT:
                waiting.add(number)
        elif serving:
            request = serving.pop()
            following = choker.done(owner[request], 1_000, float(number))
            if following is not None:
                waiting.remove(following)
                serving.add(following)
        assert choker.serving == len(serving) <= slots
        served = Counter(owner[request] for request in serving)
        assert max(served.values(), default=0) <= each
        assert len(serving) == slots or all(served[owner[request]] == each for request in waiting)
