"""Checkpoints to measure the codec on: real ones from a small GRPO run, and a quick synthetic model of them.

    python scripts/bench/checkpoints.py --out DIR [--steps 12] [--seed 0]

Real: a Qwen3 of 28 M parameters learns the local Python files as text, then takes GRPO steps with fp32 master weights and
AdamW at each learning rate. Every step's weights are cast to bf16, as a trainer publishes them, and the last ones are kept as
`DIR/lr<rate>/step<n>.npz` (name -> uint16 bit patterns). The invariant: nothing is shaped for the codec; the weights, the
gradients and the moments are those of training.

Synthetic (`synthetic_pair`): no torch, seconds. Master weights are Gaussian per matrix, the base is their bf16 cast, and the
update is `rate * N(0, 0.4) * Laplace-like tail`, the spread of AdamW's m / sqrt(v) in the real runs. What matters for the size is
the ratio of the update to one unit in the last place of each weight, and that is kept. Rows do not differ, and no tensor is idle.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Weights = dict[str, np.ndarray]
"""A checkpoint: tensor name -> uint16 bit patterns of bf16, in the tensor's shape."""

RATES = (1e-6, 3e-6, 1e-5, 1e-4)
VOCABULARY = 5120
CORPUS_CHARACTERS = 12_000_000
PROMPT, COMPLETION, PROBLEMS, GROUP = 48, 48, 8, 8


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> bf16 bit patterns, round to nearest even (finite values only)."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def synthetic_pair(rate: float, *, elements: int = 1 << 22, seed: int = 0) -> tuple[Weights, Weights]:
    """Two neighbouring policies. The four tensors differ in scale as embedding, attention, MLP and norm weights do."""
    rng = np.random.default_rng([seed, int(rate * 1e9)])
    base, new = {}, {}
    for name, scale, share in (
        ("embed", 0.02, 0.25),
        ("attention", 0.04, 0.25),
        ("mlp", 0.03, 0.4995),
        ("norm", 0.0, 0.0005),
    ):
        shape = (max(1, int(elements * share) // 1024), 1024)
        master = (
            rng.standard_normal(shape, dtype=np.float32) * np.float32(scale) if scale else np.ones(shape, np.float32)
        )
        update = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.4)
        update *= np.sqrt(rng.standard_exponential(shape, dtype=np.float32))
        base[name], new[name] = to_bf16(master), to_bf16(master - np.float32(rate) * update)
    return base, new


def load(path: Path) -> Weights:
    with np.load(path) as archive:
        return {name: np.ascontiguousarray(archive[name]) for name in archive.files}


def corpus(folder: Path) -> np.ndarray:
    """Return token ids of the Python files on this machine: text that every machine has and a small model can learn from."""
    cached = folder / "tokens.npy"
    if cached.exists():
        return np.asarray(np.load(cached))
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    roots = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    files = sorted(file for root in roots for file in root.rglob("*.py") if 500 < file.stat().st_size < 60_000)
    random.Random(0).shuffle(files)
    texts: list[str] = []
    characters = 0
    for file in files:
        if characters > CORPUS_CHARACTERS:
            break
        texts.append(file.read_text(encoding="utf-8", errors="ignore"))
        characters += len(texts[-1])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts[: len(texts) // 4],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    ids = [np.asarray([0, *encoded.ids], np.uint16) for encoded in tokenizer.encode_batch(texts)]
    tokens = np.concatenate(ids)
    np.save(cached, tokens)
    return tokens


def new_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=768,
            intermediate_size=2304,
            num_hidden_layers=3,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
            tie_word_embeddings=False,
            max_position_embeddings=512,
            use_cache=True,
        )
    ).float()


def pretrain(folder: Path, steps: int, seed: int) -> Path:
    import torch

    saved = folder / f"pretrained-{seed}.pt"
    if saved.exists():
        return saved
    torch.manual_seed(seed)
    rng, tokens, model = np.random.default_rng(seed), corpus(folder), new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    begin = time.monotonic()
    for step in range(steps):
        rate = 1e-3 * min(1, (step + 1) / 30) * (0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = rate
        starts = rng.integers(0, tokens.size - 257, 8)
        batch = torch.from_numpy(np.stack([tokens[s : s + 257] for s in starts]).astype(np.int64))
        loss = torch.nn.functional.cross_entropy(
            logits(model, batch[:, :-1]).float().reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1)
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0:
            print(f"pretrain {step}: loss {loss.item():.3f}, {time.monotonic() - begin:.0f} s", flush=True)
    torch.save(model.state_dict(), saved)
    return saved


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    import torch

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return found


def snapshot(model: Any) -> Weights:
    import torch

    state = model.state_dict().items()
    return {name: t.detach().to(torch.bfloat16).contiguous().view(torch.uint16).numpy().copy() for name, t in state}


def overlap(completion: np.ndarray, truth: set[int]) -> float:
    """The reward: Jaccard similarity of the tokens that were sampled with those that really followed."""
    sampled = set(completion.tolist())
    return len(sampled & truth) / max(1, len(sampled | truth))


def grpo(folder: Path, pretrained: Path, rate: float, steps: int, keep: int, seed: int) -> None:
    """`steps` GRPO steps with a warm-up of three; the bf16 weights after each of the last `keep + 1` are written."""
    import torch

    out = folder / f"lr{rate:g}"
    if (out / f"step{steps:03d}.npz").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    rng, tokens, model = np.random.default_rng(seed + 1), corpus(folder), new_model()
    model.load_state_dict(torch.load(pretrained))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.01)
    for step in range(1, steps + 1):
        starts = rng.integers(0, tokens.size - PROMPT - COMPLETION, PROBLEMS)
        prompts = np.stack([tokens[s : s + PROMPT] for s in starts]).astype(np.int64)
        truths = [set(tokens[s + PROMPT : s + PROMPT + COMPLETION].tolist()) for s in starts]
        inputs = torch.from_numpy(np.repeat(prompts, GROUP, 0))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            sampled = model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=True,
                max_new_tokens=COMPLETION,
                min_new_tokens=COMPLETION,
                pad_token_id=0,
                eos_token_id=None,
            )
        completions = sampled[:, PROMPT:].numpy()
        rewards = np.array([overlap(c, truths[i // GROUP]) for i, c in enumerate(completions)], np.float32)
        rewards = rewards.reshape(PROBLEMS, GROUP)
        advantages = torch.from_numpy(
            ((rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)).reshape(-1)
        )
        for rows in torch.arange(PROBLEMS * GROUP).split(32):
            logp = torch.log_softmax(logits(model, sampled[rows, :-1])[:, PROMPT - 1 :].float(), -1)
            chosen = logp.gather(-1, sampled[rows, PROMPT:].unsqueeze(-1)).squeeze(-1)
            (-(advantages[rows].unsqueeze(1) * chosen).mean() * len(rows) / (PROBLEMS * GROUP)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate * min(1, step / 3)
        optimizer.step()
        optimizer.zero_grad()
        if step >= steps - keep:
            np.savez(out / f"step{step:03d}.npz", allow_pickle=False, **snapshot(model))
        print(f"lr {rate:g} step {step}: reward {rewards.mean():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pretrain-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--keep", type=int, default=2, help="neighbouring pairs to keep for each rate")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    pretrained = pretrain(options.out, options.pretrain_steps, options.seed)
    for rate in options.rates:
        grpo(options.out, pretrained, rate, options.steps, options.keep, options.seed)


if __name__ == "__main__":
    main()
