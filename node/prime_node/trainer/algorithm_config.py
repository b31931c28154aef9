"""Settings of the algorithms: optimizer, loss, advantages, filters, teachers and the critic. A part of the [trainer] table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prime_node.algo.advantages import KlCredit, LengthCost
from prime_node.algo.kl_control import KlControl, KlControlKind
from prime_node.ports.train_backend import AggregationKind, CriticSettings, DivisionKind, OptimizerSettings
from prime_node.ports.train_samples import DistillationKind

Scalar = str | int | float | bool


class AdamW(BaseModel):
    """The optimizer of one phase."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(default=1e-6, gt=0.0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises linearly."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the gradient's running mean."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of the gradient's running square."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Decoupled weight decay."""
    grad_norm_max: float = Field(default=1.0, gt=0.0)
    """Global norm to which gradients are clipped."""
    moments: Literal["fp32", "8bit"] = "fp32"
    """Type of both running means. 8bit saves 6 bytes a parameter, and its step takes longer."""
    import_path: str | None = None
    """Custom optimizer, "package.module:Class"; then beta1, beta2 and weight_decay are unused."""
    kwargs: dict[str, Scalar | None] = Field(default_factory=dict)
    """Keyword arguments of the custom optimizer besides the parameters."""

    def settings(self) -> OptimizerSettings:
        """Return the settings for the training backend."""
        return OptimizerSettings(
            betas=(self.beta1, self.beta2),
            weight_decay=self.weight_decay,
            grad_norm_max=self.grad_norm_max,
            moments=self.moments,
            import_path=self.import_path,
            kwargs=self.kwargs,
        )


class Chosen(BaseModel):
    """An algorithm by name, with its settings. A key that is not named here is one of `kwargs`, as in prime-rl."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: str
    """Name of the algorithm."""
    kwargs: dict[str, Scalar | None] = Field(default_factory=dict)
    """Keyword arguments besides its inputs: `kwargs = { kl_tau = 1e-3 }`, or `kl_tau = 1e-3` by itself."""

    @model_validator(mode="before")
    @classmethod
    def _gather_kwargs(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"type": given}
        if not isinstance(given, Mapping):
            return given
        loose = {key: value for key, value in given.items() if key not in cls.model_fields}
        kwargs = given.get("kwargs", {})
        if not loose or not isinstance(kwargs, Mapping):
            return given
        return {key: value for key, value in given.items() if key not in loose} | {"kwargs": {**loose, **kwargs}}


class LossConfig(Chosen):
    """The loss and its settings."""

    type: str = "aipo"
    """Name of a loss in prime_node.algo.losses."""
    import_path: str | None = None
    """Custom loss, "package.module:function", also from the current folder; then `type` is unused."""
    aggregation: AggregationKind | None = None
    """Aggregation: token_mean, sequence_mean, constant_length, prompt_mean, sequence_sum or token_sum. None: that of the loss's
    paper."""
    constant_length: int | None = Field(default=None, ge=1)
    """Divisor of the aggregation constant_length, in tokens. None: the run's longest completion."""
    division: DivisionKind = DivisionKind.BATCH
    """Counts that a batch of several modes is divided by: those of the whole batch, or mode, each mode's own (prime-rl)."""
    kl_loss_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the divergence from the reference policy in the loss. Above 0 each step costs one more forward pass."""
    kl_loss_type: str = "k3"
    """Estimator of that divergence: k1, k2, k3 or abs (verl: kl, mse, low_var_kl); with a + the gradient is that of k2."""
    entropy_coeff: float = 0.0
    """Weight of the policy's entropy, which is subtracted from the loss."""
    rollout_is: str | None = None
    """Importance weight of any loss between sampler and proximal policy: token, sequence or geometric."""
    rollout_is_threshold: str = "2"
    """Its upper bound; "0.5_5" drops tokens outside of both bounds."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the optimizer step. It costs one more forward pass."""
    rollout_rs: str | None = None
    """Rejection of tokens or sequences too far from the sampler: token_k1, seq_mean_k1, seq_max_k2, ..."""
    rollout_rs_threshold: str | None = None
    """Bound for each name of `rollout_rs`, or one for all."""


