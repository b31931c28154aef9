"""The piece picker: everything arrives, duplicates are rare, and rare pieces come first."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_node.broadcast.swarm.picker import Picker, PickerRules
from prime_node.broadcast.swarm.piece_sets import PieceCounts, any_of, members, piece_set, runs, span

numbers = st.sets(st.integers(0, 40))


def picker(num_pieces: int, *, seed: int = 0, size: int = 100, rules: PickerRules | None = None) -> Picker:
    return Picker([size] * num_pieces, rng=random.Random(seed), rules=rules)


def picks(of: Picker, name: str, *, now_s: float = 0.0) -> list[int]:
    """Return everything that one source is asked for at once."""
    found = []
    while (piece := of.pick(name, now_s)) is not None:
        found.append(piece)
    return found


def give(of: Picker, name: str, *, rate: float, until_s: float, now_s: float = 0.0) -> float:
    """Simulate a source that answers one request after another at `rate` pieces per second."""
    while now_s < until_s and (piece := of.pick(name, now_s)) is not None:
        now_s += 1 / rate
        of.arrived(name, piece, now_s)
    return now_s


# Sets and counts


@given(numbers)
def test_a_set_is_its_members_and_its_runs(chosen: set[int]) -> None:
    made = piece_set(chosen)
    assert list(members(made)) == sorted(chosen)
    assert sum(span(start, end) for start, end in runs(made)) == made
    assert all(end < start for (_, end), (start, _) in zip(runs(made), runs(made)[1:], strict=False))


@given(numbers.filter(bool), st.integers())
def test_a_random_member_is_a_member(chosen: set[int], seed: int) -> None:
    assert any_of(piece_set(chosen), random.Random(seed)) in chosen


@given(st.lists(numbers, max_size=12), st.data())
def test_counts_are_those_of_a_plain_counter(held: list[set[int]], data: st.DataObject) -> None:
    counts = PieceCounts()
    for one in held:
        counts.add(piece_set(one))
    kept = []
    for one in held:
        if data.draw(st.booleans()):
            kept.append(one)
        else:
            counts.remove(piece_set(one))
    plain = Counter(number for one in kept for number in one)
    assert set(members(counts.is_held())) == set(plain)
    asked = data.draw(numbers.filter(bool))
    fewest = min(plain[number] for number in asked)
    assert set(members(counts.rarest(piece_set(asked)))) == {number for number in asked if plain[number] == fewest}


# Choice of requests


def test_the_rarest_piece_is_asked_for_first() -> None:
    of = picker(8)
    of.add("all", has=span(0, 8))
    of.add("most", has=span(1, 8))
    assert picks(of, "all")[0] == 0


def test_nothing_is_asked_of_two_sources_while_there_is_other_work() -> None:
    of = picker(64)
    for name in ("a", "b", "c"):
        of.add(name, has=span(0, 64))
    asked = [piece for name in ("a", "b", "c") for piece in picks(of, name)]
    assert len(set(asked)) == len(asked) == 6


def test_a_source_is_asked_for_what_it_has_only() -> None:
    of = picker(8)
    of.add("a", has=piece_set([3]))
    assert picks(of, "a") == [3]


def test_equally_rare_pieces_come_from_ones_own_share_first() -> None:
    of = Picker([100] * 40, rng=random.Random(1), share=(0.25, 0.5))
    of.add("origin", has=span(0, 40))
    first = [of.pick("origin", 0.0) for _ in range(2)]
    assert set(first) <= set(range(10, 20))


def test_receivers_with_shares_of_their_own_ask_the_origin_for_different_pieces() -> None:
    asked: list[int] = []
    for place in range(4):
        of = Picker([100] * 40, rng=random.Random(place), share=(place / 4, (place + 1) / 4))
        of.add("origin", has=span(0, 40))
        for _ in range(10):
            piece = of.pick("origin", 0.0)
            assert piece is not None
            of.arrived("origin", piece, 0.1)
            asked.append(piece)
    assert len(set(asked)) == 40


def test_a_fallback_gives_only_what_no_peer_has() -> None:
    of = picker(4)
    of.add("peer", has=piece_set([0, 1, 2]))
    of.add("origin", has=span(0, 4), is_web_seed=True)
    assert picks(of, "origin") == [3]


def test_a_source_far_below_the_others_gives_only_what_no_other_has() -> None:
    of = picker(100)
    of.add("fast", has=span(0, 99))
    of.add("slow", has=span(0, 100))
    give(of, "slow", rate=1, until_s=1.0)
    give(of, "fast", rate=100, until_s=1.0)
    assert picks(of, "slow", now_s=1.0) in ([99], [])
    assert 99 in members(of.have) or "slow" not in of.idle()


def test_pieces_that_only_slow_sources_have_are_asked_of_them_and_of_a_fallback() -> None:
    for is_web_seed in (True, False):
        of = picker(100)
        of.add("fast", has=span(0, 100 if is_web_seed else 50), is_web_seed=is_web_seed)
        give(of, "fast", rate=100, until_s=0.4)
        for slow in ("slow", "slower"):
            of.add(slow, has=of.missing)
            give(of, slow, rate=0.5, until_s=2.0)
        give(of, "fast", rate=100, until_s=9.0, now_s=4.0)
        for slow in ("slow", "slower", "slow"):  # each is found to be slow when it is its turn
            picks(of, slow, now_s=9.0)
        assert not {"slow", "slower"}.intersection(of.idle())
        give(of, "fast", rate=100, until_s=20.0, now_s=9.0)
        assert (of.unasked == 0) == is_web_seed


@pytest.mark.parametrize(("size", "most"), [(2**20, 4), (2**16, 32)])
def test_a_fast_source_far_away_gets_many_requests_at_once_and_more_of_small_pieces(size: int, most: int) -> None:
    of = picker(400, size=size, rules=PickerRules(rate_memory_s=0.1))
    of.add("far", has=span(0, 400))
    asked: list[tuple[float, int]] = []  # answered 0.2 s after the request, however many are open
    now_s, widest = 0.0, 0
    while not of.is_done:
        asked += [(now_s + 0.2, piece) for piece in picks(of, "far", now_s=now_s)]
        widest = max(widest, len(asked))
        now_s, piece = asked.pop(0)
        of.arrived("far", piece, now_s)
    assert widest == most


def test_the_first_source_far_away_is_used_fully_within_a_second() -> None:
    of = picker(400, size=2**16)
    of.add("far", has=span(0, 400))
    asked: list[tuple[float, int]] = []
    now_s, free_s = 0.0, 0.0
    while now_s < 1.0:
        for piece in picks(of, "far", now_s=now_s):
            free_s = max(free_s, now_s + 0.1) + 2**16 / 10e6  # a round trip of 0.1 s, 10 MB/s
            asked.append((free_s, piece))
        now_s, piece = asked.pop(0)
        of.arrived("far", piece, now_s)
    assert len(asked) * 2**16 >= 0.1 * 10e6


def test_new_sources_are_asked_for_half_a_megabyte_together_and_each_for_a_piece() -> None:
    for num_sources, expected in ((1, 8), (4, 2), (13, 1)):
        of = picker(400, size=2**16)
        for number in range(num_sources):
            of.add(str(number), has=span(0, 400))
        assert len(picks(of, "0")) == expected


# The end game


def test_the_last_pieces_of_a_slow_source_are_taken_over() -> None:
    of = picker(20)
    of.add("slow", has=span(0, 20))
    of.add("fast", has=span(0, 20))
    give(of, "slow", rate=1, until_s=1.0)
    stuck = of.pick("slow", 1.0)  # and it is never answered
    give(of, "fast", rate=20, until_s=60.0, now_s=1.0)
    assert stuck is not None
    assert list(members(of.missing)) == [stuck]
    assert give(of, "fast", rate=20, until_s=60.0, now_s=2.2) < 2.3
    assert of.is_done
    assert "slow" in of.idle()


def test_a_fallback_takes_over_what_is_late_but_only_what_is_very_late_while_other_pieces_are_unasked() -> None:
    for num_unasked, late_s in ((0, 0.1), (5, 2.1)):
        of = picker(4 + num_unasked, rules=PickerRules(first_bytes=0, in_flight_max=1, in_flight_bytes=0))
        of.add("peer", has=of.missing & ~1)
        of.add("origin", has=of.missing, is_web_seed=True)
        give(of, "origin", rate=10, until_s=0.1)
        give(of, "peer", rate=1, until_s=2.0)
        stuck = of.pick("peer", 2.0)  # expected within a second
        assert of.unasked.bit_count() == num_unasked
        assert of.pick("origin", 3.0 + late_s - 0.2) is None
        assert of.pick("origin", 3.0 + late_s) == stuck


def test_peers_that_claim_everything_and_give_nothing_do_not_keep_a_receiver_from_the_fallback() -> None:
    claimers = [f"claims-{number}" for number in range(16)]
    of = picker(256, size=2**18)
    of.add("origin", has=of.missing, is_web_seed=True)
    for name in claimers:
        of.add(name, has=of.missing)
    now_s = 0.0
    while not of.is_done and now_s < 60.0:
        for name in claimers:
            picks(of, name, now_s=now_s)
        now_s = max(now_s + 0.1, give(of, "origin", rate=100, until_s=now_s + 0.1, now_s=now_s))
    assert now_s < 10.0


def test_a_peer_that_was_late_is_believed_again_once_it_gives_something() -> None:
    of = picker(8, rules=PickerRules(first_bytes=0))
    of.add("peer", has=span(4, 8))
    of.add("other", has=span(0, 4))
    of.add("origin", has=of.missing, is_web_seed=True)
    asked = picks(of, "peer")
    give(of, "other", rate=10, until_s=60.0)
    assert of.pick("origin", 3.0) in asked
    assert of.pick("origin", 3.0) not in asked
    of.arrived("peer", asked[0], 3.1)
    assert of.pick("origin", 3.1) is None


def test_peers_that_together_need_seconds_for_a_piece_do_not_set_the_pace_where_a_fallback_is_faster() -> None:
    of = picker(128, size=2**18)
    of.add("home", has=of.missing)
    of.add("origin", has=of.missing, is_web_seed=True)
    now_s = coming_s = 0.0
    while not of.is_done and now_s < 60.0:
        coming_s = give(of, "home", rate=0.5, until_s=now_s + 0.1, now_s=coming_s)
        now_s = max(now_s + 0.1, give(of, "origin", rate=50, until_s=now_s + 0.1, now_s=now_s))
    assert now_s < 10.0


def test_a_fallback_gives_nothing_where_two_slow_peers_together_bring_more_than_a_piece_a_second() -> None:
    of = picker(128, size=2**18)
    of.add("origin", has=of.missing, is_web_seed=True)
    for name in ("home", "other"):
        of.add(name, has=of.missing)
        give(of, name, rate=0.6, until_s=1.0)
    assert of.pick("origin", 2.0) is None


def test_a_piece_that_is_a_little_late_is_taken_over_at_the_end_and_not_while_others_are_unasked() -> None:
    for num_unasked in (0, 1):
        of = picker(4 + num_unasked, rules=PickerRules(first_bytes=0, in_flight_max=1, in_flight_bytes=0))
        of.add("third", has=of.missing)
        for name, rate in (("late", 1.0), ("fast", 1 / 0.55)):
            of.add(name, has=span(0, 4))
            give(of, name, rate=rate, until_s=0.1)
        late = of.pick("late", 2.0)  # expected within a second
        give(of, "fast", rate=1 / 0.55, until_s=60.0, now_s=2.0)
        assert of.unasked.bit_count() == num_unasked
        assert of.pick("fast", 3.2) == (None if num_unasked else late)


def test_a_piece_that_is_about_to_arrive_is_not_asked_for_again() -> None:
    of = picker(4)
    for name in ("a", "b"):
        of.add(name, has=span(0, 4))
        give(of, name, rate=10, until_s=0.05)
    assert of.idle() == ["a", "b"]
    assert of.pick("a", 1.0) is not None
    assert of.pick("a", 1.0) is not None
    assert of.pick("b", 1.0) is None


def test_other_sources_of_a_request_are_named_when_the_piece_arrives() -> None:
    of = picker(3)
    of.add("slow", has=span(0, 3))
    of.add("fast", has=span(0, 3))
    give(of, "slow", rate=5, until_s=0.1)
    give(of, "fast", rate=50, until_s=0.01)
    (last,) = members(of.missing)
    assert of.pick("slow", 1.0) == last
    assert of.pick("fast", 1.0) == last
    assert of.arrived("fast", last, 1.1) == ("slow",)
    assert of.is_done


def test_a_piece_that_did_not_come_is_asked_of_another() -> None:
    of = picker(1)
    of.add("liar", has=1)
    of.add("honest", has=1)
    assert of.pick("liar", 0.0) == 0
    of.missed("liar", 0)
    assert of.pick("honest", 0.0) == 0


def test_what_a_lost_source_was_asked_for_is_free_again() -> None:
    of = picker(2)
    of.add("gone", has=0b11)
    of.add("there", has=0b11)
    assert len(picks(of, "gone")) == 2
    of.remove("gone")
    assert sorted(picks(of, "there")) == [0, 1]


def test_what_is_on_the_disk_is_not_asked_for() -> None:
    of = Picker([100] * 4, rng=random.Random(0), have=piece_set([0, 2]))
    of.add("a", has=span(0, 4))
    assert sorted(picks(of, "a")) == [1, 3]


# Everything at once


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=40),
    rates=st.lists(st.floats(1.0, 1e6), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_every_download_ends_whatever_the_sources_do(sizes: Sequence[int], rates: list[float], seed: int) -> None:
    """Sources announce, fail, lie and vanish at random. The last one has everything and is honest."""
    rng, now_s = random.Random(seed), 0.0
    of = Picker(sizes, rng=random.Random(seed))
    fallbacks = {number for number, _ in enumerate(rates) if rng.random() < 0.2}
    for number, _ in enumerate(rates):
        of.add(str(number), is_web_seed=number in fallbacks)
    of.has(str(len(rates) - 1), of.missing)
    asked: dict[str, set[int]] = {name: set() for name in of.sources}
    for _ in range(200 * len(sizes) + 1000):
        if of.is_done:
            break
        name = rng.choice(of.sources)
        honest = name == str(len(rates) - 1)
        now_s += rng.random()
        match rng.randrange(6):
            case 0 if not honest:
                of.has(name, rng.getrandbits(len(sizes)))
            case 1 if not honest and rng.random() < 0.05:
                of.remove(name)
                asked[name].clear()
            case _:
                if (picked := of.pick(name, now_s)) is not None:
                    asked[name].add(picked)
                for piece in list(asked[name]):
                    if honest or rng.random() < 0.5:
                        others = of.arrived(name, piece, now_s)
                        assert set(others) == {one for one in of.sources if piece in asked[one]} - {name}
                        for one in (name, *others):
                            asked[one].remove(piece)
                    elif rng.random() < 0.5:
                        of.missed(name, piece)
                        asked[name].remove(piece)
        assert of.idle() == [one for one in of.sources if not asked[one]]
        open_now = [piece for pieces_of in asked.values() for piece in pieces_of]
        assert not any(1 << piece & of.have for piece in open_now)
        copies_max = len(rates) if fallbacks else PickerRules().copies_max  # a fallback shows which source is too slow
        assert all(count <= copies_max for count in Counter(open_now).values())
    assert of.is_done
