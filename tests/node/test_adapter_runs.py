"""A run whose policies are adapters publishes only the adapters, and every engine adds them to the base model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.node.batch_coordinator import BatchCoordinator, make_run, write_model
from tests.node.rank_jobs import samples
from tests.node.trainer_world import CONFIG, make_trainer, rows

from prime_node.adapters.engines.merging_engine import MergingEngine, MergingScorer
from prime_node.adapters.engines.torch_weights import to_torch
from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.lora import LoraSettings, merged_weight
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.broadcast.audit.audit import Verified
from prime_node.broadcast.audit.export import export_checkpoint
from prime_node.broadcast.audit.safetensors_file import read_weights, write_safetensors
from prime_node.cli import wire_adapters, wire_training
from prime_node.cli.new import make_run as make_run_folder
from prime_node.cli.options import Options
from prime_node.cli.run_dir import RunDir
from prime_node.cli.shipped import config_path
from prime_node.ports.engine import ScoreRequest
from prime_node.ports.train_backend import OptimizerSettings
from prime_node.trainer.config import LoraConfig, TrainerConfig
from prime_node.trainer.loop import run_trainer
from prime_protocol.adapters import AdapterSpec, merged, unit_for
from prime_protocol.assignment import Sampling
from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.errors import LocalError
from prime_protocol.manifest import BasePolicy
from prime_protocol.run_spec import PinnedRun
from prime_protocol.schedule import SwapPolicy
from prime_protocol.weights import WeightTensor, num_bytes, root_of, rounded_to

DEMO = config_path("demo.toml")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Make a pretrained model."""
    folder = write_model(tmp_path / "base")
    write_safetensors(folder / "model.safetensors", initial_weights(folder, seed=4))
    return folder


def adapter_run(base: Path, *, max_steps: int = 3) -> PinnedRun:
    root = root_of(read_weights(base))
    return make_run(
        max_steps=max_steps,
        adapters=AdapterSpec(base="base", base_root=root, rank=4, alpha=8, unit_log2=unit_for(4, 8)),
    )


@pytest.fixture
def trained(base: Path, tmp_path: Path) -> BatchCoordinator:
    """Train three steps of such a run with the trainer that the command builds."""
    coordinator = BatchCoordinator(adapter_run(base))
    optimizer = CONFIG.optimizer.model_copy(update={"lr": 1e-2})
    sft = CONFIG.sft.model_copy(update={"steps_max": 0})
    config = CONFIG.model_copy(
        update={"evaluate_every": 0, "optimizer": optimizer, "sft": sft, "initial_weights": str(base)}
    )
    model = write_model(tmp_path / "trainer" / "model")
    backend = wire_training.train_backend(config, coordinator.run.spec, None, model=model)
    trainer = make_trainer(tmp_path / "trainer", coordinator, config=config, backend=backend)
    assert asyncio.run(run_trainer(trainer, asyncio.Event()))
    return coordinator


def test_policies_are_adapters_and_deltas_between_them(trained: BatchCoordinator, base: Path, tmp_path: Path) -> None:
    whole = num_bytes(read_weights(base))
    for signed in trained.manifests:
        names = {entry.name for entry in signed.manifest.tensors}
        assert all(name.startswith("base_model.model.model.layers.") and ".lora_" in name for name in names)
    assert len(set(trained.roots)) == 4
    newest = trained.manifests[-1].manifest
    assert [encoding.base is not None for encoding in newest.encodings] == [True]
    published = rows(tmp_path / "trainer", "raw_bytes")
    assert all(int(str(row["raw_bytes"])) < whole / 4 for row in published)


