from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.limits import Limits
from prime_protocol.parcel import open_parcel
from prime_protocol.rollout import RolloutHeader, Rollouts, decompress_body, pack_body, parse_body
from prime_protocol.tensor_file import pack_tensors

Raises = Callable[..., RemoteError]
BOUNDS = Limits()
TEXT = b"a" * 1_000
FRAME = zstandard.ZstdCompressor().compress(TEXT)
INT32_MAX = 2**31 - 1


def reheaded(sample: Any, rollouts: Rollouts, **fields: object) -> tuple[RolloutHeader, bytes]:
    """Return a body for some tensors, with a matching header."""
    body, size = pack_body(rollouts)
    header = {"body_digest": digest_of(body), "body_bytes": len(body), "decompressed_bytes": size} | fields
    return sample.header.model_copy(update=header), body


def test_a_bundle_survives_the_wire(sample: Any) -> None:
    parcel = open_parcel(sample.parcel, body_bytes_max=BOUNDS.rollout_bytes_max)
    header = parse_json(parcel.envelope.verify(PayloadType.ROLLOUT, trusted=[sample.worker.key_id]), RolloutHeader)
    rollouts = parse_body(header, parcel.check_body(header), BOUNDS)
    assert header == sample.header
    assert tuple(rollouts.completions()) == sample.completions
    assert [rollouts.completion(i) for i in range(len(rollouts))] == rollouts.completions()
    assert (len(rollouts), rollouts.num_tokens) == (4, 11)


def test_an_honest_bundle_names_slots_seeds_and_policy_of_its_lease(sample: Any) -> None:
    assert sample.rollouts.slots_N.tolist() == [4, 4, 5, 5]
    assert sample.rollouts.seeds_N.tolist() == [40, 41, 50, 51]
    assert sample.rollouts.spans_S3.tolist() == [[0, 1, 2], [1, 1, 4], [2, 1, 1], [3, 1, 4]]


def test_a_completion_of_two_policies_is_well_formed(sample: Any) -> None:
    spans = np.array([[0, 0, 1], [0, 1, 1], [1, 1, 4], [2, 1, 1], [3, 1, 4]], np.int32)
    header, body = reheaded(sample, replace(sample.rollouts, spans_S3=spans))
    assert parse_body(header, body, BOUNDS).spans_S3.tolist() == spans.tolist()


# Decompression


def test_a_frame_gives_exactly_its_bytes() -> None:
    assert decompress_body(FRAME, size=1_000) == TEXT
    assert decompress_body(memoryview(FRAME), size=1_000) == TEXT


def test_a_frame_that_declares_more_than_the_header_is_refused(raises: Raises) -> None:
    raises(ErrorCode.DECOMPRESSED_TOO_LARGE, decompress_body, FRAME, size=999)


def test_a_frame_that_declares_a_tebibyte_is_refused_without_trying(raises: Raises) -> None:
    bomb = b"\x28\xb5\x2f\xfd\xe0" + (2**40).to_bytes(8, "little") + FRAME[6:]
    assert zstandard.frame_content_size(bomb) == 2**40
    raises(ErrorCode.DECOMPRESSED_TOO_LARGE, decompress_body, bomb, size=1_000)


def test_a_frame_that_declares_less_than_the_header_is_refused(raises: Raises) -> None:
    raises(ErrorCode.MALFORMED, decompress_body, FRAME, size=1_001)


def test_a_frame_that_holds_more_or_less_than_it_declares_is_refused(raises: Raises) -> None:
    assert FRAME[4] >> 6 == 1  # the content size is two bytes, less 256, after the descriptor
    for size in (900, 1_100):
        lie = FRAME[:5] + (size - 256).to_bytes(2, "little") + FRAME[7:]
        assert zstandard.frame_content_size(lie) == size
        raises(ErrorCode.MALFORMED, decompress_body, lie, size=size)


