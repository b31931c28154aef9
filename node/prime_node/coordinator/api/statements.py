"""The run's other signed statements: key rings, timestamps, and the ledger.

Anyone may upload a key ring: its signatures count. It is on disk before it is used, so that no restart goes back to revoked
keys. A timestamp is renewed every few seconds and after each publication. The last one is stored with the manifests, for
mirrors.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from prime_node.coordinator.api.publishing import read_manifest
from prime_node.coordinator.api.requests import RequestGate
from prime_node.coordinator.assignments import newest_open
from prime_node.coordinator.core import Core
from prime_node.ports.documents import Documents
from prime_protocol import limits
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import ErrorCode, LocalError, PeerError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import KeyRing, Role
from prime_protocol.ledger import LedgerHead
from prime_protocol.run_spec import PinnedRun
from prime_protocol.timestamp import Timestamp

log = logging.getLogger(__name__)

TIMESTAMP_NAME = "timestamp.json"
LEDGER_HEAD_NAME = "ledger_head.json"


async def restore_keys(run: PinnedRun, published: Documents, key: SigningKey) -> None:
    """Read every accepted key ring after a restart. Raise LocalError if our own key has been revoked."""
    for version in range(run.keys.version + 1, limits.KEY_RINGS_MAX + 1):
        try:
            run.keys.add(open_envelope(await published.read(key_ring_name(version))))
        except KeyError:
            break
        except PeerError as error:
            raise LocalError(
                f"{key_ring_name(version)} in the published folder: {error}; restore it from a copy"
            ) from None
    require_own_key(run, key)


def require_own_key(run: PinnedRun, key: SigningKey) -> None:
    """Raise LocalError if the coordinator's key is not in the current key ring, so that its signatures would be rejected."""
    if key.key_id not in run.keys.current.coordinator:
        raise LocalError(
            f"{key.key_id} is no coordinator key of this run by key ring {run.keys.version}: start with the key that is"
        )


async def take_key_ring(core: Core, gate: RequestGate, body: bytes, *, address: str) -> None:
    """Accept the next key ring, signed by the root. Idempotent for the newest one. Raise PeerError."""
    now_s = core.clock.monotonic_s()
    with gate.blame(address, now_s):
        envelope = open_envelope(body)
        if not any(one.key_id in core.run.keys.current.root for one in envelope.signatures):
            gate.limiter.by_address.require(address, now_s)
        async with core.blobs_turn:  # no manifest is accepted meanwhile
            if envelope.digest == core.run.keys.digest:
                return
            ring = core.run.keys.check(envelope)
            await check_published(ring, core.state.head, lambda version: read_manifest(core, version))
            await core.published.write(key_ring_name(ring.version), envelope.to_bytes())
            core.run.keys.add(envelope)
    log.warning("key ring %d is in force: %s", ring.version, ring.reason or "no reason given")
    await renew_timestamp(core)
    if core.key.key_id not in ring.keys.coordinator:
        core.revoked.set()


async def check_published(ring: KeyRing, head: int, read: Callable[[int], Awaitable[Envelope]]) -> None:
    """Check that a ring keeps the published manifests valid, up to policy `head`.

    The ring names one of these manifests, and keys that it keeps have signed those after it. Raise PeerError.
    """
    first = 0
    if ring.published is not None:
        envelope = await read(ring.published.policy_version)
        if envelope.digest != ring.published.manifest:
            raise PeerError(
                ErrorCode.FORK, f"the ring names another manifest for policy {ring.published.policy_version}"
            )
        first = ring.published.policy_version + 1
    trainers = ring.keys.of(Role.TRAINER)
    for version in range(first, head + 1):
        envelope = await read(version)
        try:
            envelope.verify(PayloadType.MANIFEST, trusted=trainers, threshold=ring.keys.threshold(Role.TRAINER))
        except PeerError:
            raise PeerError(
                ErrorCode.CHAIN_BROKEN,
                f"policy {version} is published and not signed by this ring's trainers; make the ring again at the head",
            ) from None


async def read_key_ring(core: Core, version: int) -> Envelope:
    """Return an accepted key ring. Raise PeerError(NOT_FOUND)."""
    if not 1 <= version <= core.run.keys.version:
        raise PeerError(ErrorCode.NOT_FOUND, f"the newest key ring is {core.run.keys.version}; 0 is the RunSpec")
    return core.run.keys.rings[version - 1][1]


async def timestamp(core: Core) -> Envelope:
    """Return a fresh timestamp."""
    await renew_timestamp(core)
    assert core.timestamp is not None
    return core.timestamp[1]


async def renew_timestamp(core: Core) -> None:
    """Sign a new timestamp if the last one is old or outdated. Cheap otherwise."""
    now_ms, head = core.clock.now_ms(), None if core.head is None else core.head.point
    if core.timestamp is not None:
        last = core.timestamp[0]
        age_ms = now_ms - last.issued_at_ms
        if (last.head, last.key_ring) == (head, core.run.keys.version) and (
            0 <= age_ms < core.config.timestamp_seconds * 1_000
        ):
            return
    stamp = Timestamp(
        run=core.run.digest,
        head=head,
        key_ring=core.run.keys.version,
        issued_at_ms=now_ms,
        expires_at_ms=now_ms + round(core.config.timestamp_lifetime_seconds * 1_000),
    )
    core.timestamp = (stamp, seal(stamp, PayloadType.TIMESTAMP, core.key))
    await core.published.write(TIMESTAMP_NAME, core.timestamp[1].to_bytes())


async def ledger_head(core: Core) -> Envelope:
    """Return the ledger's length and last line, signed. Sign again if it has grown or the last head is old.

    The head is stored before it is shown. Otherwise a restart with a clock that was set back could sign a contradicting one.
    """
    async with core.ledger_turn:
        now_ms, chain = core.journal.said_ms(), core.journal.ledger
        if core.ledger_head is not None:
            last, envelope = core.ledger_head
            if last.num_entries == chain.num_entries and now_ms - last.at_ms < core.config.timestamp_seconds * 1_000:
                return envelope
        head = chain.head(now_ms, newest_open(core.run, core.assigner.secrets, core.state.steps_over))
        signed = seal(head, PayloadType.LEDGER_HEAD, core.key)
        await core.private.write(LEDGER_HEAD_NAME, signed.to_bytes())
        core.ledger_head = (head, signed)
        return signed


async def ledger_head_ms(private: Documents) -> int:
    """Return the time of the last ledger head that may have been shown before a restart; 0 if there is none."""
    try:
        return parse_json(open_envelope(await private.read(LEDGER_HEAD_NAME)).payload, LedgerHead).at_ms
    except KeyError:
        return 0


async def ledger_lines(core: Core, start: int) -> bytes:
    """Return the ledger's lines from line `start` on, each with its newline."""
    await core.journal.synced()  # the store must have caught up with the head that was shown
    lines = await core.store.ledger(start=start, limit=limits.LEDGER_LINES_MAX)
    return "".join(f"{line}\n" for line in lines).encode()


def key_ring_name(version: int) -> str:
    """Return the name of a key ring's file."""
    return f"keys/{version:04d}.json"
