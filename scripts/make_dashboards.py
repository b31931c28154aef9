"""Write the Grafana dashboards in deploy/grafana/dashboards from one table of panels.

python scripts/make_dashboards.py            # write them
python scripts/make_dashboards.py --check    # exit with 1 if a file is not as this script writes it
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards"
Panel = tuple[str, str, str, tuple[tuple[str, str], ...]]
"""Title, unit of Grafana, description, and (expression, legend) of each line."""


def quantiles(metric: str, *labels: str) -> tuple[tuple[str, str], ...]:
    """Return the median and the 95th percentile of a histogram over ten minutes."""
    by = ", ".join(("le", *labels))
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return tuple(
        (f"histogram_quantile({share}, sum by ({by}) (rate({metric}_bucket[10m])))", f"{name} {legend}".strip())
        for share, name in ((0.5, "median"), (0.95, "95 %"))
    )


DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "run": (
        "prime-node: run",
        (
            ("Steps", "none", "Newest policy, and the last one of the run.",
             (("prime_head", "policy"), ("prime_max_steps", "last"))),
            ("Steps per hour", "none", "Pace of the trainer.", (("3600 * deriv(prime_head[30m])", "steps"),)),
            ("Reward", "none", "Mean reward of the newest step.", (("prime_coordinator_reward_mean", "reward"),)),
            ("Off-policy lag", "none", "Policies between sampling and training.", quantiles("prime_group_lag")),
            ("Groups in progress", "none", "Open groups, open leases and bundles without a verdict.",
             (("prime_groups_open", "groups"), ("prime_leases_open", "leases"), ("prime_bundles_pending", "bundles"))),
            ("Time of a group", "s", "Lease, and time from verdict to batch.",
             (*quantiles("prime_group_generate_seconds")[:1], *quantiles("prime_group_queue_seconds")[:1])),
            ("Dropped groups", "none", "Accepted groups that were not trained on, per hour.",
             (("3600 * sum by (reason) (rate(prime_groups_dropped_total[30m]))", "{{reason}}"),)),
            ("Problems that fail", "none", "Problems replaced since a quorum of workers reported them.",
             (("prime_problems_redrawn", "problems"),)),
        ),
    ),
    "swarm": (
        "prime-node: swarm",
        (
            ("Peers", "none", "Peers that the coordinator lists.", (("prime_peers", "peers"),)),
            ("Time until a policy is used", "s", "From publication to a worker's engine.",
             quantiles("prime_policy_usable_seconds")),
            ("Time of a swap", "s", "Time that an engine takes for a new policy.", quantiles("prime_policy_swap_seconds")),
            ("Published bytes", "bytes", "All published checkpoints.", (("prime_published_bytes", "bytes"),)),
            ("Uploads", "Bps", "Bundles that workers upload.", (("rate(prime_upload_bytes_total[5m])", "bundles"),)),
            ("Faults of the libp2p host", "none", "Since the coordinator's start.", (("prime_p2p_host_faults", "faults"),)),
        ),
    ),
    "validators": (
        "prime-node: validators",
        (
            ("Bundles without a verdict", "none", "They wait for validators.", (("prime_bundles_pending", "bundles"),)),
            ("Time to a verdict", "s", "From a bundle's arrival.", quantiles("prime_check_seconds")),
            ("Verdicts", "none", "Settled rollouts per minute.",
             (("60 * sum by (outcome) (rate(prime_rollouts_total[10m]))", "{{outcome}}"),)),
            ("Measured values", "none", "What validators measured, 95th percentile.",
             quantiles("prime_check_measured", "number")[1:]),
            ("Contradictions", "none", "Bundles about which two validators disagree, and pairs that disagree too often.",
             (("prime_validator_contradictions", "bundles"), ("prime_validators_differing", "pairs"))),
            ("Left unanswered", "none", "Bundles that a validator had to confirm and did not.",
             (("prime_validator_unanswered", "bundles"),)),
        ),
    ),
    "contributors": (
        "prime-node: contributors",
        (
            ("Workers", "none", "Active and banned keys.", (("prime_workers", "active"), ("prime_workers_banned", "banned"))),
            ("Accepted rollouts", "none", "Per minute.",
             (('60 * sum(rate(prime_rollouts_total{outcome="accepted"}[10m]))', "accepted"),)),
            ("Rejected rollouts", "none", "Per minute, by reason.",
             (('60 * sum by (outcome) (rate(prime_rollouts_total{outcome!="accepted"}[10m]))', "{{outcome}}"),)),
            ("Leases without a bundle", "none", "Per minute.",
             (("60 * sum by (outcome) (rate(prime_leases_wasted_total[10m]))", "{{outcome}}"),)),
            ("Refused requests", "none", "Per second, by endpoint.",
             (('sum by (endpoint) (rate(prime_requests_total{outcome!="ok"}[5m]))', "{{endpoint}}"),)),
            ("Requests", "none", "Per second.", (("sum by (endpoint) (rate(prime_requests_total[5m]))", "{{endpoint}}"),)),
        ),
    ),
}  # fmt: skip


def dashboard(name: str) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it. It asks for the Prometheus data source."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"prime-node-{name}",
        "title": title,
        "tags": ["prime-node"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [{"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(number, *one) for number, one in enumerate(panels)],
    }


def _panel(number: int, title: str, unit: str, description: str, lines: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    targets = [
        {"refId": "ABCDEFG"[index], "datasource": source, "expr": expression, "legendFormat": legend}
        for index, (expression, legend) in enumerate(lines)
    ]
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": source,
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def main() -> None:
    """Write or compare the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file differs")
    checks = parser.parse_args().check
    for name in DASHBOARDS:
        file, text = FOLDER / f"{name}.json", json.dumps(dashboard(name), indent=1) + "\n"
        if not checks:
            FOLDER.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        elif not file.exists() or file.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{file} is not as scripts/make_dashboards.py writes it: run it")


if __name__ == "__main__":
    main()
