"""vLLM gets the parts of layers that changed, whole."""

from __future__ import annotations

import os

import numpy as np
import pytest

from prime_node.adapters.engines.shared_weights import digests_by_name, share_weights, to_replace
from prime_protocol.weights import WeightTensor

NAMES = (
    "model.embed_tokens.weight",
    *(
        f"model.layers.{layer}.{part}.weight"
        for layer in (1, 11)
        for part in ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj")
    ),
    "model.norm.weight",
)
HELD = dict.fromkeys(NAMES, "old")


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ((), ()),
        (("model.norm.weight",), ("model.norm",)),
        (("model.layers.1.self_attn.q_proj.weight",), ("model.layers.1.self_attn",)),
        (("model.layers.11.mlp.up_proj.weight",), ("model.layers.11.mlp",)),
        (NAMES, ("model",)),
    ],
)
def test_all_of_a_part_or_nothing_is_replaced(changed: tuple[str, ...], parts: tuple[str, ...]) -> None:
    wanted = HELD | dict.fromkeys(changed, "new")
    expected = {name for name in NAMES if any(name.startswith(f"{part}.") for part in parts)}
    assert to_replace(HELD, wanted) == expected
    assert to_replace({}, wanted) == set(NAMES)


def test_a_mixture_of_experts_is_replaced_as_a_whole() -> None:
    held = HELD | {"model.layers.1.mlp.experts.3.up_proj.weight": "old"}
    assert to_replace(held, held | {"model.norm.weight": "new"}) == held.keys()


def test_an_alias_is_shared_with_its_tensor_alone() -> None:
    weights = {name: WeightTensor("bf16", (2,), np.array([1, 2], np.uint16)) for name in NAMES[:2]}
    assert digests_by_name(weights).keys() == weights.keys()
    for shared, expected in ((weights, [*NAMES[:2], "lm_head.weight"]), ({NAMES[1]: weights[NAMES[1]]}, [NAMES[1]])):
        memory, places = share_weights(shared, aliases={"lm_head.weight": NAMES[0]})
        assert [name for name, *_ in places] == expected
        assert os.fstat(memory).st_size == 4 * len(shared)
        os.close(memory)
