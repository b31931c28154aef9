"""The algorithms of a step: those that the settings name, looked up before any training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from prime_node.algo.advantages import Advantage, OverlongPenalty, TokenNeed, find_advantage
from prime_node.algo.filters import Filter, find_filter
from prime_node.algo.kl_control import KlControl
from prime_node.algo.losses import Distillation, Objective, Penalty, RolloutCorrection, find_loss
from prime_node.algo.losses.penalty import known_estimator
from prime_node.algo.schedule import Damping, ParameterSchedule
from prime_node.ports.train_backend import AggregationKind, DivisionKind, Loss, LossNeed
from prime_node.ports.train_samples import TrainingMode
from prime_node.trainer.algorithm_config import AdvantageConfig, CriticConfig, DistillationConfig, LossConfig
from prime_node.trainer.config import TrainerConfig
from prime_protocol.errors import LocalError


class ProximalPolicy(StrEnum):
    """Proximal policy of a loss (rho = pi / pi_prox), if a step takes several optimizer steps."""

    CURRENT = "current"
    """Policy at the start of the optimizer step: rho is 1."""
    CYCLE = "cycle"
    """First weights of the step: `compute_prox_log_prob` of AReaL and verl."""
    ROLLOUT = "rollout"
    """Policy that sampled the token: `use_rollout_log_probs` of verl. Then rho = pi / mu, and w = 1."""

    @classmethod
    def of(cls, config: TrainerConfig) -> ProximalPolicy:
        """Return the policy that the settings name. Raises LocalError if they name two."""
        if config.compute_prox_log_prob and config.use_rollout_log_probs:
            raise LocalError(
                "compute_prox_log_prob and use_rollout_log_probs select different proximal policies; set one of them"
            )
        if config.compute_prox_log_prob:
            return cls.CYCLE
        return cls.ROLLOUT if config.use_rollout_log_probs else cls.CURRENT


@dataclass(frozen=True, slots=True)
class KlInReward:
    """A divergence from the reference policy that is subtracted from each token's reward."""

    estimator: str
    kl_coef: float
    """Coefficient at the beginning."""
    control: KlControl


@dataclass(frozen=True, slots=True)
class CriticSchedule:
    """When and how fast a critic is trained."""

    warmup_steps: int
    """Steps that train the critic alone."""
    rates: ParameterSchedule


@dataclass(frozen=True, slots=True)
class Recipe:
    """The algorithms of the reinforcement learning."""

    loss: Loss
    advantage: Advantage
    filters: tuple[Filter, ...]
    schedule: ParameterSchedule
    damping: Damping | None
    mode: TrainingMode
    environment_modes: Mapping[str, TrainingMode]
    vocab_size: int
    proximal: ProximalPolicy
    claim_nats_max: float
    ref_update_interval: int = 0
    aggregation: AggregationKind = AggregationKind.TOKEN_MEAN
    """Aggregation of the loss; that of prompt_mean needs a factor of each sample."""
    divides_by_mode: bool = False
    """Whether each training mode's losses are divided by its own count, so that samples need their factors."""
    kl_in_reward: KlInReward | None = None
    critic: CriticSchedule | None = None
    topk: int = 0
    """Likeliest tokens of a teacher; 0: the logprob of the sampled token alone."""
    hint_template: str = ""
    is_taught_by_reference: bool = False
    """Whether the reference policy, rather than the current one, teaches in mode opsd."""

    @classmethod
    def of(cls, config: TrainerConfig, *, max_steps: int, completion_tokens_max: int, vocab_size: int) -> Recipe:
        """Look up the algorithms. Raises LocalError if a name or a setting is unknown."""
        optimizer = config.optimizer
        if config.teacher is None and TrainingMode.OPD in (config.mode, *config.environment_modes.values()):
            raise LocalError("mode opd needs a teacher: set trainer.teacher.url and trainer.teacher.model")
        loss = _loss(config.loss, completion_tokens_max, _distillation(config.distillation))
        advantage = _advantage(config.advantage, completion_tokens_max)
        _check_critic(config, loss, advantage)
        return cls(
            loss=loss,
            advantage=advantage,
            filters=tuple(find_filter(each.type, kwargs=each.kwargs, enforce=each.enforce) for each in config.filters),
            schedule=ParameterSchedule(
                optimizer.lr, optimizer.warmup_steps, max_steps, config.lr_final_share, config.lr_decay
            ),
            damping=None if config.lr_damping_nats is None else Damping(config.lr_damping_nats),
            mode=config.mode,
            environment_modes=config.environment_modes,
            vocab_size=vocab_size,
            proximal=ProximalPolicy.of(config),
            claim_nats_max=config.claim_nats_max,
            ref_update_interval=config.ref_update_interval,
            aggregation=loss.aggregation.kind,
            divides_by_mode=config.loss.division is DivisionKind.MODE,
            kl_in_reward=_kl_in_reward(config),
            critic=_critic(config.critic, max_steps),
            topk=config.distillation.topk,
            hint_template=config.self_distillation.template,
            is_taught_by_reference=config.asks_environments and config.self_distillation.policy == "reference",
        )

    @property
    def needs_reference(self) -> bool:
        """Return whether a step needs logprobs of the reference policy."""
        return LossNeed.REFERENCE_LOGPROBS in self.loss.needs or self.kl_in_reward is not None

    @property
    def keeps_reference(self) -> bool:
        """Return whether the trainer keeps the reference policy."""
        return self.needs_reference or self.is_taught_by_reference

    @property
    def credits_by_weights(self) -> bool:
        """Return whether advantages need values that only the trainer's weights give."""
        return self.kl_in_reward is not None or bool(self.advantage.needs) or self.needs_values

    @property
    def needs_values(self) -> bool:
        """Return whether a step needs the critic's values."""
        return TokenNeed.VALUES in self.advantage.needs or LossNeed.VALUES in self.loss.needs

    @property
    def chooses_tokens(self) -> bool:
        """Return whether the loss chooses tokens of the optimizer step, for which it needs their logprobs."""
        return LossNeed.SELECTED in self.loss.needs

    @property
    def looks_at_tokens(self) -> bool:
        """Return whether the loss needs values of the whole optimizer step, and so all logprobs before it."""
        return self.chooses_tokens or self.loss.normalizes_weights

    def renews_reference(self, step: int, kept_step: int | None) -> bool:
        """Return whether the policy before this step becomes the reference. `kept_step`: that of the present one."""
        every = self.ref_update_interval
        return self.keeps_reference and (kept_step is None or (every > 0 and step % every == 0 and step != kept_step))

    def mode_of(self, environment: str) -> TrainingMode:
        """Return the training mode of an environment's rollouts."""
        return self.environment_modes.get(environment, self.mode)

    def next_multiplier(self, multiplier: float, log_ratio_abs: float) -> float:
        """Return the multiplier of the next step's learning rate, from this step's mean |log ratio|."""
        return multiplier if self.damping is None else self.damping.after(multiplier, log_ratio_abs)


