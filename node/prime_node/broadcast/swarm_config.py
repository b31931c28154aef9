"""Settings of a peer: the [worker.swarm], [trainer.swarm] and [seed.swarm] tables."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SwarmConfig(BaseModel):
    """How this machine takes part in spreading the policies."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    enabled: bool = True
    """Fetch from other peers, and serve them. Without it, everything comes from the coordinator and the mirrors."""
    private: bool = False
    """Outbound only: no address is announced and nothing is served. Everything can still be fetched from others."""
    host: str = "0.0.0.0"
    """Address to serve on."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port to serve on; 0 takes any free one. Behind a router, forward a port of your choice and set it here."""
    upload_slots: int = Field(default=16, ge=1, le=256)
    """Pieces on their way to others at one time."""
    upload_mbit_per_s: float = Field(default=0.0, ge=0.0)
    """What serving may take of the uplink, in megabits per second; 0 is no limit."""
    download_mbit_per_s: float = Field(default=0.0, ge=0.0)
    """What fetching may take of the downlink; 0 is no limit."""
    upload_gib_max: float = Field(default=0.0, ge=0.0)
    """A cap on what is given away in `cap_days` days, in GiB; 0 is no cap. It is remembered over restarts."""
    cap_days: int = Field(default=30, ge=1, le=366)
    """Days after which the count begins anew: 1 for a daily cap, 30 for a monthly one."""
    serve: Literal["always", "idle"] = "always"
    """idle: only while this machine is fetching nothing itself and less than half of its cores are busy."""
    neighbours_max: int = Field(default=32, ge=1, le=256)
    """Peers that this machine is linked to at one time."""

    @property
    def upload_bytes_per_s(self) -> float:
        return self.upload_mbit_per_s * 1e6 / 8

    @property
    def download_bytes_per_s(self) -> float:
        return self.download_mbit_per_s * 1e6 / 8
