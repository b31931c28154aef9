"""Under the default policy cheating does not pay: not at any rate, not at a chosen moment."""

from __future__ import annotations

import pytest

from prime_lab.cheating import Strategy, after_audits, at_rate, once_trusted, play, with_little_at_stake
from prime_protocol.check_policy import AuditPolicy, CheckPolicy

DEFAULT = CheckPolicy(audits=AuditPolicy())
STRATEGIES = {
    "1 %": at_rate(0.01),
    "3 %": at_rate(0.03),
    "10 %": at_rate(0.1),
    "30 %": at_rate(0.3),
    "always": at_rate(1.0),
    "once it is hardly audited": once_trusted(64),
    "as soon as not all is audited": once_trusted(17),
    "right after an audit": after_audits,
    "with little at stake": with_little_at_stake(2),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize(("cost", "detection"), [(0.5, 1.0), (0.9, 1.0), (0.5, 0.5)])
def test_no_way_of_cheating_gains(strategy: Strategy, cost: float, detection: float) -> None:
    outcome = play(strategy, DEFAULT, cost=cost, detection=detection, num_lives=80, seed=1)
    assert outcome.cheated > 0
    assert outcome.gain + 3 * outcome.gain_error < 0


@pytest.mark.parametrize("detection", [1.0, 0.5])
def test_the_best_of_four_in_one_bundle_of_twenty_pays_less_than_honest_work(detection: float) -> None:
    for work in (0.0, 4.0):  # even if the three other samples cost nothing, and if nothing did
        outcome = play(at_rate(0.05), DEFAULT, cost=0.5, detection=detection, work=work, num_lives=40, seed=1)
        assert outcome.gain + 3 * outcome.gain_error < 0
        assert outcome.poisoned < outcome.cheated


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize(("delay", "unjudged", "cost"), [(30, 0.0, 0.9), (0, 1.0, 0.5), (30, 1.0, 0.9)])
def test_no_way_of_cheating_gains_by_audits_that_are_slow_or_never_finished(
    strategy: Strategy, delay: int, unjudged: float, cost: float
) -> None:
    outcome = play(strategy, DEFAULT, cost=cost, unjudged=unjudged, delay=delay, num_lives=80, seed=1)
    assert outcome.cheated > 0
    assert outcome.gain + 3 * outcome.gain_error < 0


def test_honest_work_is_audited_less_and_less() -> None:
    assert play(at_rate(0.0), DEFAULT, cost=0.5, num_bundles=2_000, num_lives=5).audited < 0.3


def test_without_escrow_a_cheat_that_picks_its_moment_would_gain() -> None:
    """The model can show a gain: cheating loses because of the escrow, not because of the model."""
    audits = AuditPolicy.model_construct(share_min=0.25, newcomer_bundles=16, escrow_bundles=0)
    careless = DEFAULT.model_copy(update={"audits": audits})
    assert play(once_trusted(64), careless, cost=0.5, num_lives=80, seed=1).gain > 0
