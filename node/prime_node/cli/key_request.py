"""The file that carries the next key ring from root key to root key, and the verified state of its run.

The file is the ring's envelope with the signatures collected so far. Nothing in it is trusted: each reader checks it against
the chain of key rings that it already has.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from prime_node.broadcast.audit.audit_report import date_of
from prime_node.broadcast.follow.pinned import fetch_key_rings
from prime_node.cli.operator import hand_over, send_to
from prime_node.cli.place import is_url
from prime_node.cli.run_dir import RunDir
from prime_node.cli.target import answering, expected_run, open_source
from prime_node.files import write_durably
from prime_node.keyfile import load_key
from prime_node.ports.documents import key_ring_name
from prime_node.ports.transport import StatementSource
from prime_protocol.envelope import (
    Envelope,
    PayloadType,
    Signature,
    open_envelope,
    parse_json,
    pre_authentication_encoding,
)
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import ChainPoint, KeyChain, KeyRing, Role, RoleKeys
from prime_protocol.manifest import open_manifest
from prime_protocol.run_spec import PinnedRun, open_run_spec
from prime_protocol.timestamp import Timestamp

if TYPE_CHECKING:
    from prime_node.cli.wire import HttpClient


@dataclass(frozen=True, slots=True)
class Known:
    """State of a run as its coordinator or its folder shows it."""

    run: PinnedRun
    published: ChainPoint | None
    now_ms: int


async def known_of(target: str) -> Known:
    """Return the run, every key ring and the newest manifest, verified. Raises LocalError or RemoteError."""
    with answering(target):
        async with open_source(target) as source:
            envelope = await source.run_spec()
            run = open_run_spec(envelope, pinned=expected_run(target) or envelope.digest)
            await fetch_key_rings(source, run.keys)
            if not is_url(target):
                await _require_rings(source, run.keys)
            head = await source.head()
            published = run.keys.published if head is None else open_manifest(head, run).point
    return Known(run, published, time.time_ns() // 1_000_000)


async def _require_rings(source: StatementSource, keys: KeyChain) -> None:
    """Raise LocalError if a folder lacks a key ring that was in force: the root would sign another one of that version."""
    with contextlib.suppress(RemoteError):  # there is none yet
        stamp = parse_json((await source.timestamp()).payload, Timestamp)
        if stamp.key_ring > keys.version:
            raise LocalError(
                f"key ring {keys.version + 1} was in force, and its file is missing; restore it from a copy or a mirror"
            )


def changed(keys: RoleKeys, changes: Mapping[str, object]) -> RoleKeys:
    """Return the keys with those of some roles changed.

    Raises LocalError if they are inconsistent. A threshold that exceeds the number of remaining keys becomes that number.
    """
    fields = keys.model_dump() | dict(changes)
    for role in (Role.ROOT, Role.TRAINER):
        threshold, held = fields[f"{role}_threshold"], fields[role.value]
        if threshold is not None and f"{role}_threshold" not in changes:
            fields[f"{role}_threshold"] = min(threshold, len(set(held)))
    try:
        return RoleKeys.model_validate(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise LocalError(f"{'.'.join(map(str, fault['loc'])) or 'keys'}: {fault['msg']}") from None


def signed_with(envelope: Envelope | None, *keys: SigningKey | Path, ring: KeyRing | None = None) -> Envelope:
    """Return the envelope, or a new one around `ring`, with further signatures. A key signs once."""
    if envelope is None:
        assert ring is not None
        envelope = Envelope(PayloadType.KEY_RING, ring.model_dump_json().encode(), ())
    message = pre_authentication_encoding(envelope.payload_type, envelope.payload)
    signatures = {one.key_id: one for one in envelope.signatures}
    for key in (load_key(one) if isinstance(one, Path) else one for one in keys):
        signatures[key.key_id] = Signature(key.key_id, key.sign(message))
    return Envelope(envelope.payload_type, envelope.payload, tuple(signatures.values()))


def read_request(file: Path) -> tuple[Envelope, KeyRing]:
    """Read a request. Raises LocalError if the file is not a request."""
    try:
        envelope = open_envelope(file.read_bytes(), unsigned=True)
        return envelope, parse_json(envelope.payload, KeyRing)
    except OSError as error:
        raise LocalError(f"{file}: {error.strerror}") from None
    except RemoteError as error:
        raise LocalError(f"{file} is not a key ring request: {error.detail}") from None


def write_request(file: Path, envelope: Envelope) -> None:
    """Write a request durably. Raises LocalError."""
    try:
        write_durably(file, envelope.to_bytes())
    except OSError as error:
        raise LocalError(f"{file}: {error.strerror}; give another place with --out") from None


def signatures_missing(known: KeyChain, envelope: Envelope, ring: KeyRing) -> list[str]:
    """Return a line for the old root and one for the new root if too few of its keys have signed."""
    lines = []
    for whose, keys in (("present", known.current), ("new", ring.keys)):
        signed, needed = {one.key_id for one in envelope.signatures} & set(keys.root), keys.threshold(Role.ROOT)
        if len(signed) < needed:
            lines.append(f"{len(signed)} of the {whose} root keys have signed, {needed} must")
    return lines


async def submit_to(target: str, known: Known, envelope: Envelope) -> None:
    """Send the ring to the coordinator at the target, or write it to the run's folder if no coordinator runs there.

    Raises RemoteError or LocalError.
    """
    from prime_node.cli import wire
    from prime_node.coordinator.api.statements import check_published

    def send(client: HttpClient) -> Awaitable[None]:
        return client.add_key_ring(envelope)

    async def check() -> None:
        newest = -1 if known.published is None else known.published.policy_version
        await check_published(known.run.keys.check(envelope), newest, wire.folder_source(run_dir.public).manifest)

    if is_url(target):
        await send_to(target, send)
        return
    run_dir = RunDir(Path(target))
    if not run_dir.exists:
        raise LocalError(f"{target} is not a run directory; give one, or the coordinator's address")
    await hand_over(run_dir, key_ring_name(known.run.keys.version + 1), envelope, send, check)


def use_new_keys(run_dir: RunDir, ring: KeyRing) -> Iterator[str]:
    """Install keys that were made for the ring as their roles' keys; rename the former ones and keep them."""
    for role in Role:
        made, place = run_dir.next_key(role, ring.version), run_dir.key(role)
        if made.exists() and load_key(made).key_id in ring.keys.of(role):
            if place.exists():
                place.rename(place.with_name(f"{role}-until-{ring.version}.key"))
            made.rename(place)
            runs = role not in (Role.ROOT, Role.AUDITOR)
            yield f"{place} holds the new key; start the {role} again" if runs else f"{place} is new"


def describe_key_request(known: Known) -> Iterator[str]:
    """Yield the current keys, then the key rings."""
    keys = known.run.keys
    yield f"run {known.run.spec.name} ({known.run.digest[:12]}), key ring {keys.version}"
    yield from _role_lines(keys.current)
    for ring, _ in keys.rings:
        yield from ("", *ring_lines(ring))


def ring_lines(ring: KeyRing) -> Iterator[str]:
    """Yield the content of a ring as lines."""
    yield f"key ring {ring.version} of {date_of(ring.created_at_ms)}, run {ring.run[:12]}: {ring.reason}"
    yield from _role_lines(ring.keys)
    if ring.published is not None:
        yield f"  manifests up to policy {ring.published.policy_version} ({ring.published.manifest[:12]}) need the earlier keys"


def _role_lines(keys: RoleKeys) -> Iterator[str]:
    for role in Role:
        threshold = f" ({keys.threshold(role)} must sign)" if role in (Role.ROOT, Role.TRAINER) else ""
        if held := keys.of(role):
            yield f"  {role}{threshold}: {', '.join(held)}"
