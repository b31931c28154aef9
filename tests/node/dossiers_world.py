"""Shared parts of the tests of evidence: a class with a calibration, and cases as they are published."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tests.node.coordinator_world import (
    ANNA,
    VALIDATOR,
    World,
    make_parcel,
    make_run,
)
from typer.testing import CliRunner

from prime_node.cli.main import app
from prime_protocol.assignment import Lease, Sampling
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.evidence import BundleEvidence, Moments, Sums
from prime_protocol.identity import SigningKey
from prime_protocol.replies import CheckTask
from prime_protocol.requests import CheckRequest, CheckResultRequest
from prime_protocol.rollout import Completion, FinishReason, Rollouts, pack_body, rollouts_for
from prime_protocol.verdict import RejectReason, Verdict

CLASS = "toy/fp32/cpu"
MOMENTS = Moments(cap=1.0, lambdas=(1.0, 2.0), log_moments=(0.01, 0.02), num_tokens=1_000)
CALIBRATED = CheckPolicy(
    calibration=Calibration(pairs=(PairMoments(worker=CLASS, validator=CLASS, moments={"margin": MOMENTS}),))
)


async def judged(world: World, *, nats: float = 0.0, reason: RejectReason | None = None) -> Lease:
    """One more bundle of Anna's gets its verdict. Returns its lease."""
    lease = await world.lease(ANNA, rollouts_max=2)
    await world.client(ANNA).upload(make_parcel(lease, ANNA))
    await judge(world, nats=nats, reason=reason)
    return lease


async def judge(world: World, *, nats: float = 0.0, reason: RejectReason | None = None) -> None:
    task = await world.client(VALIDATOR).check(CheckRequest(policy_versions=(), wait_s=5.0))
    assert isinstance(task, CheckTask)
    sums = {"margin": Sums(num_tokens=6, log_e=(min(nats, 5.9), nats))}
    result = CheckResultRequest(
        bundle=task.bundle,
        verdict=Verdict.refuse(reason) if reason else Verdict.accept(),
        rewards=() if reason else (0.5,) * task.lease.num_rollouts,
        evidence=BundleEvidence(worker=CLASS, validator=CLASS, sums=sums),
    )
    await world.client(VALIDATOR).check_result(result)


async def case_in(world: World, folder: Path) -> Path:
    async def is_there() -> bool:
        return bool(list((folder / "evidence").glob("ban-*.jsonl")))

    await world.until(is_there)
    return next((folder / "evidence").glob("ban-*.jsonl"))


def check(file: Path, *options: str) -> tuple[int, dict[str, object]]:
    result = CliRunner().invoke(app, ["evidence", "verify", str(file), "--json", *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, json.loads(result.stdout)


TEXTS_RUN = make_run(sampling=Sampling(completion_tokens_max=128, stop_token_ids=(0,)))
BY_ROLLOUT = ("a", "b")
"""Names of the texts of a bundle's two rollouts."""


def text(name: str) -> Completion:
    """Return a completion that does not occur twice by chance; the same name gives the same one."""
    tokens = np.random.default_rng(list(name.encode())).integers(1, 256, 128)
    return Completion(tuple(tokens.tolist()), (-1.5,) * len(tokens), FinishReason.LENGTH)


def rollouts_of(lease: Lease, names: tuple[str, ...]) -> Rollouts:
    return rollouts_for(lease, [text(name) for name in names])


async def upload_texts(world: World, key: SigningKey, names: tuple[str, ...]) -> bytes:
    lease = await world.lease(key, rollouts_max=2)
    body, size = pack_body(rollouts_of(lease, names))
    parcel = make_parcel(lease, key, body=body, decompressed_bytes=size)
    await world.client(key).upload(parcel)
    return parcel
