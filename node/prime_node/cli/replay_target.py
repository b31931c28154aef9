"""Re-execution of a target's steps, for `prime-node replay`, `prime-node evidence verify` and the end of `up`."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING

from prime_node.cli import wire, wire_replay
from prime_node.cli.place import is_url
from prime_node.cli.run_dir import RunDir
from prime_node.cli.target import answering, expected_run, open_source
from prime_node.keyfile import load_key
from prime_protocol.errors import ErrorCode, LocalError, RemoteError

if TYPE_CHECKING:
    from prime_node.cli.wire_training import Ranks
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.ports.environment import Environment
    from prime_node.ports.transport import LedgerSource, ReplaySource
    from prime_node.replay.checks import BatchChecks
    from prime_node.replay.finding import ReplayReport, StepFinding
    from prime_node.replay.material import Material, ReplayProgress
    from prime_node.trainer.config import TrainerConfig
    from prime_node.trainer.step_runner import StepRunner
    from prime_protocol.verdict import Receipt

    OnStep = Callable[[StepFinding], None]

DAY_MS = 86_400_000
STATES_SHARE = 0.9
"""Share of the bytes of a promise that training states take; bundles take the rest."""
DATES_READ = 64
"""Manifests, of those that their dates exclude from a draw, whose dates are compared."""
STATES_READ = 64
"""Training states, of those in a draw, whose sizes are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What a re-execution does."""

    run: str | None = None
    """Expected digest of the run."""
    steps: tuple[int, ...] = ()
    sample: int = 0
    genesis: bool = False
    batches_only: bool = False
    bound_only: bool = False
    tolerance: bool = False
    rewards: bool = True
    ledger: bool = True
    """Whether batches are compared with the ledger, where the target has one."""
    evidence: Path | None = None
    key: Path | None = None
    """File of an auditor's private key, which signs requests for bundles that are not public."""
    code: frozenset[str] = frozenset()
    """Import paths of code that the recipe may name, and that is run here."""
    ranks: Ranks | None = None
    """Processes to compute in; None: this one."""


REPEATED = ("genesis", "batches_only", "bound_only", "tolerance", "rewards")
"""Options that a finding keeps. `code` is not among them: only its reader may name code to run."""


async def replay_target(
    target: str,
    options: ReplayOptions,
    grants: EnvironmentSettings,
    on_step: OnStep = lambda finding: None,
    progress: ReplayProgress | None = None,
) -> ReplayReport:
    """Re-execute steps of a target. Raises LocalError, and RemoteError if it is another run than the named one.

    `progress` is kept up to date meanwhile.
    """
    from prime_node.broadcast.follow.pinned import fetch_key_rings
    from prime_node.replay.finding import RecordedSource, ReplayReport
    from prime_node.replay.material import Material, ReplayProgress
    from prime_protocol.run_spec import open_run_spec

    if options.evidence is not None and options.evidence.exists() and any(options.evidence.iterdir()):
        raise LocalError(f"--evidence {options.evidence}: the folder is not empty; name a new one")
    key = None if options.key is None else load_key(options.key)
    known = options.run or expected_run(target)
    if key is not None and known is None and is_url(target):
        raise LocalError("--key signs for one run: give its join link, or --run")
    async with open_source(target, key=key, run=known) as opened:
        recorded = None if options.evidence is None else RecordedSource(opened, options.evidence)
        source: ReplaySource = recorded or opened
        with answering(target):
            envelope = await source.run_spec()
            run = open_run_spec(envelope, pinned=known or envelope.digest)
            wire_replay.take_bounds(opened, run)
            await fetch_key_rings(source, run.keys)
        report = ReplayReport(run.digest, pinned=options.run is not None or (is_url(target) and known is not None))
        report.options = {name: getattr(options, name) for name in REPEATED}
        if not report.pinned:
            report.notes.append(
                "the run is not pinned: give the join link or --run to know that it is the run you mean"
            )
        if run.spec.replay is None:
            raise RemoteError(ErrorCode.NOT_FOUND, "the RunSpec promises no re-execution: the run has no [run.replay]")
        material = Material(source, run, run.spec.replay, progress or ReplayProgress())
        work = _TargetReplay(target, opened, material, options, grants, report, on_step)
        await work.run()
        if recorded is not None:
            recorded.finish(report.as_fields())
    return report


