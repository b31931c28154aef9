"""Does cheating pay? Strategies of cheating compared under the default audit policy (lab/prime_lab/cheating.py) and full audits.

    python scripts/bench/cheating.py [--quick] [--json]

A credited bundle is worth 1. `gain` is per bundle, over what an honest worker earns that meets the same audits; `poisoned` is the
share of bundles that were cheated, accepted and not taken back.
"""

from __future__ import annotations

import argparse

from checks import Check, Output

from prime_lab.cheating import Outcome, Strategy, after_audits, at_rate, once_trusted, play, with_little_at_stake
from prime_protocol.check_policy import AuditPolicy, CheckPolicy

POLICY = CheckPolicy(audits=AuditPolicy())
STRATEGIES: dict[str, Strategy] = {
    "honest": at_rate(0.0),
    "1 %": at_rate(0.01),
    "3 %": at_rate(0.03),
    "10 %": at_rate(0.1),
    "30 %": at_rate(0.3),
    "always": at_rate(1.0),
    "after 17 passed audits": once_trusted(17),
    "after 64 passed audits": once_trusted(64),
    "right after audits": after_audits,
    "with little at stake": with_little_at_stake(2),
    "best of 4, 1 in 20": at_rate(0.05),
}
WORK = {"best of 4, 1 in 20": 4.0}
"""Cost of a cheated bundle relative to an honest one, where it is not zero."""
CASES = ((0.5, 1.0), (0.9, 1.0), (0.5, 0.5), (0.9, 0.5))
"""Cost of honest work, and the share of cheated bundles that an audit detects."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the lives")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    options = parser.parse_args()
    output = Output(as_json=options.json)
    lives = 100 if options.quick else 500
    rows = [
        (
            name,
            cost,
            detection,
            play(strategy, POLICY, cost=cost, detection=detection, work=WORK.get(name, 0.0), num_lives=lives),
        )
        for cost, detection in CASES
        for name, strategy in STRATEGIES.items()
    ]
    print(f"{'':24} cost detection      gain +- error   cheated  poisoned  audited")
    for name, cost, detection, o in rows:
        figures = f"{o.gain:+9.4f} +- {o.gain_error:.4f} {o.cheated:9.2%} {o.poisoned:9.2%} {o.audited:8.1%}"
        print(f"{name:24} {cost:4} {detection:9} {figures}")
    return output.finish(_checks(rows))


def _checks(rows: list[tuple[str, float, float, Outcome]]) -> list[Check]:
    cheats = [(name, cost, detection, outcome) for name, cost, detection, outcome in rows if name != "honest"]
    checks = []
    for name, cost, detection, outcome in cheats:
        value = outcome.gain + 3 * outcome.gain_error
        what = f"gain of cheating {name}, cost {cost}, detection {detection}, with 3 standard errors"
        checks.append(Check(what, value, "< 0", value < 0.0))
    return checks


if __name__ == "__main__":
    raise SystemExit(main())
