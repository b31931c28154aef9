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
    p2p: Literal["auto", "on", "off"] = "auto"
    """libp2p beside HTTP, for links through NATs and announcements from peer to peer. auto: where the extra p2p is installed."""
    p2p_listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddrs that libp2p listens on. Behind a router, forward a port of your choice and set it here."""
    p2p_announce: tuple[str, ...] = ()
    """Multiaddrs that you know to be open from outside, beside those that are found out."""
    p2p_bootstrap: tuple[str, ...] = ()
    """Peers to stay linked to beside the coordinator's host, as multiaddrs that end in /p2p/ and the peer's key id."""
    p2p_lan: bool = True
    """Look for peers on the local network by multicast DNS, and be found there. A private machine does neither."""
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
