"""Downloads of a worker that was away, with changes as sparse as in real runs; and its recovery from damage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.builder import base_of
from tests.node.worker_world import MemorySource, following, make_follower, make_run, settle
from tests.time_world import until

from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.publish.encoder import SpanEncoder, WholeCopy
from prime_node.broadcast.publish.spans import SpanRules
from prime_protocol.checkpoint import encode_checkpoint, tensor_table
from prime_protocol.chunk_index import pack_index
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import BasePolicy, PartEntry, SignedManifest
from prime_protocol.weights import Weights, WeightTensor, root_of, state_root

RUN = make_run()
ELEMENTS = 2**16
POLICIES = 65


def to_bf16(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Round to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def trained(num_policies: int, *, lr: float = 3e-6, elements: int = ELEMENTS) -> list[Weights]:
    """bf16 copies of fp32 weights under Adam-like steps: directions last for some ten steps, sizes are near lr."""
    rng = np.random.default_rng(1)
    weights = rng.normal(0, 0.02, elements).astype(np.float32)
    direction = np.zeros(elements, np.float32)
    policies: list[Weights] = []
    for _ in range(num_policies):
        policies.append({"w": WeightTensor("bf16", (elements,), to_bf16(weights))})
        direction = 0.9 * direction + 0.44 * rng.normal(0, 1, elements).astype(np.float32)
        weights = weights - np.float32(lr) * direction
    return policies


def publish_all(source: MemorySource, policies: list[Weights], rules: SpanRules | None = None) -> None:
    """Publish as the trainer's publisher does."""
    encoder = SpanEncoder(rules or SpanRules())
    for version, weights in enumerate(policies):
        parts: dict[str, bytes] = {}
        encoded = encoder.encode(
            version, WholeCopy(weights), lambda entry, data, parts=parts: parts.update({entry.digest: bytes(data)})
        )
        signed = source.publish(weights, encodings=tuple(one.encoding for one in encoded))
        source.blobs |= {one.encoding.index.digest: one.index for one in encoded}
        source.blobs |= {part.digest: parts[part.digest] for one in encoded for part in one.encoding.parts}
        encoder.published(signed.manifest, WholeCopy(weights), head=version)


@pytest.fixture(scope="module")
def policies() -> list[Weights]:
    return trained(POLICIES)


@pytest.fixture(scope="module")
def long_run(policies: list[Weights]) -> MemorySource:
    source = MemorySource(RUN)
    publish_all(source, policies)
    return source


@pytest.fixture
def source(long_run: MemorySource) -> MemorySource:
    """Return a copy that a test may damage."""
    copy = MemorySource(RUN)
    copy.manifests, copy.blobs = dict(long_run.manifests), dict(long_run.blobs)
    copy.shown_head = copy.manifests[POLICIES - 1]
    return copy


def downloaded(source: MemorySource) -> int:
    return sum(len(source.blobs[digest]) for digest in source.blobs_asked)


async def taken(source: MemorySource, follower: Follower, head: int) -> int:
    """Let a follower reach `head`; return the bytes that it downloads."""
    source.blobs_asked.clear()
    source.shown_head = source.manifests[head]
    policy = await follower.wait_newer(head - 1)
    assert policy.version == head
    assert root_of(policy.weights) == policy.signed.manifest.state_root
    return downloaded(source)


def single_deltas(source: MemorySource, first: int, last: int) -> int:
    """Return the cost of a chain of nothing but deltas from the previous policy."""
    deltas = [source.signed(version).manifest.encoding(version - 1) for version in range(first + 1, last + 1)]
    return sum(delta.sent_bytes for delta in deltas if delta is not None)


# Bytes


@pytest.mark.parametrize(("away", "share_max"), [(1, 1.0), (5, 0.9), (20, 0.75), (40, 0.6)])
async def test_a_follower_that_was_away_downloads_less_than_a_chain_of_single_deltas(
    away: int, share_max: float, source: MemorySource, tmp_path: Path
) -> None:
    head = POLICIES - 1
    async with following(make_follower(tmp_path, source)) as follower:
        await taken(source, follower, head - away)
        num_bytes = await taken(source, follower, head)
    chain = single_deltas(source, head - away, head)
    anchor = source.signed(0).manifest.encodings[0].sent_bytes
    print(f"away {away}: {num_bytes:,} bytes; single deltas {chain:,}, an anchor {anchor:,}, raw {2 * ELEMENTS:,}")
    assert num_bytes <= share_max * chain


async def test_a_newcomer_takes_the_anchor_and_a_root_delta(source: MemorySource, tmp_path: Path) -> None:
    async with following(make_follower(tmp_path, source)) as follower:
        num_bytes = await taken(source, follower, POLICIES - 1)
    anchor = source.signed(0).manifest.encoding(None)
    root = source.signed(POLICIES - 1).manifest.encoding(0)
    assert anchor is not None
    assert root is not None
    assert num_bytes == anchor.sent_bytes + root.sent_bytes
    assert num_bytes < anchor.sent_bytes + single_deltas(source, 0, POLICIES - 1)


