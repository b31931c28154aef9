"""Log-probabilities computed in blocks equal those of all logits at once, including gradients and entropies."""

from __future__ import annotations

import pytest
import torch

from prime_node.adapters.training import chosen_logprobs
from prime_node.adapters.training.chosen_logprobs import of_logits


@pytest.mark.parametrize("block", [1, 300, 2**24])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_blocks_change_nothing_but_rounding(
    monkeypatch: pytest.MonkeyPatch, block: int, with_bias: bool, temperature: float
) -> None:
    """Compare with float64. Several predictions may be read from one row, and none from some rows."""
    monkeypatch.setitem(chosen_logprobs.BLOCK_LOGITS, "cpu", block)
    monkeypatch.setattr(chosen_logprobs, "WHOLE_LOGITS", block)
    torch.manual_seed(1)
    hidden, head, bias = torch.randn(9, 16), torch.randn(50, 16) * 0.3, torch.randn(50)
    rows, targets = torch.tensor([0, 0, 3, 8, 5, 3, 0]), torch.tensor([1, 1, 49, 0, 7, 8, 2])
    slopes = torch.randn(7)
    leaves = [tensor.clone().requires_grad_() for tensor in (hidden, head, bias)]
    exact = [tensor.double().requires_grad_() for tensor in (hidden, head, bias)]

    found, entropies = chosen_logprobs.chosen_logprobs(
        leaves[0], leaves[1], leaves[2] if with_bias else None, rows, targets, temperature=temperature
    )
    logits = exact[0] @ exact[1].T + (exact[2] if with_bias else 0.0)
    expected, expected_entropies = of_logits(logits / temperature, rows, targets)
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=5e-6)
    squares = chosen_logprobs.squared_sums(hidden, head, bias if with_bias else None, temperature=temperature)
    torch.testing.assert_close(
        squares.double(), (logits / temperature).softmax(-1).square().sum(-1), rtol=0.0, atol=5e-6
    )
    torch.testing.assert_close(entropies.double(), expected_entropies, rtol=0.0, atol=5e-6)
    assert not entropies.requires_grad

    torch.autograd.backward((found * slopes).sum())
    torch.autograd.backward((expected * slopes.double()).sum())
    for leaf, its_exact in list(zip(leaves, exact, strict=True))[: 2 + with_bias]:
        assert leaf.grad is not None
        assert its_exact.grad is not None
        torch.testing.assert_close(leaf.grad.double(), its_exact.grad, rtol=0.0, atol=2e-5)
