from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.tensor_file import pack_tensors, unpack_tensors

Raises = Callable[..., RemoteError]
LAYOUT = {"a": ("I32", 1), "b": ("F32", 2), "c": ("U8", 1), "d": ("I64", 1)}
TENSORS: dict[str, npt.NDArray[Any]] = {
    "a": np.array([1, -2, 3, 4], np.int32),
    "b": np.array([[0.5, np.nan, -np.inf]], np.float32),
    "c": np.array([7], np.uint8),
    "d": np.array([2**62], np.int64),
}
FILE = pack_tensors(TENSORS)


def parts(data: bytes = FILE) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def file_of(header: object, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def same(arrays: dict[str, Any]) -> bool:
    return all(array.tobytes() == TENSORS[name].tobytes() for name, array in arrays.items())


def test_tensors_survive_with_every_bit() -> None:
    arrays = unpack_tensors(FILE, LAYOUT)
    assert list(arrays) == list(LAYOUT)
    assert same(arrays)
    assert [array.dtype for array in arrays.values()] == [array.dtype for array in TENSORS.values()]
    assert [array.shape for array in arrays.values()] == [array.shape for array in TENSORS.values()]


def test_tensors_are_read_only_and_aligned() -> None:
    for array in unpack_tensors(FILE, LAYOUT).values():
        assert not array.flags.writeable
        assert array.flags.aligned


def test_a_file_put_together_by_hand_is_read() -> None:
    assert same(unpack_tensors(file_of(*parts()), LAYOUT))


def shift(header: Any, name: str, start: int, end: int) -> None:
    header[name]["data_offsets"] = [header[name]["data_offsets"][0] + start, header[name]["data_offsets"][1] + end]


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("a"),
        lambda h: h.update(e=h["a"]),
        lambda h: h.update(__metadata__={}),
        lambda h: h.update(a=[]),
        lambda h: h["a"].pop("dtype"),
        lambda h: h["a"].update(more=1),
        lambda h: h["a"].update(dtype="F32"),
        lambda h: h["a"].update(dtype="i32"),
        lambda h: h["a"].update(shape=[2, 2]),
        lambda h: h["a"].update(shape=4),
        lambda h: h["a"].update(shape=[5]),
        lambda h: h["a"].update(shape=[3]),
        lambda h: h["a"].update(shape=[-4]),
        lambda h: h["a"].update(shape=[4.0]),
        lambda h: h["a"].update(shape=["4"]),
        lambda h: h["a"].update(shape=[True]),
        lambda h: h["a"].update(shape=[2**63]),
        lambda h: h["a"].update(shape=[10**100]),
        lambda h: h["b"].update(shape=[2**39, 2**39]),
        lambda h: h["b"].update(shape=[2**32 + 1, 2**32 - 1]),
        lambda h: h["b"].update(shape=[0, 2**39], data_offsets=[0, 0]),
        lambda h: h["a"].update(shape=[0], data_offsets=[8, 8]),
        lambda h: h["a"].update(data_offsets=[0]),
        lambda h: h["a"].update(data_offsets=[24, 8]),
        lambda h: h["a"].update(data_offsets=[-8, 8]),
        lambda h: h["a"].update(data_offsets=[2**41, 2**41 + 16]),
        lambda h: h["a"].update(data_offsets=h["b"]["data_offsets"]),
        lambda h: shift(h, "a", -4, -4),
        lambda h: shift(h, "a", 4, 4),
        lambda h: shift(h, "c", 1, 1),
        lambda h: shift(h, "c", -1, -1),
    ],
)
def test_a_header_with_false_data_is_refused(change: Callable[[Any], object], raises: Raises) -> None:
    header, body = parts()
    change(header)
    raises(ErrorCode.MALFORMED, unpack_tensors, file_of(header, body), LAYOUT)


def test_a_name_that_comes_twice_is_refused(raises: Raises) -> None:
    """The published parser takes the last one."""
    header, body = parts()
    text = json.dumps(header).encode()
    twice = text[:-1] + b", " + json.dumps({"a": header["a"]}).encode()[1:]
    raises(ErrorCode.MALFORMED, unpack_tensors, file_of(twice, body), LAYOUT)


def test_bytes_before_between_or_after_the_tensors_are_refused(raises: Raises) -> None:
    header, body = parts()
    raises(ErrorCode.MALFORMED, unpack_tensors, file_of(header, body + b"\0"), LAYOUT)
    raises(ErrorCode.MALFORMED, unpack_tensors, file_of(header, body[:-1]), LAYOUT)
    for entry in header.values():
        entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]
    raises(ErrorCode.MALFORMED, unpack_tensors, file_of(header, bytes(8) + body), LAYOUT)


def test_a_tensor_that_is_not_aligned_is_refused(raises: Raises) -> None:
    layout = {"c": ("U8", 1), "d": ("I64", 1)}
    header = {
        "c": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "d": {"dtype": "I64", "shape": [1], "data_offsets": [1, 9]},
    }
    raises(ErrorCode.MALFORMED, unpack_tensors, file_of(header, bytes(9)), layout)


@pytest.mark.parametrize(
    "length", [0, 7, len(parts()[0]), 2**63, 2**64 - 1, len(FILE) - 7, len(FILE), limits.TENSOR_HEADER_BYTES_MAX + 8]
)
def test_a_header_length_that_does_not_fit_is_refused(length: int, raises: Raises) -> None:
    raises(ErrorCode.MALFORMED, unpack_tensors, length.to_bytes(8, "little") + FILE[8:], LAYOUT)


def test_a_header_over_its_limit_is_refused(raises: Raises) -> None:
    header, body = parts()
    padded = json.dumps(header).encode().ljust(limits.TENSOR_HEADER_BYTES_MAX + 8)
    raises(ErrorCode.MALFORMED, unpack_tensors, file_of(padded, body), LAYOUT)
    unpack_tensors(file_of(padded[:-8], body), LAYOUT)


def test_a_file_cut_anywhere_is_refused() -> None:
    for end in range(len(FILE)):
        with pytest.raises(RemoteError):
            unpack_tensors(FILE[:end], LAYOUT)


@given(st.integers(0, len(FILE) - 1), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_values_only(place: int, value: int) -> None:
    mutated = FILE[:place] + bytes([value]) + FILE[place + 1 :]
    try:
        arrays = unpack_tensors(mutated, LAYOUT)
    except RemoteError:
        return
    assert [(array.shape, array.dtype) for array in arrays.values()] == [(a.shape, a.dtype) for a in TENSORS.values()]


@given(st.binary(max_size=100))
def test_any_bytes_are_refused_politely(data: bytes) -> None:
    for prefix in (b"", (16).to_bytes(8, "little")):
        with pytest.raises(RemoteError):
            unpack_tensors(prefix + data, LAYOUT)