def _loss(config: LossConfig, completion_tokens_max: int, distillation: Distillation | None) -> Objective:
    return find_loss(
        config.type,
        import_path=config.import_path,
        kwargs=config.kwargs,
        aggregation=config.aggregation,
        constant_length=config.constant_length or completion_tokens_max,
        correction=RolloutCorrection(
            config.rollout_is,
            config.rollout_is_threshold,
            config.rollout_rs,
            config.rollout_rs_threshold,
            config.rollout_is_batch_normalize,
        ),
        penalty=Penalty(config.kl_loss_coef, config.kl_loss_type, config.entropy_coeff),
        distillation=distillation,
    )


def _distillation(config: DistillationConfig) -> Distillation | None:
    """Return the loss; None for that of the sampled token. Raises LocalError."""
    loss = Distillation(config.kl_type, config.mixed_kl_weight, config.include_tail, config.zero_outside_topk)
    return loss if config.topk else None


def _check_critic(config: TrainerConfig, loss: Loss, advantage: Advantage) -> None:
    by_advantage = TokenNeed.VALUES in advantage.needs
    is_used = by_advantage or LossNeed.VALUES in loss.needs
    if is_used and config.critic is None:
        what = f"advantage {advantage.name}" if by_advantage else "the loss"
        raise LocalError(f"{what} needs the values of a critic: add [trainer.critic]")
    if config.critic is not None and not is_used:
        raise LocalError(
            'trainer.critic: nothing uses its values; set trainer.advantage.type = "gae", or remove [trainer.critic]'
        )


def _critic(config: CriticConfig | None, max_steps: int) -> CriticSchedule | None:
    if config is None:
        return None
    rates = ParameterSchedule(config.optimizer.lr, config.optimizer.warmup_steps, max_steps, 1.0)
    return CriticSchedule(config.critic_warmup, rates)


def _kl_in_reward(config: TrainerConfig) -> KlInReward | None:
    known_estimator(config.kl_penalty)
    if not config.use_kl_in_reward:
        return None
    if config.use_rollout_log_probs:
        raise LocalError(
            "use_kl_in_reward with use_rollout_log_probs makes rewards of logprobs that workers claim; "
            "set compute_prox_log_prob instead of use_rollout_log_probs, or loss.kl_loss_coef instead of use_kl_in_reward"
        )
    return KlInReward(config.kl_penalty, config.kl_ctrl.kl_coef, config.kl_ctrl.rule())


def _advantage(config: AdvantageConfig, completion_tokens_max: int) -> Advantage:
    penalty, buffer = config.length_penalty, config.overlong_buffer
    return find_advantage(
        config.type,
        import_path=config.import_path,
        kwargs=config.kwargs,
        length_cost=None if penalty is None else penalty.type,
        length_weights={} if penalty is None else penalty.model_dump(exclude={"type"}),
        overlong=None if buffer is None else OverlongPenalty(buffer.len, buffer.penalty_factor, completion_tokens_max),
        whiten=config.whiten,
        kl_credit=config.kl_credit,
    )
