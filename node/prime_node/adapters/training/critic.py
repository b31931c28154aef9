"""The critic of a train backend: a model of its own with its own optimizer, sharded as the policy is, and never published.

Its weights are trained in fp32 themselves: nothing samples from them, so nothing is rounded. Each rank holds 16 bytes of a
parameter (weight, gradient, two moments), divided by the ranks, besides the policy's.

    loss = mean over the tokens of max((V - return)^2, (clip(V, old V - cliprange_value, old V + cliprange_value) - return)^2) / 2

Equal to verl's `compute_value_loss` with token-mean, and to NeMo-RL's MseValueLossFn.

With several ranks every method is a collective. Letters: N predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from prime_node.adapters.models.policy_build import build_critic
from prime_node.adapters.training.passes import Passes
from prime_node.adapters.training.ranks import Ranks
from prime_node.adapters.training.sharding import Placement, local_rows
from prime_node.adapters.training.torch_batch import Tallies, value_targets
from prime_node.adapters.training.torch_optimizers import make_optimizer, set_learning_rate
from prime_node.algo.shares import RankShare
from prime_node.ports.train_backend import CriticSettings, CriticStats, TrainingDiverged
from prime_protocol.weights import Weights


class Critic:
    """The critic on one rank."""

    def __init__(
        self,
        model_folder: Path,
        weights: Weights | None,
        settings: CriticSettings,
        *,
        seed: int,
        device: torch.device,
        ranks: Ranks,
        placement: Placement,
    ) -> None:
        """Build the critic of these weights. Raises LocalError."""
        self._settings = settings
        self._ranks = ranks
        self._module = build_critic(model_folder, weights, seed=seed, device=device, ranks=ranks, placement=placement)
        self._passes = Passes(self._module, device, ranks, placement)
        self.tensors = dict(self._module.named_parameters())
        self.optimizer = make_optimizer(list(self.tensors.values()), settings.optimizer)

    @property
    def has_own_weights(self) -> bool:
        """Return whether the settings name the critic's first weights, instead of the policy's."""
        return self._settings.initial_weights is not None

    def begin(self, policy: torch.nn.Module) -> None:
        """Take over the policy's weights, where both have a parameter, and begin with a new optimizer."""
        theirs = {name: local_rows(each)[0] for name, each in policy.named_parameters()}
        prefix = getattr(policy, "base_model_prefix", "model")
        with torch.no_grad():
            for name, parameter in self.tensors.items():
                source = theirs.get(f"{prefix}.{name.removeprefix('model.')}")
                if source is not None:
                    local_rows(parameter)[0].copy_(source)
        self.optimizer = make_optimizer(list(self.tensors.values()), self._settings.optimizer)

    def values(self, share: RankShare, num_samples: int) -> list[list[float]]:
        """Return the value before every completion token of the whole batch, on every rank."""
        found = self._passes.values(share, num_samples, lambda packed: (self._module(**self._passes.places(packed)),))
        return [values.tolist() for (values,) in found]

    def train(self, share: RankShare, lr: float, before_change: Callable[[], None]) -> CriticStats:
        """Compute this rank's part of a step. Raises TrainingDiverged before any weight has changed."""
        if share.num_tokens == 0:
            return CriticStats(0.0, 0.0, {})
        loss_sum, tallies = 0.0, Tallies()
        for one in self._passes.of(share):
            values_N = self._module(**self._passes.places(one.packed))
            if not one.places:
                torch.autograd.backward(values_N.sum() * 0.0)
                continue
            old_N, returns_N, mask_N = value_targets(one.samples, device=values_N.device)
            losses_N, clipped_N = value_losses(values_N, old_N, returns_N, self._settings.cliprange_value)
            total = torch.where(mask_N, losses_N, 0.0).sum()
            torch.autograd.backward(total / share.num_tokens)
            loss_sum += total.item()
            tallies.add(_metrics(values_N.detach(), returns_N, clipped_N, mask_N))
        norm = self._passes.clipped_norm(self._settings.optimizer.grad_norm_max)
        if not norm < float("inf"):
            self.optimizer.zero_grad()
            raise TrainingDiverged(
                f"the norm of the critic's gradient is {norm}; lower trainer.critic.optimizer.lr and resume from the last "
                "checkpoint"
            )
        set_learning_rate(self.optimizer, lr)
        before_change()
        self.optimizer.step()
        self.optimizer.zero_grad()
        means = tallies.means(self._ranks)
        residual, square, mean = (means.pop(name) for name in ("residual_square", "return_square", "returns_mean"))
        spread = square - mean**2
        explained = {"explained_variance": 1.0 - residual / spread} if spread > 0.0 else {}
        loss = self._ranks.sum([loss_sum])[0] / share.num_tokens
        return CriticStats(loss, norm, {**means, "returns_mean": mean, **explained})


def value_losses(values_N: Tensor, old_N: Tensor, returns_N: Tensor, cliprange: float | None) -> tuple[Tensor, Tensor]:
    """Return [N] the losses, and whether the clipped value decides them."""
    plain_N = (values_N - returns_N).square()
    if cliprange is None:
        return 0.5 * plain_N, torch.zeros_like(plain_N, dtype=torch.bool)
    clipped_N = (values_N.clamp(old_N - cliprange, old_N + cliprange) - returns_N).square()
    return 0.5 * torch.maximum(plain_N, clipped_N), clipped_N > plain_N


def _metrics(values_N: Tensor, returns_N: Tensor, clipped_N: Tensor, mask_N: Tensor) -> Mapping[str, Tensor]:
    def tally(values: Tensor) -> Tensor:
        return torch.stack([torch.where(mask_N, values, 0.0).sum(), mask_N.sum().to(values.dtype)])

    return {
        "values_mean": tally(values_N),
        "returns_mean": tally(returns_N),
        "value_clipped_share": tally(clipped_N.to(torch.float32)),
        "residual_square": tally((returns_N - values_N).square()),
        "return_square": tally(returns_N.square()),
    }
