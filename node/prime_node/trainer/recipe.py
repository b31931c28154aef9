"""How a step learns: the algorithms that the settings name, found before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prime_node.algo.advantages import Advantage, find_advantage
from prime_node.algo.filters import Filter, find_filters
from prime_node.algo.losses import find_loss
from prime_node.algo.schedule import Damping, LinearSchedule
from prime_node.ports.train_backend import Loss
from prime_node.trainer.config import TrainerConfig


@dataclass(frozen=True, slots=True)
class Recipe:
    """The reinforcement learning's algorithms."""

    loss: Loss
    advantage: Advantage
    filters: Mapping[str, Filter]
    schedule: LinearSchedule
    damping: Damping | None

    @classmethod
    def of(cls, config: TrainerConfig, *, max_steps: int, completion_tokens_max: int) -> Recipe:
        """Raises LocalError where a name or a setting is unknown."""
        optimizer, loss = config.optimizer, config.loss
        return cls(
            loss=find_loss(
                loss.type,
                import_path=loss.import_path,
                kwargs=loss.kwargs,
                aggregation=loss.aggregation,
                constant_length=loss.constant_length or completion_tokens_max,
            ),
            advantage=find_advantage(config.advantage, import_path=config.advantage_import_path),
            filters=find_filters(config.filters),
            schedule=LinearSchedule(optimizer.lr, optimizer.warmup_steps, max_steps, config.lr_final_share),
            damping=None if config.lr_damping_nats is None else Damping(config.lr_damping_nats),
        )

    def next_multiplier(self, multiplier: float, log_ratio_abs: float) -> float:
        """Of the learning rate, for the step after one with this mean |log ratio|."""
        return multiplier if self.damping is None else self.damping.after(multiplier, log_ratio_abs)
