"""A step as a row of metrics: where its seconds went, how fast it was, what it was trained on.

Names from verl's fully asynchronous trainer have the same meaning as there.
"""

from __future__ import annotations

from collections.abc import Mapping

from prime_node.ports.metrics import Metrics
from prime_node.ports.web import Request, Response, Route
from prime_node.trainer.state import TrainerState
from prime_node.trainer.step import Trained


def trainer_row(
    trained: Trained,
    state: TrainerState,
    *,
    train_seconds: float,
    save_seconds: float,
    copy_seconds: float,
    commit_seconds: float,
    submit_seconds: float,
    step_seconds: float,
    device_flops_max: float | None,
) -> dict[str, float]:
    """Return a step's row. `state` is the state after the step."""
    return {
        **trained.metrics,
        "num_groups_left_out": trained.groups_left_out,
        "idle_seconds": trained.idle_seconds,
        "ahead_seconds": trained.ahead_seconds,
        "train_seconds": train_seconds,
        **speed(trained.metrics, train_seconds, device_flops_max),
        "save_seconds": save_seconds,
        "copy_seconds": copy_seconds,
        "commit_seconds": commit_seconds,
        "submit_seconds": submit_seconds,
        "step_seconds": step_seconds,
        "trainer/idle_ratio": trained.idle_seconds / max(step_seconds, 1e-9),
        "fully_async/total_wait_time": trained.idle_seconds,
        "fully_async/count/stale_samples_processed": state.stale_groups,
        "fully_async/count/stale_trajectory_processed": state.stale_rollouts,
    }


def line_of(row: Mapping[str, float]) -> str:
    """Return a row as a line of text; empty if it holds nothing of interest.

    Example: `step 40: reward 0.62, lag 2.0, 0.4 s of which 68 % waiting`.
    """
    if "sft_step" in row:
        score = f"sampled accuracy {row['sft_accuracy']:.2f}" if "sft_accuracy" in row else f"loss {row['loss']:.2f}"
        return f"supervised step {row['sft_step']}: {score}"
    if "reward_mean" in row and "step_seconds" in row:
        waiting = f"{row['step_seconds']:.1f} s of which {row['trainer/idle_ratio']:.0%} waiting".replace("%", " %")
        return f"step {row['step']}: reward {row['reward_mean']:.2f}, lag {row['lag_mean']:.1f}, {waiting}"
    return ""


def speed(metrics: Mapping[str, float], train_seconds: float, device_flops_max: float | None) -> dict[str, float]:
    """Return tokens a second, and the model FLOPs' utilisation (MFU).

    MFU counts 6 FLOPs for each parameter and token (arXiv 2204.02311, appendix B), relative to the peak of all devices.
    It omits attention's own part, which is small for short sequences.
    """
    seconds = max(train_seconds, 1e-9)
    rows = {"tokens_per_second": metrics["num_tokens"] / seconds}
    if "model_flops" in metrics:
        rows["computed_tokens_per_second"] = metrics["num_computed_tokens"] / seconds
        if device_flops_max is not None:
            rows["mfu"] = metrics["model_flops"] / (seconds * device_flops_max * metrics["ranks"])
    return rows


def metrics_route(metrics: Metrics) -> Route:
    """Return the route of the trainer's own GET /metrics, in Prometheus's format."""

    async def answer(request: Request) -> Response:
        body, content_type = metrics.exposition()
        return Response(body, content_type=content_type)

    return Route("GET", "/metrics", answer)
