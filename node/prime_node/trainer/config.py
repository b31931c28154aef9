"""Settings of the trainer: the [trainer] table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prime_node.algo.schedule import Decay
from prime_node.algo.shares import Packing
from prime_node.broadcast.publish.spans import SpanRules
from prime_node.broadcast.swarm.swarm_config import SwarmConfig
from prime_node.config import Settings, SettingsConfigDict
from prime_node.ports.train_samples import TrainingMode
from prime_node.trainer.algorithm_config import (
    AdamW,
    AdvantageConfig,
    CriticConfig,
    DistillationConfig,
    FilterConfig,
    KlControlConfig,
    LossConfig,
    SelfDistillationConfig,
    TeacherConfig,
)


class LoraConfig(BaseModel):
    """Low-rank adapters (arXiv 2106.09685): the model's own weights are frozen, and small factors added to them are trained.

    Policies are published merged, so workers need no support for adapters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(ge=1)
    """Width of the factors."""
    alpha: int = Field(default=32, ge=1)
    """Scale of the adapters' product: alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of linear layers, such as "q_proj"; none: all except the head."""


class SftConfig(BaseModel):
    """Supervised training before the reinforcement learning: it teaches the task's format."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps_max: int = Field(default=0, ge=0)
    """Maximum number of steps; 0 skips the phase."""
    accuracy_target: float = Field(default=0.2, gt=0.0, le=1.0)
    """Sampled accuracy on its own held-out problems at which the phase ends."""
    check_every: int = Field(default=5, ge=1)
    """Steps between two measurements of the accuracy. Once it rises, it rises fast."""
    check_problems: int = Field(default=256, ge=1)
    """Held-out problems of the stopping rule; the evaluation uses others."""
    batch_size: int = Field(default=64, ge=1, le=2**16)
    """Problems of one step."""
    problems: int = Field(default=8_192, ge=1)
    """Number of training problems of each environment to draw from, starting at 0."""
    optimizer: AdamW = AdamW(lr=2e-3, warmup_steps=30, beta2=0.95)
    """Optimizer, with a constant learning rate after the warm-up."""


class PublishConfig(BaseModel):
    """Encodings published of each policy. Those that do not pay are omitted: broadcast/publish/spans.py."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    spans: tuple[Annotated[int, Field(ge=1)], ...] = (1, 4, 16)
    """Steps that deltas cover, at policies whose version they divide. The trainer holds one policy's weights for each."""
    root_every: int = Field(default=16, ge=0)
    """Policies between two deltas against policy 0, which the trainer then holds too; 0 makes none."""
    anchor_pays: float = Field(default=2.0, ge=1.0)
    """Download ratio above which an anchor is made: what a newcomer would otherwise download, relative to the anchor."""

    def rules(self) -> SpanRules:
        """Return the settings for the publisher."""
        return SpanRules(spans=self.spans, root_every=self.root_every, anchor_pays=self.anchor_pays)


class RanksConfig(BaseModel):
    """Training on several processes, which `--nproc` or torchrun start. They divide the devices' memory among them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nproc: int | None = Field(default=None, ge=1)
    """Processes on this machine, one for each GPU; the option `--nproc` overrides it. torchrun has its own. None: as few as `up`
    finds enough for the model, otherwise 1."""
    replicas: int = Field(default=1, ge=1)
    """HSDP replicas: copies of the sharded model, between which gradients are summed. 1 shards over all ranks."""
    compute_dtype: Literal["fp32", "bf16"] | None = None
    """Type of forward and backward pass. Master weights and reductions are always fp32. None: bf16 on a GPU, else fp32."""
    recompute: bool = False
    """Activation checkpointing: recompute activations in the backward pass instead of keeping them."""
    compile_backend: str | None = None
    """Backend of torch.compile for each layer, such as "inductor"; none computes eagerly."""
    offload: bool = False
    """Keep master weights, gradients and optimizer in the host's memory."""
    reduce_each_pass: bool = True
    """Reduce gradients after each pass (less memory) or once a step (less traffic)."""
    timeout_seconds: float = Field(default=300.0, gt=0.0)
    """Seconds without an answer after which a rank counts as failed, and all ranks are restarted."""
    restarts_max: int = Field(default=100, ge=0)
    """Maximum number of restarts of all ranks by `--nproc` after one of them has died."""


