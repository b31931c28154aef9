"""Named numbers of a step's log: the row of metrics.jsonl.

Names of verl's fully asynchronous trainer have the same meaning here; a sample is a group, a trajectory a completion. Times are
in seconds. Counts `since the start` restart with the coordinator.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from prime_node.coordinator.measure.tracker import StepLog


def coordinator_row(log: StepLog, *, head: int, num_generated: int, num_dropped: int) -> dict[str, float]:
    """Return the row of a step. `num_generated` groups were accepted since the run began.

    `num_dropped` groups were dropped as stale since the start.
    """
    row = {
        "step": log.step,
        "rollouter/idle_ratio": log.idle_ratio,
        "fully_async/rollouter/active_time": log.seconds * (1.0 - log.idle_ratio),
        "fully_async/rollouter/version_time": log.seconds,
        "fully_async/count/current_param_version": head,
        "fully_async/count/total_generated_samples": num_generated,
        "fully_async/count/staleness_samples": log.num_ready + log.num_leased,
        "fully_async/count/dropped_stale_samples": num_dropped,
        "fully_async/monitor/active_tasks_size": log.num_leased,
        "fully_async/monitor/queue/mq_queue_size": log.num_ready,
        "fully_async/monitor/queue/pending_queue_size": log.num_open,
        "workers_mean": log.workers_mean,
        **_spread("queue_age_seconds", log.queue_seconds),
        **_spread("check_seconds", log.check_seconds),
        **_processing_time(log.generate_seconds),
    }
    if log.rewards:
        row["reward_mean"] = statistics.fmean(log.rewards)
    num_trained = log.lags.total()
    if num_trained:
        row["lag_mean"] = sum(lag * count for lag, count in log.lags.items()) / num_trained
        row["lag_max"] = max(log.lags)
    for base, counts in (("dropped", log.dropped), ("refused", log.refused), ("wasted", log.wasted)):
        row |= {f"{base}/{name}": count for name, count in sorted(counts.items())}
    return row | {f"lag/{lag}": count for lag, count in sorted(log.lags.items())}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_mean": statistics.fmean(values), f"{name}_max": max(values)} if values else {}


def _processing_time(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    marks = {f"tp{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 95, 99)}
    found = {"avg": statistics.fmean(ordered), "min": ordered[0], "max": ordered[-1], **marks}
    return {f"fully_async/processing_time/{name}": value for name, value in found.items()}
