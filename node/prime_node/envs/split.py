"""An Environment over any ProblemSource: the held-out split, the reward's mix, and the frame of question and answer.

A question whose sha256 is 0 modulo 8 is for evaluation, all others are for training. So the two never overlap, however
often a generator repeats itself and with any seed. Training problem `index` is found by drawing numbers from a hash of
(seed, index, attempt) until one is not held out; evaluation problems by counting through numbers of their own. Problem
HELD_OUT_START + n is evaluation problem n, so that leases can request it like any other.

    reward = exact_share * (credit == 1) + (1 - exact_share) * credit        0 if cut off, unless score_cut_off is set
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256

from prime_node.envs.source import ProblemSource, SourceProblem, parts_of
from prime_node.ports.environment import HeldOutProblem
from prime_protocol.assignment import HELD_OUT_START

HELD_OUT_MODULUS = 8
"""Modulus: one question of eight is held out."""
NUMBER_BYTES = 6
"""Bytes of a training problem's number: numbers are below 2**48."""
DRAWS_MAX = 10_000
"""Consecutive draws without a new problem after which a source counts as exhausted."""
EVALUATION_START = 10_000_000
"""First number of the evaluation's problems, whatever the seed of the run."""
CACHED_PROBLEMS = 4_096
HELD_OUT_CACHED = 256
"""Evaluation problems drawn at a time when one is requested by its number."""


def is_held_out(question: str) -> bool:
    """Return whether a question belongs to the evaluation."""
    return sha256(question.encode()).digest()[-1] % HELD_OUT_MODULUS == 0


@dataclass(frozen=True, slots=True)
class Frame:
    """Format of questions and answers. Example: Frame(suffix=" Answer in <answer> tags.", answer_tag="answer")."""

    prefix: str = ""
    """Text before each question."""
    suffix: str = ""
    """Text after each question."""
    answer_tag: str = ""
    """Tag of the answer: if set, the answer is the content of the last <tag>...</tag> of a completion, else the whole
    completion."""

    def ask(self, question: str) -> str:
        """Return the prompt's text for a question."""
        return f"{self.prefix}{question}{self.suffix}"

    def read(self, completion: str) -> str | None:
        """Return the answer in a completion, None if there is none."""
        if not self.answer_tag:
            return completion
        _, opening, rest = completion.rpartition(f"<{self.answer_tag}>")
        answer, closing, _ = rest.partition(f"</{self.answer_tag}>")
        return answer.strip() if opening and closing else None

    def write(self, answer: str) -> str:
        """Return a completion in which `read` finds this answer."""
        return f"<{self.answer_tag}>{answer}</{self.answer_tag}>" if self.answer_tag else answer


@dataclass(frozen=True, slots=True)
class Judge:
    """Scorer of completions."""

    source: ProblemSource
    frame: Frame = Frame()
    exact_share: float = 0.5
    """Share of the reward that only an exactly right answer gets; the rest is the source's partial credit."""

    score_cut_off: bool = False
    """Whether a completion that reached the length limit is scored like any other. Otherwise its reward is 0."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.exact_share <= 1.0:
            raise ValueError(f"exact_share must be between 0 and 1, got {self.exact_share}")

    def credit(self, problem: SourceProblem, completion: str, *, finished: bool) -> float:
        """Return the source's credit for a completion; 0 if it holds no answer, or was cut off and such are not scored."""
        answer = self.frame.read(completion) if finished or self.score_cut_off else None
        return 0.0 if answer is None else self.source.grade(problem, answer)

    def parts(self, problem: SourceProblem, completion: str, *, finished: bool) -> Mapping[str, float]:
        """Return the further rewards of a completion; none where it holds no answer. Raises ValueError if the source has none."""
        answer = self.frame.read(completion) if finished or self.score_cut_off else None
        return {} if answer is None else parts_of(self.source, problem, answer)

    def reward(self, problem: SourceProblem, completion: str, *, finished: bool) -> float:
        """Return the reward of a completion."""
        return self.worth(self.credit(problem, completion, finished=finished))

    def worth(self, credit: float) -> float:
        """Return the reward for a credit."""
        return self.exact_share * (credit == 1.0) + (1.0 - self.exact_share) * credit