def test_a_frame_without_a_declared_size_is_refused(raises: Raises) -> None:
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(TEXT)
    raises(ErrorCode.MALFORMED, decompress_body, silent, size=1_000)


@pytest.mark.parametrize("tail", [b"\0", FRAME, b"\x50\x2a\x4d\x18\0\0\0\0", FRAME[:10]])
def test_nothing_may_follow_the_frame(tail: bytes, raises: Raises) -> None:
    raises(ErrorCode.MALFORMED, decompress_body, FRAME + tail, size=1_000)


def test_nothing_may_precede_the_frame(raises: Raises) -> None:
    raises(ErrorCode.MALFORMED, decompress_body, b"\x50\x2a\x4d\x18\0\0\0\0" + FRAME, size=1_000)


def test_a_frame_that_wants_a_huge_window_is_refused(raises: Raises) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, write_content_size=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    greedy = compressor.compress(TEXT) + compressor.flush()
    assert zstandard.get_frame_parameters(greedy).window_size == 2**30
    raises(ErrorCode.MALFORMED, decompress_body, greedy, size=1_000)


def test_a_frame_cut_anywhere_is_refused() -> None:
    for end in range(len(FRAME)):
        with pytest.raises(RemoteError):
            decompress_body(FRAME[:end], size=1_000)


@given(st.integers(0, len(FRAME) - 1), st.integers(0, 255), st.integers(1, 5_000))
def test_a_mutated_frame_is_refused_or_gives_its_size(place: int, value: int, size: int) -> None:
    with suppress(RemoteError):
        assert len(decompress_body(FRAME[:place] + bytes([value]) + FRAME[place + 1 :], size=size)) == size


def test_a_declared_size_over_the_runs_limit_is_refused_before_anything_is_decompressed(
    sample: Any, raises: Raises
) -> None:
    header = sample.header.model_copy(update={"decompressed_bytes": BOUNDS.rollout_decompressed_bytes_max + 1})
    raises(ErrorCode.DECOMPRESSED_TOO_LARGE, parse_body, header, b"", BOUNDS)


# Tensors


def poke(field: str, index: object, value: object) -> Callable[[Any], dict[str, Any]]:
    def change(rollouts: Any) -> dict[str, Any]:
        array = getattr(rollouts, field).copy()
        array[index] = value
        return {field: array}

    return change


def spans(*rows: tuple[int, int, int]) -> Callable[[Any], dict[str, Any]]:
    return lambda _: {"spans_S3": np.array(rows, np.int64).astype(np.int32)}


