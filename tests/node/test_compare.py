"""Two sets of weights are equal if their bits are equal; a malformed safetensors file is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from prime_node.adapters.models.pretrained_model import folder_weights
from prime_node.broadcast.audit.compare import Fault, compare
from prime_node.broadcast.audit.safetensors_file import DTYPE_OF, INDEX_FILE, NAMES, read_weights, write_safetensors
from prime_protocol.codec import DTYPES
from prime_protocol.errors import LocalError
from prime_protocol.weights import Weights, WeightTensor, empty_like, root_of


def bf16(*values: float) -> WeightTensor:
    bits = (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return WeightTensor("bf16", (len(values),), bits)


def fp32(*values: float) -> WeightTensor:
    return WeightTensor("fp32", (len(values),), np.array(values, np.float32).view(np.uint32))


def of_every_type() -> Weights:
    """One tensor of each wire type, all bit patterns random."""
    rng = np.random.default_rng(0)
    weights = {}
    for dtype in DTYPES:
        tensor = empty_like(dtype, (3, 5))
        tensor.data[:] = rng.integers(0, 2 if dtype == "bool" else 2**63, tensor.data.shape).astype(tensor.data.dtype)
        weights[f"of {dtype}"] = tensor
    return weights


def test_equal_weights_are_equal() -> None:
    found = compare({"a": bf16(1.0, -2.0)}, {"a": bf16(1.0, -2.0)})
    assert found.equal
    assert found.num_tensors == 1


def test_one_bit_is_a_difference_and_its_size_is_reported() -> None:
    found = compare({"a": bf16(1.0, 2.0), "b": bf16(1.0)}, {"a": bf16(1.0, 2.5), "b": bf16(1.0)})
    assert not found.equal
    (difference,) = found.differences
    assert (difference.tensor, difference.fault, difference.num_elements) == ("a", Fault.VALUES, 1)
    assert difference.largest == 0.5
    assert "1 of 2 elements" in difference.detail
    assert "number 1" in difference.detail


def test_minus_zero_is_not_zero() -> None:
    (difference,) = compare({"a": fp32(0.0)}, {"a": fp32(-0.0)}).differences
    assert difference.num_elements == 1
    assert difference.largest == 0.0


def test_two_nans_with_one_payload_are_equal_and_with_two_are_not() -> None:
    nan, other = bf16(float("nan")), bf16(float("nan"))
    assert compare({"a": nan}, {"a": other}).equal
    other.data[0] ^= 1
    (difference,) = compare({"a": nan}, {"a": other}).differences
    assert difference.largest is None


def test_an_infinity_among_finite_differences_leaves_no_distance() -> None:
    signed = bf16(*[1.0] * 10)
    other = bf16(*[1.0] * 8, 2.0, float("inf"))
    (difference,) = compare({"a": signed}, {"a": other}).differences
    assert difference.num_elements == 2
    assert difference.largest is None


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({}, Fault.MISSING),
        ({"a": bf16(1.0), "z": bf16(1.0)}, Fault.EXTRA),
        ({"a": fp32(1.0)}, Fault.DTYPE),
        ({"a": WeightTensor("bf16", (1, 1), bf16(1.0).data)}, Fault.SHAPE),
    ],
)
def test_other_tensors_are_named_with_what_is_wrong(other: Weights, fault: Fault) -> None:
    (difference,) = compare({"a": bf16(1.0)}, other).differences
    assert difference.fault is fault


def test_signed_integers_are_subtracted_as_signed() -> None:
    signed, other = (WeightTensor("i8", (1,), np.array([value], np.int8).view(np.uint8)) for value in (1, -1))
    assert compare({"a": signed}, {"a": other}).differences[0].largest == 2.0


def test_every_type_of_the_wire_has_a_name_in_the_file() -> None:
    assert NAMES.keys() == DTYPES.keys()
    assert len(DTYPE_OF) == len(NAMES)


def test_a_written_file_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    weights = of_every_type()
    write_safetensors(tmp_path / "a.safetensors", weights)
    assert root_of(read_weights(tmp_path / "a.safetensors")) == root_of(weights)
    assert compare(weights, read_weights(tmp_path)).equal


def test_the_published_library_reads_a_written_file(tmp_path: Path) -> None:
    known = {name: tensor for name, tensor in of_every_type().items() if not name.startswith(("of bf16", "of fp8"))}
    write_safetensors(tmp_path / "a.safetensors", known)
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == known.keys()
    for name, tensor in known.items():
        assert loaded[name].shape == tensor.shape
        assert loaded[name].tobytes() == tensor.data.tobytes()


def test_empty_and_scalar_tensors_survive(tmp_path: Path) -> None:
    weights = {"empty": empty_like("bf16", (0, 4)), "scalar": WeightTensor("fp32", (), fp32(3.0).data)}
    write_safetensors(tmp_path / "a.safetensors", weights)
    assert compare(weights, read_weights(tmp_path)).equal


def test_the_shards_of_a_folder_are_one_model(tmp_path: Path) -> None:
    first, second = {"a": bf16(1.0)}, {"b": bf16(2.0)}
    write_safetensors(tmp_path / "one.safetensors", first)
    write_safetensors(tmp_path / "two.safetensors", second)
    assert compare(first | second, read_weights(tmp_path)).equal
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert read_weights(tmp_path).keys() == {"a"}


def test_a_model_that_is_trained_begins_with_the_files_of_its_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "consolidated.safetensors", {"the same, by another name": bf16(1.0)})
    write_safetensors(tmp_path / "model-00001-of-00001.safetensors", {"a": bf16(1.0)})
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    assert folder_weights(tmp_path).keys() == {"a"}


def test_a_model_with_quantized_weights_is_not_trained(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"a": bf16(1.0), "b": empty_like("fp8_e4m3", (0,))})
    with pytest.raises(LocalError, match="tensor b has type fp8_e4m3; bf16, fp16, fp32 can be trained"):
        folder_weights(tmp_path)


def broken(tmp_path: Path, header: object, body: bytes = b"\0\0") -> Path:
    text = json.dumps(header).encode()
    path = tmp_path / "broken.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


HEADERS: dict[str, object] = {
    "no object": [1],
    "an unknown type": {"a": {"dtype": "BF17", "shape": [1], "data_offsets": [0, 2]}},
    "a type that is no text": {"a": {"dtype": ["BF16"], "shape": [1], "data_offsets": [0, 2]}},
    "one field more": {"a": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2], "more": 1}},
    "a negative size": {"a": {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 2]}},
    "a size that is true": {"a": {"dtype": "BF16", "shape": [True], "data_offsets": [0, 2]}},
    "bytes beyond the end": {"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}},
    "fewer bytes than the shape": {"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 2]}},
    "a gap": {"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}},
    "an overlap": {
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "b": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]},
    },
    "offsets the wrong way round": {"a": {"dtype": "U8", "shape": [0], "data_offsets": [2, 0]}},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path, header: object) -> None:
    with pytest.raises(LocalError, match="not a safetensors file"):
        read_weights(broken(tmp_path, header))


@pytest.mark.parametrize(
    "data",
    [b"", b"\1", b"\xff" * 8, b"\2\0\0\0\0\0\0\0{", b"\1\0\0\0\0\0\0\0[", (9000).to_bytes(8, "little") + b"[" * 9000],
)
def test_rubbish_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(LocalError):
        read_weights(path)


def test_missing_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no such file"):
        read_weights(tmp_path / "nothing")
    with pytest.raises(LocalError, match=r"has no \*\.safetensors file"):
        read_weights(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": {"a": "../a.safetensors"}}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(LocalError):
        read_weights(tmp_path)


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_safetensors(tmp_path / f"{name}.safetensors", {"a": bf16(1.0)})
    with pytest.raises(LocalError, match="two files"):
        read_weights(tmp_path)
