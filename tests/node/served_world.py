"""Shared parts of the tests of workers with a real coordinator."""

from __future__ import annotations

from tests.node.coordinator_world import World
from tests.node.table_engine import STOP_TOKEN, VOCAB_SIZE, prefill, table_weights
from tests.node.worker_world import TRAINER, WORKER, MemorySource, make_run

from prime_node.adapters.web.http_client import HttpClient
from prime_protocol.envelope import PayloadType, parse_json
from prime_protocol.parcel import open_parcel
from prime_protocol.replies import CheckTask
from prime_protocol.requests import BundleRequest, CheckRequest, CheckResultRequest
from prime_protocol.rollout import RolloutHeader, parse_body
from prime_protocol.verify import check_assignment, judge, measure_logprobs

RUN = make_run(lease_seconds=60.0, heartbeat_seconds=0.2, max_steps=2)


class Digits:
    """Implements ports.environment.Tokenizer: one token a decimal digit."""

    vocab_size = VOCAB_SIZE
    stop_token_id = STOP_TOKEN

    def encode_prompt(self, text: str) -> list[int]:
        return [int(digit) for digit in text if digit.isdigit()]

    def encode(self, text: str) -> list[int]:
        return self.encode_prompt(text)

    def decode(self, token_ids: list[int]) -> str:
        return "".join(str(token) for token in token_ids if token < 10)


async def validate(client: HttpClient) -> None:
    """Run a validator that recomputes every logprob and every choice, without end."""
    while True:
        task = await client.check(CheckRequest(policy_versions=(), wait_s=1.0))
        if not isinstance(task, CheckTask):
            continue
        parcel = open_parcel(await client.bundle(BundleRequest(bundle=task.bundle)), body_bytes_max=2**20)
        header = parse_json(parcel.envelope.verify(PayloadType.ROLLOUT, trusted=[WORKER.key_id]), RolloutHeader)
        rollouts = parse_body(header, parcel.check_body(header), RUN.spec.limits)
        verdict = check_assignment(header, rollouts, task.lease, vocab_size=VOCAB_SIZE)
        if verdict.accepted:
            truth = prefill(table_weights(header.policy_version), task.lease, rollouts)
            verdict = judge(measure_logprobs(rollouts, truth), RUN.spec.checks)
        rewards = tuple(float(index % 2) for index in range(len(rollouts))) if verdict.accepted else ()
        await client.check_result(
            CheckResultRequest(bundle=task.bundle, verdict=verdict, rewards=rewards, num_tokens=rollouts.num_tokens)
        )


async def publish(world: World, source: MemorySource, version: int, batch: str | None) -> None:
    """Publish as the trainer does: first the bytes, then the manifest."""
    trainer = world.client(TRAINER)
    provenance = {"step": version - 1, "optimizer_steps": version, "batch": batch, "software": "test"}
    signed = source.publish(table_weights(version), produced_by=provenance)
    for blob in signed.manifest.blobs:
        await trainer.put_blob(source.blobs[blob.digest])
    await trainer.publish(signed.envelope)
