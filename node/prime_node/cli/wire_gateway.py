"""The part of wire.py for gateways: their link to the coordinator, and their blobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.cli import wire
from prime_node.cli.wire_store import FOLDER, open_blobs
from prime_protocol.envelope import open_envelope
from prime_protocol.run_spec import PinnedRun, open_run_spec

if TYPE_CHECKING:
    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.coordinator.gateway.config import GatewayConfig
    from prime_node.ports.blobs import Blobs
    from prime_node.ports.writer_link import WriterLink


def writer_link(settings: GatewayConfig, secret: bytes, run: str) -> WriterLink:
    """Return a gateway's side of the link."""
    from prime_node.adapters.link.link_client import LinkClient

    return LinkClient(settings.addresses, secret=secret, run=run)


async def run_of(link: WriterLink, digest: str) -> PinnedRun:
    """Return the run of that digest from the writer, waiting until it answers. Raises RemoteError for another run."""
    from prime_node.patience import ask_until_answered, unless
    from prime_node.ports.writer_link import ForwardedCall

    ask = ask_until_answered(
        lambda: link.ask(ForwardedCall("/v1/run")), what="the run's description", clock=wire.clock()
    )
    answer = await unless(link.keep(), ask)
    assert answer is not None, "the link is kept until it fails"
    assert isinstance(answer.response.body, bytes)
    return open_run_spec(open_envelope(answer.response.body), pinned=digest)


async def shared_blobs(settings: CoordinatorConfig, run: PinnedRun, name: str) -> Blobs | None:
    """Return the blobs of a name, "blobs" or "bundles", if they are in a bucket, which gateways use themselves; else None."""
    return None if settings.blobs == FOLDER else await open_blobs(settings.blobs, run, Path(name))
