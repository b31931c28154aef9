"""Verdicts of other checks on a bundle: TOPLOC alone, a comparison of logprobs alone, and INTELLECT-2's published checks.

Each checks the same bundles as our validator, by a forward pass of the claimed policy. Cut-offs that are not published are
1.5 times the maximum of the honest bundles, the tightest possible value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tests.adversaries.arena import SEEN, Arena
from tests.adversaries.watching import Judged
from toploc_rule import refused_by_toploc

from prime_lab.adversaries.uploads import opened_upload
from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.ports.engine import ScoreRequest
from prime_protocol.errors import RemoteError
from prime_protocol.proof import compare_proofs
from prime_protocol.verdict import RejectReason

STOP_PROBABILITY = 0.1
"""Published: a stop token of a smaller probability is refused."""
UNLIKELY = 0.01
"""Probability below which a token counts for the token sampling check, whose cut-off is not published."""
SLACK = 1.5
FORM = {RejectReason.MALFORMED, RejectReason.WRONG_ASSIGNMENT, RejectReason.BAD_TERMINATION}
BASELINES = ("logprobs alone", "TOPLOC alone", "INTELLECT-2")


@dataclass(frozen=True)
class Numbers:
    """Numbers of a bundle for the baselines."""

    logprob_error: float = 0.0
    toploc: bool = False
    """Whether a proof is beyond TOPLOC's thresholds."""
    unlikely: float = 0.0
    """Share of tokens that the policy gives a small probability."""
    stop_probability: float = 1.0
    """Probability of the least likely stop token."""
    form: bool = False
    """Whether it is rejected for its form: it cannot be parsed, has other problems than assigned, or ends wrongly."""


class Baselines:
    """A forward pass of the claimed policy over bundles that were judged."""

    def __init__(self, arena: Arena) -> None:
        self._policies = arena.policies
        self._engine = TransformersEngine(arena.policies.folder, threads=1)
        self._loaded = -1

    async def numbers(self, judged: Judged) -> Numbers:
        reason = None if judged.verdict is None else judged.verdict.reason
        try:
            _, rollouts = opened_upload(judged.parcel)
        except RemoteError:
            return Numbers(form=True)
        if judged.lease.policy_version != self._loaded:
            self._loaded = judged.lease.policy_version
            await self._engine.load(self._policies.chain[SEEN + self._loaded], policy_version=self._loaded)
        prompts = [group.prompt_token_ids for group in judged.lease.groups for _ in group.seeds]
        requests = [
            ScoreRequest(prompt, completion.token_ids, 0, hidden=True)
            for prompt, completion in zip(prompts, rollouts.completions(), strict=True)
        ]
        prefill = await self._engine.prefill(requests, judged.lease.sampling)
        toploc = True
        if rollouts.proofs_CB is not None and prefill.hidden_TD is not None:
            errors = compare_proofs(rollouts.proofs_CB, prefill.hidden_TD, rollouts.lengths_N.tolist())
            toploc = bool(refused_by_toploc(errors).any())
        ends_T = np.isin(rollouts.token_ids_T, judged.lease.sampling.stop_token_ids)
        return Numbers(
            logprob_error=float(np.abs(rollouts.logprobs_T - prefill.logprobs_T).mean()),
            toploc=toploc,
            unlikely=float((prefill.logprobs_T < np.log(UNLIKELY)).mean()),
            stop_probability=float(np.exp(prefill.logprobs_T[ends_T]).min()) if ends_T.any() else 1.0,
            form=reason in FORM,
        )

    async def close(self) -> None:
        await self._engine.close()


@dataclass(frozen=True)
class Cuts:
    """The thresholds that are not published, from honest bundles."""

    logprob_error: float
    unlikely: float
    stop_probability: float

    @classmethod
    def of(cls, honest: Sequence[Numbers]) -> Cuts:
        return cls(
            SLACK * max(one.logprob_error for one in honest),
            SLACK * max(one.unlikely for one in honest),
            min(one.stop_probability for one in honest) / SLACK,
        )

    def verdicts(self, one: Numbers) -> dict[str, bool]:
        """Return which baselines reject a bundle."""
        sampling = one.unlikely > self.unlikely or one.stop_probability < self.stop_probability
        return {
            "logprobs alone": one.logprob_error > self.logprob_error,
            "TOPLOC alone": one.toploc and not one.form,
            "INTELLECT-2": one.form or one.toploc or sampling,
        }

    def first_refused(self, stream: Sequence[Numbers], who: str) -> int | None:
        """Return the number of bundles up to and including the first rejected one; None without one."""
        return next((place + 1 for place, one in enumerate(stream) if self.verdicts(one)[who]), None)
