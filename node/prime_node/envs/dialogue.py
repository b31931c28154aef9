"""A multi-turn environment in which a partner answers the model.

The partner's text is a user message. Prompts extend the sampled tokens if the renderer allows it. Otherwise (for
example, if a template strips thinking from earlier answers) the conversation is rendered again, and a new sample
begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prime_node.envs.partners import Partner
from prime_node.envs.source import SourceProblem
from prime_node.envs.split import HeldOutInSplit, Judge, SplitEnvironment
from prime_node.ports.environment import Ask, HeldOutProblem
from prime_node.ports.renderer import Message, Renderer
from prime_protocol.rollout import FinishReason

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Player of one problem's conversation."""

    judge: Judge
    partner: Partner
    renderer: Renderer

    async def credit(self, problem: SourceProblem, prompt_token_ids: TokenIds, ask: Ask) -> float:
        """Play the conversation and return the credit of its last answer."""
        answer, finished = await self._last_answer(problem, prompt_token_ids, ask)
        return 0.0 if answer is None else self.judge.credit(problem, answer, finished=finished)

    async def parts(self, problem: SourceProblem, prompt_token_ids: TokenIds, ask: Ask) -> Mapping[str, float]:
        """Play the conversation and return the further rewards of its last answer."""
        answer, finished = await self._last_answer(problem, prompt_token_ids, ask)
        return {} if answer is None else self.judge.parts(problem, answer, finished=finished)

    async def _last_answer(
        self, problem: SourceProblem, prompt_token_ids: TokenIds, ask: Ask
    ) -> tuple[str | None, bool]:
        """Return the last answer, None if there is none, and whether it ended with a stop token."""
        messages: list[Message] = [{"role": "user", "content": self.judge.frame.ask(problem.question)}]
        answers: list[str] = []
        prompt, finished = prompt_token_ids, False
        while (completion := await ask(prompt)) is not None:
            response = self.renderer.parse_response(completion.token_ids)
            answers.append(response.content)
            finished = completion.finish is FinishReason.STOP
            reply = self.partner(problem, answers, self._grade) if finished else None
            if reply is None:
                break
            new: list[Message] = [{"role": "user", "content": reply}]
            messages += [response.message, *new]
            bridged = self.renderer.bridge_to_next_turn(prompt, completion.token_ids, new)
            prompt = tuple(bridged if bridged is not None else self.renderer.render_ids(messages))
        return (answers[-1] if answers else None), finished

    def _grade(self, problem: SourceProblem, answer: str) -> float:
        return self.judge.credit(problem, answer, finished=True)


class DialogueEnvironment(SplitEnvironment):
    """Implementation of ports.environment.PartedTurnEnvironment with a partner."""

    def __init__(self, judge: Judge, *, seed: int, partner: Partner, renderer: Renderer) -> None:
        super().__init__(judge, seed=seed)
        self._conversation = Conversation(judge, partner, renderer)

    async def play(self, index: int, prompt_token_ids: TokenIds, ask: Ask) -> float:
        """Play one rollout of training problem `index` and return its reward."""
        credit = await self._conversation.credit(self.problem(index), prompt_token_ids, ask)
        return self.judge.worth(credit)

    async def play_parts(self, index: int, prompt_token_ids: TokenIds, ask: Ask) -> Mapping[str, float]:
        """Play one rollout of training problem `index` and return its further rewards."""
        return await self._conversation.parts(self.problem(index), prompt_token_ids, ask)

    def held_out(self, count: int) -> Sequence[HeldOutProblem]:
        """Return different held-out problems; fewer than `count` if the source has no more."""
        return [HeldOutDialogue(self.judge, found.problem, self._conversation) for found in self.drawn_held_out(count)]


@dataclass(frozen=True, slots=True)
class HeldOutDialogue(HeldOutInSplit):
    """Implementation of ports.environment.TurnProblem."""

    conversation: Conversation

    async def play(self, prompt_token_ids: TokenIds, ask: Ask) -> float:
        """Play one rollout and return its reward."""
        return self.judge.worth(await self.conversation.credit(self.problem, prompt_token_ids, ask))
