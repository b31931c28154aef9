from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_protocol.chain import check_link, check_manifest, check_not_a_fork
from prime_protocol.checkpoint import (
    CheckpointDecoder,
    EncodedCheckpoint,
    encode_checkpoint,
    encode_parts,
    tensor_table,
)
from prime_protocol.chunk_index import INDEX_BYTES_MAX, open_index
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.limits import ENVELOPE_BYTES_MAX
from prime_protocol.manifest import (
    BasePolicy,
    CheckpointKind,
    Manifest,
    Provenance,
    open_manifest,
    sign_manifest,
)
from prime_protocol.weights import WeightTensor, root_of, state_root

Raises = Callable[..., RemoteError]
Changed = Callable[..., Manifest]


def decoder_of(manifest: Manifest, encoded: EncodedCheckpoint, base: Any = None, **options: Any) -> CheckpointDecoder:
    index = open_index(encoded.index, encoded.encoding, manifest.tensors)
    return CheckpointDecoder(manifest, encoded.encoding, index, base, **options)


def decoded(sample: Any, version: int, base: Any = None) -> Any:
    decoder = decoder_of(sample.manifests[version].manifest, sample.encoded[version], base)
    for index, part in reversed(list(enumerate(sample.encoded[version].parts))):
        decoder.feed_part(index, part)
    return decoder.finish()


def feed_all(decoder: CheckpointDecoder, encoded: EncodedCheckpoint) -> Any:
    for number, part in enumerate(encoded.parts):
        decoder.feed_part(number, part)
    return decoder.finish()


def same(a: Any, b: Any) -> bool:
    return list(a) == list(b) and all(
        (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape) and np.array_equal(a[name].data, b[name].data)
        for name in a
    )


# Both policies of the sample


def test_an_anchor_and_its_delta_decode_to_their_policies(sample: Any) -> None:
    first = decoded(sample, 0)
    assert same(first, sample.weights[0])
    assert same(decoded(sample, 1, first), sample.weights[1])
    assert same(first, sample.weights[0])  # the base is never touched


def test_both_manifests_hold_and_form_a_chain(sample: Any) -> None:
    first, second = sample.manifests
    for signed in (first, second):
        check_manifest(signed.manifest, sample.run)
        assert open_manifest(signed.envelope, sample.run) == signed
    check_link(first.manifest, None)
    check_link(second.manifest, first)
    assert second.manifest.encodings[0].sent_bytes == sum(map(len, sample.encoded[1].blobs))
    assert second.manifest.encoding(0) == sample.encoded[1].encoding
    assert second.manifest.encoding(None) is None
    assert len(sample.encoded[0].parts) > 1


def test_the_last_policy_of_a_run_is_the_one_of_its_last_step(sample: Any, raises: Raises) -> None:
    last = sample.manifests[1].manifest
    ends_there = replace(sample.run, spec=sample.run.spec.model_copy(update={"max_steps": last.policy_version}))
    check_manifest(last, ends_there)
    ends_before = replace(sample.run, spec=sample.run.spec.model_copy(update={"max_steps": last.policy_version - 1}))
    raises(ErrorCode.CHAIN_BROKEN, check_manifest, last, ends_before)


def test_a_manifest_by_another_key_is_refused(sample: Any, raises: Raises) -> None:
    for key in (sample.coordinator, sample.worker, sample.root):
        raises(
            ErrorCode.BAD_SIGNATURE,
            open_manifest,
            seal(sample.manifests[0].manifest, PayloadType.MANIFEST, key),
            sample.run,
        )


# check_manifest, by its numbers


def table(manifest: Manifest) -> str:
    return state_root((t.name, t.dtype, t.shape, t.digest) for t in manifest.tensors)


