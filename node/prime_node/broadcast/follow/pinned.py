"""Data that a join link pins: the RunSpec and, through it, keys, configuration and tokenizer.

They are fetched from any source and compared with the pinned digests.

A key ring that this machine knew and has lost is found missing: a file that rotted must not put former keys back in force. Two
traces of a lost ring remain in the folder: the name of its file, and a timestamp whose signer no known ring names. Both were
written after the ring was verified.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from prime_node.files import read_or_begin
from prime_node.inside import read_inside, write_inside
from prime_node.patience import ask_until_answered, first_answer
from prime_node.ports.clock import Clock
from prime_node.ports.transport import CheckpointSource, StatementSource
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, LocalError, RemoteError
from prime_protocol.key_ring import KeyChain, KeyRing, Role
from prime_protocol.names import may_be_listed
from prime_protocol.run_spec import ModelFile, PinnedRun, open_run_spec
from prime_protocol.timestamp import Timestamp, open_timestamp, require_named


def newest_ring_kept(folder: Path, run: PinnedRun) -> int:
    """Return the highest version of which the folder has a file, also a damaged one; 0 if there is none.

    Whole key rings of another run, which used the folder before, do not count. Raises OSError.
    """
    kept = {path: int(path.name[:4]) for path in folder.glob("[0-9][0-9][0-9][0-9].json*")}  # one may be NAME.damaged
    known = (path for path, version in kept.items() if version <= limits.KEY_RINGS_MAX)
    return max((kept[path] for path in known if not _is_of_other_run(read_or_begin(path), run)), default=0)


def _is_of_other_run(data: bytes, run: PinnedRun) -> bool:
    try:
        return parse_json(open_envelope(data).payload, KeyRing).run != run.digest
    except RemoteError:
        return False


def is_by_unknown_key(envelope: Envelope, run: PinnedRun) -> bool:
    """Return whether an undamaged timestamp of the run is signed by a key that no known ring names as a coordinator's."""
    try:
        signer = envelope.sole_signer()
        stamp = parse_json(envelope.verify(PayloadType.TIMESTAMP, trusted=(signer,)), Timestamp)
    except RemoteError:
        return False
    return stamp.run == run.digest and signer not in run.keys.ever(Role.COORDINATOR)


log = logging.getLogger(__name__)

HEDGE_S = 5.0
"""Seconds without an answer after which the next source is asked too."""
BYTES_PER_S = 2**18
"""Rate of a file's transfer, up to which no second source is asked for it."""


async def fetch_run(pinned: str, *sources: CheckpointSource, clock: Clock) -> PinnedRun:
    """Fetch the RunSpec of that digest from the first source that has it, waiting while sources are unreachable.

    Raises RemoteError for a wrong one.
    """

    async def from_one(source: CheckpointSource) -> PinnedRun:
        return open_run_spec(await source.run_spec(), pinned=pinned)

    asks = [partial(from_one, source) for source in sources]
    ask = partial(first_answer, asks, hedge_s=HEDGE_S)
    run = await ask_until_answered(ask, what="the run's description", clock=clock)
    log.info("run %s is '%s'; preparing", run.digest[:12], run.spec.name)
    return run


async def fetch_key_rings(source: StatementSource, keys: KeyChain) -> None:
    """Fetch every key ring of the source after the known ones; their number is bounded. Raises RemoteError."""
    while keys.version < limits.KEY_RINGS_MAX:
        try:
            envelope = await source.key_ring(keys.version + 1)
        except RemoteError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            return
        keys.add(envelope)


async def fetch_amendments(source: StatementSource, run: PinnedRun) -> None:
    """Fetch every amendment of the calibration after the known ones; their number is bounded.

    Raises RemoteError, also if the source's timestamp names another one: keys of a former root may have signed those.
    """
    while run.calibrations.version < limits.CALIBRATIONS_MAX:
        try:
            envelope = await source.calibration(run.calibrations.version + 1)
        except RemoteError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            break
        run.calibrations.add(envelope)
    try:
        stamp = open_timestamp(await source.timestamp(), run)
    except RemoteError as error:
        if error.code not in (ErrorCode.NOT_FOUND, ErrorCode.REVOKED):
            raise
        return  # there is none yet, or a ring has replaced its key
    require_named(run.calibrations, stamp)


async def fetch_model_files(sources: Sequence[CheckpointSource], run: PinnedRun, folder: Path) -> Path:
    """Put every model file into `folder`, and return `folder`. Files that are there already stay untouched.

    Those that another run has listed, which used the folder before, are removed: libraries would read them too. Raises
    RemoteError or Unreachable.
    """
    for file in run.spec.model_files:
        if not await asyncio.to_thread(is_stored, folder, file):
            asks = [partial(_fetch, source, file, run) for source in sources]
            data = await first_answer(asks, hedge_s=HEDGE_S + file.size / BYTES_PER_S)
            await asyncio.to_thread(store_model_file, folder, file.name, data)
    await asyncio.to_thread(_remove_others, folder, run)
    return folder


def _remove_others(folder: Path, run: PinnedRun) -> None:
    listed = {file.name for file in run.spec.model_files}
    for path in folder.iterdir():
        if path.name not in listed and may_be_listed(path.name) and not path.is_dir():
            path.unlink()


def model_files_in(folder: Path, run: PinnedRun) -> dict[str, bytes]:
    """Return the run's model files in `folder`, by name. Raises LocalError if one is missing or different."""
    return {file.name: _there(folder, file) for file in run.spec.model_files}


def _there(folder: Path, file: ModelFile) -> bytes:
    data = read_inside(folder, file.name, bytes_max=file.size)
    if data is None or digest_of(data) != file.digest:
        raise LocalError(f"{folder / file.name} is not the file that the run names; copy it from the run's creator")
    return data


def is_stored(folder: Path, file: ModelFile) -> bool:
    """Return whether the folder holds a model file with the run's bytes."""
    data = read_inside(folder, file.name, bytes_max=file.size)
    return data is not None and digest_of(data) == file.digest


def store_model_file(folder: Path, name: str, data: bytes) -> None:
    """Write a model file, and the folder if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    write_inside(folder, name, data)


async def _fetch(source: CheckpointSource, file: ModelFile, run: PinnedRun) -> bytes:
    bound = run.spec.limits.blob_bytes_max
    if file.size > bound:
        raise LimitExceeded("blob_bytes_max", file.size, bound)
    data = await source.blob(file.digest, end=file.size)
    if digest_of(data) != file.digest:
        raise RemoteError(
            ErrorCode.DIGEST_MISMATCH,
            f"model file {file.name} is not the one that the RunSpec names; the run's creator has to replace it",
        )
    return data
