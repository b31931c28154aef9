"""From the turns of a rollout to training samples: best-effort interleaving.

A multi-turn rollout is recorded as independent requests and answers. Most often the prompt of a turn is the whole
conversation so far plus something new. Then both turns are one sample, and the text between two answers is masked.
Otherwise (thinking was stripped, the context was compacted, a sub-agent has a context of its own), a new sample begins.
Nothing is rendered or tokenised again: every sampled token is trained exactly once, after exactly the tokens that
preceded it when it was sampled.

The rule is prime-rl's: of the existing samples whose tokens are a prefix of the turn's prompt, the longest one is
continued; of two equally long ones, the older one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prime_protocol.turns import Turn


@dataclass(frozen=True, slots=True)
class Interleaved:
    """One sample: the first turn's prompt, and everything after it."""

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Logprobs (nats); 0 on tokens that were not sampled."""
    loss_mask: tuple[bool, ...]
    """True on sampled tokens."""
    turns: tuple[int, ...]
    """Turns in this sample, by their index in the rollout."""


def interleave(turns: Sequence[Turn]) -> list[Interleaved]:
    """Return the samples of one rollout, in the order of their first turns.

    A turn without an answer trains nothing and is left out.
    """
    samples: list[_Sample] = []
    for index, turn in enumerate(turns):
        if not turn.completion.token_ids:
            continue
        prefixes = (sample for sample in samples if sample.is_prefix_of(turn.prompt_token_ids))
        sample = max(prefixes, key=lambda sample: len(sample.token_ids), default=None)
        if sample is None:
            sample = _Sample(num_prompt_tokens=len(turn.prompt_token_ids), token_ids=list(turn.prompt_token_ids))
            samples.append(sample)
        sample.add(index, turn)
    return [sample.finished() for sample in samples]


@dataclass
class _Sample:
    num_prompt_tokens: int
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def is_prefix_of(self, prompt_token_ids: tuple[int, ...]) -> bool:
        return list(prompt_token_ids[: len(self.token_ids)]) == self.token_ids

    def add(self, index: int, turn: Turn) -> None:
        environment_ids = turn.prompt_token_ids[len(self.token_ids) :]  # from the environment or a tool
        self.token_ids += (*environment_ids, *turn.completion.token_ids)
        self.logprobs += (*(0.0 for _ in environment_ids), *turn.completion.logprobs)
        self.loss_mask += (*(False for _ in environment_ids), *(True for _ in turn.completion.logprobs))
        self.turns.append(index)

    def finished(self) -> Interleaved:
        return Interleaved(
            prompt_token_ids=tuple(self.token_ids[: self.num_prompt_tokens]),
            completion_token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            logprobs=tuple(self.logprobs),
            loss_mask=tuple(self.loss_mask),
            turns=tuple(self.turns),
        )
