"""`prime-node validator`: judges rollouts. Several may run at once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from prime_node.cli.kernels import ready_kernels
from prime_node.cli.role import role_command

if TYPE_CHECKING:
    from prime_node.broadcast.follow.follower import Follower
    from prime_node.broadcast.follow.trust import Trust
    from prime_node.cli.options import Options
    from prime_node.cli.place import Place
    from prime_node.ports.engine import SamplingScorer
    from prime_node.validator.lanes import Lanes
    from prime_protocol.run_spec import PinnedRun

GRACE_S = 8.0


async def _validate(place: Place, options: Options, stop: asyncio.Event) -> int:
    from prime_node.broadcast.follow.pinned import fetch_run
    from prime_node.cli import wire, wire_swarm
    from prime_node.patience import unless
    from prime_node.validator.config import ValidatorConfig
    from prime_node.validator.loop import Validator
    from prime_node.validator.loop import run as run_validator

    settings = options.load(ValidatorConfig)
    model = place.folder / "model"
    async with wire.client(place.link, place.key) as client:

        async def set_up() -> tuple[PinnedRun, SamplingScorer, Lanes]:
            """Waits for a coordinator that is away, and builds in threads: signals are heard all the while."""
            run = await fetch_run(client, place.link.run, clock=wire.clock())
            client.bounds = run.spec.limits
            await wire.model_folder(client, run, model)
            scorer = await asyncio.to_thread(wire.scorer, settings, model, run)
            lanes = wire.scoring_lanes(run.spec, model, folder=place.folder, lanes_max=settings.scorers)
            await lanes.open()
            return run, scorer, lanes

        ready = await unless(stop.wait(), set_up())
        if ready is None:
            return 0
        run, scorer, lanes = ready
        kept = max(settings.policies_kept, run.spec.async_level + 2)
        following = wire_swarm.swarm_follower(
            run, place.key, client, place.folder, settings.model_copy(update={"policies_kept": kept})
        )
        try:
            async with following as (follower, trust, _):
                task = asyncio.create_task(_follow(trust, follower))
                task.add_done_callback(lambda _: stop.set())  # a full disk ends it; its error is raised below, not lost
                try:
                    await run_validator(
                        Validator(
                            run=run,
                            config=settings,
                            coordinator=client,
                            scorer=scorer,
                            lanes=lanes,
                            tokenizer=wire.tokenizer(model),
                            policy=follower.weights,
                            policy_versions=follower.versions,
                            clock=wire.clock(),
                        ),
                        stop,
                    )
                finally:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
        finally:
            lanes.close()
            await scorer.close()
    return 0


async def _follow(trust: Trust, follower: Follower) -> None:
    """Policies by the keys of today. A validator that is shown a frozen run does no harm: it judges what it is asked to."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(trust.follow())
        tasks.create_task(follower.follow())


validator = role_command(
    "validator",
    _validate,
    grace_s=GRACE_S,
    about="Judge rollouts by a forward pass of the claimed policy, and compute their rewards.",
    prepare=ready_kernels,
)
