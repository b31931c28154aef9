"""The loss path: logprobs of the sampled tokens without all logits, and whole steps beside TRL's GRPOTrainer.

    python scripts/bench/loss.py            a vocabulary of 151,936; about three minutes
    python scripts/bench/loss.py --quick    a vocabulary of 32,768, fewer rounds, under a minute
    python scripts/bench/loss.py --json     the checks alone

Head: forward and backward from hidden states to logprobs, each formulation in a process of its own. The plain one is log_softmax
and gather on float32 logits; TRL's is its selective_log_softmax on the same logits. Errors are against float64. The head's
gradient, which all of them return, is not counted as memory.

Step: the same model, batch, advantages and optimizer, in one process, turn by turn within TRL's own callback: TRL's step from
begin to end (its generation replaced by a cached batch), a plain padded loop, and our backend. All three start from the same
weights; how far apart they are after the last step is printed. TRL comes from PyPI into a folder of its own the first time.

Memory is the peak of the resident set over where it stood before; tokens are those of prompts and completions, without padding.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor
from torch.nn import functional

from prime_node.adapters.engines.torch_weights import to_weights
from prime_node.adapters.training.chosen_logprobs import chosen_logprobs
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.ports.train_backend import OptimizerSettings, TrainSample

TRL_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prime-node" / "bench-trl"
TRL_PACKAGES = (
    *("trl==1.16.0", "datasets==4.4.1", "dill", "multiprocess", "xxhash", "pyarrow", "pandas", "fsspec"),
    *("python-dateutil", "pytz", "tzdata", "six", "httpx", "httpcore", "h11", "anyio", "sniffio"),
)
HIDDEN = 1024
LR = 1e-4


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    vocab: int
    rows: int
    rounds: int
    steps: int


FULL, QUICK = Size(151_936, 1_024, 3, 7), Size(32_768, 2_048, 2, 5)


@dataclass(frozen=True)
class Check:
    name: str
    value: float
    bar: str
    ok: bool


# The head


def plain(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return functional.linear(hidden, head).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def ours(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    rows = torch.arange(len(targets))
    return chosen_logprobs(hidden, head, None, rows, targets, temperature=1.0)[0]


def trl(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """As its trainer calls it: [B, T, V] logits, looped over B; here the rows are four sequences."""
    load_trl()
    from trl.trainer.utils import selective_log_softmax

    logits = functional.linear(hidden, head).view(4, -1, head.shape[0])
    result: Tensor = selective_log_softmax(logits, targets.view(4, -1)).flatten()
    return result


HEADS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"plain": plain, "TRL": trl, "ours": ours}


def measure_head(name: str, size: Size) -> dict[str, Any]:
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


# Whole steps


@dataclass(frozen=True)
class Batch:
    """Prompts that groups share, completions of unequal lengths."""

    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: list[float]
    group: int

    @property
    def advantages(self) -> list[float]:
        """As TRL's default: over the group's deviation (of a sample) plus 1e-4."""
        grouped = torch.tensor(self.rewards).view(-1, self.group)
        centred = grouped - grouped.mean(1, keepdim=True)
        scaled: list[float] = (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten().tolist()
        return scaled

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.prompts)) + sum(map(len, self.completions))


VOCAB, PAD, EOS, GROUPS, GROUP = 264, 0, 1, 4, 4


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(4, VOCAB, (count,), generator=generator).tolist()

    prompts = [ids(int(torch.randint(16, 48, (1,), generator=generator))) for _ in range(GROUPS)]
    lengths = torch.exp(4.4 + 0.7 * torch.randn(GROUPS * GROUP, generator=generator)).clamp(2, 320).int().tolist()
    completions = [[*ids(length - 1), EOS] for length in lengths]
    rewards = torch.randn(GROUPS * GROUP, generator=generator).tolist()
    return Batch([prompts[index // GROUP] for index in range(GROUPS * GROUP)], completions, rewards, GROUP)


def make_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=24,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, EOS
    return model


class PaddedLoop:
    """What one writes first: left-padded prompts, right-padded completions, logits of all completion places."""

    def __init__(self, batch: Batch) -> None:
        self.model = make_model()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0, fused=True)
        self._start = max(map(len, batch.prompts))
        self._ids = torch.zeros(len(batch.prompts), self._start + max(map(len, batch.completions)), dtype=torch.int64)
        self._seen = torch.zeros_like(self._ids)
        for row, (prompt, completion) in enumerate(zip(batch.prompts, batch.completions, strict=True)):
            begin, end = self._start - len(prompt), self._start + len(completion)
            self._ids[row, begin:end] = torch.tensor(prompt + completion)
            self._seen[row, begin:end] = 1
        self._mask = self._seen[:, self._start :].float()
        self._advantages = torch.tensor(batch.advantages)[:, None]

    def step(self) -> None:
        self._optimizer.zero_grad()
        keep = self._ids.shape[1] - self._start + 1
        logits = self.model(input_ids=self._ids, attention_mask=self._seen, logits_to_keep=keep).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, self._ids[:, self._start :, None])[..., 0]
        ratio = torch.exp(logprobs - logprobs.detach())
        surrogate = torch.min(ratio * self._advantages, ratio.clamp(0.8, 1.2) * self._advantages)
        torch.autograd.backward(-(surrogate * self._mask).sum() / self._mask.sum())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()


class OurStep:
    """TorchBackend with the loss `grpo`: prefix trees, packed rows."""

    def __init__(self, batch: Batch, folder: Path) -> None:
        model = make_model()
        model.config.save_pretrained(folder)
        weights = to_weights(model.named_parameters(), dtype="fp32")
        self.backend = TorchBackend(folder, weights, published_dtype="fp32", row_tokens=512)
        self.backend.new_optimizer(OptimizerSettings(weight_decay=0.0))
        self._loss = find_loss("grpo")
        self._samples = [
            TrainSample(tuple(prompt), tuple(completion), (-5.0,) * len(completion), advantage)
            for prompt, completion, advantage in zip(batch.prompts, batch.completions, batch.advantages, strict=True)
        ]

    def step(self) -> None:
        self.backend.train_step(self._samples, self._loss, lr=LR)


Competitor = Callable[[Batch, Path], Callable[[], None]]
"""Makes what does one step, from the batch and an empty folder."""


def measure_steps(size: Size, competitors: Mapping[str, Competitor] | None = None) -> dict[str, Any]:
    """In a process of its own; `competitors` take their turns in the same rounds."""
    load_trl()
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(VOCAB)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "t0", "eos_token": "t1", "bos_token": "t2", "unk_token": "t3"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)
    batch = make_batch()

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        logprobs = [[-5.0] * len(completion) for completion in batch.completions]
        return {"prompt_ids": batch.prompts, "completion_ids": batch.completions, "logprobs": logprobs}

    class Cached(GRPOTrainer):  # type: ignore[misc]
        """Generates once; what is timed is the training."""

        cached: Any = None

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            if Cached.cached is None:
                Cached.cached = super()._generate_and_score_completions(inputs)
            return dict(Cached.cached)

    seconds: defaultdict[str, list[float]] = defaultdict(list)
    peaks: defaultdict[str, list[int]] = defaultdict(list)

    with tempfile.TemporaryDirectory() as folder:
        padded, packed = PaddedLoop(batch), OurStep(batch, Path(folder))
        more = {name: make(batch, Path(tempfile.mkdtemp(dir=folder))) for name, make in (competitors or {}).items()}

        class Turns(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                self.before, self.began = reset_peak(), time.perf_counter()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                seconds["TRL"].append(time.perf_counter() - self.began)
                peaks["TRL"].append(peak_bytes() - self.before)
                for name, step in (("plain", padded.step), ("ours", packed.step), *more.items()):
                    before, began = reset_peak(), time.perf_counter()
                    step()
                    seconds[name].append(time.perf_counter() - began)
                    peaks[name].append(peak_bytes() - before)

        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=GROUPS * GROUP,
            num_generations=GROUP,
            max_completion_length=400,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1_000,
            max_steps=size.steps,
            beta=0.0,
            learning_rate=LR,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            disable_tqdm=True,
            seed=0,
        )
        distinct = batch.prompts[:: batch.group]
        prompts = [" ".join(f"t{token}" for token in prompt) for prompt in distinct] * 8
        trainer = Cached(
            model=make_model(),
            reward_funcs=lambda completions, **_: batch.rewards,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            rollout_func=rollouts,
        )
        trainer.add_callback(Turns())
        trainer.train()
        theirs = dict(trainer.model.named_parameters())
        snapshot = packed.backend.snapshot()
        apart = {
            "plain": max(float((theirs[n] - p).detach().abs().max()) for n, p in padded.model.named_parameters()),
            "ours": max(
                float((theirs[name].detach().flatten() - torch.from_numpy(tensor.data).view(torch.float32)).abs().max())
                for name, tensor in snapshot.items()
            ),
        }
    warm = 2  # the first steps allocate the optimizer's state
    return {
        "tokens": batch.num_tokens,
        "seconds": {name: values[warm:] for name, values in seconds.items()},
        "peak_bytes": {name: statistics.median(values[warm:]) for name, values in peaks.items()},
        "apart": apart,
    }


# Machinery


def load_trl() -> None:
    """Behind everything else on the path, so that the project's own versions win."""
    if not (TRL_FOLDER / "trl").is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(TRL_FOLDER),
            *TRL_PACKAGES,
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
    if str(TRL_FOLDER) not in sys.path:
        sys.path.append(str(TRL_FOLDER))


