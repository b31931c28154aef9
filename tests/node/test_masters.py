"""Masters of a published model, whose weights are values of bf16."""

from __future__ import annotations

import torch

from prime_node.adapters.training.masters import SPREAD_ELEMENTS, Masters


def published(rows: int, columns: int) -> torch.nn.Parameter:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) / 8
    values[0, :3] = torch.tensor([0.0, 1.0, -(2.0**-20)])
    return torch.nn.Parameter(values.to(torch.bfloat16).float())


def test_the_first_policy_is_the_published_one_and_a_tiny_movement_reaches_it_in_the_mean() -> None:
    parameter = published(1_000, 512)
    first = parameter.detach().clone()
    masters = Masters({"layer.weight": parameter}, dtype="bf16")
    master = masters.tensors["layer.weight"]
    masters.round()
    assert torch.equal(parameter, first)
    assert 0.99 < float((master != first).float().mean()) < 1.0, "zeros stay"
    step = torch.where(torch.arange(512) % 3 == 0, -1e-6, 1e-6)
    with torch.no_grad():
        master.add_(step)
    masters.round()
    published_share = float(((parameter.detach() - first) * step).sum() / (step * step).sum() / 1_000)
    assert 0.9 < published_share < 1.1, "without random places nothing would be published"


def test_places_do_not_depend_on_rows_before_them_or_on_pieces() -> None:
    columns = SPREAD_ELEMENTS // 16
    whole = Masters({"w": published(40, columns)}, dtype="bf16").tensors["w"]
    again = Masters({"w": published(40, columns), "other": published(2, 8)}, dtype="bf16").tensors
    assert torch.equal(whole, again["w"])
    assert not torch.equal(whole[:2, :8] - published(40, columns)[:2, :8], again["other"] - published(2, 8))


def test_masters_that_are_not_rounded_stay_where_they_are() -> None:
    values = torch.linspace(0.1, 0.2, 1_001)[1:-1] + 1e-7
    master = Masters({"w": torch.nn.Parameter(values.clone())}, dtype="bf16").tensors["w"]
    kept = values != values.to(torch.bfloat16).float()
    assert torch.equal(master[kept], values[kept])