async def test_a_follower_that_keeps_up_downloads_single_deltas(source: MemorySource, tmp_path: Path) -> None:
    async with following(make_follower(tmp_path, source)) as follower:
        await taken(source, follower, 30)
        for head in (31, 32, 33):
            assert await taken(source, follower, head) == single_deltas(source, head - 1, head)


async def test_a_restart_continues_from_the_disk(source: MemorySource, tmp_path: Path) -> None:
    async with following(make_follower(tmp_path, source)) as follower:
        for head in (30, 31, 32, 33):
            await taken(source, follower, head)
    async with following(make_follower(tmp_path, source)) as follower:
        assert await taken(source, follower, 34) == single_deltas(source, 33, 34)


async def test_the_disk_holds_no_more_than_twice_the_weights(source: MemorySource, tmp_path: Path) -> None:
    async with following(make_follower(tmp_path, source)) as follower:
        for head in range(20, POLICIES):
            await taken(source, follower, head)
            await settle(source)
            assert sum(path.stat().st_size for path in (tmp_path / "parts").iterdir()) <= 2 * 2 * ELEMENTS + 20_000


# Healing


async def test_a_flipped_byte_in_memory_is_noticed_and_healed(source: MemorySource, tmp_path: Path) -> None:
    async with following(make_follower(tmp_path, source)) as follower:
        await taken(source, follower, 40)
        held = follower.latest()
        assert held is not None
        held.weights["w"].data[1_234] ^= 0x0100
        assert await taken(source, follower, 41) < source.signed(0).manifest.encodings[0].sent_bytes
        assert 40 not in follower.versions(), "what is not what it was is not kept"


async def test_without_the_parts_on_disk_healing_begins_from_the_anchor(source: MemorySource, tmp_path: Path) -> None:
    async with following(make_follower(tmp_path, source)) as follower:
        await taken(source, follower, 40)
        held = follower.latest()
        assert held is not None
        held.weights["w"].data[1_234] ^= 0x0100
        for path in (tmp_path / "parts").iterdir():
            path.unlink()
        healed = await taken(source, follower, 41)
    anchor = source.signed(0).manifest.encodings[0].sent_bytes
    assert anchor < healed < 2 * anchor


async def test_healing_uses_the_other_policy_that_is_held(source: MemorySource, tmp_path: Path) -> None:
    async with following(make_follower(tmp_path, source)) as follower:
        await taken(source, follower, 39)
        await taken(source, follower, 40)
        follower_held = follower.latest()
        assert follower_held is not None
        follower_held.weights["w"].data[0] ^= 1
        healed = await taken(source, follower, 41)
    assert healed <= single_deltas(source, 39, 41)


async def test_a_waiter_for_a_dropped_policy_gets_the_next_one(source: MemorySource, tmp_path: Path) -> None:
    async with following(make_follower(tmp_path, source)) as follower:
        await taken(source, follower, 40)
        held = follower.latest()
        assert held is not None
        held.weights["w"].data[0] ^= 1

        def refuse(_: str) -> None:
            raise RemoteError(ErrorCode.NOT_FOUND, "not now")

        source.before_blob = refuse
        source.shown_head = source.manifests[41]
        await until(lambda: 40 not in follower.versions())
        waiting = asyncio.create_task(follower.wait_newer(39))
        await asyncio.sleep(0)
        assert not waiting.done()
        source.before_blob = lambda _: None
        assert root_of((await waiting).weights) == source.signed(41).manifest.state_root


async def test_an_encoding_whose_bytes_are_missing_is_bypassed(source: MemorySource, tmp_path: Path) -> None:
    async with following(make_follower(tmp_path, source)) as follower:
        await taken(source, follower, 47)
        single = source.signed(48).manifest.encoding(47)
        assert single is not None
        del source.blobs[single.parts[0].digest]
        assert await taken_whatever(source, follower, 48) == source.signed(48).manifest.state_root


async def taken_whatever(source: MemorySource, follower: Follower, head: int) -> str:
    source.shown_head = source.manifests[head]
    return root_of((await follower.wait_newer(head - 1)).weights)


def spoilt(signed: SignedManifest, blobs: dict[str, bytes], base: int) -> tuple[tuple[object, ...], dict[str, bytes]]:
    """Return the policy's encodings, with a different index for the delta against `base`."""
    encoding = signed.manifest.encoding(base)
    assert encoding is not None
    [part] = encoding.parts
    index = pack_index([(part.size, ELEMENTS, digest_of(b"other"))])
    lied = encoding.model_copy(update={"index": PartEntry(digest=digest_of(index), size=len(index))})
    others = tuple(lied if one is encoding else one for one in signed.manifest.encodings)
    return others, blobs | {digest_of(index): index}


