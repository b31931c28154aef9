"""Log-probabilities of chosen tokens, and entropies, computed a part of the vocabulary at a time and again in the backward pass.

With a vocabulary of 151,936 the logits of 1,024 tokens take 0.6 GB in float32, and log_softmax with its gradient three times
that. Here only one block of them is in memory at a time, and of the rows only their normalisers are kept. A block is a part of
the vocabulary over all rows: each part of the head is read once a pass and its gradient written once. Blocks of rows would read
and write the whole head for each block. The normaliser is summed as in "online" softmax (arXiv 1805.02867). If all logits fit
into one block, plain log_softmax is faster and is used.

Letters: B columns of a block, H hidden size, N predictions, S rows that they are read from, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

WHOLE_LOGITS = 2**24
"""Number of logits that are still computed at once, 64 MiB in float32; more are computed in blocks."""
BLOCK_LOGITS = {"cpu": 2**21, "cuda": 2**28}
"""Logits of one block, by type of device; further types get the CPU's. On a CPU small blocks stay in the caches between
operations. On a GPU each block costs a wait for the device, and 2**28 logits are 1 GiB."""


def chosen_logprobs(
    hidden_SH: Tensor,
    head_VH: Tensor,
    bias_V: Tensor | None,
    row_N: Tensor,
    target_N: Tensor,
    *,
    temperature: float,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return float32 [N] log-softmax of `hidden_SH @ head_VH.T / temperature` at (row, target); [S] entropies.

    The entropies have a gradient only if it is asked for.
    """
    if hidden_SH.shape[0] * head_VH.shape[0] <= WHOLE_LOGITS:
        logits_SV = torch.nn.functional.linear(hidden_SH, head_VH, bias_V).float() / temperature
        return of_logits(logits_SV, row_N, target_N, entropy_gradient=entropy_gradient)
    return in_blocks(hidden_SH, head_VH, bias_V, row_N, target_N, temperature, entropy_gradient=entropy_gradient)


