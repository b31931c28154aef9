"""Which checkpoints are kept, and deleting the others.

A policy may be needed by whoever holds a lease for it, by a worker that joins now, and as the base of a delta. So the newest ones
stay, policy 0 stays (it is what a whole run is compared with), and so does every base that one of those is built on.
"""

from __future__ import annotations

import logging

from prime_node.coordinator import events as ev
from prime_node.coordinator.core import Core
from prime_node.coordinator.publishing import read_manifest
from prime_node.coordinator.records import State
from prime_protocol.envelope import parse_json
from prime_protocol.manifest import Manifest

log = logging.getLogger(__name__)


def kept_versions(state: State, checkpoints_kept: int) -> set[int]:
    """Policies whose bytes must stay."""
    newest = max(checkpoints_kept, state.rules.async_level + 2)
    kept = {0} | {version for version in state.published if version > state.head - newest}
    for version in sorted(kept, reverse=True):
        base = state.published[version].base
        while base in state.published and base not in kept:
            kept.add(base)
            base = state.published[base].base
    return kept


async def forget_old_policies(core: Core) -> None:
    """Delete the parts that only forgotten policies use. The fact comes first: then no reader is sent to missing bytes."""
    limit = core.config.checkpoints_kept
    if limit is None or core.state.head < 0:
        return
    kept = kept_versions(core.state, limit)
    forgotten = tuple(sorted(core.state.published.keys() - kept))
    if not forgotten:
        return
    core.decide(ev.PoliciesForgotten(forgotten))
    await core.journal.synced()
    needed = {part for version in kept for part in await _parts(core, version)}
    needed |= {file.digest for file in core.run.spec.model_files}
    for version in forgotten:
        for part in await _parts(core, version) - needed:
            await core.public.delete(part)
    log.info("deleted the parts of policies %s", ", ".join(map(str, forgotten)))


async def _parts(core: Core, policy_version: int) -> set[str]:
    envelope = await read_manifest(core, policy_version)
    return {part.digest for part in parse_json(envelope.payload, Manifest).parts}
