"""`prime-node gateway`: take connections in front of the coordinator that decides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.cli.options import READ_BY_ROLE, ConfigFile, LogLevel, Options, Set, StopWithParent
from prime_node.cli.place import GatewayRun, coordinator_hosts, is_url, parse_link
from prime_node.cli.run_dir import RunDir
from prime_node.keyfile import read_secret
from prime_protocol.errors import LocalError

if TYPE_CHECKING:
    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.coordinator.gateway.config import GatewayConfig
    from prime_protocol.run_spec import JoinLink

GRACE_S = 5.0


def gateway(
    run: GatewayRun,
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
    log_level: LogLevel = "INFO",
    stop_with_parent: StopWithParent = False,
) -> None:
    """Take a run's connections, verify requests, and forward them to its coordinator.

    Any number of gateways may serve one run; each keeps nothing. The coordinator hears them at `coordinator.gateways_listen`.
    Settings: [gateway]; limits on callers: [coordinator].
    """
    import typer

    from prime_node.cli.lifetime import run_role
    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.coordinator.gateway.config import GatewayConfig
    from prime_node.observe import setup_logging

    setup_logging("gateway", level=log_level)
    options = Options.of_run(run, config, assignments, reads=READ_BY_ROLE["gateway"])
    settings, shared = options.load(GatewayConfig), options.load(CoordinatorConfig)
    if is_url(run):
        link, run_dir = parse_link(run), None
    else:
        run_dir = RunDir(Path(run))
        run_dir.load_run()
        link = run_dir.join_link()
    secret = secret_of_gateways(settings, run_dir)
    raise typer.Exit(
        run_role(
            lambda stop: _serve(link, run_dir, settings, shared, secret, stop),
            stop_with_parent=stop_with_parent,
            grace_s=shared.grace_seconds + GRACE_S,
        )
    )


def secret_of_gateways(settings: GatewayConfig, run_dir: RunDir | None) -> bytes:
    """Return the secret that gateways share with the coordinator. Raises LocalError."""
    if not settings.key and run_dir is None:
        raise LocalError("with a join link, a gateway needs --set gateway.key=FILE: the coordinator's keys/gateway.key")
    path = Path(settings.key) if settings.key else run_dir.key("gateway") if run_dir is not None else Path()
    secret = read_secret(path)
    if secret is None:
        raise LocalError(
            f"key {path}: no such file. A coordinator with coordinator.gateways_listen writes it into keys/gateway.key; "
            "copy it here, and name it in gateway.key"
        )
    return secret


async def _serve(
    link: JoinLink,
    run_dir: RunDir | None,
    settings: GatewayConfig,
    shared: CoordinatorConfig,
    secret: bytes,
    stop: asyncio.Event,
) -> int:
    from prime_node.cli import wire, wire_gateway
    from prime_node.coordinator.gateway.daemon import GatewayParts, serve_gateway
    from prime_node.patience import unless

    writer = wire_gateway.writer_link(settings, secret, link.run)
    run = (
        run_dir.load_run() if run_dir is not None else await unless(stop.wait(), wire_gateway.run_of(writer, link.run))
    )
    if run is None:
        return 0
    shared = shared.model_copy(update={"hosts": (*shared.hosts, *coordinator_hosts(link, run))})
    parts = GatewayParts(
        run=run,
        config=settings,
        shared=shared,
        clock=wire.clock(),
        web=wire.web_server(),
        link=writer,
        public=await wire_gateway.shared_blobs(shared, run, "blobs"),
        bundles=await wire_gateway.shared_blobs(shared, run, "bundles"),
    )
    await serve_gateway(parts, stop)
    return 0
