"""The part of wire.py for the adapters that only a coordinator needs."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_node.cli import wire, wire_swarm
from prime_node.cli.missing_extra import needing_extra
from prime_node.cli.run_dir import ARCHIVED, SECRET
from prime_node.cli.wire_rows import rows_in
from prime_node.cli.wire_store import open_blobs, open_direct, open_storage, read_store
from prime_protocol.errors import LocalError
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import PinnedRun
from prime_protocol.seed_chain import OpenSecret

if TYPE_CHECKING:
    from prime_node.coordinator.assembly import Parts
    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.coordinator.journal_replay import JournalReplay, JournalReport
    from prime_node.coordinator.ledger import StoredLedger
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.ports.peer_network import PeerNetwork
    from prime_node.ports.swarm import DialBack


async def coordinator_parts(
    run: PinnedRun,
    key: SigningKey,
    settings: CoordinatorConfig,
    grants: EnvironmentSettings,
    *,
    folder: Path,
    public: Path,
    model: Path,
    gateway_key: Path,
) -> Parts:
    """Return the coordinator's parts, with the store and the blobs of its settings. Raises LocalError."""
    with needing_extra("operator", "a coordinator's metrics"):
        from prime_node.adapters.prometheus_metrics import PrometheusMetrics
    from prime_node.adapters.link.link_server import LinkServer
    from prime_node.adapters.web.aiohttp_server import AiohttpServer
    from prime_node.adapters.web.http_peer import HttpDialBack
    from prime_node.broadcast.follow.pinned import model_files_in
    from prime_node.coordinator.assembly import Parts
    from prime_node.keyfile import keep_secret
    from prime_node.observe import BestEffort, JsonLines

    has_gateways = settings.gateways_address is not None
    rows = rows_in(
        folder, run, tensorboard=settings.tensorboard, wandb_project=settings.wandb_project, who="coordinator"
    )
    blobs = await open_blobs(settings.blobs, run, public / "blobs")
    for data in model_files_in(model, run).values():
        await blobs.put(data)
    storage = await open_storage(settings, run, folder, public=public)
    return Parts(
        run=run,
        key=key,
        secret=keep_secret(folder / SECRET, _secret(run, folder, key)),
        config=settings,
        clock=wire.clock(),
        store=storage.store,
        bundles=await open_blobs(settings.blobs, run, folder / "bundles"),
        archived=await open_blobs(settings.blobs, run, folder / ARCHIVED),
        direct=await open_direct(settings, run),
        public=blobs,
        published=storage.published,
        private=storage.private,
        gateways=LinkServer() if has_gateways else None,
        gateway_secret=keep_secret(gateway_key, secrets.token_bytes(32)) if has_gateways else b"",
        leadership=storage.leadership,
        web=AiohttpServer(),
        metrics=PrometheusMetrics(),
        environments=wire.environments(run.spec, model, grants, folder=folder),
        tokenizer=wire.tokenizer(model),
        dial_back=HttpDialBack(run.digest),
        dial_back_libp2p=_libp2p_dial_back(),
        network=_coordinator_network(run, key, settings),
        rows=BestEffort(rows),
        timeline=BestEffort(JsonLines(folder / "timeline.jsonl", bytes_max=settings.timeline_bytes_max)),
    )


@contextlib.asynccontextmanager
async def stored_ledger(run: PinnedRun, folder: Path, key: SigningKey, *, store: str) -> AsyncIterator[StoredLedger]:
    """Open the ledger of a coordinator that does not run. `store` is its setting `coordinator.store`. Raises LocalError."""
    from prime_node.adapters.storage.folder_blobs import FolderDocuments
    from prime_node.coordinator.api.statements import stored_head
    from prime_node.coordinator.assignments import newest_open, secrets_of
    from prime_node.coordinator.ledger import StoredLedger
    from prime_node.coordinator.state.rules import rules_of
    from prime_node.coordinator.state_follower import restore_state

    opened = await read_store(store, run, folder)

    async def newest() -> OpenSecret | None:
        if run.spec.seed_chain is None:
            return None
        secrets = secrets_of(run, _secret(run, folder, key))
        _, state = await restore_state(opened, rules_of(run))
        return newest_open(run, secrets, state.steps_over)

    try:
        shown = await stored_head(run, FolderDocuments(folder / "evidence"), key)
        yield await StoredLedger.signed(opened, run.digest, key, shown, newest)
    finally:
        await opened.close()


