"""One step on 1, 2 and 4 ranks over gloo is one and the same step. Tolerances are float32's rounding of sums in another order.

Adam divides by the root of squares that may be tiny, which amplifies rounding; eps = 1e-6 keeps that below the tolerance.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.builder import provenance
from tests.node import cluster_process, cluster_world, rank_jobs
from tests.node.batch_coordinator import make_run, tiny_files, write_model
from tests.node.rank_pool import RankPool
from tests.node.replay_world import STEPS, outcomes_on_ranks

from prime_node.adapters.models.lora import LoraSettings
from prime_node.adapters.training.ranks import ALONE
from prime_node.adapters.training.sharding import Placement
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import LOSSES
from prime_node.ports.train_backend import OptimizerSettings
from prime_protocol.adapters import AdapterSpec, merged
from prime_protocol.checkpoint import CheckpointDecoder, root_of_table, tensor_table
from prime_protocol.chunk_index import open_index
from prime_protocol.errors import LocalError
from prime_protocol.manifest import Manifest
from prime_protocol.weights import Weights, num_bytes, root_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
ADAMW = OptimizerSettings(eps=1e-6, grad_norm_max=0.5)
FP32 = 2e-6
"""Largest difference of a weight after three steps of 1e-3."""
BF16 = 4e-3
"""The same for bf16 arithmetic: for a tiny gradient, Adam's steps may go either way."""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small mixture of experts of Qwen3."""
    folder = write_model(tmp_path_factory.mktemp("moe"))
    dense = json.loads(tiny_files()["config.json"])
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    (folder / "config.json").write_text(json.dumps(dense | experts))
    return folder


def same(found: rank_jobs.Curve, expected: rank_jobs.Curve, *, atol: float = FP32) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=atol * 10, abs=atol)
    assert found.norms == pytest.approx(expected.norms, rel=atol * 10)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-3, abs=1e-3 if atol > FP32 else 1e-5)
    worst = max(abs(found.weights[name] - expected.weights[name]).max() for name in expected.weights)
    assert worst <= atol, worst


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"opd"}))
def test_the_number_of_ranks_changes_nothing_but_rounding(pool: RankPool, model: Path, loss: str) -> None:
    expected = rank_jobs.train(ALONE, model=model, loss=loss, optimizer=ADAMW)
    for ranks in (1, 2, 4):
        curves = pool.run(rank_jobs.train, ranks=ranks, model=model, loss=loss, optimizer=ADAMW)
        assert len({(curve.losses, curve.norms) for curve in curves}) == 1
        same(curves[0], expected)


@pytest.mark.parametrize(
    ("packing", "micro_batch_tokens"), [("tree", 20), ("tree", 4_096), ("sequences", 20), ("sequences", 4_096)]
)
def test_packing_and_passes_change_nothing_but_rounding(
    pool: RankPool, model: Path, packing: str, micro_batch_tokens: int
) -> None:
    expected = rank_jobs.train(ALONE, model=model, optimizer=ADAMW)
    how: dict[str, Any] = {"packing": packing, "micro_batch_tokens": micro_batch_tokens, "optimizer": ADAMW}
    same(rank_jobs.train(ALONE, model=model, **how), expected)
    same(pool.run(rank_jobs.train, ranks=4, model=model, **how)[0], expected)


def test_ranks_without_a_sample_join_in(pool: RankPool, model: Path) -> None:
    expected = rank_jobs.train(ALONE, model=model, optimizer=ADAMW, count=1)
    same(pool.run(rank_jobs.train, ranks=4, model=model, optimizer=ADAMW, count=1)[0], expected)


@pytest.mark.parametrize(
    ("placement", "replicas", "atol"),
    [
        (Placement(recompute=True), 1, FP32),
        (Placement(offload=True), 1, FP32),
        (Placement(reduce_each_pass=False), 1, FP32),
        (Placement(), 2, FP32),
        (Placement(compute_dtype="bf16", recompute=True), 2, BF16),
    ],
)
def test_the_layout_of_the_model_on_the_ranks_changes_only_rounding(
    pool: RankPool, model: Path, placement: Placement, replicas: int, atol: float
) -> None:
    expected = rank_jobs.train(ALONE, model=model, optimizer=ADAMW)
    how: dict[str, Any] = {"placement": placement, "replicas": replicas, "optimizer": ADAMW}
    same(pool.run(rank_jobs.train, ranks=4, model=model, **how)[0], expected, atol=atol)


