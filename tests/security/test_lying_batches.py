"""A coordinator's batch that contradicts itself or the run's bounds is refused before anything of it is trained."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.builder import build_manifest
from tests.node.batch_coordinator import COORDINATOR, TRAINER, VALIDATOR, make_bundle, make_run

from prime_node.training_data.bundles import open_batch
from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import sign_manifest
from prime_protocol.replies import BatchGroup, TrainBatch
from prime_protocol.weights import WeightTensor

RUN = make_run()
WEIGHTS = {"w": WeightTensor("bf16", (4,), np.zeros(4, np.uint16))}
POLICY = sign_manifest(build_manifest(RUN, None, WEIGHTS, encode_checkpoint(WEIGHTS)), TRAINER)
GROUPS = make_bundle(RUN, 0, POLICY)[1]
Groups = tuple[BatchGroup, ...]


def opened(groups: Groups) -> TrainBatch:
    batch = TrainBatch(run=RUN.digest, step=0, groups=groups)
    return open_batch(seal(batch, PayloadType.BATCH, COORDINATOR), RUN, step=0)


def first(**changes: object) -> Callable[[Groups], Groups]:
    return lambda groups: (groups[0].model_copy(update=changes), *groups[1:])


def test_an_honest_batch_is_opened() -> None:
    assert opened(GROUPS).groups == GROUPS


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (first(logprobs="ab" * 32), "two workers or logprobs"),
        (first(worker=VALIDATOR.key_id), "two workers or logprobs"),
        (first(prompt_token_ids=()), "its prompt"),
        (first(prompt_token_ids=(RUN.spec.vocab_size,)), "its prompt"),
        (first(prompt_token_ids=(1,) * (RUN.spec.limits.prompt_tokens_max + 1)), "its prompt"),
    ],
    ids=["logprobs", "worker", "empty prompt", "token", "long prompt"],
)
def test_a_batch_that_contradicts_itself_or_the_run_is_refused(change: Callable[[Groups], Groups], named: str) -> None:
    """Before, logprobs that one group alone names made a worker's claims count as a validator's, without their bound."""
    with pytest.raises(RemoteError, match=named) as refused:
        opened(change(GROUPS))
    assert refused.value.code is ErrorCode.MALFORMED