@pytest.mark.parametrize(
    "change",
    [
        lambda r: {"lengths_N": r.lengths_N[:-1]},
        lambda r: {"finish_N": r.finish_N[:-1]},
        lambda r: {"slots_N": np.append(r.slots_N, 5)},
        lambda r: {"seeds_N": r.seeds_N[:1]},
        lambda r: {"logprobs_T": r.logprobs_T[:-1]},
        lambda r: {"token_ids_T": r.token_ids_T[:-1]},
        poke("lengths_N", 0, 0),
        poke("lengths_N", 0, -1),
        poke("lengths_N", 0, 3),
        poke("lengths_N", slice(0, 2), [INT32_MAX, INT32_MAX]),
        poke("finish_N", 0, 2),
        poke("finish_N", 0, 255),
        poke("logprobs_T", 3, np.nan),
        poke("logprobs_T", 3, np.inf),
        poke("logprobs_T", 3, -np.inf),
        poke("logprobs_T", 3, 0.01),
        poke("token_ids_T", 3, -1),
        poke("token_ids_T", 3, -(2**31)),
        spans((0, 1, 2), (1, 1, 4), (2, 1, 1)),
        spans((0, 1, 2), (1, 1, 4), (2, 1, 1), (3, 1, 4), (4, 1, 1)),
        spans((0, 1, 2), (1, 1, 4), (3, 1, 4), (2, 1, 1)),
        spans((0, 1, 2), (1, 1, 4), (2, 1, 1), (3, 1, 3)),
        spans((0, 1, 2), (1, 1, 3), (2, 1, 2), (3, 1, 4)),
        spans((0, 1, 2), (1, 1, 0), (1, 1, 4), (2, 1, 1), (3, 1, 4)),
        spans((0, 1, 3), (0, 1, -1), (1, 1, 4), (2, 1, 1), (3, 1, 4)),
        spans((0, -1, 2), (1, 1, 4), (2, 1, 1), (3, 1, 4)),
        spans((-1, 1, 2), (0, 1, 2), (1, 1, 4), (2, 1, 1), (3, 1, 4)),
        # Differences of int32 wrap: these rows ascend where they are subtracted in 32 bits.
        spans((0, 1, 2), (INT32_MAX, 1, 1), (-INT32_MAX - 1, 1, 1), (-1, 1, 1), (1, 1, 4), (2, 1, 1), (3, 1, 4)),
        spans((0, 1, 2), (1, 1, INT32_MAX), (1, 1, INT32_MAX), (2, 1, 1), (3, 1, 4)),
    ],
)
def test_tensors_that_contradict_each_other_are_refused(
    change: Callable[[Any], dict[str, Any]], sample: Any, raises: Raises
) -> None:
    header, body = reheaded(sample, replace(sample.rollouts, **change(sample.rollouts)))
    raises(ErrorCode.MALFORMED, parse_body, header, body, BOUNDS)


def test_tensors_of_another_number_of_rollouts_are_refused(sample: Any, raises: Raises) -> None:
    header, body = reheaded(sample, sample.rollouts, num_rollouts=3)
    raises(ErrorCode.MALFORMED, parse_body, header, body, BOUNDS)


def test_a_completion_over_the_runs_limit_is_refused(sample: Any, raises: Raises) -> None:
    raises(ErrorCode.TOO_LARGE, parse_body, sample.header, sample.body, Limits(completion_tokens_max=3))
    parse_body(sample.header, sample.body, Limits(completion_tokens_max=4))


def test_spans_of_another_width_are_refused(sample: Any, raises: Raises) -> None:
    rollouts = replace(sample.rollouts, spans_S3=sample.rollouts.spans_S3[:, :2])
    header, body = reheaded(sample, rollouts)
    raises(ErrorCode.MALFORMED, parse_body, header, body, BOUNDS)


def test_a_body_that_is_no_tensor_file_is_refused(sample: Any, raises: Raises) -> None:
    raw = pack_tensors({"token_ids": np.zeros(3, np.int32)})
    body = zstandard.ZstdCompressor().compress(raw)
    header = sample.header.model_copy(update={"decompressed_bytes": len(raw)})
    raises(ErrorCode.MALFORMED, parse_body, header, body, BOUNDS)


@given(data=st.data())
def test_any_change_of_the_tensors_bytes_is_refused_or_well_formed(sample: Any, data: st.DataObject) -> None:
    raw = bytearray(decompress_body(sample.body, size=sample.header.decompressed_bytes))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(
            st.sampled_from([0, 1, 127, 128, 255]) | st.integers(0, 255)
        )
    try:
        rollouts = parse_body(sample.header, zstandard.ZstdCompressor(level=1).compress(bytes(raw)), BOUNDS)
    except RemoteError:
        return
    assert sum(len(completion.token_ids) for completion in rollouts.completions()) == rollouts.num_tokens


@pytest.mark.parametrize("field", sorted(RolloutHeader.model_fields.keys() - {"lease_digest"}))
def test_a_header_without_one_of_its_fields_is_refused(field: str, sample: Any, raises: Raises) -> None:
    partial = sample.header.model_dump_json(exclude={field}).encode()
    raises(ErrorCode.WRONG_TYPE, parse_json, partial, RolloutHeader)