def test_bf16_gives_the_same_on_any_number_of_ranks(pool: RankPool, model: Path) -> None:
    placement = Placement(compute_dtype="bf16")
    one, two, four = (
        pool.run(rank_jobs.train, ranks=ranks, model=model, placement=placement, optimizer=ADAMW)[0]
        for ranks in (1, 2, 4)
    )
    same(two, one, atol=BF16)
    same(four, one, atol=BF16)


def test_a_fixed_seed_gives_the_identical_curve_twice(pool: RankPool, model: Path) -> None:
    first, second = (pool.run(rank_jobs.train, ranks=4, model=model)[0] for _ in range(2))
    assert (first.losses, first.norms, first.root) == (second.losses, second.norms, second.root)


def test_mixtures_of_experts_train_on_any_number_of_ranks(pool: RankPool, moe: Path) -> None:
    expected = rank_jobs.train(ALONE, model=moe, optimizer=ADAMW)
    assert any(name.endswith("mlp.experts.7.up_proj.weight") for name in expected.weights)
    for ranks in (2, 4):
        same(pool.run(rank_jobs.train, ranks=ranks, model=moe, optimizer=ADAMW)[0], expected, atol=5e-6)


def test_experts_leave_the_ranks_that_have_them_under_the_hub_s_names(pool: RankPool, moe: Path) -> None:
    (_, _, whole, tables, _, _), *_ = pool.run(rank_jobs.publish_in_shards, ranks=4, model=moe)
    assert tables == [tensor_table(weights) for weights in whole]
    assert any(name.endswith("mlp.experts.7.up_proj.weight") for name in whole[1])


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (4, 1), (4, 2)])
def test_a_policy_that_rank_0_has_goes_back_to_the_ranks_row_by_row(
    pool: RankPool, moe: Path, ranks: int, replicas: int
) -> None:
    for is_same in pool.run(rank_jobs.take_rows, ranks=ranks, replicas=replicas, model=moe):
        assert is_same


def test_adapters_leave_the_ranks_alone(pool: RankPool, model: Path) -> None:
    lora = LoraSettings(rank=4, alpha=8, targets=("q_proj", "v_proj"), alone=True)
    expected = rank_jobs.train(ALONE, model=model, lora=lora)
    assert {name.rpartition(".lora_")[2] for name in expected.weights} == {"A.weight", "B.weight"}
    same(pool.run(rank_jobs.train, ranks=4, model=model, lora=lora)[0], expected)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_given_are_read_rows_by_rows(pool: RankPool, tmp_path: Path, tied: bool) -> None:
    """The model is built without memory; its buffers, such as rotary frequencies, must not be. A tied head stays tied."""
    model = write_model(tmp_path, tie_word_embeddings=tied)
    weights = rank_jobs.initial(model, seed=9)
    expected = rank_jobs.train(ALONE, model=model, weights=weights, optimizer=ADAMW)
    assert ("lm_head.weight" in expected.weights) is not tied
    for ranks in (1, 4):
        same(pool.run(rank_jobs.train, ranks=ranks, model=model, weights=weights, optimizer=ADAMW)[0], expected)


def test_logprobs_come_in_the_batch_s_order_from_all_ranks(pool: RankPool, model: Path) -> None:
    expected = rank_jobs.logprobs(ALONE, model=model)
    for found in pool.run(rank_jobs.logprobs, ranks=4, model=model):
        assert [pytest.approx(values, abs=2e-6) for values in expected] == found


def test_values_of_tokens_come_from_all_ranks(pool: RankPool, model: Path) -> None:
    norms, tops, kept = rank_jobs.token_values(ALONE, model=model)
    assert tops == kept
    for found_norms, found_tops, found_kept in pool.run(rank_jobs.token_values, ranks=2, model=model):
        for values, expected in zip(found_norms, norms, strict=True):
            assert values == pytest.approx(expected, abs=1e-5)
        assert found_tops == found_kept == tops


