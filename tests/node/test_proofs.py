"""Hidden-state proofs from engine to verdict, and each wrong proof."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from tests.node.proofs_world import LEASE, RUN
from tests.node.validator_world import LeasedPrompts, LetterTokenizer, judge_bundle, make_bundle
from tests.node.worker_world import make_run
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.engines.hidden_rows import SLACK, HiddenRows, bf16_bits
from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.ports.engine import GenerateRequest
from prime_node.validator.judge import Judgement, OpenedBundle, open_bundle
from prime_node.worker.generating import requests_for
from prime_protocol.proof import build_proofs
from prime_protocol.rollout import Rollouts, rollouts_for
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import RejectReason

Proofs = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("model"), hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128
    )


@pytest_asyncio.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(folder)
    await made.load(initial_weights(folder, 0), policy_version=0)
    yield made
    await made.close()


def proving() -> list[GenerateRequest]:
    return [replace(each, proofs=True) for each in requests_for(LEASE)]


async def sampled(engine: TransformersEngine) -> Rollouts:
    return rollouts_for(LEASE, await engine.generate(proving(), LEASE.sampling))


async def judge(engine: TransformersEngine, rollouts: Rollouts, run: PinnedRun = RUN) -> Judgement:
    opened = open_bundle(make_bundle(LEASE, rollouts), LEASE, run)
    if not isinstance(opened, OpenedBundle):
        return opened
    toys = {"toy": LeasedPrompts(LEASE)}
    return await judge_bundle(opened, engine, run=run, environments=toys, tokenizer=LetterTokenizer())


async def test_an_honest_bundle_with_its_proofs_is_accepted(engine: TransformersEngine) -> None:
    rollouts = await sampled(engine)
    assert rollouts.proofs_CB is not None
    assert len(rollouts.proofs_CB) > len(rollouts), "some completion has two chunks"
    judgement = await judge(engine, rollouts)
    assert judgement.verdict.accepted
    assert judgement.measured["proof_error_max"] < 0.1


def _of_nothing(proofs: Proofs) -> Proofs:
    """Return a polynomial that is 0 everywhere."""
    zeros = np.zeros_like(proofs)
    zeros[:, :2] = proofs[:, :2]
    return zeros


def _one_changed(proofs: Proofs) -> Proofs:
    changed = proofs.copy()
    changed[3, 101] ^= 1
    return changed


@pytest.mark.parametrize(
    "forge",
    [_of_nothing, _one_changed, lambda proofs: proofs[::-1], lambda proofs: np.roll(proofs, 1, axis=0)],
    ids=["zeros", "one byte of one proof", "another order", "copied from the neighbour"],
)
async def test_7_proofs_of_other_hidden_states_are_refused(
    forge: Callable[[Proofs], Proofs], engine: TransformersEngine
) -> None:
    rollouts = await sampled(engine)
    assert rollouts.proofs_CB is not None
    judgement = await judge(engine, replace(rollouts, proofs_CB=forge(rollouts.proofs_CB)))
    assert judgement.verdict.reason is RejectReason.PROOF_MISMATCH


async def test_7_right_tokens_and_logprobs_with_the_proofs_of_other_weights_are_refused(
    engine: TransformersEngine, folder: Path
) -> None:
    rollouts = await sampled(engine)
    other = TransformersEngine(folder)
    await other.load(initial_weights(folder, 1), policy_version=0)
    forged = replace(rollouts, proofs_CB=(await sampled(other)).proofs_CB)
    lengths = rollouts.lengths_N.tolist()
    assert forged.proofs_CB is not None
    fitting = np.resize(forged.proofs_CB, (sum(-(-length // 32) for length in lengths), 258))
    assert (await judge(engine, replace(rollouts, proofs_CB=fitting))).verdict.reason is RejectReason.PROOF_MISMATCH
    await other.close()


async def test_proofs_are_there_exactly_where_the_run_asks_for_them(engine: TransformersEngine) -> None:
    rollouts = await sampled(engine)
    assert rollouts.proofs_CB is not None
    for bad in (None, rollouts.proofs_CB[:-1], np.concatenate([rollouts.proofs_CB, rollouts.proofs_CB[:1]])):
        judgement = await judge(engine, replace(rollouts, proofs_CB=bad))
        assert judgement.verdict.reason is RejectReason.MALFORMED
    asks_for_none = make_run(vocab_size=264, sampling=RUN.spec.sampling)
    assert (await judge(engine, rollouts, asks_for_none)).verdict.reason is RejectReason.MALFORMED
    assert (await judge(engine, replace(rollouts, proofs_CB=None), asks_for_none)).verdict.accepted


async def test_a_cancelled_call_keeps_no_rows(engine: TransformersEngine) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.generate(proving(), LEASE.sampling), timeout=0.001)
    assert (await judge(engine, await sampled(engine))).verdict.accepted


# The rows of completions in the making


def filled(rows: HiddenRows, hidden: torch.Tensor, name: Hashable = "a", *, start: int = 0) -> None:
    for position, row in enumerate(hidden, start):
        rows.add([name, None], [position, position], torch.stack([row, -row]))


def test_rows_give_the_proofs_of_the_whole_completion_however_they_came() -> None:
    hidden = torch.randn(75, 16)
    expected = build_proofs(bf16_bits(hidden), [75]).tobytes()
    straight, redone = HiddenRows(), HiddenRows()
    filled(straight, hidden)
    filled(redone, torch.cat([hidden[:30], -hidden[30 : 32 + SLACK]]))
    filled(redone, hidden[30:], start=30)  # the tokens from the 30th on were dropped and sampled again
    assert straight.take({"a": 75}) == redone.take({"a": 75}) == {"a": expected}
    assert straight.take({"a": 0}) == {"a": b""}, "nothing is kept"


def test_rows_beyond_the_completions_end_do_not_count() -> None:
    hidden = torch.randn(40, 16)
    rows = HiddenRows()
    filled(rows, hidden)
    assert rows.take({"a": 33})["a"] == build_proofs(bf16_bits(hidden[:33]), [33]).tobytes()


def test_rows_of_many_completions_do_not_mix_and_dropped_ones_are_removed() -> None:
    first, second = torch.randn(50, 16), torch.randn(41, 16)
    rows = HiddenRows()
    filled(rows, first, "first")
    filled(rows, second, "second")
    filled(rows, first, "third")
    rows.drop(["third", "unknown"])
    expected = {"first": build_proofs(bf16_bits(first), [50]).tobytes(), "third": b""}
    assert rows.take({"first": 50, "third": 0}) == expected
    assert rows.take({"second": 41})["second"] == build_proofs(bf16_bits(second), [41]).tobytes()
