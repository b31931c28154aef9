"""Settings of `prime-node up`: the [up] table."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from prime_node.config import Settings, SettingsConfigDict


class UpConfig(Settings):
    """Settings of the [up] table."""

    model_config = SettingsConfigDict(env_prefix="PRIME_UP_")
    section: ClassVar[str] = "up"

    num_workers: int | None = Field(default=None, ge=0)
    """Workers on this machine; with 0 all workers join by the link. None: one for each GPU that the trainer leaves, or 3 without
    a GPU."""
    unsafe_cheaters: dict[str, str] = Field(default={"3": "altered"})
    """Workers that cheat, to show that they are caught: number -> kind (a name that `prime-node join --unsafe-cheat` takes)."""
    cheat_after_policies: int = Field(default=40, ge=0)
    """Number of policies for which a cheater is honest first, so that it is caught in the middle of the run."""
    host: str = "127.0.0.1"
    """Address that the coordinator listens on. Others can join only if they can reach it."""
    port: int = Field(default=8400, ge=0, le=65535)
    """Port of the coordinator; if it is in use, the next free one is taken."""
    replay_steps: int = Field(default=2, ge=0)
    """Steps drawn at random that are trained again at the end, in a run with [run.replay]. 0: none."""
    threads: int = Field(default=1, ge=1)
    """Arithmetic threads of each process. More than cores / processes makes everything slower."""
    log_bytes_max: int = Field(default=16 * 2**20, ge=2**16)
    """Size at which a log file is moved to NAME.log.1, replacing the previous one, and a new file begins."""