async def first_young(date_of: Callable[[int], Awaitable[int]], head: int, oldest_ms: int) -> int:
    """Return the first policy up to `head` of at least a date, by bisection; head + 1 if there is none.

    `date_of` returns a manifest's date in ms since 1970. Of the policies before the result, DATES_READ at random are read too.
    Raises Unfaithful if a date that was read is before an earlier policy's.
    """
    from prime_node.replay.finding import Unfaithful

    dates = {head: await date_of(head)}
    low, high = 0, head + (dates[head] < oldest_ms)
    while low < high:
        middle = (low + high) // 2
        dates[middle] = await date_of(middle)
        low, high = (low, middle) if dates[middle] >= oldest_ms else (middle + 1, high)
    for version in SystemRandom().sample(range(low), min(DATES_READ, low)):
        dates[version] = await date_of(version)
    for before, after in pairwise(sorted(dates)):
        if dates[after] < dates[before]:
            raise Unfaithful(
                f"manifest {after} is dated before manifest {before}: dates along the chain must not decrease, and decide which "
                "steps are drawn"
            )
    return low


@dataclass
class _TargetReplay:
    target: str
    source: ReplaySource
    """The target's own source, of which a ledger is no part of the evidence."""
    material: Material
    options: ReplayOptions
    grants: EnvironmentSettings
    report: ReplayReport
    on_step: OnStep

    async def run(self) -> None:
        """Run what the options ask for, and turn what ends it into a finding."""
        from prime_node.replay.finding import Unfaithful, Withheld
        from prime_node.scratch import Scratch

        scratch = Scratch("replay")
        try:
            await self._chosen(scratch.path)
        except (Withheld, Unfaithful) as error:
            if isinstance(error, Withheld) and self.material.policy.bytes_max:
                self.report.notes.append(
                    f"the RunSpec promises states and bundles of {self._promise} and no older ones"
                )
            first = next(iter(self.options.steps), -1 if self.options.genesis else 0)
            self.on_step(self.report.end(error, first))
        finally:
            scratch.close()

    async def _chosen(self, folder: Path) -> None:
        from prime_node.cli.wire_environments import end_environments
        from prime_node.replay.material import given
        from prime_node.trainer.pinned_recipe import config_of

        material, options = self.material, self.options
        with material.progress.during("the draw"):
            head = await material.head()
            steps = await self._steps(head)
        document = await material.recipe()
        if options.bound_only:
            from prime_node.replay.checks import check_bounds

            if material.run.spec.adapters is not None:
                raise LocalError("--bound-only reads whole weights, and this run publishes adapters")
            config = config_of(document, material.policy, trusted_code=options.code)
            await check_bounds(material, config, steps, self.report, self.on_step)
            return
        self._require_bundles(steps)
        with material.progress.during("the model files"):
            model = await given(wire_replay.replay_model(material.source, material.run, folder), "the model files")
        retrained = None  # its code is not run where nothing is trained
        if not options.batches_only:
            retrained = config_of(document, material.policy, trusted_code=options.code)
        are_needed = options.genesis or (retrained is not None and retrained.asks_environments)
        worlds: dict[str, Environment] = {}
        if options.rewards or are_needed:
            try:
                worlds = wire.environments(material.run.spec, model, self.grants, folder=folder)
            except LocalError as error:
                advice = "" if are_needed else ". --no-rewards leaves out what needs the run's environments"
                raise LocalError(f"{error}{advice}") from None
        try:
            await self._with_environments(steps, head, retrained, worlds, model, folder)
        finally:
            end_environments(worlds)

    async def _with_environments(
        self,
        steps: Sequence[int],
        head: int,
        retrained: TrainerConfig | None,
        worlds: dict[str, Environment],
        model: Path,
        folder: Path,
    ) -> None:
        from prime_node.replay.checks import BatchChecks, check_batches
        from prime_node.training_data.feed import Feed

        material, options = self.material, self.options
        receipts = await self._receipts() if steps else None
        checks = BatchChecks(material, worlds if options.rewards else None, wire.tokenizer(model), receipts)
        feed = Feed(material, material.run, clock=wire.clock(), kept=True)
        try:
            if retrained is None:
                await check_batches(checks, feed, steps, self.report, self.on_step)
                return
            numerics = (await material.signed(steps[0] if steps else 0)).manifest.produced_by.numerics or ""
            runner = wire_replay.replay_runner(
                material,
                retrained,
                feed,
                worlds,
                model,
                numerics=numerics,
                genesis=options.genesis,
                ranks=options.ranks,
            )
            try:
                await self._reexecute(runner, checks, steps, head, folder)
            finally:
                runner.end_thread()
        finally:
            await feed.close()

    async def _reexecute(
        self, runner: StepRunner, checks: BatchChecks, steps: Sequence[int], head: int, folder: Path
    ) -> None:
        from prime_node.replay.reexecution import Reexecution

        work = Reexecution(
            self.material, runner, self.report, folder, checks.check, self.options.tolerance, self.on_step
        )
        if self.options.genesis:
            await work.genesis()
        await work.steps(steps, head=head)

    async def _steps(self, head: int) -> Sequence[int]:
        """Return the steps that the options name or draw, each once, in order. Raises LocalError.

        All steps are a range: a stranger's newest policy may be the two-billionth.
        """
        options = self.options
        if beyond := [step for step in options.steps if step >= head]:
            raise LocalError(f"--step {beyond[0]}: the newest policy is {head}, which step {head - 1} made")
        if head < 1:
            raise LocalError("no step is published yet")
        all_steps = options.batches_only or options.bound_only
        if not options.steps and not options.sample and all_steps:
            return range(head)
        count = options.sample or (0 if options.steps or options.genesis else 1)
        if not count:
            return sorted(set(options.steps))
        first = await self._first_promised(head)
        drawn = SystemRandom().sample(range(first, head), min(count, head - first))
        return sorted({*options.steps, *drawn})

    async def _first_promised(self, head: int) -> int:
        """Return the first step whose material the source must still have; 0 for an old copy, which may have all or none."""
        policy = self.material.policy

        async def date_of(version: int) -> int:
            return (await self.material.signed(version)).manifest.created_at_ms

        days = min(policy.state_days, policy.bundle_days)
        young = await first_young(date_of, head, wire.clock().now_ms() - round(days * DAY_MS))
        young = max(young, await self._first_fitting(head))
        first = young + policy.state_every - 1 if young else 0
        if first >= head:
            self.report.notes.append(
                f"by the trainer's dates every step is older than the {self._promise} of the RunSpec's promise, or begins at a "
                "training state that is: all were in the draw"
            )
            return 0
        if first:
            self.report.notes.append(
                f"steps 0 to {first - 1} were not in the draw: by the trainer's dates they, or the states where they "
                f"begin, are older than the {self._promise} of the RunSpec's promise; --step N tries one"
            )
        return first

    @property
    def _promise(self) -> str:
        policy = self.material.policy
        days = f"{min(policy.state_days, policy.bundle_days):g} days"
        return f"{days}, or the newest {policy.bytes_max / 2**30:.3g} GiB," if policy.bytes_max else days

    async def _first_fitting(self, head: int) -> int:
        """Return the first policy that the bound on bytes leaves, as the sizes of training states tell: an estimate.

        The smallest decides. So who publishes large states to leave steps out must do so where drawn steps begin.
        """
        from prime_node.replay.finding import Withheld

        policy = self.material.policy
        if not policy.bytes_max:
            return 0
        newest, every = await self.material.state_before(head), policy.state_every
        largest = await self._state_bytes(newest)
        first, sizes = self._fitting(newest, largest), []
        others = range(max(1, -(-first // every)) * every, newest, every)  # policy 0 has no moments
        for version in {*others[:1], *SystemRandom().sample(others, min(STATES_READ, len(others)))}:
            with contextlib.suppress(Withheld):  # drawn steps show that
                sizes.append(await self._state_bytes(version))
        if (size := min(sizes, default=largest)) < largest:
            first = self._fitting(newest, size)
            self.report.notes.append(
                f"training state {newest} has {largest:,} bytes, and an older one {size:,}: the draw is by the smaller "
                "size. The source may lack some of its steps"
            )
        return first

    def _fitting(self, newest: int, size: int) -> int:
        """Return the first policy that the bound on bytes leaves, if each training state has `size` bytes."""
        kept = max(1, int(STATES_SHARE * self.material.policy.bytes_max) // size)
        return max(0, newest - (kept - 1) * self.material.policy.state_every)

    async def _state_bytes(self, version: int) -> int:
        index = await self.material.state_index(await self.material.state_before(version))
        return sum(part.size for part in index.parts)

    def _require_bundles(self, steps: Sequence[int]) -> None:
        """Raise RemoteError if the RunSpec gives this caller no bundles."""
        from prime_node.replay.finding import FINDING
        from prime_protocol.key_ring import Role
        from prime_protocol.replay import BundleAccess

        if not steps or self.material.policy.bundles is BundleAccess.PUBLIC:
            return
        refusal, keys = "", self.material.run.keys
        if not is_url(self.target):
            if not (RunDir(Path(self.target)).archived.exists() or (Path(self.target) / FINDING).exists()):
                refusal = "give the join link, and an auditor's --key"
        elif self.options.key is None:
            refusal = "give an auditor's --key"
        elif (key := load_key(self.options.key).key_id) not in keys.current.of(Role.AUDITOR):
            refusal = f"{key} is {'one no longer' if keys.is_revoked(key, Role.AUDITOR) else 'none'}"
        if refusal:
            raise RemoteError(
                ErrorCode.WRONG_ROLE,
                f"the run gives bundles to its auditors only: {refusal}. --bound-only and --genesis need none",
            )

    async def _receipts(self) -> Mapping[str, Receipt] | None:
        """Return the newest receipt of each bundle, None where the target has no ledger. Raises Unfaithful or Withheld."""
        from prime_node.broadcast.audit.ledger_file import UnpinnedLedger
        from prime_node.cli.ledger import open_ledger
        from prime_node.replay.finding import Withheld

        if not self.options.ledger:
            return None
        if is_url(self.target):
            ledger = wire_replay.as_ledger(self.source)
            return await self._audited(ledger if self.report.pinned else UnpinnedLedger(ledger))
        if not RunDir(Path(self.target)).key("coordinator").exists():
            self.report.notes.append("a published folder has no ledger: batches were not compared with it")
            return None
        try:
            async with open_ledger(self.target, self.material.run.digest) as opened:
                return await self._audited(opened.source)
        except (LocalError, Withheld) as error:  # of a folder that is the reader's own
            self.report.notes.append(f"batches were not compared with the ledger: {error}")
            return None

    async def _audited(self, source: LedgerSource) -> Mapping[str, Receipt]:
        from prime_node.replay.checks import audited_receipts
        from prime_node.replay.finding import ReplayFault, Unfaithful, listed
        from prime_node.replay.material import given

        with self.material.progress.during("the ledger"):
            receipts, faults = await given(audited_receipts(source, self.material.run), "the ledger")
        if faults:
            raise Unfaithful(f"the ledger: {listed(faults)}", ReplayFault.LEDGER)
        return receipts
