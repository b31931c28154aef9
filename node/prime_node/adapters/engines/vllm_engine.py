"""The Engine port over vLLM: tokens in, tokens out, seeded choice, weights swapped in memory.

The engine runs in its own processes and starts at the first `load` (tens of seconds), with dummy weights. A policy reaches it
through anonymous shared memory, never through a disk; parts of layers that did not change keep their weights. After every swap
its prefix cache is emptied, because the cached keys and values are the old policy's. A probe is then sampled and compared with
an independent forward pass of the new weights. In upstream engines some updates had no effect and raised no error (verl #7495,
NeMo-RL #3839).

The probe verifies that the engine's logprobs are those of the new weights within its arithmetic's noise. It also verifies that
different weights change at least one bit of the answer. At a very small learning rate a swap that reaches only some tensors may
pass at first; it is detected when the difference has grown.
Temperature: vLLM takes raw logprobs before temperature, so the worker extension divides each request's logits before that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import vllm
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from prime_node.adapters.engines.engine_watch import EngineWatch
from prime_node.adapters.engines.shared_weights import digests_by_name, share_weights, to_replace
from prime_node.adapters.engines.vllm_draft import Draft
from prime_node.adapters.engines.vllm_probe import (
    PROBE_TOKENS_SAMPLING,
    compared_after,
    errors_of_probe,
    is_honest_noise,
    prompts_of_probe,
)
from prime_node.adapters.engines.vllm_runner import executor_of, runner_arguments, start_engine
from prime_node.adapters.engines.vllm_worker_extension import OWNER_SETTING, WorkerExtension
from prime_node.adapters.models.causal_model import CausalModel
from prime_node.ports.engine import EngineFault, EngineMismatch, GenerateRequest
from prime_node.scratch import process_folder
from prime_protocol.assignment import Sampling
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.rollout import Completion, EngineInfo
from prime_protocol.schedule import SwapPolicy
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)

VLLM_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "bf16-fp32head": "bfloat16"}
FP32_HEAD = "bf16-fp32head"
"""Arithmetic whose output head alone computes in fp32."""

GPU_MEMORY_SHARE = 0.9
"""Share of a GPU's memory that vLLM takes, if none is given. The rest is for CUDA, and for the noise of the sampler."""
PROOFS_POLL_SECONDS = 0.005
"""Time between requests for proofs that vLLM's worker still computes."""
PROOFS_SECONDS_MAX = 120.0
"""Time for the proofs of finished completions. They take milliseconds."""
CLOSE_SECONDS = 1.0
"""Time after which the engine's processes are killed. They hold nothing that has to be kept."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # a run's model files are complete
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other roles share the cores
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads and may have used the GPU: neither survives a fork
}
"""Settings that vLLM reads only from the environment. Variables set by the user take precedence."""


class VllmEngine:
    """Implementation of ports.engine.SwappingEngine and BatchingEngine."""

    batches = True

    extension: ClassVar[type[WorkerExtension]] = WorkerExtension
    """Mixin of vLLM's workers."""
    block_tokens: ClassVar[int | None] = 32 if current_platform.is_cpu() else None
    """Tokens of a block of the prefix cache; None: vLLM's default. Completions share whole blocks of their prompt. vLLM's own
    128 on CPUs share nothing of a short prompt, and 32 is the fewest that its attention takes."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "auto",
        context_tokens_max: int | None = None,
        sequences_max: int = 256,
        cpu_cache_gib: float = 1.0,
        seeded: bool = True,
        model_runner: str = "v1",
        gpu_memory_share: float | None = None,
        tensor_parallel: int | None = None,
        checks: CheckPolicy | None = None,
    ) -> None:
        """Configure the engine.

        `dtype` auto is fp32 on a CPU, bf16 on a GPU. `context_tokens_max` bounds prompt plus completion. With `seeded` False
        vLLM's own sampler chooses. `model_runner` v2 schedules steps ahead and needs Triton. `gpu_memory_share` is the share of
        a GPU's memory to use, GPU_MEMORY_SHARE if None; `tensor_parallel` is the number of GPUs. `checks` are the run's: the
        probe's error must be honest by their calibration.
        """
        self._gpu_memory_share = gpu_memory_share or GPU_MEMORY_SHARE
        self._tensor_parallel = tensor_parallel or 1
        self._model_runner = model_runner
        self._checks = checks
        self._seeded = seeded
        self._folder = folder
        self._dtype = ("fp32" if current_platform.is_cpu() else "bf16") if dtype == "auto" else dtype
        self._sequences_max = sequences_max
        self._cpu_cache_gib = cpu_cache_gib
        self._reference = CausalModel(folder, dtype="fp32", device="cpu")  # never loaded: its memory stays untouched
        bounds = [bound for bound in (context_tokens_max, self._reference.positions_max) if bound is not None]
        self._context_tokens_max = min(bounds, default=None)
        self._unties = current_platform.is_cpu() and bool(self._reference.tied)
        self._starting: asyncio.Task[Any] | None = None
        self._llm: Any = None
        self._watch = EngineWatch(lambda: self._llm is not None and bool(self._llm.errored))
        self._last_probe: tuple[dict[str, str], list[Completion]] | None = None
        """Digests of the tensors, and what vLLM answered with them."""
        self._held: dict[str, str] = {}
        """Digests of the tensors that vLLM has; empty if it is not known to have any."""
        self._wanted: dict[str, str] = {}
        """Digests of the tensors of the policy that is being loaded or was loaded last."""
        self._probes = 0
        """Number of policies that this vLLM's probe has passed."""
        self._loaded, self._version = False, -1
        self._drafts: dict[str, Draft] = {}
        """Drafts by the names of their current requests."""
        self._unfinished = 0
        """Number of completions that `generate` has begun and not finished."""
        self._one_finished = asyncio.Event()
        self._forgotten: list[str] = []
        """Names of completions that were interrupted: their proofs are no longer needed."""
        self._resumed = asyncio.Event()
        """Cleared while completions are interrupted by a swap."""
        self._resumed.set()

    @property
    def info(self) -> EngineInfo:
        """Name, version, arithmetic and device."""
        device = str(current_platform.device_type)
        return EngineInfo(name="vllm", version=vllm.__version__, dtype=self._dtype, device=device, seeded=self._seeded)

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        """Load a policy and check it on the probe. The first load starts vLLM, and so does one after its processes have ended.

        Raises EngineMismatch, LocalError.
        """
        self._reference.require_fit(weights)
        if self._llm is not None and self._llm.errored:
            await self.close()
        await self._watch.call(self._load(weights, policy_version))

    async def _load(self, weights: Weights, policy_version: int) -> None:
        if self._llm is None:
            self._watch.begin()
            await self._start()
        self._loaded = False
        self._wanted = await asyncio.to_thread(digests_by_name, weights)
        await self.replace_weights(weights)
        self._version = policy_version
        await self._check_probe(weights, policy_version)
        self._loaded = True

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        assert self._loaded, "no weights have been loaded"
        completions = await self._watch.call(self._sample(requests, sampling))
        self._watch.answered()
        return completions

    async def wait_for_room(self) -> None:
        """Wait until fewer completions than `sequences_max` are unfinished. vLLM queues those that are too many."""
        while self._unfinished >= self._sequences_max:
            self._one_finished.clear()
            await self._one_finished.wait()

    @property
    def swaps(self) -> frozenset[SwapPolicy]:
        """Supported swaps. Two are implemented alike, since both leave keys and values that the new policy computed."""
        return frozenset(swap for swap in SwapPolicy if swap.spans_policies)

    async def update(self, weights: Weights, *, policy_version: int, swap: SwapPolicy) -> None:
        """Swap to another policy between two tokens, and check it on the probe."""
        assert swap in self.swaps
        if self._llm is None or self._llm.errored:
            await self.load(weights, policy_version=policy_version)
            return
        self._reference.require_fit(weights)
        await self._watch.call(self._update(weights, policy_version, swap))

    async def _update(self, weights: Weights, policy_version: int, swap: SwapPolicy) -> None:
        self._wanted = await asyncio.to_thread(digests_by_name, weights)
        self._resumed.clear()
        self._loaded = False
        try:
            if swap is SwapPolicy.KEEP_KV:
                await self._freeze()
                await self._put(weights)
            else:
                await self._llm.pause_generation(mode="abort", clear_cache=True)
                await self.replace_weights(weights)
            await self._llm.resume_generation()
            self._version = policy_version
            await self._check_probe(weights, policy_version)
            self._loaded = True
        finally:
            self._resumed.set()

    async def close(self) -> None:
        """End vLLM's processes, by force after CLOSE_SECONDS."""
        starting, self._starting = self._starting, None
        self._llm, self._loaded = None, False
        self._last_probe, self._probes, self._held = None, 0, {}
        if starting is None:
            return
        try:
            llm = await starting  # a start cannot be interrupted, and the `load` that began it may be cancelled
        except (RuntimeError, ValueError):
            return
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # else it reports the engine's end as a failure
        await asyncio.to_thread(llm.shutdown, timeout=CLOSE_SECONDS)
        llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM closes its sockets and leaves their context

    async def _start(self) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # Folder for vLLM's sockets, which a killed vLLM leaves behind; the sandbox may hide an inherited one.
        os.environ["VLLM_RPC_BASE_PATH"] = str(process_folder("vllm"))
        arguments = AsyncEngineArgs(
            model=str(self._folder),
            trust_remote_code=False,
            skip_tokenizer_init=True,
            load_format="dummy",
            generation_config="vllm",  # omitted parameters get vLLM's neutral values, not the folder's
            dtype=VLLM_DTYPES[self._dtype],
            max_model_len=self._context_tokens_max,
            max_num_seqs=self._sequences_max,
            gpu_memory_utilization=self._gpu_memory_share,
            tensor_parallel_size=self._tensor_parallel,
            distributed_executor_backend=executor_of(self._tensor_parallel),
            kv_cache_memory_bytes=int(self._cpu_cache_gib * 2**30) if current_platform.is_cpu() else None,
            # On a CPU the head is a packed copy, and reloading a tied one leaves it on the old weights. So untie it.
            hf_overrides=({"tie_word_embeddings": False} if self._unties else {})
            | ({"head_dtype": "float32"} if self._dtype == FP32_HEAD else {}),
            block_size=self.block_tokens,
            enforce_eager=current_platform.is_cpu(),
            enable_prefix_caching=True,
            **runner_arguments(self._model_runner, seeded=self._seeded),
            worker_extension_cls=f"{self.extension.__module__}.{self.extension.__qualname__}",
            additional_config={OWNER_SETTING: os.getpid()},
            disable_log_stats=True,
        )
        log.info("starting vLLM %s; this takes tens of seconds", vllm.__version__)
        self._starting = asyncio.create_task(asyncio.to_thread(start_engine, arguments))
        try:
            self._llm = await asyncio.shield(self._starting)
        except (RuntimeError, ValueError) as error:
            self._starting = None
            raise EngineFault(
                f"vLLM did not start ({error}); its own messages are above. --engine transformers does not need vLLM"
            ) from error
        await self._llm.collective_rpc("prime_watch_logits")
        if not self._seeded:
            await self._llm.collective_rpc("prime_die_with", args=(os.getpid(),))

    async def _freeze(self) -> None:
        """Stop between two tokens, keep all keys and values, and note the length of each completion.

        Requests that have not begun are aborted instead: they would use prompt keys and values that the old policy computed.
        """
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        lengths, *_ = await self._llm.collective_rpc("prime_lengths")  # the ranks agree
        begun = {name[: len(uuid.UUID(int=0).hex)]: length for name, length in lengths.items()}
        for name, draft in self._drafts.items():
            if begun.get(name):
                draft.cut(begun[name], self._version)
            else:
                await self._llm.abort(name)

    async def replace_weights(self, weights: Weights) -> None:
        """Put new weights into vLLM and empty its prefix cache. Raises EngineMismatch."""
        await self._put(weights)
        if not await self._llm.reset_prefix_cache():
            raise EngineMismatch("vLLM could not empty its prefix cache, which holds keys and values of the old policy")

    async def _put(self, weights: Weights) -> None:
        names = to_replace(self._held, self._wanted)
        if not names:
            return
        self._held = {}  # until all of them are replaced
        changed = {name: tensor for name, tensor in weights.items() if name in names}
        memory, places = share_weights(changed, aliases=self._reference.tied if self._unties else {})
        try:
            path = f"/proc/{os.getpid()}/fd/{memory}"
            await self._llm.collective_rpc("prime_load", args=(path, places))
        finally:
            os.close(memory)
        self._held = self._wanted

    async def _check_probe(self, weights: Weights, policy_version: int) -> None:
        requests = prompts_of_probe(self._reference.vocab_size)
        found = await self._sample(requests, PROBE_TOKENS_SAMPLING)
        some = compared_after(self._probes)
        errors_T, normed_T = await asyncio.to_thread(
            errors_of_probe, self._reference, weights, requests[some], found[some]
        )
        if not is_honest_noise(errors_T, normed_T, self.info, self._checks):
            self._held = {}
            raise EngineMismatch(
                f"policy {policy_version}: vLLM's logprobs are {errors_T.mean():.3g} nats off a forward pass of the same "
                "weights; the update did not reach it. Restart the worker, or use --engine transformers"
            )
        if self._last_probe is not None and self._last_probe[0] != self._wanted and self._last_probe[1] == found:
            self._held = {}
            raise EngineMismatch(
                f"policy {policy_version}: vLLM answers the probe exactly as before, though the weights changed; "
                "the update did not reach it. Restart the worker, or use --engine transformers"
            )
        self._last_probe = self._wanted, found
        self._probes += 1

    def require_known(self, sequences: Iterable[Sequence[int]]) -> None:
        """Check that a model has these tokens: vLLM's processes end with one that it lacks. Raises EngineMismatch."""
        largest = max((max(tokens, default=0) for tokens in sequences), default=0)
        if largest >= self._reference.vocab_size:
            raise EngineMismatch(f"token {largest} is none of the model's {self._reference.vocab_size} token ids")

    async def _sample(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        self.require_known(request.prompt_token_ids for request in requests)
        drafts = [Draft(request, sampling, self._seeded) for request in requests]
        self._unfinished += len(drafts)
        try:
            # If this is cancelled, so is each request, which makes vLLM abort it.
            completions = await asyncio.gather(*(self._complete(draft) for draft in drafts))
            return await self._with_proofs(drafts, completions)
        except BaseException:
            self._forgotten += [draft.name for draft in drafts if draft.request.proofs]
            raise
        finally:
            self._finished(sum(draft.is_open for draft in drafts))

    async def _with_proofs(self, drafts: list[Draft], completions: list[Completion]) -> list[Completion]:
        lengths = [(draft.name, len(draft.token_ids)) for draft in drafts if draft.request.proofs]
        if not lengths:
            return completions
        try:
            async with asyncio.timeout(PROOFS_SECONDS_MAX):
                proofs = await self._taken_proofs(lengths)
        except TimeoutError as error:
            raise EngineMismatch(f"vLLM's worker computed no proofs within {PROOFS_SECONDS_MAX:g} s") from error
        return [replace(c, proofs=proofs.get(draft.name, b"")) for draft, c in zip(drafts, completions, strict=True)]

    async def _taken_proofs(self, lengths: list[tuple[str, int]]) -> dict[str, bytes]:
        forgotten, self._forgotten = self._forgotten, []
        proofs: dict[str, bytes] = {}
        while missing := [(name, length) for name, length in lengths if name not in proofs]:
            taken, *_ = await self._llm.collective_rpc("prime_take_proofs", args=(missing, forgotten))
            proofs |= {name: proof for (name, _), proof in zip(missing, taken, strict=True) if proof is not None}
            forgotten = []
            if len(proofs) < len(lengths):
                await asyncio.sleep(PROOFS_POLL_SECONDS)
        return proofs

    def _finished(self, number: int) -> None:
        self._unfinished -= number
        self._one_finished.set()

    async def _complete(self, draft: Draft) -> Completion:
        """Complete a draft. After each swap that interrupts it, forward its tokens again and continue."""
        asked_of = self._version
        while True:
            name = uuid.uuid4().hex
            self._drafts[name] = draft
            try:
                (final,) = [output async for output in self._llm.generate(*draft.rest(self._version), name)]
            finally:
                del self._drafts[name]
            # A swap aborts all begun requests, so what ends here was sampled by the current policy.
            draft.take(final.outputs[0], self._version)
            if final.outputs[0].finish_reason != "abort":
                draft.is_open = False
                self._finished(1)
                return draft.completion(asked_of)
            await self._resumed.wait()
            if not self._loaded:
                raise EngineMismatch("the policy that continues this completion could not be loaded")
