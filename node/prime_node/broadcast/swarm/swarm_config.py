"""Settings of a peer: the [worker.swarm], [trainer.swarm] and [seed.swarm] tables."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class SwarmConfig(BaseModel):
    """Settings for this machine's part in distributing policies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    """Fetch from other peers and serve them. If off, everything comes from the coordinator and the mirrors."""
    private: bool = False
    """Outbound only: announce no address and serve nothing. Fetching from others still works."""
    host: str = "0.0.0.0"
    """Address to serve on."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port to serve on; 0 takes any free one. Behind a router, forward a port of your choice and set it here."""
    hosts: tuple[str, ...] = ()
    """DNS names under which machines at private addresses may reach this one, for example as a mirror. Others are refused, so
    that no web page can read from it by DNS rebinding; IP addresses and names without a dot are always valid."""
    p2p: Literal["auto", "on", "off"] = "auto"
    """libp2p in addition to HTTP, for links through NATs. auto: on where the extra p2p is installed."""
    p2p_listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddrs that libp2p listens on. Behind a router, forward a port of your choice and set it here."""
    p2p_announce: tuple[str, ...] = ()
    """Multiaddrs known to be reachable from outside, in addition to those that are discovered."""
    p2p_bootstrap: tuple[str, ...] = ()
    """Peers to stay linked to in addition to the coordinator's host, as multiaddrs that end in /p2p/ and the peer's key id."""
    p2p_lan: bool = True
    """Discover peers on the local network by multicast DNS, and be discoverable there. A private machine does neither."""
    upload_slots: int = Field(default=16, ge=1, le=256)
    """Pieces that may be uploaded at the same time."""
    upload_mbit_per_s: float = Field(default=0.0, ge=0.0)
    """Upload limit for serving, in megabits per second; 0 is no limit."""
    yields: bool = True
    """Upload slower while packets queue on the uplink, so that calls over the same line are delayed less. An otherwise unused
    uplink is still used fully. On Linux; elsewhere set `upload_mbit_per_s`. The trainer's default is false."""
    download_mbit_per_s: float = Field(default=0.0, ge=0.0)
    """Download limit for fetching, in megabits per second; 0 is no limit."""
    upload_gib_max: float = Field(default=0.0, ge=0.0)
    """Upload cap over `cap_days` days, in GiB; 0 is no cap. The count survives restarts."""
    cap_days: int = Field(default=30, ge=1, le=366)
    """Days after which the count restarts: 1 for a daily cap, 30 for a monthly one."""
    serve: Literal["always", "idle"] = "always"
    """Time to serve. idle: only while this machine fetches nothing itself and less than half of its cores are busy."""
    neighbours_max: int = Field(default=32, ge=1, le=256)
    """Peers that this machine is linked to at the same time."""

    @property
    def upload_bytes_per_s(self) -> float:
        """Upload limit in bytes per second; 0 is no limit."""
        return self.upload_mbit_per_s * 1e6 / 8

    @property
    def download_bytes_per_s(self) -> float:
        """Download limit in bytes per second; 0 is no limit."""
        return self.download_mbit_per_s * 1e6 / 8
