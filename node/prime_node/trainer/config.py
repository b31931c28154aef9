"""Settings of the trainer: the [trainer] table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from prime_node.algo.advantages.length_penalty import LengthCost
from prime_node.algo.schedule import Decay
from prime_node.algo.shares import Packing
from prime_node.broadcast.publish.spans import SpanRules
from prime_node.broadcast.swarm.swarm_config import SwarmConfig
from prime_node.config import Settings, SettingsConfigDict
from prime_node.ports.train_backend import AggregationKind, OptimizerSettings, TrainingMode

Scalar = str | int | float | bool


class AdamW(BaseModel):
    """The optimizer of one phase."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    lr: float = Field(default=1e-6, gt=0.0)
    """Learning rate after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises linearly."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the gradient's running mean."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """Decay of its running square."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """Decoupled weight decay."""
    grad_norm_max: float = Field(default=1.0, gt=0.0)
    """Gradients are scaled down to this global norm."""
    import_path: str | None = None
    """Another optimizer, "package.module.Class"; then beta1, beta2 and weight_decay are not used."""
    kwargs: dict[str, Scalar | None] = Field(default_factory=dict)
    """What that one takes beside the parameters."""

    def settings(self) -> OptimizerSettings:
        return OptimizerSettings(
            betas=(self.beta1, self.beta2),
            weight_decay=self.weight_decay,
            grad_norm_max=self.grad_norm_max,
            import_path=self.import_path,
            kwargs=self.kwargs,
        )


class LoraConfig(BaseModel):
    """Low-rank adapters (arXiv 2106.09685): the model's own weights stay, and small factors beside them are trained.

    Policies are published merged, so workers need to know nothing of adapters.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    rank: int = Field(ge=1)
    """Width of the factors."""
    alpha: int = Field(default=32, ge=1)
    """The adapters' product is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of linear layers, such as "q_proj"; none takes all but the head."""


class Chosen(BaseModel):
    """An algorithm by name, with settings of its own. A key that is not named here is one of `kwargs`, as the seeds write it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: str
    """Its name."""
    kwargs: dict[str, Scalar | None] = Field(default_factory=dict)
    """What it takes beside its inputs: `kwargs = { kl_tau = 1e-3 }`, or `kl_tau = 1e-3` by itself."""

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
    """Which loss, and its settings."""

    type: str = "aipo"
    """Name of a loss in prime_node.algo.losses."""
    import_path: str | None = None
    """A loss of one's own, "package.module.function"; then `type` is not used."""
    aggregation: AggregationKind | None = None
    """token_mean, sequence_mean or constant_length; none takes that of the loss's paper."""
    constant_length: int | None = Field(default=None, ge=1)
    """Divisor of the aggregation constant_length, tokens; none takes the run's longest completion."""


class LengthPenaltyConfig(BaseModel):
    """Among a group's best rollouts the cheap ones get a larger reward."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    type: LengthCost
    """What costs: tokens or turns."""
    completion_weight: float = Field(default=1.0, ge=0.0)
    """Of the model's tokens."""
    tool_response_weight: float = Field(default=1.0, ge=0.0)
    """Of the environment's tokens."""


class AdvantageConfig(Chosen):
    """Which advantage, and its settings."""

    type: str = "group_mean"
    """Name of an advantage in prime_node.algo.advantages."""
    import_path: str | None = None
    """An advantage of one's own, "package.module.function"; then `type` is not used."""
    length_penalty: LengthPenaltyConfig | None = None
    """Shapes the rewards before the advantage, whichever that is."""


class FilterConfig(Chosen):
    """One filter."""

    type: str
    """Name of a filter in prime_node.algo.filters."""
    enforce: bool = True
    """Whether what it flags is left out of the batch; false only counts."""


