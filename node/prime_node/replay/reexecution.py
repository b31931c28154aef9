"""Steps, trained again by the trainer's own code from a published training state.

Waiting: each step waits for its batch and bundles, then for the trainer's thread. Nothing is retried.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prime_node import __version__
from prime_node.inside import place
from prime_node.replay.finding import ReplayFault, ReplayOutcome, ReplayReport, StepFinding, Unfaithful
from prime_node.replay.material import MASTERS, Material, foreign_tensor
from prime_node.replay.tolerance import BOUNDS, REST_MAX, ReadState, distances, drift_between
from prime_node.trainer.committing import StateFile, committed_file
from prime_node.trainer.recipe import Recipe
from prime_node.trainer.sft import end_phase, teach_step
from prime_node.trainer.state import Phase, TrainerState
from prime_node.trainer.step import run_step
from prime_node.trainer.step_runner import StepRunner
from prime_node.training_data.feed import StepBatch
from prime_protocol.checkpoint import root_of_table
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.manifest import Manifest
from prime_protocol.training_state import TrainingState, TrainingTensor

BatchCheck = Callable[[StepBatch, StepFinding], Awaitable[None]]
"""Function that makes further checks of a batch before the step is trained, and notes what it finds."""


@dataclass
class Reexecution:
    """Re-execution of some steps of one run."""

    material: Material
    runner: StepRunner
    report: ReplayReport
    folder: Path
    """Folder for files of training states."""
    check_batch: BatchCheck
    tolerance: bool = False
    """Whether results of other arithmetic are compared within the tolerance of their class."""
    on_step: Callable[[StepFinding], None] = lambda finding: None
    _recipe: Recipe = field(init=False)
    _before: ReadState | None = field(default=None, init=False)
    """State from which the present window began."""
    _masters: dict[str, TrainingTensor] | None = field(default=None, init=False)
    """Tensors that the recipe trains, by their names in a training state."""
    _counters_follow: bool = field(default=True, init=False)
    """Whether all counters and rates of the present window follow, which no tolerance covers."""

    def __post_init__(self) -> None:
        self._recipe = self.runner.recipe()
        self.runner.prepare_ahead(self._recipe)

    async def genesis(self) -> None:
        """Make policy 0 again, from the seed and the supervised phase."""
        finding = self._begin(-1)
        manifest = (await self.material.signed(0)).manifest
        said = _progress(await self.material.state_index(0), manifest)
        runner = self.runner
        if said.sft_step > (most := runner.config.sft.steps_max):
            raise Unfaithful(
                f"training state 0 states {said.sft_step} supervised steps, and the recipe has at most {most}",
                ReplayFault.STATE,
            )
        runner.state = TrainerState(run=self.material.run.digest)
        await runner.in_thread(runner.backend.new_optimizer, runner.config.sft.optimizer.settings())
        for number in range(said.sft_step):
            self.material.progress.note("supervised steps", number + 1, said.sft_step)
            await teach_step(runner)
        await end_phase(runner)
        runner.state = runner.state.updated(phase=Phase.RL)
        runner.date_critic(self._recipe)
        await runner.renew_reference(self._recipe)
        finding.established.append(
            f"{said.sft_step} supervised steps from the seed (their number is the trainer's word)"
        )
        await self._compare(manifest, finding)
        self._end(finding)

    async def steps(self, wanted: Iterable[int], *, head: int) -> None:
        """Re-execute these steps, each from the newest training state before it. Those between are re-executed too."""
        left = sorted(set(wanted))
        while left:
            first = await self.material.state_before(left[0])
            last = left[0]
            while left and await self.material.state_before(left[0]) == first:
                last = left.pop(0)
            if self.tolerance:
                while (
                    last + 1 < head
                    and (await self.material.signed(last + 1)).manifest.produced_by.training_state is None
                ):
                    last += 1
            if not await self._window(first, last):
                return

    async def _window(self, first: int, last: int) -> bool:
        """Re-execute steps `first` to `last`. Return whether all gave the published policy, or something tolerable."""
        runner = self.runner
        self.material.progress.step = f"steps {first} to {last}"
        self._counters_follow = True
        signed = (await self.material.signed(first)).manifest
        runner.state = _progress(await self.material.state_index(first), signed)
        if (runner.state.run, runner.state.step, runner.state.phase) != (self.material.run.digest, first, Phase.RL):
            raise Unfaithful(f"training state {first} is one of another run, policy or phase", ReplayFault.STATE)
        made = (await self.material.signed(first)).manifest.produced_by
        if (runner.state.lr, runner.state.lr_multiplier) != (made.lr, made.lr_multiplier):
            raise Unfaithful(
                f"training state {first} has another learning rate than its manifest", ReplayFault.LEARNING_RATE
            )
        await runner.in_thread(runner.backend.new_optimizer, runner.config.optimizer.settings())
        state = await self._committed(first)
        try:
            await runner.in_thread(runner.backend.restore, self._path(first), state.tensors)
        except LocalError as error:
            raise Unfaithful(f"training state {first} is not one of the recipe: {error}", ReplayFault.STATE) from None
        self._before = ReadState(self._path(first), state.tensors)
        begun = self._begin(first, of=f" of {first} to {last}")
        if await self._root() != (await self.material.signed(first)).manifest.state_root:
            begun.fail(
                ReplayOutcome.DIFFERS, f"training state {first} does not round to policy {first}", ReplayFault.STATE
            )
            self._end(begun)
            return False
        begun.established.append(f"training state {first} rounds to policy {first}")
        for step in range(first, last + 1):
            finding = begun if step == first else self._begin(step, of=f" of {first} to {last}")
            try:
                await run_step(runner, self._recipe, partial(self._next_batch, finding), asyncio.Event())
            except RemoteError as error:
                raise Unfaithful(f"step {step}: {error.detail}") from None
            with self.material.progress.during("comparison with the published policy"):
                await self._compare((await self.material.signed(step + 1)).manifest, finding)
            self._end(finding)
            passing = (ReplayOutcome.EXACT, *([ReplayOutcome.OTHER_NUMERICS] if self.tolerance else []))
            if finding.outcome not in passing:
                break
        if finding.outcome is ReplayOutcome.TOLERATED:  # the comparison covers all steps of the window
            for one in self.report.steps[-(last + 1 - first) :]:
                if one.outcome is ReplayOutcome.OTHER_NUMERICS:
                    one.outcome = ReplayOutcome.TOLERATED
        return finding.outcome in (ReplayOutcome.EXACT, ReplayOutcome.TOLERATED)

    async def _next_batch(self, finding: StepFinding, part: int) -> StepBatch:
        batch = await self.runner.feed.take(self.runner.state.step, part)
        finding.established.append(f"batch {part} is signed, and the manifest of policy {batch.step + 1} leads to it")
        await self.check_batch(batch, finding)
        return batch

    async def _compare(self, manifest: Manifest, finding: StepFinding) -> None:
        """Compare the weights, and the training state if the manifest commits to it, with what was computed here."""
        version, made, state = manifest.policy_version, manifest.produced_by, self.runner.state
        said = (made.optimizer_steps, made.lr, made.lr_multiplier)
        if said != (state.optimizer_steps, state.lr, state.lr_multiplier):
            due = (state.optimizer_steps, state.lr, state.lr_multiplier)
            what = f"policy {version} states (optimizer steps, lr, multiplier) {said}, and {due} follows"
            self._counters_follow = False
            outcome = self._differs(made.numerics)
            if said[1:] != due[1:] and self.runner.config.lr_damping_nats is None:
                outcome = ReplayOutcome.DIFFERS  # then a rate depends on no arithmetic
            finding.fail(outcome, what, ReplayFault.LEARNING_RATE)
        if await self._root() == manifest.state_root:
            finding.established.append(f"the weights are those of policy {version}, bit for bit")
        else:
            finding.fail(self._differs(made.numerics), f"the weights that follow are not those of policy {version}")
        if made.training_state is None:
            return
        mine = await self.runner.in_thread(committed_file, state, self.runner.backend, self.folder / "mine")
        if mine.digest == made.training_state:
            finding.established.append(f"masters, running means and counters are those of training state {version}")
            return
        finding.fail(self._differs(made.numerics), f"the training state that follows is not that of policy {version}")
        if self.tolerance and self._counters_follow and finding.outcome is ReplayOutcome.OTHER_NUMERICS:
            await self._tolerate(manifest, mine, finding)

    async def _tolerate(self, manifest: Manifest, mine: StateFile, finding: StepFinding) -> None:
        assert self._before is not None
        version = manifest.policy_version
        theirs = await self._committed(version)
        ours = TrainingState.model_validate_json(mine.index)
        honest = ReadState(self._path(version), theirs.tensors)
        steps = version - int(self._before.path.name)
        kind = (manifest.produced_by.numerics or "").split("/")[3:4]
        bounds = BOUNDS.get(kind[0] if kind else "", BOUNDS["fp32"])
        most = steps * bounds.rest
        if most >= REST_MAX:
            finding.detail = f"over {steps} steps the tolerance is {most:g} of the update, which shows nothing"
            return
        states = self._before, honest, ReadState(mine.path, ours.tensors)
        drift = await asyncio.to_thread(drift_between, *states)
        found = f"over {steps} steps |a - 1| = {drift.scale:.2g}, r = {drift.rest:.2g}"
        finding.detail = f"{found}; a step may have {bounds.scale:g} and {bounds.rest:g}"
        if not drift.passes(bounds, steps=steps):
            finding.outcome, finding.fault = ReplayOutcome.DIFFERS, ReplayFault.WEIGHTS
            return
        apart = await asyncio.to_thread(distances, *states, update_norm=drift.update_norm)
        beyond = [f"{what} {far:.2g}" for what, far in apart.items() if not far <= most]
        if beyond:
            finding.detail = f"{found}; other parts of the training state are further apart: {', '.join(beyond)}"
        else:
            finding.outcome = ReplayOutcome.TOLERATED

    def _differs(self, numerics: str | None) -> ReplayOutcome:
        here = self.report.numerics["here"] = self.runner.backend.numerics
        self.report.numerics["committed"] = numerics or ""
        return ReplayOutcome.DIFFERS if here == numerics else ReplayOutcome.OTHER_NUMERICS

    async def _root(self) -> str:
        copy = await self.runner.in_thread(self.runner.backend.copy)
        return root_of_table(await asyncio.to_thread(copy.tensors))

    async def _committed(self, version: int) -> TrainingState:
        """Fetch a training state, once its tensors are those of the model that the recipe trains."""
        if self._masters is None:
            written = await self.runner.in_thread(self.runner.backend.commit, self.folder / "mine")
            trained = [each for each in written.tensors if each.name.startswith(MASTERS)]
            self._masters = {each.name: each for each in trained}
        if fault := foreign_tensor((await self.material.state_index(version)).tensors, self._masters):
            raise Unfaithful(f"training state {version} is not one of the recipe: {fault}", ReplayFault.STATE)
        return await self.material.fetch_state(version, self._path(version))

    def _path(self, version: int) -> Path:
        return place(self.folder, f"{version:08d}")

    def _begin(self, step: int, *, of: str = "") -> StepFinding:
        self.material.progress.step = "policy 0" if step < 0 else f"step {step}{of}"
        finding = StepFinding(step, seconds=-time.monotonic())
        self.report.steps.append(finding)
        return finding

    def _end(self, finding: StepFinding) -> None:
        finding.seconds += time.monotonic()
        self.on_step(finding)


def _progress(state: TrainingState, manifest: Manifest) -> TrainerState:
    try:
        return TrainerState.model_validate_json(state.progress)
    except ValueError as error:
        if manifest.produced_by.software == f"prime-node {__version__}":
            raise Unfaithful(
                f"training state {state.policy_version} is not one of this release, which its manifest names",
                ReplayFault.STATE,
            ) from None
        raise LocalError(
            f"this release cannot read training state {state.policy_version} ({error}): use the release that wrote it"
        ) from None
