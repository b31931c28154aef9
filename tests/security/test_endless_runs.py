"""A run whose policies have only deltas, back to policy 2^31 - 1: neither an audit nor a follower reads it without end."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.builder import provenance
from tests.node.worker_world import MODEL_FILES, TRAINER, MemorySource, make_follower, make_run

from prime_node.broadcast.audit.audit import audit
from prime_node.broadcast.audit.one_tensor import prove_tensor
from prime_protocol.checkpoint import root_of_table
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.limits import ENCODINGS_MAX, STEP_MAX
from prime_protocol.manifest import (
    BasePolicy,
    CheckpointKind,
    Encoding,
    Manifest,
    PartEntry,
    TensorEntry,
    sign_manifest,
)

MANIFESTS_MAX = 40
TABLE = (TensorEntry(name="w", dtype="bf16", shape=(4,), digest="0" * 64),)
BLOB = PartEntry(digest="1" * 64, size=1)


class Endless(MemorySource):
    """Source that signs a manifest when it is requested: sixteen deltas, none to the policy whose digest its own names."""

    def __init__(self) -> None:
        super().__init__(make_run(max_steps=STEP_MAX))
        self.requested: list[int] = []
        self.shown_head = self.made(STEP_MAX)

    def made(self, version: int) -> Envelope:
        root = root_of_table(TABLE)
        bases = [BasePolicy(policy_version=version - span, state_root=root) for span in range(2, ENCODINGS_MAX + 2)]
        manifest = Manifest(
            run=self.run.digest,
            policy_version=version,
            previous="2" * 64,
            model_config_digest=digest_of(MODEL_FILES["config.json"]),
            state_root=root,
            tensors=TABLE,
            encodings=tuple(
                Encoding(kind=CheckpointKind.DELTA, base=base, index=BLOB, parts=(BLOB,)) for base in bases
            ),
            produced_by=provenance(version),
            created_at_ms=0,
        )
        return sign_manifest(manifest, TRAINER).envelope

    async def manifest(self, policy_version: int) -> Envelope:
        self.requested.append(policy_version)
        return self.made(policy_version)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Endless:
    """Return an endless source, and lower the bound so that a test signs few manifests."""
    monkeypatch.setattr("prime_node.broadcast.routes.MANIFESTS_MAX", MANIFESTS_MAX)
    return Endless()


async def test_an_audit_stops_reading_deltas_without_an_anchor(source: Endless) -> None:
    report = await audit(source, None)
    assert report.failure is not None
    assert f"the {MANIFESTS_MAX} manifests that a search reads" in report.failure.detail
    assert len(source.requested) == MANIFESTS_MAX - 1, "the head's manifest is not read again"
    proof = await prove_tensor(source, None, "w")
    assert proof[1] is None
    assert len(source.requested) == 2 * (MANIFESTS_MAX - 1)


async def test_a_follower_stops_reading_deltas_without_an_anchor_and_reads_none_twice(
    source: Endless, tmp_path: Path
) -> None:
    follower = make_follower(tmp_path, source)
    await follower.heads.look()
    for _ in range(3):
        with pytest.raises(RemoteError, match="manifests that a search reads") as refused:
            await follower.fetch(STEP_MAX)
        assert refused.value.code is ErrorCode.NOT_FOUND
        assert len(source.requested) == MANIFESTS_MAX - 1
    assert len(set(source.requested)) == MANIFESTS_MAX - 1