def test_torch_and_numpy_merge_to_the_same_bits(base: Path) -> None:
    """The trainer merges with torch, workers and validators with numpy. A GPU has not been tried."""
    spec = AdapterSpec(base="base", base_root="ab" * 32, rank=16, alpha=24, unit_log2=-11)
    random = np.random.default_rng(0)
    for dtype, torch_dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        weight = rounded_to(random.standard_normal((96, 160)).astype(np.float32) * np.float32(0.05), dtype)
        integers = {
            "A": random.integers(-400, 400, (16, 160)).astype(np.int16),
            "B": random.integers(-(2**15), 2**15, (96, 16)).astype(np.int16),
        }
        factors = {
            f"base_model.model.layer.lora_{name}.weight": WeightTensor(
                "i16", each.shape, each.reshape(-1).view(np.uint16)
            )
            for name, each in integers.items()
        }
        expected = merged({"layer.weight": weight}, factors, spec)["layer.weight"]
        A, B = (torch.from_numpy(integers[name]).float() * 2.0**-11 for name in "AB")
        found = merged_weight(to_torch(weight), A, B, 24 / 16, torch_dtype)
        assert torch.equal(found, to_torch(expected))


def test_a_delta_of_integers_is_a_fraction_of_one_of_floats(base: Path) -> None:
    """B begins at zero. As bf16 nearly every element of it changes in each step, by many units in the last place."""
    sizes = {}
    for unit_log2 in (None, -11):
        lora = LoraSettings(rank=16, alpha=32, alone=True, unit_log2=unit_log2)
        backend = TorchBackend(base, read_weights(base), seed=3, lora=lora)
        for seed in range(4):
            old = backend.snapshot()
            backend.train_step(samples(seed=seed), find_loss("aipo"), lr=1e-4)
        made = encode_checkpoint(backend.snapshot(), (BasePolicy(policy_version=0, state_root=root_of(old)), old))
        sizes[unit_log2] = made.encoding.sent_bytes
    assert sizes[-11] < 0.4 * sizes[None]  # a chunk of these small tensors is mostly its head


@pytest.mark.parametrize("lr", [1e-3, 1e-2])
def test_movements_below_a_factor_s_unit_add_up(base: Path, lr: float) -> None:
    """Elements of B that begin between two units would otherwise stay at zero for the first steps."""
    unit = 2.0**-6
    backend = TorchBackend(base, read_weights(base), seed=3, lora=LoraSettings(4, 8, alone=True, unit_log2=-6))
    before = {name: tensor for name, tensor in backend.snapshot().items() if ".lora_B." in name}
    assert not any(tensor.data.any() for tensor in before.values())
    backend.new_optimizer(OptimizerSettings(weight_decay=0.0))
    backend.train_step(samples(), find_loss("aipo"), lr=lr)
    after = [backend.snapshot()[name].data.view(np.int16) for name in before]
    moved = np.mean([np.abs(values * unit).mean() for values in after])  # each element moves by about lr
    assert moved == pytest.approx(lr, rel=0.25)


async def test_engines_compute_with_the_merged_model(base: Path, tmp_path: Path) -> None:
    """The trainer's logprobs equal those of an engine that loaded base and adapters itself and rounded the sum to bf16."""
    spec = adapter_run(base).spec
    adapters = spec.adapters
    assert adapters is not None
    backend = wire_training.train_backend(
        TrainerConfig(initial_weights=str(base)), spec, None, model=write_model(tmp_path / "model")
    )
    objective = find_loss("aipo")
    backend.train_step(samples(), objective, lr=1e-2)
    policy = backend.snapshot()
    asked = samples()
    requests = [ScoreRequest(one.prompt_token_ids, one.completion_token_ids, seed=0) for one in asked]
    expected = [nats for one in backend.logprobs(asked) for nats in one]
    sampling = Sampling(completion_tokens_max=64, stop_token_ids=(256,))
    inner = TransformersEngine(base, threads=1)
    scorer = MergingScorer(inner, read_weights(base), adapters)
    await scorer.load(policy, policy_version=1)
    found = await scorer.prefill(requests, sampling)
    assert found.logprobs_T.tolist() == pytest.approx(expected, abs=1e-4)
    engine = MergingEngine(inner, read_weights(base), adapters)
    for wrong in (dict(list(policy.items())[1:]), dict(read_weights(base))):
        with pytest.raises(LocalError, match="not of its adapters"):
            await engine.load(wrong, policy_version=2)
    assert SwapPolicy.KEEP_KV in engine.swaps
    await engine.update(policy, policy_version=2, swap=SwapPolicy.KEEP_KV)
    again = await scorer.prefill(requests, sampling)
    assert again.logprobs_T.tolist() == found.logprobs_T.tolist()
    await engine.close()


