"""Check of a lease's prompts: this machine renders each problem again, by the rule of the coordinator (envs/prompts.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from prime_node.envs.prompts import is_leasable, prompt_of
from prime_node.ports.environment import Environment, EnvironmentGone, EnvironmentSilent, Tokenizer
from prime_protocol.assignment import GroupAssignment, Lease
from prime_protocol.limits import Limits

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseFault:
    """Reason why the bundle of a lease is unverifiable. It is no fault of the worker."""

    detail: str
    unscored: tuple[int, ...] = ()
    """Indices of the rollouts whose problem the environment failed to render; the coordinator draws other problems then."""


async def lease_fault(
    lease: Lease, environments: Mapping[str, Environment], tokenizer: Tokenizer, limits: Limits
) -> LeaseFault | None:
    """Return why a lease's prompts are not those of its problems, or None. It renders each problem, in a thread."""
    failed: list[int] = []
    detail, first = "", 0
    for group in lease.groups:
        environment = environments.get(group.problem.environment)
        if environment is None:
            return _logged(LeaseFault(f"slot {group.slot}: the run has no environment {group.problem.environment}"))
        try:
            prompt = await asyncio.to_thread(prompt_of, environment, group.problem.index, tokenizer)
        except Exception as error:  # third-party code: whatever it raises, the validator continues
            log.warning("%s: rendering failed", _named(group), exc_info=True)
            detail = f"{_named(group)}: no prompt: {type(error).__name__}"
            failed += range(first, first + len(group.seeds))
            if isinstance(error, EnvironmentGone | EnvironmentSilent):
                break  # the next one may take as long
        else:
            if prompt != group.prompt_token_ids:
                return _logged(
                    LeaseFault(
                        f"{_named(group)}: the coordinator leased another prompt than this validator renders; "
                        "compare their model files and versions of the environment"
                    )
                )
            if not is_leasable(prompt, limits):
                return _logged(
                    LeaseFault(f"{_named(group)}: its prompt has {len(prompt)} tokens, which the run forbids")
                )
        first += len(group.seeds)
    return LeaseFault(detail, tuple(failed)) if failed else None


def _named(group: GroupAssignment) -> str:
    return f"slot {group.slot}, environment {group.problem.environment}, problem {group.problem.index}"


def _logged(fault: LeaseFault) -> LeaseFault:
    log.error("the coordinator's lease is wrong: %s", fault.detail)
    return fault
