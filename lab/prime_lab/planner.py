"""Estimate of a training step on a cluster: time and memory from a model's shape, in closed form.

Letters: P parameters, L layers, h hidden size, N GPUs, T tokens of a step, M tokens of a pass and GPU, s tokens of a
sequence. Bytes and seconds.

    computing  C = (6 P T + 6 L h s T) k / (N F e)           k = 4/3 where activations are computed again
               6 FLOPs a parameter and token (arXiv 2001.08361); causal attention 6 h s a layer and token, both directions
    traffic    W = passes * (2 * 2 P + 4 P) (N - 1) / N / B  parameters gathered twice in bf16, gradients scattered in fp32
               passes = ceil(T / (N M)); B is what a ring over all GPUs carries for each of them over its slowest link
    waiting    max(0, W - C) + W / (passes (L + 1))          the next layer is gathered meanwhile; the first one is waited for
    optimizer  O = 40 P / (N H)                              master, gradient, two moments read, three written, in fp32; then
                                                             the master is read and rounded
    copy       2 P / (N D)                                   a rank's rows in bf16 to the host: what publishing costs a step

    memory     20 P / N                                      fp32 rounded weight, master, gradient, two moments
               + (3 * 2 + 4) (P - E) / L + 2 E               three layers gathered, one layer's gradient before it is scattered;
                                                             the root unit E is embedding and head
               + (2 L + 34) h M                              an activation a layer, and one layer at work (arXiv 2205.05198);
               (34 L h M where nothing is computed again)    with flash attention
               + 3 * 4 * BLOCK                               logits in blocks (adapters/training/chosen_logprobs.py)

Not modelled: stragglers, the network's latency, kernels that are slower than e for small shapes, generation,
fragmentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BLOCK_LOGITS = 2**24
ACTIVATION_BYTES = 34
"""Bytes of one layer, a hidden element and a token, in bf16 with flash attention."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder. Example: SHAPES["8B"]."""

    parameters: float
    layers: int
    hidden: int
    vocab: int
    is_tied: bool = False

    @property
    def root_parameters(self) -> float:
        """Return the parameters of embedding and head."""
        return self.vocab * self.hidden * (1 if self.is_tied else 2)


SHAPES = {
    "8B": Shape(8.2e9, 36, 4_096, 151_936),
    "32B": Shape(32.8e9, 64, 5_120, 151_936),
    "70B": Shape(70.6e9, 80, 8_192, 128_256),
}
"""Shapes of Qwen3-8B, Qwen3-32B and Llama-3-70B."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU and its links.

    The default is an H100 SXM in nodes of 8 with 400 Gbit/s for each GPU, from NVIDIA's data sheet.
    """

    flops_max: float = 989e12
    """Peak FLOPs per second: bf16, dense."""
    efficiency: float = 0.55
    """Share of the peak that large matrix products of a whole model reach. Published FSDP runs of 7-70B report 0.4 to 0.6."""
    memory_bytes: float = 80e9
    memory_bytes_s: float = 3.35e12
    node_gpus: int = 8
    node_bytes_s: float = 360e9
    """NVLink, each GPU and direction; 80 % of 450e9."""
    network_bytes_s: float = 40e9
    """Network between nodes, each GPU; 80 % of 50e9."""
    host_bytes_s: float = 50e9
    """Link to the host's memory over PCIe 5."""


@dataclass(frozen=True, slots=True)
class Load:
    """Size of a step."""

    tokens: int = 4_194_304
    """Tokens of a step: 512 sequences of 8,192."""
    sequence_tokens: int = 8_192
    pass_tokens: int = 16_384
    """Tokens of one pass on one GPU."""
    recompute: bool = True


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The estimate for one step."""

    compute_s: float
    traffic_s: float
    wait_s: float
    optimizer_s: float
    copy_s: float
    memory_bytes: float
    passes: int

    @property
    def step_s(self) -> float:
        """Return the duration of a step."""
        return self.compute_s + self.wait_s + self.optimizer_s + self.copy_s


def model_flops(shape: Shape, load: Load) -> float:
    """Return the FLOPs of a step's forward and backward, nothing computed twice."""
    attention = 6.0 * shape.layers * shape.hidden * load.sequence_tokens
    return (6.0 * shape.parameters + attention) * load.tokens


def state_bytes(parameters: float, gpus: int) -> float:
    """Return the bytes on each GPU between two steps: fp32 rounded weight, master, gradient and two moments of its rows."""
    return 20.0 * parameters / gpus


def plan(shape: Shape, gpus: int, load: Load | None = None, machine: Machine | None = None) -> StepPlan:
    """Estimate a step of `shape`, sharded over all GPUs."""
    load, machine = load or Load(), machine or Machine()
    passes = math.ceil(load.tokens / (gpus * load.pass_tokens))
    again = 4.0 / 3.0 if load.recompute else 1.0
    compute_s = model_flops(shape, load) * again / (gpus * machine.flops_max * machine.efficiency)
    link = machine.node_bytes_s if gpus <= machine.node_gpus else machine.network_bytes_s
    traffic_s = passes * 8.0 * shape.parameters * (gpus - 1) / gpus / link
    layer = (shape.parameters - shape.root_parameters) / shape.layers
    kept = 2.0 * shape.layers + ACTIVATION_BYTES if load.recompute else ACTIVATION_BYTES * shape.layers
    return StepPlan(
        compute_s=compute_s,
        traffic_s=traffic_s,
        wait_s=max(0.0, traffic_s - compute_s) + traffic_s / (passes * (shape.layers + 1)),
        optimizer_s=40.0 * shape.parameters / gpus / machine.memory_bytes_s,
        copy_s=2.0 * shape.parameters / gpus / machine.host_bytes_s,
        memory_bytes=state_bytes(shape.parameters, gpus)
        + 10.0 * layer
        + 2.0 * shape.root_parameters
        + kept * shape.hidden * load.pass_tokens
        + 3.0 * 4.0 * BLOCK_LOGITS,
        passes=passes,
    )
