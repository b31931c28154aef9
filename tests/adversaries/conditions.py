"""Conditions of a run in which a cheat can act, and the rate of its audits."""

from __future__ import annotations

from typing import Any

from prime_node.cli.shipped import shipped_calibration
from prime_protocol.assignment import Sampling
from prime_protocol.check_policy import AuditPolicy, CheckPolicy

SOFT = ("equivocation", "time-shift", "hoarding", "picking")
"""Cheats that upload nothing false; the scheduler limits them."""
UNSEEDED = ("unseeded-best-of-n", "framing")
"""Cheats that need a run that admits engines without seeds."""
FLOOR = AuditPolicy(newcomer_bundles=1)
"""A worker is at the default floor, one bundle in four, after four passed audits."""
FLOOR_AUDITS = 4


def conditions_for(name: str, *, audits: AuditPolicy | None = None, strikes_max: int = 2) -> dict[str, Any]:
    """Fields of the RunSpec that differ from the arena's own."""
    checks = CheckPolicy(
        proofs=True,
        calibration=shipped_calibration(),
        audits=audits,
        strikes_max=strikes_max,
        flips_explained=True,
        close_flips_seen=True,
        shading_seen=True,
        logprobs_judged=True,
        unseeded=name in UNSEEDED,
        reference_share=float(name == "unseeded-best-of-n"),
    )
    fields: dict[str, Any] = {"checks": checks}
    if name in SOFT:
        fields |= {"lease_seconds": 0.5, "max_steps": 5}
    if name == "framing":  # only a long and surprising text has an owner
        fields["sampling"] = Sampling(temperature=1.5, completion_tokens_max=160, stop_token_ids=())
    return fields