class TeacherConfig(BaseModel):
    """The model that mode opd distils from: `vllm serve MODEL --port 8001`, with the tokenizer of the one that is trained."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    url: str
    """Of its HTTP server, "http://host:port"."""
    model: str
    """The name that it is served under."""


class SftConfig(BaseModel):
    """Supervised training before the reinforcement learning: it teaches the task's format."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    steps_max: int = Field(default=0, ge=0)
    """No more steps than this; 0 leaves the phase out."""
    accuracy_target: float = Field(default=0.2, gt=0.0, le=1.0)
    """It ends once the sampled accuracy on its own held-out problems is this high."""
    check_every: int = Field(default=5, ge=1)
    """Steps between two looks at the accuracy. It rises fast once it rises."""
    check_problems: int = Field(default=256, ge=1)
    """Held-out problems that the stopping rule sees; the evaluation uses others."""
    batch_size: int = Field(default=64, ge=1)
    """Problems of one step."""
    problems: int = Field(default=8_192, ge=1)
    """Training problems 0 to this number, of each environment, are drawn from."""
    optimizer: AdamW = AdamW(lr=2e-3, warmup_steps=30, beta2=0.95)
    """Constant learning rate after the warm-up."""


class PublishConfig(BaseModel):
    """Which encodings of each policy are published. What does not pay is left out: broadcast/publish/spans.py."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    spans: tuple[Annotated[int, Field(ge=1)], ...] = (1, 4, 16)
    """Steps that deltas go over, at policies whose version they divide. The trainer holds one policy's weights for each."""
    root_every: int = Field(default=16, ge=0)
    """Policies between two deltas against policy 0, which the trainer then holds too; 0 makes none."""
    anchor_pays: float = Field(default=2.0, ge=1.0)
    """An anchor is made where a newcomer would otherwise download more than this many times as much."""

    def rules(self) -> SpanRules:
        return SpanRules(spans=self.spans, root_every=self.root_every, anchor_pays=self.anchor_pays)


class RanksConfig(BaseModel):
    """Training on several processes, which `--nproc` or torchrun start; the device's own memory is what they share out."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    nproc: int = Field(default=1, ge=1)
    """Processes on this machine, one for each GPU; the option `--nproc` overrides it. torchrun has its own."""
    replicas: int = Field(default=1, ge=1)
    """HSDP: so many copies of the sharded model; gradients are added up between them. 1 shards over all ranks."""
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of forward and backward. Master weights, reductions and the optimizer are fp32 always."""
    recompute: bool = False
    """Activation checkpointing: compute activations again in the backward pass instead of keeping them."""
    compile_backend: str | None = None
    """torch.compile's backend for each layer, such as "inductor"; none computes eagerly."""
    offload: bool = False
    """Master weights, gradients and optimizer in the host's memory."""
    reduce_each_pass: bool = True
    """Reduce gradients after each pass (less memory) or once a step (less traffic)."""
    timeout_seconds: float = Field(default=300.0, gt=0.0)
    """A rank that does not answer the others for so long has failed, and all are started again."""
    restarts_max: int = Field(default=100, ge=0)
    """How often `--nproc` starts all ranks again after one of them has died."""


