"""Make an amendment of a run's calibration from a measured one, sign it, and hand it to the coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from prime_node.broadcast.follow.pinned import fetch_amendments, fetch_key_rings
from prime_node.cli.hand_over import hand_over
from prime_node.cli.run_calibration import require_covers
from prime_node.cli.run_dir import RunDir
from prime_node.cli.shipped import read_calibration
from prime_node.cli.target import open_source
from prime_node.keyfile import load_key
from prime_node.ports.documents import amendment_name
from prime_protocol.amendment import CalibrationAmendment
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import LocalError
from prime_protocol.key_ring import Role
from prime_protocol.run_spec import CONFIG_FILE, PinnedRun, open_run_spec


def amend_run(run_dir: RunDir, file: Path, *, keys: Sequence[Path] = (), note: str = "") -> Iterator[str]:
    """Add the pairs of a calibration file that a run lacks. Yield what was done. Raises LocalError or RemoteError."""
    from prime_node.coordinator.api.amendments import check_new, pairs_of

    found = read_calibration(file)
    run = asyncio.run(_known_run(run_dir))
    advice = f"`prime-node calibrate {file} --run {run_dir.path}` measures for this run"
    config_json = (run_dir.model / CONFIG_FILE).read_bytes()
    require_covers(str(file), found, config_json, run.spec.sampling.temperature, advice=advice)
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
    name = amendment_name(amendment.version)
    is_running = asyncio.run(hand_over(run_dir, name, envelope, lambda client: client.add_amendment(envelope)))
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