@pytest.mark.parametrize("packing", ["tree", "sequences"])
def test_a_critic_learns_the_same_on_any_number_of_ranks_and_survives_a_checkpoint(
    pool: RankPool, model: Path, tmp_path: Path, packing: str
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    expected = rank_jobs.critic_steps(ALONE, model=model, folder=tmp_path / "one", packing=packing)
    for found in pool.run(rank_jobs.critic_steps, ranks=2, model=model, folder=tmp_path / "two", packing=packing):
        for values, its in zip(found, expected, strict=True):
            for one, other in zip(values, its, strict=True):
                assert one == pytest.approx(other, abs=1e-5)
    assert expected[0] == [[0.0] * len(values) for values in expected[0]]
    assert min(map(min, expected[2])) > 0.0


def test_a_critic_that_joins_a_run_is_the_same_on_any_number_of_ranks(
    pool: RankPool, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    expected = rank_jobs.late_critic(ALONE, model=model, folder=tmp_path / "one")
    for found in pool.run(rank_jobs.late_critic, ranks=2, model=model, folder=tmp_path / "two"):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-5)
    assert min(map(min, expected)) > 0.0


def test_distillation_is_the_same_on_any_number_of_ranks(pool: RankPool, model: Path) -> None:
    expected = rank_jobs.distilled(ALONE, model=model)
    same(pool.run(rank_jobs.distilled, ranks=2, model=model)[0], expected)


def test_copies_that_do_not_divide_the_ranks_are_refused(pool: RankPool, model: Path) -> None:
    with pytest.raises(AssertionError, match="4 ranks cannot hold 3 copies"):
        pool.run(rank_jobs.train, ranks=4, replicas=3, model=model)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4, alpha=8)])
@pytest.mark.parametrize("placement", [Placement(), Placement(offload=True)])
def test_ranks_compute_with_exactly_the_published_weights(
    pool: RankPool, model: Path, placement: Placement, lora: LoraSettings | None
) -> None:
    """The bar is 1e-4 nats between the trainer and an fp32 worker that has the same policy. Found: 2e-6."""
    for found, published in pool.run(rank_jobs.agreement, ranks=4, model=model, placement=placement, lora=lora)[:1]:
        plain = TorchBackend(model, published).logprobs(rank_jobs.samples())
        assert found == [pytest.approx(values, abs=5e-6) for values in plain]


@pytest.mark.parametrize("placement", [Placement(), Placement(offload=True)])
def test_ranks_compute_with_exactly_the_merged_weights_of_integer_factors(
    pool: RankPool, model: Path, placement: Placement
) -> None:
    base = TorchBackend(model, seed=9).snapshot()
    spec = AdapterSpec(base="base", base_root=root_of(base), rank=4, alpha=8, unit_log2=-10)
    lora = LoraSettings(rank=4, alpha=8, alone=True, unit_log2=-10)
    jobs = pool.run(rank_jobs.agreement, ranks=4, model=model, placement=placement, lora=lora, weights=base)
    for found, factors in jobs[:1]:
        assert {tensor.dtype for tensor in factors.values()} == {"i16"}
        plain = TorchBackend(model, merged(base, factors, spec)).logprobs(rank_jobs.samples())
        assert found == [pytest.approx(values, abs=5e-6) for values in plain]


@pytest.mark.parametrize("ranks", [1, 4])
def test_masters_survive_a_checkpoint_bit_by_bit(pool: RankPool, model: Path, tmp_path: Path, ranks: int) -> None:
    how: dict[str, Any] = {"model": model, "folder": tmp_path, "published_dtype": "bf16"}
    expected = pool.run(rank_jobs.save_and_go_on, ranks=ranks, **how)[0]
    found = pool.run(rank_jobs.resume, ranks=ranks, **how)[0]
    assert (found.losses, found.norms, found.root) == (expected.losses, expected.norms, expected.root)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4, alpha=8)])
def test_the_reference_is_sharded_and_survives_a_checkpoint(
    pool: RankPool, model: Path, tmp_path: Path, lora: LoraSettings | None
) -> None:
    found = pool.run(rank_jobs.reference_logprobs, ranks=2, model=model, folder=tmp_path, lora=lora)
    assert found == [(True, True)] * 2


