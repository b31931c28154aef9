"""Settings of `prime-node up`: the [up] table."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from prime_node.config import Settings, SettingsConfigDict


class UpConfig(Settings):
    model_config = SettingsConfigDict(env_prefix="PRIME_UP_")
    section: ClassVar[str] = "up"

    num_workers: int = Field(default=3, ge=0)
    """Workers on this machine; with 0 all come by the join link."""
    unsafe_cheaters: dict[str, str] = Field(default={"3": "altered"})
    """Which of them cheat, and how (a name that `prime-node join --unsafe-cheat` takes), to see them caught."""
    cheat_after_policies: int = Field(default=40, ge=0)
    """A cheater is honest for this many policies first, so that it is caught in the middle of the run."""
    host: str = "127.0.0.1"
    """Address that the coordinator listens on. Others can join only where they can reach it."""
    port: int = Field(default=8400, ge=0, le=65535)
    """Its port; the next free one is taken where it is in use."""
    threads: int = Field(default=1, ge=1)
    """Threads of each process for arithmetic. More than cores / processes makes everything slower."""
    log_bytes_max: int = Field(default=16 * 2**20, ge=2**16)
    """A log file that has grown to this becomes NAME.log.1, in the place of the one before, and begins anew."""
