"""Settings of a gateway: the [gateway] table. Its limits on callers are those of [coordinator]."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from prime_node.config import Settings, SettingsConfigDict
from prime_node.coordinator.config import host_and_port


class GatewayConfig(Settings):
    """The [gateway] table."""

    model_config = SettingsConfigDict(env_prefix="PRIME_GATEWAY_")
    section: ClassVar[str] = "gateway"

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 lets other machines join."""
    port: int = Field(default=8400, ge=0, le=65_535)
    """Port to listen on; 0 takes any free one."""
    writers: tuple[str, ...] = ("127.0.0.1:8402",)
    """Addresses at which the coordinators of the run hear gateways (`coordinator.gateways_listen`): of one, or of the leader and
    its standbys. The first one that answers is used."""
    key: str = ""
    """File with the secret that gateways share with the coordinator; a coordinator that hears gateways writes it. Empty:
    keys/gateway.key of the run's folder."""

    @field_validator("writers")
    @classmethod
    def _writers_are_addresses(cls, writers: tuple[str, ...]) -> tuple[str, ...]:
        if not writers:
            raise ValueError("needs at least one address")
        for writer in writers:
            host_and_port(writer)
        return writers

    @property
    def addresses(self) -> tuple[tuple[str, int], ...]:
        """Hosts and ports of the writers."""
        return tuple(host_and_port(writer) for writer in self.writers)