def test_an_export_is_an_adapter_for_peft_or_a_merged_model(
    trained: BatchCoordinator, base: Path, tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    signed = trained.manifests[-1]
    files = {file.name: (base / file.name).read_bytes() for file in trained.run.spec.model_files}
    verified = Verified(trained.run, signed, trained.decode(signed), files)
    written = export_checkpoint(verified, tmp_path / "adapter", software="test 1")
    assert {"adapter_model.safetensors", "adapter_config.json"} < written.keys()
    assert "model.safetensors" in export_checkpoint(
        verified, tmp_path / "merged", software="test 1", base=read_weights(base)
    )
    ids = torch.tensor([[72, 105, 33, 50]])
    auto = transformers.AutoModelForCausalLM
    plain = auto.from_pretrained(base, dtype=torch.float32)
    before = plain(ids).logits
    with_adapter = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter"))(ids).logits
    merged_logits = auto.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    moved = float((with_adapter - before).detach().abs().max())
    assert moved > 0.01
    assert float((with_adapter - merged_logits).detach().abs().max()) < 0.2 * moved  # merged, it is rounded to bf16


def test_an_export_is_merged_into_the_run_s_own_base_alone(
    trained: BatchCoordinator, base: Path, tmp_path: Path
) -> None:
    signed = trained.manifests[-1]
    verified = Verified(trained.run, signed, trained.decode(signed), {})
    other = initial_weights(base, seed=5)
    with pytest.raises(LocalError, match="the base has state root"):
        export_checkpoint(verified, tmp_path / "merged", software="test 1", base=other)
    spec = trained.run.spec.adapters
    assert spec is not None
    whole = merged(read_weights(base), verified.weights, spec)
    assert root_of(whole) != root_of(read_weights(base))


def test_another_base_is_refused_before_anything_is_computed(base: Path) -> None:
    spec = adapter_run(base).spec
    write_safetensors(base / "model.safetensors", initial_weights(base, seed=5))
    assert spec.adapters is not None
    with pytest.raises(LocalError, match="the run's adapters belong to"):
        wire_adapters.base_weights(spec.adapters, str(base))


@pytest.mark.parametrize("named", ["{}", "{}/", "base", "./base", "../base/../base", "models/base"])
def test_a_run_s_name_for_its_base_opens_no_folder_of_this_machine(
    base: Path, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name comes from the RunSpec, so a worker would open and hash files that the run's operator chose."""
    spec = adapter_run(base).spec.adapters
    assert spec is not None
    (base.parent / "models").symlink_to(base.parent)
    monkeypatch.chdir(base.parent)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    wire_adapters.base_weights(spec, str(base))  # its own settings may
    with pytest.raises(LocalError, match=r"no name on the hub|not available from the hub"):
        wire_adapters.base_weights(spec.model_copy(update={"base": named.format(base)}), None)


def test_settings_of_its_own_adapters_are_refused_in_such_a_run(base: Path) -> None:
    with pytest.raises(LocalError, match=r"trainer\.lora: this run's policies are adapters already"):
        wire_training.train_backend(TrainerConfig(lora=LoraConfig(rank=2)), adapter_run(base).spec, None, model=base)


def test_a_new_run_pins_its_base(base: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    (tmp_path / "sums.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    config.write_text(f"""[run]
model = {{ kind = "pretrained", name_or_path = "{base}" }}
environments = [{{ name = "sums", id = "jsonl", options = {{ path = "sums.jsonl" }} }}]

[environments]
data_folder = "{tmp_path}"
""")
    adapters = ["run.adapters.rank=4", 'run.adapters.targets=["q_proj"]']
    made = make_run_folder(RunDir(tmp_path / "run"), Options(config, adapters), config_file=config)
    root = root_of(read_weights(base))
    assert made.spec.adapters == AdapterSpec(
        base="base", base_root=root, rank=4, alpha=32, targets=("q_proj",), unit_log2=-12
    )
    with pytest.raises(LocalError, match=r"\[run\.adapters\] need a base that others can download"):
        make_run_folder(RunDir(tmp_path / "tiny"), Options(DEMO, adapters), config_file=DEMO)
