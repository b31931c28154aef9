"""The loss path: logprobs of the sampled tokens without all logits, and whole steps, compared with TRL's GRPOTrainer.

    python scripts/bench/loss.py            a vocabulary of 151,936; about three minutes
    python scripts/bench/loss.py --quick    a vocabulary of 32,768, fewer rounds, under a minute
    python scripts/bench/loss.py --json     the checks alone

Head: forward and backward from hidden states to logprobs, each formulation in a separate process. The plain one is log_softmax
and gather on float32 logits; TRL's is its selective_log_softmax on the same logits. Errors are against float64. The head's
gradient, which all of them return, is not counted as memory.

Step: the same model, batch, advantages and optimizer, in one process, turn by turn within TRL's own callback: TRL's whole
step (its generation replaced by a cached batch), a plain padded loop, and our backend. All three start from the same
weights; their distance after the last step is printed. The first run installs TRL from PyPI into a separate folder.

Memory is the peak of the resident set above its size before. Tokens are those of prompts and completions, without padding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import loss_steps  # first: it sets the number of torch's threads
import torch
from checks import Check, Output
from memory import peak_bytes, reset_peak
from torch import Tensor
from torch.nn import functional

from prime_node.adapters.training.chosen_logprobs import chosen_logprobs

HIDDEN = 1024


# The head


def plain(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return functional.linear(hidden, head).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def ours(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    rows = torch.arange(len(targets))
    return chosen_logprobs(hidden, head, None, rows, targets, temperature=1.0)[0]


def trl(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Call it as its trainer does: [B, T, V] logits, looped over B. The rows are four sequences here."""
    loss_steps.load_trl()
    from trl.trainer.utils import selective_log_softmax

    logits = functional.linear(hidden, head).view(4, -1, head.shape[0])
    result: Tensor = selective_log_softmax(logits, targets.view(4, -1)).flatten()
    return result


HEADS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"plain": plain, "TRL": trl, "ours": ours}


def measure_head(name: str, size: loss_steps.Size) -> dict[str, Any]:
    """In a process of its own."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.rows, HIDDEN, generator=generator).requires_grad_()
    head = (torch.randn(size.vocab, HIDDEN, generator=generator) / HIDDEN**0.5).requires_grad_()
    targets = torch.randint(size.vocab, (size.rows,), generator=generator)
    HEADS[name](hidden[:8], head, targets[:8])  # imports and first calls
    head.grad = torch.zeros_like(head)
    hidden.grad = torch.zeros_like(hidden)
    seconds = []
    before = reset_peak()
    for _ in range(size.rounds):
        began = time.perf_counter()
        logprobs = HEADS[name](hidden, head, targets)
        torch.autograd.backward(logprobs.sum() / size.rows)
        seconds.append(time.perf_counter() - began)
    peak = peak_bytes() - before - head.nbytes
    exact = plain_exact(hidden[:64], head, targets[:64])
    error = float((logprobs[:64].detach() - exact).abs().max())
    return {"seconds": seconds, "peak_bytes": peak, "error_nats_max": error}


def plain_exact(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    logits = hidden.detach().double() @ head.detach().double().T
    return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)


# Machinery


def child(*arguments: str) -> dict[str, Any]:
    result = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller and under a minute")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    parser.add_argument("--head", choices=HEADS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = loss_steps.QUICK if options.quick else loss_steps.FULL
    if options.head:
        print(json.dumps(measure_head(options.head, size)))
        return 0
    if options.steps:
        print(json.dumps(loss_steps.measure_steps(size)))
        return 0
    output = Output(as_json=options.json)
    loss_steps.load_trl()
    quick = ["--quick"] if options.quick else []
    heads = {name: child("--head", name, *quick) for name in HEADS}
    steps = child("--steps", *quick)
    return output.finish([*report_heads(heads, size), *report_steps(steps)])


def report_heads(heads: dict[str, Any], size: loss_steps.Size) -> list[Check]:
    print(f"\nhead: {size.rows} rows, vocabulary {size.vocab:,}, hidden {HIDDEN}, fp32, forward and backward")
    print("| | rows/s | spread | time | peak MB | memory | error, nats |\n|---|---|---|---|---|---|---|")
    base = heads["plain"]
    for name, found in heads.items():
        median = statistics.median(found["seconds"])
        spread = (max(found["seconds"]) - min(found["seconds"])) / median
        time_ratio = median / statistics.median(base["seconds"])
        memory_ratio = found["peak_bytes"] / base["peak_bytes"]
        print(
            f"| {name} | {size.rows / median:.0f} | {spread:.0%} | {time_ratio:.2f}x | {found['peak_bytes'] / 1e6:.0f} |"
            f" {memory_ratio:.2f}x | {found['error_nats_max']:.1e} |"
        )
    mine, all_logits = heads["ours"], 4 * size.rows * size.vocab
    memory = mine["peak_bytes"] / base["peak_bytes"]
    share = mine["peak_bytes"] / all_logits
    against_trl = statistics.median(mine["seconds"]) / statistics.median(heads["TRL"]["seconds"])
    return [
        Check("head: peak memory over the plain formulation's", memory, "< 0.5", memory < 0.5),
        Check("head: peak memory over the size of all logits in fp32", share, "< 1", share < 1.0),
        Check("head: time over TRL's", against_trl, "<= 1.5", against_trl <= 1.5),
        Check("head: error in nats", mine["error_nats_max"], "< 1e-4", mine["error_nats_max"] < 1e-4),
    ]


def report_steps(steps: dict[str, Any]) -> list[Check]:
    medians = {name: statistics.median(values) for name, values in steps["seconds"].items()}
    prompts = f"{loss_steps.GROUPS} prompts x {loss_steps.GROUP}"
    print(f"\nstep: Qwen3 of 4 layers, hidden 192, vocabulary {loss_steps.VOCAB}, {prompts}, {steps['tokens']} tokens")
    print("| | tokens/s | spread | over TRL | peak MB | weights apart from TRL's |\n|---|---|---|---|---|---|")
    for name, median in medians.items():
        values = steps["seconds"][name]
        print(
            f"| {name} | {steps['tokens'] / median:.0f} | {(max(values) - min(values)) / median:.0%} |"
            f" {medians['TRL'] / median:.2f}x | {steps['peak_bytes'][name] / 1e6:.0f} | {steps['apart'].get(name, 0.0):.1e} |"
        )
    print()
    speed = medians["TRL"] / medians["ours"]
    against_plain = medians["plain"] / medians["ours"]
    memory = steps["peak_bytes"]["ours"] / max(1.0, steps["peak_bytes"]["TRL"])
    return [
        Check("step: tokens/s over TRL's GRPOTrainer", speed, "> 1", speed > 1.0),
        Check("step: tokens/s over the plain loop", against_plain, "> 1", against_plain > 1.0),
        Check("step: peak memory over TRL's", memory, "< 1", memory < 1.0),
        Check("step: weights apart from TRL's", steps["apart"]["ours"], "< 1e-4", steps["apart"]["ours"] < 1e-4),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
