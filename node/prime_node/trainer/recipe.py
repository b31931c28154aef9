"""The algorithms of a step: those that the settings name, looked up before any training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from prime_node.algo.advantages import Advantage, OverlongPenalty, find_advantage
from prime_node.algo.filters import Filter, find_filter
from prime_node.algo.losses import Penalty, RolloutCorrection, find_loss
from prime_node.algo.schedule import Damping, ParameterSchedule
from prime_node.ports.train_backend import AggregationKind, Loss, LossNeed, TrainingMode
from prime_node.trainer.config import AdvantageConfig, LossConfig, TrainerConfig
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
    is_prompt_mean: bool = False
    """Whether the loss is the mean over prompts, so that samples need their factors."""

    @classmethod
    def of(cls, config: TrainerConfig, *, max_steps: int, completion_tokens_max: int, vocab_size: int) -> Recipe:
        """Look up the algorithms. Raises LocalError if a name or a setting is unknown."""
        optimizer = config.optimizer
        if config.teacher is None and TrainingMode.OPD in (config.mode, *config.environment_modes.values()):
            raise LocalError("mode opd needs a teacher: set trainer.teacher.url and trainer.teacher.model")
        return cls(
            loss=_loss(config.loss, completion_tokens_max),
            advantage=_advantage(config.advantage, completion_tokens_max),
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
            is_prompt_mean=config.loss.aggregation is AggregationKind.PROMPT_MEAN,
        )

    @property
    def needs_reference(self) -> bool:
        """Return whether a step needs logprobs of the reference policy."""
        return LossNeed.REFERENCE_LOGPROBS in self.loss.needs

    def renews_reference(self, step: int, kept_step: int | None) -> bool:
        """Return whether the policy before this step becomes the reference. `kept_step`: that of the present one."""
        every = self.ref_update_interval
        return self.needs_reference and (kept_step is None or (every > 0 and step % every == 0 and step != kept_step))

    def mode_of(self, environment: str) -> TrainingMode:
        """Return the training mode of an environment's rollouts."""
        return self.environment_modes.get(environment, self.mode)

    def next_multiplier(self, multiplier: float, log_ratio_abs: float) -> float:
        """Return the multiplier of the next step's learning rate, from this step's mean |log ratio|."""
        return multiplier if self.damping is None else self.damping.after(multiplier, log_ratio_abs)


def _loss(config: LossConfig, completion_tokens_max: int) -> Loss:
    return find_loss(
        config.type,
        import_path=config.import_path,
        kwargs=config.kwargs,
        aggregation=config.aggregation,
        constant_length=config.constant_length or completion_tokens_max,
        correction=RolloutCorrection(
            config.rollout_is, config.rollout_is_threshold, config.rollout_rs, config.rollout_rs_threshold
        ),
        penalty=Penalty(config.kl_loss_coef, config.kl_loss_type, config.entropy_coeff),
    )


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
    )