def with_tensors(manifest: Manifest, change: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Return another tensor table with its matching root."""
    tensors = tuple(change([*manifest.tensors]))
    return {"tensors": tensors, "state_root": table(manifest.model_copy(update={"tensors": tensors}))}


def edit(items: tuple[Any, ...], index: int, /, **fields: object) -> tuple[Any, ...]:
    return (*items[:index], items[index].model_copy(update=fields), *items[index + 1 :])


def with_encoding(manifest: Manifest, **fields: object) -> dict[str, Any]:
    return {"encodings": edit(manifest.encodings, 0, **fields)}


BROKEN: list[tuple[str, ErrorCode, Callable[[Manifest], dict[str, Any]]]] = [
    ("1 another run", ErrorCode.WRONG_RUN, lambda m: {"run": digest_of(b"other")}),
    ("2 after the end", ErrorCode.CHAIN_BROKEN, lambda m: {"policy_version": 11}),
    ("2 another step", ErrorCode.CHAIN_BROKEN, lambda m: {"policy_version": 2}),
    ("2 no predecessor", ErrorCode.CHAIN_BROKEN, lambda m: {"previous": None}),
    ("2 no batch", ErrorCode.CHAIN_BROKEN, lambda m: {"produced_by": m.produced_by.model_copy(update={"batch": None})}),
    ("2 wrong step", ErrorCode.CHAIN_BROKEN, lambda m: {"produced_by": m.produced_by.model_copy(update={"step": 1})}),
    ("3 another model", ErrorCode.CHAIN_BROKEN, lambda m: {"model_config_digest": digest_of(b"{}")}),
    ("4 delta without base", ErrorCode.CHAIN_BROKEN, lambda m: with_encoding(m, base=None)),
    ("4 anchor with base", ErrorCode.CHAIN_BROKEN, lambda m: with_encoding(m, kind=CheckpointKind.ANCHOR)),
    (
        "4 base not older",
        ErrorCode.CHAIN_BROKEN,
        lambda m: with_encoding(m, base=BasePolicy(policy_version=1, state_root=m.state_root)),
    ),
    ("4 one base twice", ErrorCode.CHAIN_BROKEN, lambda m: {"encodings": 2 * m.encodings}),
    ("5 one name twice", ErrorCode.CHAIN_BROKEN, lambda m: with_tensors(m, lambda t: [t[0], t[0], *t[2:]])),
    (
        "5 unknown type",
        ErrorCode.CHAIN_BROKEN,
        lambda m: with_tensors(m, lambda t: [t[0].model_copy(update={"dtype": "fp17"}), *t[1:]]),
    ),
    (
        "5 too large",
        ErrorCode.TOO_LARGE,
        lambda m: with_tensors(m, lambda t: [t[0].model_copy(update={"shape": (2**53,) * 8}), *t[1:]]),
    ),
    ("6 another root", ErrorCode.CHAIN_BROKEN, lambda m: {"state_root": digest_of(b"")}),
    ("6 another digest", ErrorCode.CHAIN_BROKEN, lambda m: {"tensors": edit(m.tensors, 0, digest=digest_of(b""))}),
    (
        "6 another order of dimensions",
        ErrorCode.CHAIN_BROKEN,
        lambda m: {"tensors": edit(m.tensors, 0, shape=(10, 30))},
    ),
    ("7 huge part", ErrorCode.TOO_LARGE, lambda m: with_encoding(m, parts=edit(m.encodings[0].parts, 0, size=2**31))),
    (
        "7 huge index",
        ErrorCode.TOO_LARGE,
        lambda m: with_encoding(m, index=m.encodings[0].index.model_copy(update={"size": INDEX_BYTES_MAX + 1})),
    ),
    (
        "7 endless parts",
        ErrorCode.TOO_LARGE,
        lambda m: with_encoding(m, parts=(m.encodings[0].parts[0].model_copy(update={"size": 2**26}),) * 2**14),
    ),
]


@pytest.mark.parametrize(("code", "change"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_manifest_that_breaks_one_rule_is_refused(
    code: ErrorCode, change: Callable[[Manifest], dict[str, Any]], sample: Any, raises: Raises, changed: Changed
) -> None:
    manifest = sample.manifests[1].manifest
    raises(code, check_manifest, changed(manifest, **change(manifest)), sample.run)


def test_policy_0_has_neither_predecessor_nor_batch(sample: Any, raises: Raises, changed: Changed) -> None:
    first = sample.manifests[0].manifest
    raises(ErrorCode.CHAIN_BROKEN, check_manifest, changed(first, previous=digest_of(b"")), sample.run)
    batch = first.produced_by.model_copy(update={"batch": digest_of(b"")})
    raises(ErrorCode.CHAIN_BROKEN, check_manifest, changed(first, produced_by=batch), sample.run)


def described(weights: Any, encoded: EncodedCheckpoint) -> dict[str, Any]:
    return {"state_root": root_of(weights), "tensors": tensor_table(weights), "encodings": (encoded.encoding,)}


def test_a_policy_of_empty_tensors_needs_no_parts(sample: Any, changed: Changed) -> None:
    weights = {"none": WeightTensor("bf16", (0,), np.zeros(0, np.uint16))}
    encoded = encode_checkpoint(weights)
    assert encoded.parts == ()
    manifest = changed(sample.manifests[0].manifest, **described(weights, encoded))
    check_manifest(manifest, sample.run)
    assert same(decoder_of(manifest, encoded).finish(), weights)


def test_a_scalar_is_one_element(sample: Any, changed: Changed) -> None:
    weights = {"scale": WeightTensor("fp32", (), np.array([0x3F800000], np.uint32))}
    encoded = encode_checkpoint(weights)
    manifest = changed(sample.manifests[0].manifest, **described(weights, encoded))
    check_manifest(manifest, sample.run)
    decoder = decoder_of(manifest, encoded)
    decoder.feed_part(0, encoded.parts[0])
    assert same(decoder.finish(), weights)


def test_a_manifest_of_a_large_model_stays_small(sample: Any, changed: Changed) -> None:
    """70 B parameters in 1,000 tensors, an anchor and three deltas in parts of 16 MiB: the envelope holds it."""
    part = sample.encoded[0].encoding.parts[0]
    deltas = tuple(
        sample.encoded[1].encoding.model_copy(
            update={"base": BasePolicy(policy_version=base, state_root=digest_of(b"")), "parts": (part,) * 600}
        )
        for base in (8, 12, 15)
    )
    tensor = sample.manifests[0].manifest.tensors[0]
    manifest = changed(
        sample.manifests[0].manifest,
        policy_version=16,
        tensors=(tensor.model_copy(update={"name": "model.layers.79.self_attn.q_proj.weight"}),) * 1_000,
        encodings=(sample.encoded[0].encoding.model_copy(update={"parts": (part,) * 5_800}), *deltas),
    )
    assert len(sign_manifest(manifest, sample.trainer).envelope.to_bytes()) < ENVELOPE_BYTES_MAX // 2


# The chain


def test_a_link_needs_the_version_and_digest_of_its_predecessor(sample: Any, raises: Raises, changed: Changed) -> None:
    first, second = sample.manifests
    raises(ErrorCode.CHAIN_BROKEN, check_link, second.manifest, None)
    raises(ErrorCode.CHAIN_BROKEN, check_link, first.manifest, first)
    raises(ErrorCode.CHAIN_BROKEN, check_link, changed(second.manifest, previous=digest_of(b"other")), first)
    raises(ErrorCode.CHAIN_BROKEN, check_link, changed(second.manifest, policy_version=2), first)
    raises(ErrorCode.CHAIN_BROKEN, check_link, changed(first.manifest, previous=digest_of(b"x")), None)


def test_names_types_and_shapes_stay_the_same_along_the_chain(sample: Any, raises: Raises, changed: Changed) -> None:
    first, second = sample.manifests
    for fields in ({"name": "other"}, {"dtype": "fp16"}, {"shape": (10, 30)}):
        renamed = changed(second.manifest, tensors=edit(second.manifest.tensors, 0, **fields))
        raises(ErrorCode.CHAIN_BROKEN, check_link, renamed, first)


def test_two_manifests_of_one_version_are_a_fork(sample: Any, raises: Raises, changed: Changed) -> None:
    first, second = sample.manifests
    other = sign_manifest(changed(second.manifest, created_at_ms=1), sample.trainer)
    raises(ErrorCode.FORK, check_not_a_fork, other, second)
    check_not_a_fork(second, second)
    check_not_a_fork(second, first)


# Bytes


def test_a_flipped_bit_of_a_part_is_noticed_before_it_is_decoded(sample: Any, raises: Raises) -> None:
    decoder = decoder_of(sample.manifests[0].manifest, sample.encoded[0])
    for index, part in enumerate(sample.encoded[0].parts):
        for i in range(0, len(part), 5):
            tampered = part[:i] + bytes([part[i] ^ 1]) + part[i + 1 :]
            raises(ErrorCode.DIGEST_MISMATCH, decoder.feed_part, index, tampered)
        raises(ErrorCode.DIGEST_MISMATCH, decoder.feed_part, index, part[:-1])
        raises(ErrorCode.DIGEST_MISMATCH, decoder.feed_part, index, part + b"\0")


def test_weights_are_not_given_out_before_every_chunk_came(sample: Any, raises: Raises) -> None:
    decoder = decoder_of(sample.manifests[0].manifest, sample.encoded[0])
    decoder.feed_part(0, sample.encoded[0].parts[0])
    decoder.feed_part(0, sample.encoded[0].parts[0])
    raises(ErrorCode.CHAIN_BROKEN, decoder.finish)


def test_a_delta_needs_exactly_its_base(sample: Any, raises: Raises) -> None:
    manifest, encoded = sample.manifests[1].manifest, sample.encoded[1]
    bases: tuple[Any, ...] = (None, sample.weights[1], {})
    for base in bases:
        raises(ErrorCode.CHAIN_BROKEN, decoder_of, manifest, encoded, base)


def test_a_base_that_was_just_decoded_needs_no_second_hashing_but_the_right_root(sample: Any, raises: Raises) -> None:
    manifest, encoded = sample.manifests[1].manifest, sample.encoded[1]
    root = sample.manifests[0].manifest.state_root
    assert same(feed_all(decoder_of(manifest, encoded, sample.weights[0], base_root=root), encoded), sample.weights[1])
    other = digest_of(b"another policy")
    raises(ErrorCode.CHAIN_BROKEN, lambda: decoder_of(manifest, encoded, sample.weights[0], base_root=other))
    raises(ErrorCode.CHAIN_BROKEN, lambda: decoder_of(manifest, encoded, None, base_root=root))
    # A root that is claimed wrongly gives nothing away: the result's digests are still compared.
    wrong = decoder_of(manifest, encoded, sample.weights[1], base_root=root)
    with pytest.raises(RemoteError):
        feed_all(wrong, encoded)


def test_threads_encode_and_decode_the_same_as_one(raises: Raises) -> None:
    rng = np.random.default_rng(0)
    old, new = (
        {str(n): WeightTensor("bf16", (700_000,), rng.integers(0x3C00, 0x3C40, 700_000, np.uint16)) for n in range(3)}
        for _ in range(2)
    )
    base = BasePolicy(policy_version=0, state_root=root_of(old))
    kept: list[bytes] = []
    with ThreadPoolExecutor(3) as pool:
        encoding, index = encode_parts(
            new, (base, old), keep=lambda _, part: kept.append(bytes(part)), part_bytes=400_000, pool=pool
        )
        alone = encode_checkpoint(new, (base, old), part_bytes=400_000)
        assert (alone.encoding, alone.index, alone.parts) == (encoding, index, tuple(kept))
        assert len(kept) > 2
        assert root_of(new, pool=pool) == root_of(new)
        manifest = described_manifest(tensor_table(new), root_of(new), alone)
        decoder = decoder_of(manifest, alone, old, pool=pool)
        broken = kept[1][:-1] + bytes([kept[1][-1] ^ 1])
        raises(ErrorCode.DIGEST_MISMATCH, decoder.feed_part, 1, broken)
        for number, part in enumerate(kept):
            decoder.feed_part(number, part)
        assert same(decoder.finish(), new)


def described_manifest(tensors: Any, root: str, encoded: EncodedCheckpoint) -> Manifest:
    digest = digest_of(b"")
    return Manifest(
        run=digest,
        policy_version=1,
        previous=digest,
        model_config_digest=digest,
        state_root=root,
        tensors=tensors,
        encodings=(encoded.encoding,),
        produced_by=Provenance(step=0, optimizer_steps=1, batch=digest, software="test"),
        created_at_ms=0,
    )


def test_a_delta_between_different_models_is_refused(sample: Any, raises: Raises, changed: Changed) -> None:
    manifest = sample.manifests[1].manifest
    renamed = changed(manifest, tensors=edit(manifest.tensors, 0, shape=(10, 30)))
    raises(ErrorCode.CHAIN_BROKEN, decoder_of, renamed, sample.encoded[1], sample.weights[0])


def test_a_tensor_that_does_not_have_its_digest_is_refused(sample: Any, raises: Raises, changed: Changed) -> None:
    """As after a faulty decoder: every chunk is correct, the result is not."""
    manifest = sample.manifests[0].manifest
    for index in range(len(manifest.tensors)):
        lied = changed(manifest, tensors=edit(manifest.tensors, index, digest=digest_of(b"other")))
        decoder = decoder_of(lied, sample.encoded[0])
        for number, part in enumerate(sample.encoded[0].parts):
            decoder.feed_part(number, part)
        raises(ErrorCode.DIGEST_MISMATCH, decoder.finish)


# Properties


@given(data=st.data())
def test_any_mutation_of_a_signed_manifest_is_refused(sample: Any, data: st.DataObject) -> None:
    from prime_protocol.envelope import open_envelope

    wire = sample.manifests[1].envelope.to_bytes()
    place, value = data.draw(st.integers(0, len(wire) - 1)), data.draw(st.integers(0, 255))
    try:
        opened = open_manifest(open_envelope(wire[:place] + bytes([value]) + wire[place + 1 :]), sample.run)
    except RemoteError:
        return
    assert opened == sample.manifests[1]