def in_blocks(
    hidden_SH: Tensor,
    head_VH: Tensor,
    bias_V: Tensor | None,
    row_N: Tensor,
    target_N: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the same, computed in blocks whatever the number of logits."""
    apply: Any = _ChosenLogprobs.apply
    chosen_N, entropy_S = apply(hidden_SH, head_VH, bias_V, row_N, target_N, temperature, entropy_gradient)
    return chosen_N, entropy_S


@torch.no_grad()
def squared_sums(hidden_SH: Tensor, head_VH: Tensor, bias_V: Tensor | None, *, temperature: float) -> Tensor:
    """Return float32 [S] the sum over the vocabulary of the squared probabilities.

    As in the forward pass below, with Q = sum of e^(2 (z - m)), which a new m' changes to c^2 Q. The result is Q / Z^2.
    """
    largest_S = torch.full(hidden_SH.shape[:1], -torch.inf, device=hidden_SH.device)
    sum_S, squares_S = torch.zeros_like(largest_S), torch.zeros_like(largest_S)
    for columns, _ in _blocks(len(hidden_SH), len(head_VH), torch.empty(0, device=hidden_SH.device)):
        logits_SB = _logits(hidden_SH, head_VH, bias_V, columns, temperature)
        raised_S = torch.maximum(largest_S, logits_SB.amax(-1))
        share_S = (largest_S - raised_S).exp()
        powers_SB = logits_SB.sub_(raised_S[:, None]).exp_()
        sum_S = share_S * sum_S + powers_SB.sum(-1)
        squares_S = share_S.square() * squares_S + powers_SB.square_().sum(-1)
        largest_S = raised_S
    return squares_S / sum_S.square()


@torch.no_grad()
def top_of_rows(
    hidden_SH: Tensor, head_VH: Tensor, bias_V: Tensor | None, count: int, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return [S, K] the ids of the K = min(count, V) likeliest tokens, and their float32 logprobs. A count of -1: all."""
    count = len(head_VH) if count < 0 else min(count, len(head_VH))
    normaliser_S = torch.full(hidden_SH.shape[:1], -torch.inf, device=hidden_SH.device)
    logits_SK = normaliser_S.new_empty((len(hidden_SH), 0))
    ids_SK = torch.empty((len(hidden_SH), 0), dtype=torch.int64, device=hidden_SH.device)
    for columns, _ in _blocks(len(hidden_SH), len(head_VH), torch.empty(0, device=hidden_SH.device)):
        logits_SB = _logits(hidden_SH, head_VH, bias_V, columns, temperature)
        normaliser_S = torch.logaddexp(normaliser_S, logits_SB.logsumexp(-1))
        ids_SB = torch.arange(columns.start, columns.stop, device=hidden_SH.device).expand(len(hidden_SH), -1)
        every_SK, every_ids_SK = torch.cat([logits_SK, logits_SB], -1), torch.cat([ids_SK, ids_SB], -1)
        logits_SK, places_SK = every_SK.topk(min(count, every_SK.shape[1]), -1)
        ids_SK = every_ids_SK.gather(-1, places_SK)
    return ids_SK, logits_SK - normaliser_S[:, None]


def of_logits(
    logits_SV: Tensor, row_N: Tensor, target_N: Tensor, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the same from all logits, with the temperature already applied."""
    logprobs_SV = logits_SV.log_softmax(-1)
    counted_SV = logprobs_SV if entropy_gradient else logprobs_SV.detach()
    return logprobs_SV[row_N, target_N], -(counted_SV.exp() * counted_SV).sum(-1)


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        head_VH: Tensor,
        bias_V: Tensor | None,
        row_N: Tensor,
        target_N: Tensor,
        temperature: float,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        """Keep for the blocks so far: m the largest logit, Z = sum of e^(z - m), D = sum of e^(z - m) (z - m).

        A new m' changes them to c Z and c (D + (m - m') Z), with c = e^(m - m'). At the end the normaliser is m + log Z, the
        entropy log Z - D / Z.
        """
        largest_S = torch.full(hidden_SH.shape[:1], -torch.inf, device=hidden_SH.device)
        sum_S, below_S = torch.zeros_like(largest_S), torch.zeros_like(largest_S)
        chosen_N = torch.empty(row_N.shape[0], dtype=torch.float32, device=hidden_SH.device)
        for columns, picks in _blocks(len(hidden_SH), len(head_VH), target_N):
            logits_SB = _logits(hidden_SH, head_VH, bias_V, columns, temperature)
            chosen_N[picks] = logits_SB[row_N[picks], target_N[picks] - columns.start]
            raised_S = torch.maximum(largest_S, logits_SB.amax(-1))
            fallen_S = (largest_S - raised_S).clamp_(
                min=torch.finfo(torch.float32).min
            )  # not infinite: 0 times it must be 0
            share_S = fallen_S.exp()
            powers_SB = logits_SB.sub_(raised_S[:, None]).exp()
            below_S = share_S * (below_S + fallen_S * sum_S) + logits_SB.mul_(powers_SB).sum(-1)
            sum_S = share_S * sum_S + powers_SB.sum(-1)
            largest_S = raised_S
        normaliser_S = largest_S + sum_S.log()
        entropy_S = sum_S.log() - below_S / sum_S
        ctx.save_for_backward(hidden_SH, head_VH, bias_V, row_N, target_N, normaliser_S, entropy_S)
        ctx.temperature = temperature
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_S)
        return chosen_N - normaliser_S[row_N], entropy_S

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute d/dlogit_v = sum over the row's picks of g * ([v is the target] - softmax_v).

        A gradient e of the entropy H adds -e * softmax_v * (log softmax_v + H).
        """
        hidden_SH, head_VH, bias_V, row_N, target_N, normaliser_S, entropy_S = ctx.saved_tensors
        gradient_N = gradients[0].float() / ctx.temperature
        summed_S = torch.zeros_like(normaliser_S).index_add_(0, row_N, -gradient_N)
        hidden_gradient_SH = torch.zeros(hidden_SH.shape, dtype=torch.float32, device=hidden_SH.device)
        head_gradient_VH = torch.empty_like(head_VH)
        bias_gradient_V = None if bias_V is None else torch.empty_like(bias_V)
        rows_SH = hidden_SH.to(head_VH.dtype)
        for columns, picks in _blocks(len(hidden_SH), len(head_VH), target_N):
            logits_SB = _logits(hidden_SH, head_VH, bias_V, columns, ctx.temperature)
            factor_SB = summed_S[:, None]
            logits_SB.sub_(normaliser_S[:, None])
            if ctx.entropy_gradient:
                entropy_slope_S = gradients[1].float() / ctx.temperature
                factor_SB = factor_SB - entropy_slope_S[:, None] * (logits_SB + entropy_S[:, None])
            slope_SB = logits_SB.exp_().mul_(factor_SB)
            slope_SB.index_put_((row_N[picks], target_N[picks] - columns.start), gradient_N[picks], accumulate=True)
            if bias_gradient_V is not None:
                bias_gradient_V[columns] = slope_SB.sum(0)
            rounded_SB = slope_SB.to(head_VH.dtype)
            torch.mm(rounded_SB.t(), rows_SH, out=head_gradient_VH[columns])
            if head_VH.dtype == torch.float32:
                hidden_gradient_SH.addmm_(rounded_SB, head_VH[columns])
            else:
                hidden_gradient_SH += rounded_SB @ head_VH[columns]
        return hidden_gradient_SH.to(hidden_SH.dtype), head_gradient_VH, bias_gradient_V, None, None, None, None


def _logits(hidden_SH: Tensor, head_VH: Tensor, bias_V: Tensor | None, columns: slice, temperature: float) -> Tensor:
    bias_B = None if bias_V is None else bias_V[columns]
    logits_SB = torch.nn.functional.linear(hidden_SH, head_VH[columns], bias_B).float()
    return logits_SB if temperature == 1.0 else logits_SB.div_(temperature)


def _blocks(num_rows: int, vocab_size: int, target_N: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield the columns of each block, and the indices of the predictions with a target in it."""
    size = max(1, BLOCK_LOGITS.get(target_N.device.type, BLOCK_LOGITS["cpu"]) // num_rows)
    for start in range(0, vocab_size, size):
        columns = slice(start, min(start + size, vocab_size))
        yield columns, ((target_N >= columns.start) & (target_N < columns.stop)).nonzero()[:, 0]
