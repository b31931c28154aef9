"""Estimate of the memory that the trainer needs on each device, from a model's shape and the trainer's settings, without torch.

Letters: P parameters, A parameters of adapters, E those of embedding and head, L layers, h hidden size, f width of the MLP,
q and k widths of queries and of keys, V vocabulary, N ranks that share the model, M tokens of a pass, b bytes of a computed
value (2 for bf16, 4 for fp32), m bytes of one moment of the optimizer (4, or 1 in 8 bits).

    state        (4 + 4 + 4 + 2 m) P / N             fp32 rounded weight, master, gradient, two moments; in the host's memory
                                                     with offload
                 (4 P + 2 (P - E) + (12 + 2 m) A) / N    with adapters: merged weights in fp32, the base's in bf16
                 2 P / N                             each kept policy: reference, proximal; 4 A with adapters
                 (8 + 2 m) P' / N                    a critic: weight and gradient in fp32, two moments; P' lacks an untied head.
                                                     Its passes follow the policy's, so the rest is needed once
    gathered     (3 b + 4) (P - E) / L + (2 b + 4) E three layers, and one layer's gradient in fp32; the rest of the model and
                                                     its gradient. Only where FSDP shards: several ranks, bf16 or offload
                 4 P                                 gradients until the end of the step, without `reduce_each_pass`
                 10 h f                              with adapters: the merged weight of one layer, in fp32 and rounded
    activations  M a                                 for each layer, and for one alone where they are computed again:
                 a = 2 (4 + b + b) h   + 4 b f       two norms, in fp32, and a gated MLP
                     + b (2 q + 2 k)                 flash attention
                     + (4 + b) (q + k)               norms of queries and keys, if the model has them
                 b h M L                             inputs of the layers, where activations are computed again
    logits       (b + 8) min(M V, BLOCK) + 4 h M     adapters/training/chosen_logprobs.py

tests/node/test_memory_plan.py compares state and activations with torch's own numbers on the meta device. Nothing here was
compared with a GPU. Not modelled: experts of a mixture, fragmentation beyond SLACK.
"""

from __future__ import annotations

from dataclasses import dataclass

CUDA_BLOCK_LOGITS = 2**28
"""Logits that are in memory at a time on a GPU."""
PROCESS_BYTES = 3 * 2**29
"""Memory of a GPU that CUDA, its libraries and their kernels take in each process."""
SLACK = 1.1
"""Factor for fragmentation and for what is not modelled."""
MOMENT_BYTES = {"fp32": 4.0, "8bit": 1.03}
"""Bytes of one moment of a parameter, by the setting `trainer.optimizer.moments`. 8 bits have a scale for each 256 values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense decoder."""

    parameters: int
    root_parameters: int
    """Parameters of embedding and head; one matrix if they are tied."""
    layers: int
    hidden: int
    mlp: int
    """Width of the MLP."""
    queries: int
    """Heads times their size."""
    keys: int
    """Heads of keys times their size."""
    has_head_norms: bool
    """Whether queries and keys are normalised."""
    vocab: int

    def adapter_parameters(self, rank: int) -> int:
        """Return the parameters of adapters of all linear layers."""
        attention = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys)
        return rank * self.layers * (attention + 3 * (self.hidden + self.mlp))

    @property
    def critic_parameters(self) -> int:
        """Parameters of a critic: the decoder and the embedding, with one output instead of the vocabulary."""
        head = self.root_parameters - self.vocab * self.hidden
        return self.parameters - head + self.hidden + 1

    def cache_bytes(self, tokens: int) -> int:
        """Return the bytes of keys and values of so many tokens in bf16."""
        return 2 * 2 * self.layers * self.keys * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLoad:
    """The settings of the trainer that decide its memory."""

    ranks: int = 1
    """Ranks among which the model is divided: processes / replicas."""
    compute_dtype: str = "fp32"
    recompute: bool = False
    offload: bool = False
    reduce_each_pass: bool = True
    pass_tokens: int = 16_384
    moments: str = "fp32"
    kept_policies: int = 0
    """Earlier policies that the trainer keeps: a reference, a proximal one."""
    adapter_parameters: int | None = None
    """Parameters of adapters; None: the weights themselves are trained."""
    critic_moments: str | None = None
    """Type of the moments of a critic's optimizer; None: there is no critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Memory of each rank in bytes."""

    state: int
    gathered: int
    activations: int
    logits: int
    host: int
    """Memory of the host, for each rank, that takes the place of `state` with offload."""

    @property
    def device(self) -> int:
        """Return the memory of the rank's GPU, with CUDA's own."""
        return PROCESS_BYTES + int(SLACK * (self.state + self.gathered + self.activations + self.logits))


def activation_bytes(shape: ModelShape, compute_dtype: str) -> int:
    """Return the bytes that the backward pass of one layer needs for each token."""
    size = 2 if compute_dtype == "bf16" else 4
    norms = 2 * (4 + 2 * size) * shape.hidden
    attention = size * (2 * shape.queries + 2 * shape.keys)
    head_norms = (4 + size) * (shape.queries + shape.keys) if shape.has_head_norms else 0
    return norms + attention + head_norms + 4 * size * shape.mlp


def trainer_memory(shape: ModelShape, load: TrainerLoad) -> TrainerMemory:
    """Return the memory that one rank needs."""
    size = 2 if load.compute_dtype == "bf16" else 4
    moments = 2 * MOMENT_BYTES[load.moments]
    adapters = load.adapter_parameters
    if adapters is None:
        state = (12 + moments + 2 * load.kept_policies) * shape.parameters / load.ranks
    else:
        base = 2 * (shape.parameters - shape.root_parameters)
        state = (4 * shape.parameters + base + (12 + moments + 4 * load.kept_policies) * adapters) / load.ranks
    if load.critic_moments is not None:
        state += (8 + 2 * MOMENT_BYTES[load.critic_moments]) * shape.critic_parameters / load.ranks
    layer = (shape.parameters - shape.root_parameters) / shape.layers
    gathered = 0.0
    if load.ranks > 1 or load.offload or load.compute_dtype == "bf16":
        gathered = (3 * size + 4) * layer + (2 * size + 4) * shape.root_parameters
        if not load.reduce_each_pass:
            gathered += 4 * (shape.parameters if adapters is None else adapters)
    if adapters is not None:
        gathered += 10 * shape.hidden * shape.mlp
    each = activation_bytes(shape, load.compute_dtype)
    kept = each + size * shape.hidden * shape.layers if load.recompute else each * shape.layers
    logits = (size + 8) * min(CUDA_BLOCK_LOGITS, load.pass_tokens * shape.vocab) + 4 * shape.hidden * load.pass_tokens
    return TrainerMemory(
        state=0 if load.offload else int(state),
        gathered=int(gathered),
        activations=kept * load.pass_tokens,
        logits=logits,
        host=int(state) if load.offload else 0,
    )
