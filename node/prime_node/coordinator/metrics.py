"""Declarations of the coordinator's metrics. Its rows (measure/observer.py) also become gauges (observe.Gauges)."""

from __future__ import annotations

from prime_node.ports.metrics import Metric, MetricKind

HOST_FAULTS = "prime_p2p_host_faults"
LAG_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
METRICS = (
    Metric(MetricKind.GAUGE, "prime_head", "Newest published policy."),
    Metric(MetricKind.GAUGE, "prime_max_steps", "Steps of the whole run."),
    Metric(MetricKind.GAUGE, "prime_paused", "Whether the operator has paused the run: 1 or 0."),
    Metric(MetricKind.GAUGE, "prime_workers", "Active workers."),
    Metric(MetricKind.GAUGE, "prime_workers_banned", "Banned keys."),
    Metric(MetricKind.GAUGE, "prime_leases_open", "Leases without a bundle yet."),
    Metric(MetricKind.GAUGE, "prime_bundles_pending", "Bundles without a verdict yet."),
    Metric(MetricKind.GAUGE, "prime_groups_open", "Open groups of the window."),
    Metric(MetricKind.GAUGE, "prime_published_bytes", "Bytes of all published checkpoints."),
    Metric(MetricKind.GAUGE, "prime_events", "Events in the log since the run began."),
    Metric(MetricKind.COUNTER, "prime_rollouts_total", "Settled rollouts by outcome, since the start.", ("outcome",)),
    Metric(MetricKind.COUNTER, "prime_requests_total", "Requests by endpoint and outcome.", ("endpoint", "outcome")),
    Metric(
        MetricKind.COUNTER,
        "prime_requests_shed_total",
        "Requests refused because the event loop was behind, by their importance.",
        ("importance",),
    ),
    Metric(MetricKind.COUNTER, "prime_upload_bytes_total", "Bytes of uploaded bundles."),
    Metric(MetricKind.GAUGE, "prime_problems_redrawn", "Problems replaced because they fail for a quorum of workers."),
    Metric(MetricKind.GAUGE, "prime_peers", "Listed peers."),
    Metric(MetricKind.GAUGE, "prime_curriculum", "Difficulty pools and what they evicted and filtered.", ("name",)),
    Metric(MetricKind.GAUGE, "prime_validator_contradictions", "Bundles about which two validators disagree."),
    Metric(MetricKind.GAUGE, "prime_validators_differing", "Pairs of validators that disagree more often than chance."),
    Metric(
        MetricKind.GAUGE, "prime_validator_unanswered", "Bundles that a validator had to confirm and left unanswered."
    ),
    Metric(
        MetricKind.HISTOGRAM, "prime_check_measured", "Values that validators measured for their verdicts.", ("number",)
    ),
    Metric(
        MetricKind.HISTOGRAM, "prime_group_lag", "Off-policy lag of trained groups, in policies.", buckets=LAG_BUCKETS
    ),
    Metric(MetricKind.HISTOGRAM, "prime_group_queue_seconds", "Time from a group's verdict to its batch."),
    Metric(MetricKind.HISTOGRAM, "prime_group_generate_seconds", "Duration of a trained group's lease."),
    Metric(MetricKind.HISTOGRAM, "prime_check_seconds", "Time from a bundle's arrival to its verdict."),
    Metric(
        MetricKind.HISTOGRAM,
        "prime_policy_usable_seconds",
        "Time from a policy's publication to its use in a worker's engine.",
    ),
    Metric(MetricKind.HISTOGRAM, "prime_policy_swap_seconds", "Time that a worker's engine took to swap to a policy."),
    Metric(
        MetricKind.COUNTER,
        "prime_groups_dropped_total",
        "Accepted groups that were dropped, since the start: stale, damaged on the disk, too easy or hard, taken back.",
        ("reason",),
    ),
    Metric(
        MetricKind.COUNTER,
        "prime_leases_wasted_total",
        "Leases that ended without a bundle, since the start.",
        ("outcome",),
    ),
)
HOST_METRICS = (Metric(MetricKind.GAUGE, HOST_FAULTS, "Faults of the coordinator's libp2p host since its start."),)
"""Metrics of a coordinator with a libp2p host."""