def reset_peak() -> int:
    """Bytes resident now, what is free handed back; the kernel's peak starts here."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def child(*arguments: str) -> dict[str, Any]:
    result = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller and under a minute")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    parser.add_argument("--head", choices=HEADS, help=argparse.SUPPRESS)
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    if options.head:
        print(json.dumps(measure_head(options.head, size)))
        return
    if options.steps:
        print(json.dumps(measure_steps(size)))
        return
    load_trl()
    quick = ["--quick"] if options.quick else []
    heads = {name: child("--head", name, *quick) for name in HEADS}
    steps = child("--steps", *quick)
    checks = [*report_heads(heads, size, silent=options.json), *report_steps(steps, silent=options.json)]
    if options.json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}))
    for check in checks:
        if not options.json:
            print(f"{'ok  ' if check.ok else 'MISS'} {check.name}: {check.value:.3g} (bar {check.bar})")


def report_heads(heads: dict[str, Any], size: Size, *, silent: bool) -> list[Check]:
    if not silent:
        print(f"\nhead: {size.rows} rows, vocabulary {size.vocab:,}, hidden {HIDDEN}, fp32, forward and backward")
        print("| | rows/s | spread | time | peak MB | memory | error, nats |\n|---|---|---|---|---|---|---|")
    base = heads["plain"]
    for name, found in heads.items():
        median = statistics.median(found["seconds"])
        spread = (max(found["seconds"]) - min(found["seconds"])) / median
        time_ratio = median / statistics.median(base["seconds"])
        memory_ratio = found["peak_bytes"] / base["peak_bytes"]
        if not silent:
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


def report_steps(steps: dict[str, Any], *, silent: bool) -> list[Check]:
    medians = {name: statistics.median(values) for name, values in steps["seconds"].items()}
    if not silent:
        print(
            f"\nstep: Qwen3 of 4 layers, hidden 192, vocabulary {VOCAB}, {GROUPS} prompts x {GROUP}, {steps['tokens']} tokens"
        )
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
    main()
