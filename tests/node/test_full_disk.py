"""A checkpoint that does not fit on a real, small disk gives a clear error and leaves the previous one intact."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node.batch_coordinator import write_model
from tests.node.rank_jobs import samples

from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.trainer.checkpointing import Checkpoints
from prime_node.trainer.state import Phase, TrainerState
from prime_protocol.errors import LocalError
from prime_protocol.weights import root_of

RUN = "ab" * 32
DISK_BYTES = 2**20
"""Size with room for one checkpoint of 0.6 MB, and not for two."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_reported_and_the_checkpoint_before_stays_whole(disk: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    backend = TorchBackend(model, seed=1, threads=1)
    checkpoints = Checkpoints(disk / "checkpoints", run=RUN, kept=1)
    state = TrainerState(run=RUN, phase=Phase.RL, step=0)

    def save(at: TrainerState) -> None:
        folder = checkpoints.begin(at)
        assert folder is not None
        checkpoints.finish(at, backend.save(folder), head=0)

    backend.train_step(samples(), find_loss("aipo"), lr=1e-3)
    save(state)
    saved = root_of(backend.snapshot())
    backend.train_step(samples(seed=1), find_loss("aipo"), lr=1e-3)
    with pytest.raises(LocalError, match=r"cannot be written in .*(full|space).*The previous checkpoint is intact"):
        save(state.updated(step=1))
    assert [path.name for path in (disk / "checkpoints").iterdir()] == ["00000000-step-00000000"]
    found = checkpoints.newest(head=0)
    assert found is not None
    again = TorchBackend(model, seed=2, threads=1)
    again.load(found[1])
    assert (found[0], root_of(again.snapshot())) == (state, saved)