@pytest.mark.parametrize(("before", "after"), [(4, 4), (2, 4), (4, 1), (1, 2)])
def test_a_checkpoint_is_resumed_on_another_number_of_ranks(
    pool: RankPool, model: Path, tmp_path: Path, before: int, after: int
) -> None:
    expected = pool.run(rank_jobs.save_and_go_on, ranks=before, model=model, folder=tmp_path)[0]
    found = pool.run(rank_jobs.resume, ranks=after, model=model, folder=tmp_path)[0]
    if before == after:
        assert (found.losses, found.norms, found.root) == (expected.losses, expected.norms, expected.root)
    same(found, expected)
    same(rank_jobs.resume(ALONE, model=model, folder=tmp_path), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_one_process_is_resumed_on_many(pool: RankPool, tmp_path: Path, tied: bool) -> None:
    model = write_model(tmp_path / "model", tie_word_embeddings=tied)
    expected = rank_jobs.save_and_go_on(ALONE, model=model, folder=tmp_path)
    same(pool.run(rank_jobs.resume, ranks=4, model=model, folder=tmp_path)[0], expected)


def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all(pool: RankPool, model: Path, tmp_path: Path) -> None:
    """A limit on the size of files replaces the full disk: the kernel refuses the write at the same place."""
    for reason in pool.run(rank_jobs.save_on_a_full_disk, ranks=4, model=model, folder=tmp_path):
        assert "rank 3" in reason
        assert "could not be written whole; is the disk full?" in reason


def test_a_damaged_checkpoint_is_reported(model: Path, tmp_path: Path) -> None:
    rank_jobs.save_and_go_on(ALONE, model=model, folder=tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(LocalError, match="cannot be loaded"):
        rank_jobs.resume(ALONE, model=model, folder=tmp_path)


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_policies_leave_the_ranks_in_shards_and_are_whole_again_at_a_worker(
    pool: RankPool, model: Path, ranks: int, replicas: int
) -> None:
    (held, left, whole, tables, encodings, _), *others = pool.run(
        rank_jobs.publish_in_shards, ranks=ranks, replicas=replicas, model=model
    )
    assert tables == [tensor_table(weights) for weights in whole]
    decoded: list[Weights] = []
    run = make_run()
    for version, encoded in enumerate(encodings):
        manifest = Manifest(
            run=run.digest,
            policy_version=version,
            previous=run.digest if version else None,
            model_config_digest=run.digest,
            state_root=root_of_table(tables[version]),
            tensors=tables[version],
            encodings=(encoded.encoding,),
            produced_by=provenance(version),
            created_at_ms=0,
        )
        decoder = CheckpointDecoder(
            manifest, encoded.encoding, open_index(encoded.index, encoded.encoding, manifest.tensors), *decoded
        )
        for number, part in enumerate(encoded.parts):
            decoder.feed_part(number, part)
        decoded = [decoder.finish()]
        assert root_of(decoded[0]) == root_of(whole[version])
    assert left == 0
    shards = ranks // replicas
    assert held + sum(other[0] for other in others) == replicas * num_bytes(whole[0])
    assert held <= num_bytes(whole[0]) / shards + 4_096 * len(whole[0])


def test_steps_of_four_ranks_are_exact_on_four_ranks(pool: RankPool, tmp_path: Path) -> None:
    first, *_ = pool.run(outcomes_on_ranks, ranks=4, folder=str(tmp_path))
    assert first[:-1] == ["exact"] * STEPS
    assert "/ranks4/" in first[-1]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", range(int(os.environ.get("PRIME_TEST_KILLS", "1"))))
def test_ranks_killed_at_random_moments_end_with_the_policies_of_an_undisturbed_run(
    pool: RankPool, tmp_path: Path, seed: int
) -> None:
    """Real ranks under torchrun."""
    calm, folder = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir()
    folder.mkdir()
    pool.run(cluster_process.undisturbed, ranks=2, folder=calm, max_steps=cluster_world.STEPS)
    expected = cluster_world.roots(calm)
    assert len(set(expected)) == cluster_world.STEPS + 1
    rng, killed = random.Random(seed), [""]
    process = cluster_world.start(folder)
    try:
        for after in sorted(rng.sample(range(cluster_world.STEPS - 2), 2)):
            killed = cluster_world.kill_one(folder, rng, after=after, process=process, old=killed)
        assert process.wait(120) == 0, (folder / "out").read_text()[-3_000:]
    finally:
        process.kill()
    assert cluster_world.roots(folder) == expected
