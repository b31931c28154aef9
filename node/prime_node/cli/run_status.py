"""A run's status, /v1/status, fetched and parsed: for `prime-node status`, `operate` and `up`.

It is not signed, so nothing in it is proven. The size read is bounded, and it is parsed once.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prime_node.cli.place import is_url
from prime_node.cli.run_dir import RunDir
from prime_node.cli.target import expected_run
from prime_node.ports.transport import THROUGH, Unreachable
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.limits import COUNT_MAX
from prime_protocol.run_spec import PinnedRun
from prime_protocol.visible import printable

STATUS_BYTES_MAX = 16 * 2**20
"""Size limit of a status: ten times what a thousand workers take."""
STATUS_MARKS_MAX = 2**19
"""Its characters `[`, `{` and `,`: as values in memory they take up to sixty times their bytes."""
ANSWER_S_MAX = 5.0
"""Seconds until the header of an answer is whole, and without a byte of its body, after which it is given up."""
WHOLE_S_MAX = 30.0
"""Seconds for a whole answer."""


_Whole = Annotated[int, Field(ge=-COUNT_MAX, le=COUNT_MAX)]
"""Whole number of an untrusted answer. Larger ones could not be shown."""


class UntrustedRow(BaseModel):
    """Base of untrusted answers. Unknown fields, which a newer coordinator may send, are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class BanRow(UntrustedRow):
    """Ban of a worker."""

    step: _Whole
    reason: str = ""


class WorkerLine(UntrustedRow):
    """One worker in /v1/status."""

    worker: str
    """Key id of the worker."""
    name: str = ""
    state: str = ""
    active: bool = False
    policy_version: _Whole = -1
    silent_s: float | None = None
    accepted: _Whole = 0
    refused: dict[str, _Whole] = Field(default_factory=dict)
    strikes: _Whole = 0
    newcomer: bool = False
    audit_share: float = 1.0
    open_leases: _Whole = 0
    banned: BanRow | None = None
    waiting_for: str = ""


class StepLine(UntrustedRow):
    """Groups of one step, counted by state."""

    step: _Whole
    open: _Whole = 0
    leased: _Whole = 0
    pending: _Whole = 0
    accepted: _Whole = 0
    trained: _Whole = 0


class RolloutCounts(UntrustedRow):
    """Accepted rollouts, and rejected ones by reason."""

    accepted: _Whole = 0
    refused: dict[str, _Whole] = Field(default_factory=dict)


class AvailabilityRow(UntrustedRow):
    """Time until workers could use a policy: half of them, and nine of ten."""

    policy_version: _Whole
    workers: _Whole
    median_s: float
    most_s: float


class Problems(UntrustedRow):
    """Problems whose environment failed for every worker that tried them."""

    redrawn: _Whole = 0


class ContradictionRow(UntrustedRow):
    """Bundle on which validators disagree."""

    bundle: str = ""
    said: dict[str, str] = {}


class Differing(UntrustedRow):
    """Two validators whose findings differ by more than chance."""

    validators: tuple[str, ...] = ()
    how: str = ""


class Unanswered(UntrustedRow):
    """Validator that sent no verdict on bundles that it was asked to confirm."""

    validator: str = ""
    total: _Whole = 0
    waited_for: bool = True


class Validators(UntrustedRow):
    """Disagreement among the validators."""

    num_contradictions: _Whole = 0
    contradictions: tuple[ContradictionRow, ...] = ()
    differing: tuple[Differing, ...] = ()
    unanswered: tuple[Unanswered, ...] = ()

    def lines(self) -> list[str]:
        """Return what an operator must look at; empty if all validators agree."""
        found = [f"{' and '.join(one.validators)} differ: {one.how}" for one in self.differing]
        for silent in self.unanswered:
            ended = "" if silent.waited_for else "; strikes no longer wait for it"
            found.append(
                f"{silent.validator} sent no verdict on {silent.total} bundles that it was asked to confirm{ended}"
            )
        if self.contradictions:
            last = self.contradictions[-1]
            verdicts = "; ".join(f"{validator} says {what}" for validator, what in last.said.items())
            found.append(f"{self.num_contradictions} contradictions, the last on bundle {last.bundle[:12]}: {verdicts}")
        return found


