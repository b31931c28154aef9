"""Checks of published steps that need no torch: batches, bundles, prompts, rewards, ledger; learning rates and AdamW's bound.

A batch agrees with the ledger if each group was accepted from its worker, for its slot and policy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from prime_node.algo.schedule import ParameterSchedule
from prime_node.broadcast.audit.audit import Verified, audit
from prime_node.broadcast.audit.ledger_audit import audit_ledger
from prime_node.broadcast.audit.verified_parts import CheckFailed, feed_parts
from prime_node.envs.episodes import WrongContext, bounds_of, scored
from prime_node.envs.source import prompt_of
from prime_node.ports.environment import Environment, Tokenizer, TurnEnvironment
from prime_node.ports.train_samples import Group
from prime_node.ports.transport import LedgerSource
from prime_node.replay.finding import (
    ReplayFault,
    ReplayOutcome,
    ReplayReport,
    StepFinding,
    Unfaithful,
    Withheld,
    listed,
)
from prime_node.replay.material import Material, given
from prime_node.replay.tolerance import AdamBound, bound_faults
from prime_node.trainer.config import TrainerConfig
from prime_node.training_data.feed import Feed, StepBatch
from prime_protocol.checkpoint import CheckpointDecoder
from prime_protocol.chunk_index import open_index
from prime_protocol.envelope import Envelope, parse_json
from prime_protocol.errors import RemoteError
from prime_protocol.ledger import LedgerEntry
from prime_protocol.manifest import Manifest
from prime_protocol.replies import TrainBatch
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.run_spec import EnvironmentSpec, PinnedRun, RunSpec
from prime_protocol.schedule import Schedule
from prime_protocol.verdict import BundleStatus, Receipt
from prime_protocol.weights import Weights


@dataclass
class LedgerCopy:
    """A ledger that is audited while its accepting receipts are kept: implementation of ports.transport.LedgerSource."""

    source: LedgerSource
    receipts: dict[str, Receipt] = field(default_factory=dict)
    """The newest receipt of each bundle."""

    async def ledger_head(self) -> Envelope:
        """Return the signed head, unverified."""
        return await self.source.ledger_head()

    async def ledger(self, start: int) -> list[bytes]:
        """Return lines from line `start` on, and keep their receipts."""
        lines = await self.source.ledger(start)
        for line in lines:
            receipt = parse_json(line, LedgerEntry).receipt
            self.receipts[receipt.bundle] = receipt
        return lines


async def audited_receipts(source: LedgerSource, run: PinnedRun) -> tuple[Mapping[str, Receipt], list[str]]:
    """Return the newest receipt of each bundle, and the ledger's own faults. Raises RemoteError if there is no ledger."""
    copy = LedgerCopy(source)
    report = await audit_ledger(copy, run)
    return copy.receipts, report.faults


def ledger_faults(batches: Sequence[TrainBatch], receipts: Mapping[str, Receipt]) -> list[str]:
    """Return what batches state that the ledger does not, as text for people."""
    faults = []
    for batch in batches:
        for group in batch.groups:
            receipt, here = receipts.get(group.bundle), f"slot {group.slot}, bundle {group.bundle[:12]}"
            if receipt is None or receipt.status is not BundleStatus.ACCEPTED:
                faults.append(f"{here}: the ledger does not accept it")
            elif (receipt.worker, receipt.policy_version) != (group.worker, group.policy_version):
                faults.append(f"{here}: the ledger names another worker or policy")
            elif receipt.assigned is not None and group.slot not in {slot for slot, _ in receipt.assigned.places()}:
                faults.append(f"{here}: the ledger assigns it other slots")
    return faults


def repeatable(spec: RunSpec) -> frozenset[str]:
    """Return the environments whose rewards are the same each time."""
    return frozenset(one.name for one in spec.environments if one.is_deterministic and one.scorings == 1)