@contextlib.asynccontextmanager
async def stored_journal(
    run: PinnedRun, folder: Path, key: SigningKey, *, store: str, report: JournalReport
) -> AsyncIterator[JournalReplay]:
    """Open the archived journal of a coordinator. `store` is its setting `coordinator.store`. Raises LocalError."""
    from prime_node.adapters.storage.folder_blobs import FolderDocuments
    from prime_node.coordinator.api.statements import restore_keys, stored_head
    from prime_node.coordinator.assignments import Assigner
    from prime_node.coordinator.journal_replay import JournalReplay

    published = FolderDocuments(folder / "public")
    await restore_keys(run, published, key)
    opened = await read_store(store, run, folder)
    try:
        shown = await stored_head(run, FolderDocuments(folder / "evidence"), key)
        assigner = Assigner(run, secret=_secret(run, folder, key), environments={}, tokenizer=None)
        yield JournalReplay(opened, run, assigner, shown, published, report)
    finally:
        await opened.close()


async def stored_status(run: PinnedRun, folder: Path, *, store: str) -> dict[str, Any]:
    """Return the status of a run from the folder and the store of its coordinator, which has run and does not run now.

    Raises LocalError.
    """
    from prime_node.adapters.storage.folder_blobs import FolderDocuments
    from prime_node.coordinator.measure.history import RunHistory
    from prime_node.coordinator.measure.state_rows import run_row, worker_row, workers_by_activity
    from prime_node.coordinator.state.rules import rules_of
    from prime_node.coordinator.state_follower import restore_state

    history = RunHistory(FolderDocuments(folder / "evidence"), wire.clock())
    await history.restore()
    opened = await read_store(store, run, folder)
    try:
        _, state = await restore_state(opened, rules_of(run))
    finally:
        await opened.close()
    workers = [{**worker_row(state, worker), "active": False} for worker in workers_by_activity(state)]
    return {**run_row(run, state, history), "stopped": True, "num_workers": 0, "workers": workers}


def _secret(run: PinnedRun, folder: Path, key: SigningKey) -> bytes:
    """Return the assignment secret from a coordinator's folder, or else the one derived from the key if it fits the run.

    Raises LocalError before a wrong secret is stored.
    """
    from prime_node.coordinator.assignments import secret_of, secrets_of
    from prime_node.keyfile import read_secret

    kept = read_secret(folder / SECRET)
    if kept is None:
        kept = secret_of(key)
        secrets_of(run, kept)
    return kept


def _libp2p_dial_back() -> DialBack | None:
    """Return None if libp2p is not installed: the libp2p addresses of peers are then given to no other peer."""
    try:
        from prime_node.adapters.peers.libp2p_dial_back import Libp2pDialBack
    except ImportError:
        return None
    return Libp2pDialBack()


def _coordinator_network(run: PinnedRun, key: SigningKey, settings: CoordinatorConfig) -> PeerNetwork | None:
    """Return the coordinator's libp2p host, or None if it has no listen address. Raises LocalError."""
    if not settings.p2p_listen:
        return None
    with needing_extra("p2p", "a libp2p host of the coordinator"):
        from prime_node.adapters.peers.libp2p_host import PeerSettings
        from prime_node.adapters.peers.libp2p_network import Libp2pNetwork
    if not settings.p2p_announce and all("/0.0.0.0/" in listen for listen in settings.p2p_listen):
        raise LocalError(
            "coordinator.p2p_listen names no address that others could dial: set coordinator.p2p_announce, "
            'for example ["/ip4/203.0.113.7/tcp/8401"]'
        )
    wire_swarm.require_tcp("coordinator.p2p_announce", settings.p2p_announce)
    settings_of_host = PeerSettings(listen=settings.p2p_listen, announce=settings.p2p_announce, relay=True)
    return Libp2pNetwork(key, run=run.digest, settings=settings_of_host)