class TrainerConfig(Settings):
    model_config = SettingsConfigDict(env_prefix="PRIME_TRAINER_")
    section: ClassVar[str] = "trainer"

    seed: int = Field(default=0, ge=0)
    """Draws the initial weights, where the model folder has none, and the order of the supervised problems."""
    initial_weights: str | None = None
    """Policy 0 before any training: a folder or a hub's model name in Hugging Face format; none draws them by `seed`, or takes
    the base of a run whose policies are adapters."""
    threads: int = Field(default=1, ge=1)
    """Threads of the arithmetic. The same number gives the same weights; processes that share a machine need few."""
    device: str = "cpu"
    """Where the model is trained, in torch's words."""
    optimizer: AdamW = AdamW()
    """Of the reinforcement learning."""
    lr_decay: Decay = Decay.LINEAR
    """constant, linear or cosine."""
    lr_final_share: float = Field(default=1.0, ge=0.0, le=1.0)
    """The learning rate falls to this share of itself at the run's last step; 1 keeps it constant."""
    lr_damping_nats: float | None = Field(default=None, gt=0.0)
    """The learning rate is damped while the mean |log ratio| of trainer and (validated) inference is above this."""
    loss: LossConfig = LossConfig()
    """What is minimised."""
    compute_prox_log_prob: bool = False
    """The proximal policy (rho = pi / pi_prox) is the first one of the step (AReaL, verl). It costs a forward pass a batch and
    matters where a step takes several optimizer steps. Without it, it is the policy that each optimizer step begins with."""
    use_rollout_log_probs: bool = False
    """The proximal policy is the one that sampled the token (verl): rho = pi / mu, and no correction beside it."""
    mode: TrainingMode = TrainingMode.RL
    """What rollouts teach: rl by their rewards, opd by a teacher's logprobs, sft as they are."""
    environment_modes: dict[str, TrainingMode] = Field(default_factory=dict)
    """The mode of single environments, by their names."""
    teacher: TeacherConfig | None = None
    """Of mode opd."""
    advantage: AdvantageConfig = AdvantageConfig()
    """From the rewards of a group to the weight of each rollout."""
    filters: tuple[FilterConfig, ...] = (
        FilterConfig(type="gibberish", enforce=False),
        FilterConfig(type="repetition", enforce=False),
        FilterConfig(type="zero_advantage"),
    )
    """Rollouts that any of these flags are not trained on; the first that matches is counted. A list of one's own takes the place
    of this one."""
    packing: Packing = Packing.TREE
    """tree: prefixes that completions share are computed once, for short rows. sequences: one after another, for long ones."""
    row_tokens: int = Field(default=128, ge=1)
    """Tokens of a tree's row. Attention costs its square; short rows waste more on padding."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Tokens of one forward pass of one rank; bounds the memory."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights, and publish the weights with them merged in. A run may publish adapters by
    themselves: its `[run.adapters]` takes the place of this."""
    ranks: RanksConfig = RanksConfig()
    """How the model lies on several processes and devices."""
    sft: SftConfig = SftConfig()
    """The supervised phase."""
    cosign_keys: tuple[Path, ...] = ()
    """Files of further trainer keys that sign each manifest, where the run's keys ask for more than one signature."""
    publish: PublishConfig = PublishConfig()
    """How policies are sent."""
    swarm: SwarmConfig = SwarmConfig(upload_slots=64)
    """The trainer is the first seeder of what it publishes."""
    evaluate_every: int = Field(default=50, ge=0)
    """Steps between evaluations on held-out problems; 0 evaluates never. The first and the last policy are always included."""
    evaluate_at: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Further steps to evaluate at."""
    evaluation_problems: int = Field(default=256, ge=1, lt=2**20)
    """Held-out problems of one evaluation, of each environment."""
    evaluation_samples: int = Field(default=1, ge=1, lt=2**12)
    """Sampled completions of each of them."""
    evaluation_pass_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """The k of pass@k: the chance that one of k completions is right. None is above `evaluation_samples`."""
    evaluation_seed: int = Field(default=1, ge=0)
    """Of the sampled completions, the same at each evaluation."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between the trainer's own checkpoints; after a crash the steps since the last one are computed again."""
    checkpoints_kept: int = Field(default=2, ge=1)
    """Older ones are deleted."""
    checkpoints_keep_every: int = Field(default=0, ge=0)
    """Those at steps that this divides are never deleted; 0 keeps none of them."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Serve /metrics on this port, for Prometheus; none serves nothing. The rows are in metrics.jsonl in any case."""
    metrics_host: str = "127.0.0.1"
    """Its address."""
    tensorboard: bool = False
    """Write the same rows for TensorBoard, beside metrics.jsonl."""
    wandb_project: str | None = None
    """Send the same rows to this project of Weights & Biases, which keeps its own settings in WANDB_* variables."""
    device_flops_max: float | None = Field(default=None, gt=0.0)
    """What one device computes at best in a second, in the type of `ranks.compute_dtype`; the model FLOPs' utilisation is told
    against it. An H100 has 9.9e14 in bf16."""
    wait_seconds: float = Field(default=10.0, ge=0.0, le=30.0)
    """How long the coordinator may hold a request for a batch."""
    fetches_max: int = Field(default=8, ge=1)
    """Bundles that are fetched at once."""
    leave_seconds: float = Field(default=10.0, ge=0.0)
    """When it is stopped while the coordinator is away: how long to wait for it."""

    @model_validator(mode="after")
    def _enough_samples(self) -> Self:
        if max(self.evaluation_pass_at, default=1) > self.evaluation_samples:
            raise ValueError("evaluation_pass_at asks for more completions than evaluation_samples")
        return self