async def reward_faults(
    groups: Sequence[Group],
    environments: Mapping[str, Environment],
    tokenizer: Tokenizer,
    spec: RunSpec,
    on_group: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[int, list[str]]:
    """Return how many rewards were computed again, and the prompts and rewards that are others in the batch, as text for people.

    A group whose prompt is not that of its problem is not scored: its completions answer another question. `on_group` gets the
    number of groups that are done, and of all.
    """
    known = {one.name: one for one in spec.environments}
    checked, faults = 0, []
    for place, group in enumerate(groups):
        on_group(place, len(groups))
        if group.environment not in repeatable(spec) or group.problem_index is None:
            continue
        environment = environments[group.environment]
        if fault := await asyncio.to_thread(_prompt_fault, group, group.problem_index, environment, tokenizer):
            faults.append(f"slot {group.slot}: {fault}")
            continue
        rewards = await _rewards_of(group, group.problem_index, environment, tokenizer, known[group.environment], spec)
        for number, (found, stated) in enumerate(zip(rewards, group.rewards, strict=True)):
            checked += 1
            if found != stated:
                said = found if isinstance(found, str) else f"{found:g} here"
                faults.append(f"slot {group.slot}, completion {number}: its reward is {stated:g} in the batch, {said}")
    on_group(len(groups), len(groups))
    return checked, faults


def _prompt_fault(group: Group, index: int, environment: Environment, tokenizer: Tokenizer) -> str:
    """Return why the prompt is not that of the group's problem; empty if it is."""
    try:
        due = prompt_of(environment, index, tokenizer)
    except Exception as error:  # noqa: BLE001 - third-party code
        return f"the environment renders no prompt here: {type(error).__name__}: {error}"
    return "" if due == group.prompt_token_ids else f"its prompt is not that of problem {index}"


async def _rewards_of(
    group: Group, index: int, environment: Environment, tokenizer: Tokenizer, its: EnvironmentSpec, spec: RunSpec
) -> list[float | str]:
    """Return each completion's reward, or why there is none."""
    if its.turns_max == 1 or not isinstance(environment, TurnEnvironment):
        return await asyncio.to_thread(_scores_of, group.completions, index, environment, tokenizer)
    found: list[float | str] = []
    play = partial(environment.play, index, group.prompt_token_ids)
    for number in range(len(group.completions)):
        try:
            found += await scored(play, group.turns[number], bounds_of(spec)[its.name], exact=True, scorings=1)
        except WrongContext as error:
            found.append(f"and here its turns are not the environment's: {error}")
        except Exception as error:  # noqa: BLE001 - third-party code
            found.append(_failure(error))
    return found


def _scores_of(
    completions: Sequence[Completion], index: int, environment: Environment, tokenizer: Tokenizer
) -> list[float | str]:
    """Return the rewards of completions of one turn. Equal ones are scored once: the environment is another process."""
    scores: dict[tuple[tuple[int, ...], bool], float | str] = {}
    keys = [(one.token_ids, one.finish is FinishReason.STOP) for one in completions]
    for token_ids, finished in dict.fromkeys(keys):
        try:
            text = tokenizer.decode(list(token_ids))
            scores[token_ids, finished] = float(environment.score(index, text, finished=finished))
        except Exception as error:  # noqa: BLE001 - third-party code
            scores[token_ids, finished] = _failure(error)
    return [scores[key] for key in keys]


def _failure(error: Exception) -> str:
    return f"and the environment fails here: {type(error).__name__}: {error}"


OnStep = Callable[[StepFinding], None]


@dataclass
class BatchChecks:
    """Checks of a step's batches."""

    material: Material
    environments: Mapping[str, Environment] | None
    """None: rewards are not computed again."""
    tokenizer: Tokenizer
    receipts: Mapping[str, Receipt] | None
    """Newest receipt of each bundle; None: the ledger is not at hand."""

    async def check(self, batch: StepBatch, finding: StepFinding) -> None:
        """Check one batch, whose signatures the feed has verified."""
        spec = self.material.run.spec
        if self.environments is not None:
            on_group = partial(self.material.progress.note, "rewards of groups")
            checked, faults = await reward_faults(batch.groups, self.environments, self.tokenizer, spec, on_group)
            left = sum(len(group.rewards) for group in batch.groups) - checked
            if faults:
                finding.fail(ReplayOutcome.DIFFERS, listed(faults), ReplayFault.REWARD)
            else:
                if checked:
                    finding.established.append(
                        f"{checked} rewards follow from the tokens, each prompt from its problem"
                    )
                if left:
                    finding.established.append(f"{left} rewards, and their prompts, are not computed again")
        if self.receipts is not None:
            signed = self.material.batches[batch.step][batch.part : batch.part + 1]
            faults = ledger_faults(signed, self.receipts)
            if faults:
                finding.fail(ReplayOutcome.DIFFERS, listed(faults), ReplayFault.LEDGER)
            else:
                finding.established.append("each group is in the ledger")
        if batch.num_left_out:
            finding.established.append(f"{batch.num_left_out} groups are left out, because their data cannot be used")


async def check_batches(
    checks: BatchChecks, feed: Feed, steps: Iterable[int], report: ReplayReport, on_step: OnStep
) -> None:
    """Check the batches of these steps, each once and in order, without training on them."""
    for step in steps:
        checks.material.progress.step = f"step {step}"
        finding = StepFinding(step, seconds=-time.monotonic())
        report.steps.append(finding)
        for part in range(checks.material.run.spec.schedule.batches_per_step):
            try:
                batch = await feed.take(step, part)
            except RemoteError as error:
                raise Unfaithful(f"step {step}: {error.detail}") from None
            finding.established.append(
                f"batch {part} is signed, and its {len(batch.groups)} groups are in signed bundles"
            )
            await checks.check(batch, finding)
        finding.seconds += time.monotonic()
        on_step(finding)


async def check_bounds(
    material: Material, config: TrainerConfig, steps: Iterable[int], report: ReplayReport, on_step: OnStep
) -> None:
    """Check the learning rates that manifests state, and that no weight moved further than AdamW can move it.

    Each step is given once, in order.
    """
    optimizer = config.optimizer
    bound = AdamBound(optimizer.beta1, optimizer.beta2, optimizer.weight_decay)
    schedule = ParameterSchedule(
        optimizer.lr, optimizer.warmup_steps, material.run.spec.max_steps, config.lr_final_share, config.lr_decay
    )
    begun = (await material.signed(0)).manifest.produced_by.optimizer_steps
    async for before, after, old, new in _pairs(material, steps):
        finding = StepFinding(before.policy_version, seconds=-time.monotonic())
        report.steps.append(finding)
        fault, lrs = _rates(before, after, schedule, config, begun, material.run.spec.schedule)
        if fault:
            finding.fail(ReplayOutcome.DIFFERS, fault, ReplayFault.LEARNING_RATE)
        if optimizer.import_path is None:
            what = f"step {before.policy_version}"
            share, faults = await asyncio.to_thread(bound_faults, old, new, bound, lrs=lrs, what=what)
            if faults:
                finding.fail(ReplayOutcome.DIFFERS, listed(faults))
            finding.established.append(f"no weight moved more than {share:.2f} times as far as its optimizer can")
        finding.seconds += time.monotonic()
        on_step(finding)


def _rates(
    before: Manifest, after: Manifest, schedule: ParameterSchedule, config: TrainerConfig, begun: int, batches: Schedule
) -> tuple[str, dict[int, float]]:
    """Return what is wrong with the learning rates of a step, and an upper bound on that of each of its optimizer steps.

    Numbers of optimizer steps are the trainer's word, so they are bounded before they size anything.
    """
    step, made, last = before.policy_version, after.produced_by, before.produced_by
    assert made.lr is not None
    assert last.lr_multiplier is not None
    count, most = made.optimizer_steps - last.optimizer_steps, schedule.at(step)
    if last.optimizer_steps < begun:
        return f"policy {step} has {last.optimizer_steps} optimizer steps, and policy 0 has {begun}", {}
    count_max = batches.batches_per_step * batches.require_batches
    if not 0 <= count <= count_max:
        return f"step {step} takes {count} optimizer steps, and at most {count_max} are due", {}
    lrs = {made.optimizer_steps - begun - number: most for number in range(count)}
    if config.lr_damping_nats is None and made.lr_multiplier != 1.0:
        return f"step {step} damps its learning rate, which the recipe does not", lrs
    if made.lr > most:
        return f"step {step} has learning rate {made.lr!r}, and the recipe's is at most {most!r}", lrs
    if batches.batches_per_step == 1 and count <= 1:
        due = most * last.lr_multiplier
        if made.lr != due:
            return f"step {step} has learning rate {made.lr!r}, and the recipe's is {due!r}", lrs
        lrs = dict.fromkeys(lrs, due)
    return "", lrs


async def _pairs(
    material: Material, steps: Iterable[int]
) -> AsyncIterator[tuple[Manifest, Manifest, Weights, Weights]]:
    """Yield the manifests and weights before and after each step; policies are decoded once where steps follow one another."""
    held: tuple[int, Weights] | None = None
    for step in steps:
        material.progress.step = f"step {step}"
        before, after = [(await material.signed(version)).manifest for version in (step, step + 1)]
        old = held[1] if held is not None and held[0] == step else await _decoded(material, step)
        new = await _decoded_from(material, after, old)
        yield before, after, old, new
        held = (step + 1, new)


async def _decoded(material: Material, version: int) -> Weights:
    """Return a policy's weights by the cheapest update path."""
    found: list[Verified] = []
    report = await audit(material.source, material.run.digest, policy_version=version, on_verified=found.append)
    if report.failure is not None:
        raise Withheld(f"policy {version}: {report.failure.detail}")
    return found[0].weights


async def _decoded_from(material: Material, manifest: Manifest, base: Weights) -> Weights:
    encoding = manifest.encoding(manifest.policy_version - 1)
    if encoding is None:
        return await _decoded(material, manifest.policy_version)
    what = f"policy {manifest.policy_version}"
    index = open_index(await material.blob(encoding.index.digest, f"the index of {what}"), encoding, manifest.tensors)
    decoder = await asyncio.to_thread(CheckpointDecoder, manifest, encoding, index, base)
    try:
        await given(feed_parts(material.source, encoding.parts, decoder, what=what), what)
    except CheckFailed as failed:
        raise Withheld(f"{what}: {failed.error}") from None
    return await asyncio.to_thread(decoder.finish)