class HeldOut(UntrustedRow):
    """Shares of held-out problems that a policy answers right."""

    policy: _Whole = -1
    greedy: float | None = None
    sampled: float | None = None


class Learning(UntrustedRow):
    """Mean reward of the newest step, and the newest held-out figures."""

    step: _Whole = -1
    at: float = 0.0
    """Unix time of the step's end, in milliseconds."""
    reward: float | None = None
    held_out: HeldOut | None = None


class JoiningShown(UntrustedRow):
    """Rules on who joins that are in force."""

    invites_needed: bool = False


class RunStatus(UntrustedRow):
    """Fields of /v1/status that are shown."""

    run: str
    name: str = ""
    step: _Whole
    head: _Whole
    max_steps: _Whole
    async_level: _Whole = 0
    draining: bool = False
    paused: bool = False
    joining_rules: JoiningShown = JoiningShown()
    complete: bool = False
    stopped: bool = False
    """Whether the status was read from the folder of a coordinator that does not run."""
    learning: Learning = Learning()
    waiting_for: tuple[str, ...] = ()
    rollouts: RolloutCounts = RolloutCounts()
    problems: Problems = Problems()
    validators: Validators = Validators()
    bytes_published: _Whole = 0
    peers: _Whole = 0
    usable: tuple[AvailabilityRow, ...] = ()
    steps: tuple[StepLine, ...] = ()
    num_workers: _Whole = 0
    workers: tuple[WorkerLine, ...] = ()


class _PaceNow(UntrustedRow):
    accepted: _Whole
    tokens: _Whole
    step_s: Annotated[float, Field(gt=0.0, le=1e9)]


class _PaceOfStep(UntrustedRow):
    groups_per_step: Annotated[int, Field(ge=1, le=COUNT_MAX)]
    rollouts_per_group: Annotated[int, Field(ge=1, le=COUNT_MAX)]


class _Pace(UntrustedRow):
    now: _PaceNow
    run: _PaceOfStep


def run_pace(url: str) -> float | None:
    """Return how many completion tokens a run accepts in a second, by what its coordinator says; None if it is not known yet."""
    try:
        found = _Pace.model_validate(asyncio.run(_read(_url_of(url), "/v1/history")))
    except (LocalError, ValidationError):
        return None
    if found.now.accepted <= 0:
        return None
    rollouts = found.run.groups_per_step * found.run.rollouts_per_group
    return rollouts * found.now.tokens / found.now.accepted / found.now.step_s


async def status_at(url: str) -> dict[str, Any]:
    """Return the status that the coordinator at `url` gives of its run, as received. Raises LocalError."""
    return await _read(url, "/v1/status")


async def named_keys(url: str, ending: str) -> list[str]:
    """Return the key ids with this ending that the coordinator knows, active or not, up to its limit per answer.

    Raises LocalError.
    """
    found = (await _read(url, f"/v1/workers/{quote(ending, safe='')}")).get("workers")
    return [str(key) for key in found] if isinstance(found, list) else []


def _advice(url: str, error: str) -> str:
    address = urlsplit(url)
    if "WRONG_VERSION_NUMBER" in error:
        return "that port answers in http, not https; is the link complete?"
    if THROUGH in error:
        return f"is that proxy running, and does it allow this address? {address.scheme}_proxy names it, no_proxy the exceptions"
    return "is the coordinator running, and are the address and this machine's clock right?"


async def _read(url: str, path: str) -> dict[str, Any]:
    """Request a JSON object from the coordinator at `url`. Raises LocalError with the cause if it fails."""
    try:
        data, _ = await _fetch(url, path)
        if sum(map(data.count, (b"[", b"{", b","))) > STATUS_MARKS_MAX:
            raise _no_status(url, "the answer has too many parts")
        value = json.loads(data)
    except Unreachable as error:
        raise LocalError(
            f"cannot read a status from {printable(str(error), 300)}: {_advice(url, str(error))}"
        ) from None
    except RemoteError as error:
        raise LocalError(f"cannot read a status from {url}: {printable(error.detail, 200)}") from None
    except (ValueError, RecursionError):
        raise _no_status(url, "the answer is not valid") from None
    if not isinstance(value, dict):
        raise _no_status(url, "the answer is not valid")
    return value


