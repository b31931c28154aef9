"""Golden vectors of rollouts of several turns. See make_vectors.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prime_protocol.assignment import Lease
from prime_protocol.errors import ErrorCode
from prime_protocol.rollout import Completion, FinishReason, pack_body
from prime_protocol.turns import Turn, rollouts_of_turns, turn_seed
from vectors.folder import Case, Folder

STOP = 257


def turns(folder: Folder, lease: Lease) -> None:
    """Return four rollouts: one turn; two, the second of which continues; three, the last of which restarts; an answer to another
    prompt."""

    def answer(*tokens: int) -> Completion:
        return Completion((*tokens, STOP), (-0.5,) * (len(tokens) + 1), FinishReason.STOP)

    prompts = [group.prompt_token_ids for group in lease.groups for _ in group.seeds]
    first = [Turn(prompt, answer(number)) for number, prompt in enumerate(prompts)]
    second = Turn((*prompts[1], 1, STOP, 7, 8), answer(9))
    third = Turn((*prompts[2], 2, STOP, 5), answer())
    rollouts = rollouts_of_turns(
        lease, [[first[0]], [first[1], second], [first[2], third, Turn((9, 9), answer(6))], [Turn((1,), answer(2))]]
    )
    assert rollouts.turns_N3 is not None
    body, size = pack_body(rollouts)
    base: Case = {"prompts": prompts, "num_rollouts": lease.num_rollouts}
    expect = [
        [[list(turn.prompt_token_ids), list(turn.completion.token_ids)] for turn in episode]
        for episode in (
            [first[0]],
            [first[1], second],
            [first[2], third, Turn((9, 9), answer(6))],
            [Turn((1,), answer(2))],
        )
    ]

    def spoilt(place: int, column: int, value: int) -> Case:
        rows = np.array(rollouts.turns_N3)
        rows[place, column] = value
        changed, length = pack_body(replace(rollouts, turns_N3=rows))
        return {"hex": changed.hex(), "size": length, "error": ErrorCode.MALFORMED}

    folder.cases(
        "turns",
        [
            base | {"name": "one to three turns", "hex": body.hex(), "size": size, "expect": expect},
            base | {"name": "a rollout is missing"} | spoilt(0, 0, 1),
            base | {"name": "rollouts in another order"} | spoilt(3, 0, 0),
            base | {"name": "more new tokens than there are"} | spoilt(-1, 2, 3),
            base | {"name": "more kept than was said"} | spoilt(2, 1, 50),
        ],
    )
    folder.cases(
        "turn_seed",
        [
            {"name": f"seed {seed}, turn {turn}", "seed": seed, "turn": turn, "expect": turn_seed(seed, turn)}
            for seed in (0, 7, 2**63 - 1)
            for turn in (0, 1, 2, 1_023)
        ],
    )
