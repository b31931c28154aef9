"""Whole training steps and TRL's GRPOTrainer, with the peak of memory while they run. Used by loss.py and trainer.py."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from memory import peak_bytes, reset_peak

from prime_node.adapters.engines.torch_weights import to_weights
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.ports.train_backend import OptimizerSettings
from prime_node.ports.train_samples import TrainSample

TRL_FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "prime-node" / "bench-trl"
TRL_PACKAGES = (
    *("trl==1.16.0", "datasets==4.4.1", "dill", "multiprocess", "xxhash", "pyarrow", "pandas", "fsspec"),
    *("python-dateutil", "pytz", "tzdata", "six", "httpx", "httpcore", "h11", "anyio", "sniffio"),
)
LR = 1e-4


@dataclass(frozen=True)
class Size:
    """Amount of work to measure."""

    vocab: int
    rows: int
    rounds: int
    steps: int


FULL, QUICK = Size(151_936, 1_024, 3, 7), Size(32_768, 2_048, 2, 5)


@dataclass(frozen=True)
class Batch:
    """Prompts that groups share, completions of unequal lengths."""

    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: list[float]
    group: int

    @property
    def advantages(self) -> list[float]:
        """Return advantages as TRL does by default: divided by the group's sample deviation plus 1e-4."""
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
    """Run the simplest loop: left-padded prompts, right-padded completions, logits of all completion places."""

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
