"""Make an amendment of a run's calibration from a measured one, sign it, and hand it to the coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from prime_node.broadcast.follow.pinned import fetch_amendments, fetch_key_rings
from prime_node.cli.run_dir import RunDir
from prime_node.cli.shipped import read_calibration
from prime_node.cli.target import open_source
from prime_node.files import write_durably
from prime_node.folder_lock import FolderInUse, FolderLock
from prime_node.keyfile import load_key
from prime_node.ports.transport import Unreachable
from prime_protocol.amendment import CalibrationAmendment
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import LocalError
from prime_protocol.key_ring import Role
from prime_protocol.run_spec import CONFIG_FILE, PinnedRun, open_run_spec


def amend_run(run_dir: RunDir, file: Path, *, keys: Sequence[Path] = (), note: str = "") -> Iterator[str]:
    """Add the pairs of a calibration file that a run lacks. Yield what was done. Raises LocalError or RemoteError."""
    from prime_node.coordinator.api.amendments import check_new, pairs_of

    found = read_calibration(file)
    run = asyncio.run(_known_run(run_dir))
    _require_measured_for(found, file, run, run_dir)
    amendment = CalibrationAmendment(
        run=run.digest,
        version=run.calibrations.version + 1,
        previous=run.calibrations.digest,
        pairs=_new_pairs(found, file, run),
        created_at_ms=time.time_ns() // 1_000_000,
        note=note or found.note,
    )
    files = [*([run_dir.key(Role.ROOT)] if run_dir.key(Role.ROOT).exists() else []), *keys]
    signers = {key.key_id: key for key in map(load_key, files)}
    present = run.keys.current
    if (signed := len(signers.keys() & set(present.root))) < present.threshold(Role.ROOT):
        raise LocalError(
            f"{signed} of {present.threshold(Role.ROOT)} root keys are here; add `--key FILE` for each of the others"
        )
    envelope = seal(amendment, PayloadType.CALIBRATION, *signers.values())
    check_new(envelope, run)
    is_running = asyncio.run(_submit(run_dir, run, envelope))
    when = "is in force" if is_running else "is stored, and in force as soon as the coordinator starts"
    yield f"calibration {amendment.version} {when}: {pairs_of(amendment)}"


async def _known_run(run_dir: RunDir) -> PinnedRun:
    """Return the run with its key rings and amendments, from the folder that the coordinator publishes."""
    target = str(run_dir.path)
    async with open_source(target) as source:
        run = open_run_spec(await source.run_spec(), pinned=run_dir.load_run().digest)
        await fetch_key_rings(source, run.keys)
        await fetch_amendments(source, run)
    return run


def _require_measured_for(found: Calibration, file: Path, run: PinnedRun, run_dir: RunDir) -> None:
    """Raise LocalError if the calibration was measured on something that errs less than the run."""
    from prime_node.coordinator.new_run import covers

    advice = f"`prime-node calibrate {file} --run {run_dir.path}` measures for this run"
    if not covers(found, (run_dir.model / CONFIG_FILE).read_bytes()):
        raise LocalError(f"{file} was measured on a smaller model than the run's; {advice}")
    if run.spec.sampling.temperature < found.temperature_min:
        raise LocalError(f"{file} was measured at a higher temperature than the run's; {advice}")


def _new_pairs(found: Calibration, file: Path, run: PinnedRun) -> tuple[PairMoments, ...]:
    """Return the pairs that the run lacks, with the run's statistics. Raises LocalError if there are none."""
    known = run.checks.calibration
    if known is None:
        raise LocalError("this run has no calibration, so none can be added: its evidence has no statistics for it")
    classes = {(pair.worker, pair.validator) for pair in known.pairs}
    pairs = [
        pair.model_copy(
            update={"moments": {name: one for name, one in pair.moments.items() if name in known.statistics}}
        )
        for pair in found.pairs
        if (pair.worker, pair.validator) not in classes
    ]
    if not (usable := tuple(pair for pair in pairs if pair.moments)):
        raise LocalError(f"{file} has no pair of engine classes that the run lacks; known pairs are never changed")
    return usable


async def _submit(run_dir: RunDir, run: PinnedRun, envelope: Envelope) -> bool:
    """Send the amendment to the coordinator, or store it as the coordinator would. Return whether a coordinator runs."""
    from prime_node.cli import wire
    from prime_node.coordinator.api.amendments import amendment_name

    try:
        lock = FolderLock(run_dir.coordinator)
    except FolderInUse:  # the coordinator runs
        url = str(run_dir.join_link())
        try:
            async with wire.public_source(url) as client:
                await client.add_amendment(envelope)
        except Unreachable as error:
            raise LocalError(f"{url} does not answer: {error}") from None
        return True
    path = run_dir.public / amendment_name(run.calibrations.version + 1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, envelope.to_bytes())
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}") from None
    finally:
        lock.release()
    return False