class SplitEnvironment:
    """Implementation of ports.environment.Environment over a source."""

    def __init__(self, judge: Judge, *, seed: int) -> None:
        self.judge = judge
        self._seed = seed
        # The coordinator asks for a prompt, the validator for the same problem's score eight times.
        self.problem = lru_cache(CACHED_PROBLEMS)(self._draw)
        self._held_out: list[HeldOutInSplit] = []

    def prompt(self, index: int) -> str:
        """Return the prompt's text of problem `index`."""
        return self.judge.frame.ask(self.problem(index).question)

    def answer(self, index: int) -> str:
        """Return a completion with the reference answer."""
        return self.judge.frame.write(self.problem(index).answer)

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        """Return the reward of a completion for problem `index`."""
        return self.judge.reward(self.problem(index), completion, finished=finished)

    def parts(self, index: int, completion: str, *, finished: bool) -> Mapping[str, float]:
        """Return the further rewards of a completion for problem `index`."""
        return self.judge.parts(self.problem(index), completion, finished=finished)

    def held_out(self, count: int) -> Sequence[HeldOutProblem]:
        """Return different questions; fewer than `count` if the source has no more."""
        return self.drawn_held_out(count)

    def drawn_held_out(self, count: int) -> list[HeldOutInSplit]:
        """Draw different held-out problems; fewer than `count` if the source has no more."""
        found: dict[str, SourceProblem] = {}
        number = last_new = EVALUATION_START
        while len(found) < count and number - last_new < DRAWS_MAX:
            problem = self.judge.source.draw(number)
            if is_held_out(problem.question) and problem.question not in found:
                found[problem.question] = problem
                last_new = number
            number += 1
        return [HeldOutInSplit(self.judge, problem) for problem in found.values()]

    def _draw(self, index: int) -> SourceProblem:
        return self._draw_training(index) if index < HELD_OUT_START else self._nth_held_out(index - HELD_OUT_START)

    def _nth_held_out(self, number: int) -> SourceProblem:
        if number >= len(self._held_out):
            self._held_out = self.drawn_held_out(-(-(number + 1) // HELD_OUT_CACHED) * HELD_OUT_CACHED)
        if number >= len(self._held_out):
            raise ValueError(f"held-out problem {number} was requested, but this source has {len(self._held_out)}")
        return self._held_out[number].problem

    def _draw_training(self, index: int) -> SourceProblem:
        for attempt in range(DRAWS_MAX):
            digest = sha256(f"{self._seed} {index} {attempt}".encode()).digest()
            problem = self.judge.source.draw(int.from_bytes(digest[:NUMBER_BYTES], "big"))
            if not is_held_out(problem.question):
                return problem
        raise ValueError("this source has no training problems: every question that was drawn is held out")


@dataclass(frozen=True, slots=True)
class HeldOutInSplit:
    """Implementation of ports.environment.HeldOutProblem."""

    judge: Judge
    problem: SourceProblem

    @property
    def prompt(self) -> str:
        """Return the prompt's text."""
        return self.judge.frame.ask(self.problem.question)

    @property
    def answer(self) -> str:
        """Return the reference answer, in the format of a completion."""
        return self.judge.frame.write(self.problem.answer)

    def is_correct(self, completion: str, *, finished: bool) -> bool:
        """Return whether the completion gets full credit."""
        return self.judge.credit(self.problem, completion, finished=finished) == 1.0

    def score(self, completion: str, *, finished: bool) -> float:
        """Return the reward of a completion."""
        return self.judge.reward(self.problem, completion, finished=finished)
