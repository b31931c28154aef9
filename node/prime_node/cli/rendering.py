"""Renders prompts again with a run's own environments, to compare them with those that a coordinator has leased."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prime_protocol.assignment import Lease, Problem
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.run_spec import PinnedRun

if TYPE_CHECKING:
    from prime_node.broadcast.audit.seed_audit import Render


@contextlib.contextmanager
def rendering(run: PinnedRun, model: Path, *, is_pinned: bool) -> Iterator[Render]:
    """Start the run's deterministic environments, and render prompts with them. Raises LocalError."""
    from prime_node.broadcast.follow.pinned import model_files_in
    from prime_node.cli import wire
    from prime_node.cli.options import Options
    from prime_node.cli.wire_environments import end_environments
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.envs.source import prompt_of

    if not is_pinned:
        raise LocalError("--prompts runs the environments that the run names: name the run by --run or its whole link")
    model_files_in(model, run)
    certain = tuple(one for one in run.spec.environments if one.is_deterministic)
    part = run.spec.model_copy(update={"environments": certain})
    made = wire.environments(part, model, Options(None, []).load(EnvironmentSettings), folder=model)
    tokenizer = wire.tokenizer(model)

    def render(problem: Problem) -> tuple[int, ...] | None:
        environment = made.get(problem.environment)
        return None if environment is None else prompt_of(environment, problem.index, tokenizer)

    try:
        yield render
    finally:
        end_environments(made)


def about_the_prompts(lease: Lease, render: Render) -> str:
    """Compare a lease's prompts with those of its problems. Raises RemoteError if the coordinator leased others."""
    rendered = [(group, render(group.problem)) for group in lease.groups]
    known = [(group, tuple(prompt)) for group, prompt in rendered if prompt is not None]
    different = [group.slot for group, prompt in known if prompt != group.prompt_token_ids]
    if different:
        raise RemoteError(
            ErrorCode.MALFORMED,
            f"{len(different)} of the lease's {len(lease.groups)} prompts are not those that this machine renders for their "
            f"problems, first that of slot {different[0]}. Another version of an environment or of its data also renders other "
            "prompts",
        )
    return f"{len(known)} of its {len(lease.groups)} prompts are those that this machine renders"