class KlControlConfig(BaseModel):
    """Coefficient of the divergence in the reward, with verl's names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: KlControlKind = KlControlKind.FIXED
    """fixed, or adaptive: towards `target_kl`."""
    kl_coef: float = Field(default=1e-3, ge=0.0)
    """Coefficient, at the beginning if it is adaptive."""
    horizon: float = Field(default=10_000.0, gt=0.0)
    """Rollouts in which an adaptive coefficient may change by a fifth."""
    target_kl: float = Field(default=0.1, gt=0.0)
    """Divergence, in nats a token, that an adaptive coefficient aims at."""

    def rule(self) -> KlControl:
        """Return the rule for the coefficient."""
        return KlControl(self.type, self.horizon, self.target_kl)


class LengthPenaltyConfig(BaseModel):
    """Length penalty: cheap rollouts get a larger reward; tokens and turns compare the group's best, linear all of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: LengthCost
    """Cost measure: tokens, turns or linear."""
    completion_weight: float = Field(default=1.0, ge=0.0)
    """Weight of the model's tokens."""
    tool_response_weight: float = Field(default=1.0, ge=0.0)
    """Weight of the environment's tokens."""
    num_output_tokens_weight: float = Field(default=0.25, ge=0.0)
    """linear: weight of the model's tokens, relative to the group's largest number."""
    num_input_tokens_weight: float = Field(default=0.1, ge=0.0)
    """linear: weight of the prompt's and the environment's tokens."""
    num_turns_weight: float = Field(default=0.1, ge=0.0)
    """linear: weight of the requests to the model."""


class OverlongConfig(BaseModel):
    """Soft penalty of rollouts that are almost as long as the run allows (DAPO)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    len: int = Field(ge=1)
    """Tokens before the run's longest completion in which the penalty rises."""
    penalty_factor: float = Field(default=1.0, ge=0.0)
    """Penalty of a rollout of the longest length."""


class AdvantageConfig(Chosen):
    """The advantage and its settings."""

    type: str = "group_mean"
    """Name of an advantage in prime_node.algo.advantages."""
    import_path: str | None = None
    """Custom advantage, "package.module:function", also from the current folder; then `type` is unused."""
    length_penalty: LengthPenaltyConfig | None = None
    """Shaping of the rewards before any advantage."""
    overlong_buffer: OverlongConfig | None = None
    """Penalty of long rollouts, before the other shaping."""
    whiten: bool | None = None
    """Whiten the advantages of each optimizer step over its tokens. None: as the algorithm does."""
    kl_credit: KlCredit = KlCredit.ROLLOUT
    """Place of `use_kl_in_reward`: rollout, its reward (verl); return, the token and those before it (OpenRLHF); token, its
    own advantage alone. reinforce_plus_plus sums the rewards of tokens itself."""


class FilterConfig(Chosen):
    """One filter and its settings."""

    type: str
    """Name of a filter in prime_node.algo.filters."""
    enforce: bool = True
    """Whether flagged rollouts are left out of the batch; false only counts them."""


class TeacherConfig(BaseModel):
    """The teacher of mode opd: `vllm serve MODEL --port 8001`, with the tokenizer of the trained model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """URL of its HTTP server, "http://host:port"."""
    model: str
    """Name under which the model is served."""


class DistillationConfig(BaseModel):
    """Loss of modes opd and opsd, with NeMo-RL's and verl's names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    topk: int = Field(default=0, ge=-1)
    """Likeliest tokens of the teacher at each place; 0 is its logprob of the sampled token alone (loss opd), -1 the whole
    vocabulary. vLLM's server allows 20 of them unless it is started with --max-logprobs."""
    kl_type: DistillationKind = DistillationKind.FORWARD
    """Direction of the divergence over these tokens: forward, reverse or mixed."""
    mixed_kl_weight: float = Field(default=0.5, ge=0.0, le=1.0)
    """Weight of forward in mixed."""
    include_tail: bool = False
    """forward: count all other tokens as one."""
    zero_outside_topk: bool = False
    """reverse and mixed: the teacher's logprob of all other tokens is -100."""


class SelfDistillationConfig(BaseModel):
    """The teacher of mode opsd: the policy itself, whose prompt holds the environment's own answer as well."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    template: str = (
        "{problem}\n\nA correct solution of this problem:\n{solution}\n\nNow solve it yourself, in your own words."
    )
    """Text of the teacher's prompt, with {problem} and {solution}. Where rollouts have several turns it goes before the prompt,
    with {problem} empty."""
    policy: Literal["current", "reference"] = "current"
    """The weights that teach: those before the optimizer step, or the reference policy's."""


class CriticConfig(BaseModel):
    """A critic for the advantage gae: a model of its own, as large as the policy. Names are verl's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    critic_warmup: int = Field(default=0, ge=0)
    """Steps that train the critic alone, from the step at which it begins."""
    cliprange_value: float | None = Field(default=0.5, gt=0.0)
    """Distance from its old value beyond which a new value gets no gradient towards the return; `inf` bounds nothing."""
    optimizer: AdamW = AdamW(lr=1e-5)
    """Optimizer of the critic, with a constant learning rate after its warm-up."""
    initial_weights: str | None = None
    """First weights: a folder or a hub's model name. None: those of the policy after the supervised phase; where adapters are
    trained, those of their base."""

    def settings(self) -> CriticSettings:
        """Return the settings for the training backend."""
        cliprange = None if self.cliprange_value in (None, math.inf) else self.cliprange_value
        return CriticSettings(self.optimizer.settings(), cliprange, self.initial_weights)