class TrainerConfig(Settings):
    """The trainer's settings."""

    model_config = SettingsConfigDict(env_prefix="PRIME_TRAINER_")
    section: ClassVar[str] = "trainer"

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights, if the model folder has none, and of the order of the supervised problems."""
    initial_weights: str | None = None
    """Policy 0 before any training: a folder or a hub's model name in Hugging Face format. None: drawn by `seed`, or
    the base of a run whose policies are adapters."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the arithmetic. The same number gives the same weights; processes that share a machine need few."""
    device: str = "cpu"
    """Device of the model, in torch's notation: "cpu", or "cuda" for one GPU a rank. A GPU's memory is planned before anything is
    allocated."""
    evaluation_device: str | None = None
    """Device of the evaluation's model. None: the trainer's own weights are used, if one process trains whole weights; otherwise
    a copy of the model in fp32 on `device`."""
    optimizer: AdamW = AdamW()
    """Optimizer of the reinforcement learning."""
    lr_decay: Decay = Decay.LINEAR
    """Decay of the learning rate: constant, linear or cosine."""
    lr_final_share: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of the learning rate that is left at the run's last step; 1 keeps it constant."""
    lr_damping_nats: float | None = Field(default=None, gt=0.0)
    """Mean |log ratio| of trainer and (validated) inference, in nats, above which the learning rate is damped."""
    claim_nats_max: float = Field(default=math.log(8.0), gt=0.0)
    """Distance in nats between a worker's claimed logprob and the trainer's beyond which the token is not trained: an
    importance ratio outside of 1/8 to 8. It applies where no validator computed the logprobs; `inf` masks nothing."""
    loss: LossConfig = LossConfig()
    """Loss to minimise."""
    compute_prox_log_prob: bool = False
    """Use the first policy of the step as proximal policy (rho = pi / pi_prox; AReaL, verl). It costs a forward pass a
    batch and matters if a step takes several optimizer steps. Otherwise it is the policy at the start of each optimizer
    step."""
    use_rollout_log_probs: bool = False
    """Use the policy that sampled the token as proximal policy (verl): rho = pi / mu, without a further correction."""
    ref_update_interval: int = Field(default=0, ge=0)
    """Steps between two replacements of the reference policy by the current one; 0 keeps the policy before the first step."""
    use_kl_in_reward: bool = False
    """Subtract the divergence from the reference policy from the reward of each token. It costs two forward passes a batch,
    and excludes use_rollout_log_probs."""
    kl_penalty: str = "kl"
    """Estimator of that divergence: kl, abs, mse or low_var_kl (also k1, k2, k3)."""
    kl_ctrl: KlControlConfig = KlControlConfig()
    """Coefficient of that divergence."""
    critic: CriticConfig | None = None
    """Critic, for the advantage gae and for losses that need values."""
    mode: TrainingMode = TrainingMode.RL
    """Training signal of rollouts: rl their rewards, opd a teacher's logprobs, opsd the policy's own under a prompt with the
    answer, sft the rollouts themselves."""
    environment_modes: dict[str, TrainingMode] = Field(default_factory=dict)
    """Mode of single environments, by name."""
    teacher: TeacherConfig | None = None
    """Teacher of mode opd."""
    distillation: DistillationConfig = DistillationConfig()
    """Loss of modes opd and opsd."""
    self_distillation: SelfDistillationConfig = SelfDistillationConfig()
    """Teacher of mode opsd."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Advantage: from the rewards of a group to the weight of each rollout."""
    filters: tuple[FilterConfig, ...] = (
        FilterConfig(type="gibberish", enforce=False),
        FilterConfig(type="repetition", enforce=False),
        FilterConfig(type="zero_advantage"),
    )
    """Filters of rollouts before training; the first that matches is counted. A custom list replaces this one."""
    packing: Packing | None = None
    """Packing method. tree: prefixes that completions share are computed once, for short rows. sequences:
    concatenation, for long ones. None: sequences on a GPU, with torch's flash attention; else tree."""
    row_tokens: int = Field(default=128, ge=1)
    """Tokens of a tree's row. Attention costs its square; short rows waste more on padding."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens of one forward pass of one rank; bounds the memory. A longer sequence has a pass of its own."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights, and publish the weights with them merged in. A run that publishes the
    adapters themselves sets `[run.adapters]` instead."""
    ranks: RanksConfig = RanksConfig()
    """Distribution of the model over several processes and devices."""
    sft: SftConfig = SftConfig()
    """Supervised phase."""
    cosign_keys: tuple[Path, ...] = ()
    """Files of further trainer keys that sign each manifest, if the run's keys require more than one signature."""
    publish: PublishConfig = PublishConfig()
    """Encoding of published policies."""
    swarm: SwarmConfig = SwarmConfig(upload_slots=64, yields=False)
    """Swarm settings: the trainer is the first seeder of what it publishes."""
    evaluate_every: int = Field(default=50, ge=0)
    """Steps between evaluations on held-out problems; 0 disables them. Otherwise the first and the last policy are
    always included."""
    evaluate_at: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Further steps to evaluate at."""
    evaluation_problems: int = Field(default=256, ge=1, lt=2**20)
    """Held-out problems of one evaluation, of each environment."""
    evaluation_samples: int = Field(default=1, ge=1, lt=2**12)
    """Sampled completions of each of them."""
    evaluation_pass_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Values of k for pass@k: the chance that one of k completions is right. None may exceed `evaluation_samples`."""
    evaluation_seed: int = Field(default=1, ge=0)
    """Seed of the sampled completions, the same at each evaluation."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between the trainer's own checkpoints; after a crash the steps since the last one are computed again."""
    checkpoints_kept: int = Field(default=2, ge=1)
    """Number of checkpoints kept; older ones are deleted."""
    checkpoints_keep_every: int = Field(default=0, ge=0)
    """Interval of steps whose checkpoints are never deleted; 0 keeps none of them."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of /metrics, for Prometheus; none serves nothing. The rows are in metrics.jsonl in any case."""
    metrics_host: str = "127.0.0.1"
    """Address of /metrics."""
    tensorboard: bool = False
    """Write the same rows for TensorBoard, next to metrics.jsonl."""
    wandb_project: str | None = None
    """Project of Weights & Biases that gets the same rows; W&B reads its own settings from WANDB_* variables."""
    device_flops_max: float | None = Field(default=None, gt=0.0)
    """Peak FLOPs per second of one device, in the type of `ranks.compute_dtype`, for the model FLOPs' utilisation. An
    H100 has 9.9e14 in bf16."""
    wait_seconds: float = Field(default=10.0, ge=0.0, le=30.0)
    """Seconds for which the coordinator may hold a request for a batch open."""
    leave_seconds: float = Field(default=10.0, ge=0.0)
    """Seconds to wait for an unreachable coordinator when the trainer is stopped."""

    @property
    def on_gpu(self) -> bool:
        """Whether the model is on a GPU."""
        return self.device.partition(":")[0] == "cuda"

    @property
    def compute_dtype(self) -> str:
        """Type of forward and backward pass on this device."""
        return self.ranks.compute_dtype or ("bf16" if self.on_gpu else "fp32")

    @property
    def asks_environments(self) -> bool:
        """Whether the environments' own answers are part of a training step."""
        return TrainingMode.OPSD in {self.mode, *self.environment_modes.values()}

    @property
    def evaluates(self) -> bool:
        """Whether the trainer samples anything itself, so that it needs an engine."""
        is_remax = self.advantage.import_path is None and self.advantage.type == "remax"
        return self.evaluate_every > 0 or bool(self.evaluate_at) or self.sft.steps_max > 0 or is_remax

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if max(self.evaluation_pass_at, default=1) > self.evaluation_samples:
            raise ValueError("evaluation_pass_at asks for more completions than evaluation_samples")
        return self
