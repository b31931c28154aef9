"""A completion that vLLM has begun: its parameters, and its tokens so far, through swaps that interrupt it or not."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from prime_node.adapters.engines.vllm_worker_extension import (
    FILTERS_ARGUMENT,
    OFFSET_ARGUMENT,
    PROOFS_ARGUMENT,
    SEED_ARGUMENT,
    TEMPERATURE_ARGUMENT,
)
from prime_node.ports.engine import GenerateRequest
from prime_protocol.assignment import Sampling
from prime_protocol.rollout import Completion, FinishReason


@dataclass
class Draft:
    """Unfinished completion."""

    request: GenerateRequest
    sampling: Sampling
    seeded: bool
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_open: bool = True
    """Whether tokens are missing."""
    versions: Counter[int] = field(default_factory=Counter)
    """Policy version -> tokens, in the order of the policies."""

    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(tokens of the current request, policy that sampled up to there) at each swap that did not interrupt it."""

    def rest(self, policy_version: int) -> tuple[Any, SamplingParams]:
        """Return the prompt and parameters of the remaining completion. Policies never share cached prefixes."""
        arguments: dict[str, Any] = {OFFSET_ARGUMENT: len(self.token_ids)}
        arguments[TEMPERATURE_ARGUMENT] = self.sampling.temperature or 1.0
        own: dict[str, Any] = {"temperature": 0.0}
        if self.sampling.temperature and self.seeded:
            arguments[SEED_ARGUMENT] = self.request.seed
            if self.sampling.filters is not None:
                arguments[FILTERS_ARGUMENT] = self.sampling.filters
        elif self.sampling.temperature:  # the worker extension divides the logits by the temperature
            filters = {name: getattr(self.sampling, name) for name in ("top_p", "top_k", "min_p")}
            own = {"temperature": 1.0, **filters}
        if self.request.proofs:
            arguments[PROOFS_ARGUMENT] = self.name
        params = SamplingParams(
            **own,
            max_tokens=self.sampling.completion_tokens_max - len(self.token_ids),
            stop_token_ids=list(self.sampling.stop_token_ids),
            ignore_eos=True,  # only the run's stop tokens count
            logprobs=0,  # of the sampled token
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=arguments,
        )
        prompt = [*self.request.prompt_token_ids, *self.token_ids]
        return tokens_input(prompt, cache_salt=f"policy {policy_version}"), params

    def cut(self, num_tokens: int, policy_version: int) -> None:
        """Record that the first tokens of the current request are from this or older policies, and later ones from another."""
        self.cuts.append((num_tokens, policy_version))

    def take(self, output: Any, policy_version: int) -> None:
        """Add the tokens that vLLM has sampled."""
        self.token_ids += output.token_ids
        self.logprobs += [
            places[token].logprob for places, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        done = 0
        for end, version in [*self.cuts, (len(output.token_ids), policy_version)]:
            if end > done:
                self.versions[version] += end - done
                done = end
        self.cuts.clear()

    def completion(self, asked_of: int) -> Completion:
        """Return the completion, with its spans unless the requested policy sampled all of it."""
        stopped = self.token_ids[-1] in self.sampling.stop_token_ids
        spans = () if set(self.versions) == {asked_of} else tuple(self.versions.items())
        finish = FinishReason.STOP if stopped else FinishReason.LENGTH
        return Completion(tuple(self.token_ids), tuple(self.logprobs), finish, spans)