async def test_an_encoding_that_was_published_broken_is_bypassed_from_then_on(
    policies: list[Weights], tmp_path: Path
) -> None:
    source = MemorySource(RUN)
    publish_all(source, policies[:16])
    honest = encode_checkpoint(policies[16]), encode_checkpoint(policies[16], delta_base(source, 15, policies))
    signed = source.publish(policies[16], encodings=tuple(one.encoding for one in honest))
    encodings, source.blobs = spoilt(signed, source.blobs, 15)
    source.blobs |= {digest_of(blob): blob for one in honest for blob in one.blobs}
    source.publish(policies[16], previous=source.signed(15), encodings=encodings)
    async with following(make_follower(tmp_path, source)) as follower:
        await taken(source, follower, 15)
        anchor = signed.manifest.encodings[0]
        assert await taken(source, follower, 16) >= anchor.sent_bytes


def delta_base(source: MemorySource, version: int, policies: list[Weights]) -> tuple[BasePolicy, Weights]:
    return base_of(source.signed(version)), policies[version]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_happens_the_head_is_reached_with_its_own_weights(
    data: st.DataObject, long_run: MemorySource, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Random absences, flipped bytes in memory, damaged files, missing encodings and restarts."""
    source = MemorySource(RUN)
    source.manifests, source.blobs = dict(long_run.manifests), dict(long_run.blobs)
    folder = tmp_path_factory.mktemp("follower")
    for version in data.draw(st.sets(st.sampled_from(range(4, POLICIES, 4)), max_size=6)):
        for encoding in source.signed(version).manifest.encodings:
            if encoding.base_version not in (None, version - 1):
                source.blobs.pop(encoding.parts[-1].digest, None)

    async def scenario() -> None:
        head = 0
        for _ in range(data.draw(st.integers(1, 3))):
            async with following(make_follower(folder, source)) as follower:
                for _ in range(data.draw(st.integers(1, 3))):
                    if head == POLICIES - 1:
                        return
                    head = min(head + data.draw(st.integers(1, 25)), POLICIES - 1)
                    source.shown_head = source.manifests[head]
                    policy = await follower.wait_newer(head - 1)
                    assert policy.version == head
                    assert root_of(policy.weights) == source.signed(head).manifest.state_root
                    if data.draw(st.booleans()):
                        policy.weights["w"].data[data.draw(st.integers(0, ELEMENTS - 1))] ^= 1
                    for path in sorted((folder / "parts").iterdir()):
                        if data.draw(st.integers(0, 4)) == 0:
                            path.write_bytes(b"damaged")

    asyncio.run(scenario())


# Attacks


async def staged(source: MemorySource, folder: Path) -> int | None:
    """Return the policy of a newcomer after a while; None if it accepts none."""
    async with following(make_follower(folder, source)) as follower:
        await settle(source)
        policy = follower.latest()
        if policy is not None:
            assert root_of(policy.weights) == policy.signed.manifest.state_root
    return None if policy is None else policy.version


async def test_parts_of_another_version_are_not_mixed_in(source: MemorySource, tmp_path: Path) -> None:
    """A mirror serves the bytes of one policy under the digests of another."""
    ours, other = (source.signed(version).manifest.encoding(0) for version in (64, 48))
    assert ours is not None
    assert other is not None
    for mine, theirs in zip(ours.blobs, other.blobs, strict=True):
        source.blobs[mine.digest] = source.blobs[theirs.digest]
    singles = [source.signed(version).manifest for version in range(1, 65)]
    for manifest in singles:
        for encoding in manifest.encodings:
            if encoding is not ours and encoding.base_version is not None:
                for blob in encoding.parts:
                    source.blobs[blob.digest] = bytes(blob.size)
    assert await staged(source, tmp_path) is None


LIES: dict[str, Callable[[SignedManifest], dict[str, object]]] = {
    "the wrong base's root": lambda signed: with_delta(
        signed, base=BasePolicy(policy_version=0, state_root=state_root([("w", "bf16", (1,), digest_of(b""))]))
    ),
    "another policy as the base": lambda signed: with_delta(
        signed, base=BasePolicy(policy_version=1, state_root=signed.manifest.state_root)
    ),
    "another policy's tensors": lambda signed: {"tensors": tensor_table(trained(1)[0])},
    "another config": lambda signed: {"model_config_digest": digest_of(b"{}")},
    "a foreign run": lambda signed: {"run": make_run(name="other").digest},
}


def with_delta(signed: SignedManifest, **fields: object) -> dict[str, object]:
    encoding = signed.manifest.encoding(0)
    assert encoding is not None
    return {"encodings": (encoding.model_copy(update=fields),)}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
async def test_a_signed_manifest_with_false_data_is_not_followed(
    lie: Callable[[SignedManifest], dict[str, object]], policies: list[Weights], tmp_path: Path
) -> None:
    source = MemorySource(RUN)
    publish_all(source, policies[:2])
    signed = source.publish(policies[2], bases=[(source.signed(0), policies[0])])
    source.publish(policies[2], previous=source.signed(1), **lie(signed))  # type: ignore[arg-type]
    assert await staged(source, tmp_path) is None
