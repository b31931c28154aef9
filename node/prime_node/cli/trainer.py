"""`prime-node trainer`: turns accepted rollouts into policies and publishes them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from prime_node.cli.role import role_command

if TYPE_CHECKING:
    from prime_node.cli.options import Options
    from prime_node.cli.place import Place
    from prime_node.ports.transport import TrainerPort
    from prime_node.trainer.trainer import Trainer

GRACE_S = 50.0
"""Time to finish the step under way, save and publish."""
UNFINISHED = 5
"""Exit code where it was asked to stop before the run was over."""


async def _train(place: Place, options: Options, stop: asyncio.Event) -> int:
    from prime_node.broadcast.pinned import fetch_run
    from prime_node.cli import wire, wire_swarm
    from prime_node.patience import unless
    from prime_node.trainer.config import TrainerConfig
    from prime_node.trainer.loop import run as run_trainer

    settings = options.load(TrainerConfig)
    async with wire.client(place.link, place.key) as client, contextlib.AsyncExitStack() as seeding:

        async def set_up() -> Trainer:
            """Waits for a coordinator that is away, and builds in a thread: signals are heard all the while."""
            run = await fetch_run(client, place.link.run, clock=wire.clock())
            client.bounds = run.spec.limits
            model = await wire.model_folder(client, run, place.folder / "model")
            trust = await wire.trust(run, [(client.url, client)], place.folder)
            publish_to: TrainerPort = client
            if settings.swarm.enabled and not settings.swarm.private:
                publish_to, peer = wire_swarm.trainer_seeding(run, place.key, client, settings.swarm, place.folder)
                await seeding.enter_async_context(peer.running())
            return await asyncio.to_thread(
                wire.trainer_parts, run, client, place.key, settings,
                trust=trust, publish_to=publish_to, model=model, folder=place.folder,
            )  # fmt: skip

        parts = await unless(stop.wait(), set_up())
        return 0 if parts is not None and await run_trainer(parts, stop) else UNFINISHED


trainer = role_command(
    "trainer",
    _train,
    grace_s=GRACE_S,
    about="Train: supervised first where configured, then on accepted rollouts; publish every policy. Resumes where it stopped.",
)