def _no_status(url: str, why: str) -> LocalError:
    return LocalError(f"cannot read a status from {url}: {printable(why, 200)}: is it the address of a coordinator?")


async def _fetch(url: str, path: str) -> tuple[bytes, Mapping[str, str]]:
    """Return the body and the headers of an answer. Raises RemoteError, Unreachable, or ValueError for an invalid URL."""
    from prime_node.cli import wire

    try:
        async with asyncio.timeout(WHOLE_S_MAX), wire.public_source(url, stall_s=ANSWER_S_MAX) as client:
            return await client.unsigned(path, bytes_max=STATUS_BYTES_MAX)
    except TimeoutError:
        raise Unreachable(f"{url}: the answer took longer than {WHOLE_S_MAX:g} s") from None


def clock_ahead_s(target: str) -> float | None:
    """Return how far this machine's clock is ahead of the server's, accurate to a second; None if no answer contains a date."""
    try:
        _, headers = asyncio.run(_fetch(_url_of(target), "/healthz"))
        return time.time() - parsedate_to_datetime(headers.get("Date", "")).timestamp()
    except (RemoteError, Unreachable, ValueError, OverflowError):  # a number in a date may have any size
        return None


def run_status(target: str) -> tuple[RunStatus, dict[str, Any]]:
    """Return the status of a run directory, a join link or a URL: parsed, and as received. Raises LocalError.

    If the coordinator of a run directory does not answer and does not run here, its folder is read.
    """
    if is_url(target):
        return _asked(_url_of(target), expected_run(target))
    run_dir = RunDir(Path(target))
    run = run_dir.load_run()
    try:
        return _asked(run_dir.join_link().url, run.digest)
    except LocalError as error:
        if (stored := _stored(run_dir, run)) is not None:
            return _parsed(stored, run_dir.path), stored
        raise LocalError(f"{error} `prime-node coordinator {shlex.quote(target)}` starts it here") from None


def _asked(url: str, pinned: str | None) -> tuple[RunStatus, dict[str, Any]]:
    raw = asyncio.run(_read(url, "/v1/status"))
    parsed = _parsed(raw, url)
    if pinned is not None and parsed.run != pinned:
        served = printable(parsed.run[:16])
        raise LocalError(f"{url} serves another run than the link names: {served}..., not {pinned[:16]}...")
    return parsed, raw


def _parsed(raw: Mapping[str, Any], place: object) -> RunStatus:
    try:
        return RunStatus.model_validate(raw)
    except ValidationError as error:
        where = printable(".".join(map(str, error.errors(include_url=False)[0]["loc"])))
        raise LocalError(f"the status from {place} is invalid at {where}: is it that of a coordinator?") from None


def _stored(run_dir: RunDir, run: PinnedRun) -> dict[str, Any] | None:
    """Return the status in a run's folder; None if it has none, or if its coordinator runs. Raises LocalError."""
    from prime_node.cli import wire_coordinator
    from prime_node.cli.wire_store import has_store, store_setting
    from prime_node.folder_lock import FolderInUse, FolderLock

    store = store_setting(run_dir.path)
    if not run_dir.coordinator.is_dir() or not has_store(store, run_dir.coordinator):
        return None
    try:
        lock = FolderLock(run_dir.coordinator)
    except FolderInUse:
        return None
    with lock:
        return asyncio.run(wire_coordinator.stored_status(run, run_dir.coordinator, store=store))


def _url_of(target: str) -> str:
    if is_url(target):
        return target.partition("#")[0].rstrip("/")
    run_dir = RunDir(Path(target))
    run_dir.load_run()
    return run_dir.join_link().url
