"""One rank of a trainer under torchrun, in the world of trainer_world.py: `-m tests.node.cluster_process FOLDER STEPS`.

The coordinator's state is in files, so it survives whatever happens to the ranks. Each rank leaves its process id.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from tests.node.batch_coordinator import BatchCoordinator, Fuse, make_run, write_model
from tests.node.trainer_world import CONFIG, make_trainer

from prime_node.adapters.training.leading_backend import LeadingBackend, dismiss, follow
from prime_node.adapters.training.ranks import Ranks
from prime_node.adapters.training.torch_backend import make_backend
from prime_node.cli.launch import meeting_place
from prime_node.files import write_durably
from prime_node.trainer.loop import run_trainer
from prime_protocol.envelope import Envelope, open_envelope
from prime_protocol.manifest import open_manifest

CLUSTER = CONFIG.model_copy(update={"lr_damping_nats": None, "evaluate_every": 0})


class FolderCoordinator(BatchCoordinator):
    """Coordinator that records in a folder what was published."""

    def __init__(self, folder: Path, *, max_steps: int) -> None:
        super().__init__(make_run(max_steps=max_steps))
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.blob"):
            self.blobs[path.stem] = path.read_bytes()
        for path in sorted(folder.glob("*.manifest")):
            self.manifests.append(open_manifest(open_envelope(path.read_bytes()), self.run))

    async def put_blob(self, data: bytes, *, seeded: bool = True) -> str:
        digest = await super().put_blob(data)
        write_durably(self._folder / f"{digest}.blob", data)
        return digest

    async def publish(self, manifest: Envelope) -> None:
        await super().publish(manifest)
        write_durably(self._folder / f"{self.manifests[-1].manifest.policy_version:08d}.manifest", manifest.to_bytes())


def main() -> None:
    folder, max_steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    ranks = Ranks.join(device="cpu", timeout=timedelta(seconds=20), meeting=meeting_place())
    (folder / f"rank-{ranks.rank}.pid").write_text(str(os.getpid()))
    if not ranks.is_first:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        follow(ranks)
        os._exit(0)  # as cli/trainer.py does
    logging.basicConfig(level=logging.INFO, filename=folder / "log")
    lead(ranks, folder, max_steps)


def lead(ranks: Ranks, folder: Path, max_steps: int) -> None:
    """Run the trainer on the first rank."""
    build = partial(
        make_backend,
        model_folder=write_model(folder / "model"),
        initial_weights=None,
        device="cpu",
        seed=CLUSTER.seed,
        row_tokens=CLUSTER.row_tokens,
        threads=1,
    )
    coordinator = FolderCoordinator(folder / "coordinator", max_steps=max_steps)
    backend = LeadingBackend(build, ranks)

    async def train() -> None:
        assert await run_trainer(
            make_trainer(folder, coordinator, config=CLUSTER, backend=backend, fuse=Fuse()), asyncio.Event()
        )

    asyncio.run(train())
    dismiss(ranks)


def undisturbed(ranks: Ranks, *, folder: Path, max_steps: int) -> None:
    """Job of a pool of ranks that lets nothing happen to them."""
    if ranks.is_first:
        lead(ranks, folder, max_steps)
    else:
        follow(ranks)


if __name__ == "__main__":
    main()
