"""Environments built for `verifiers` (its v1 API): an installed taskset package, played by our engine.

verifiers requests tokens from a vLLM server. Here that is a loopback endpoint, `/inference/v1/generate`, which returns what the
episode's `ask` gives: the worker's engine samples, or the validator returns what was recorded. So the same code plays a rollout
and scores it again, with the environment's own prompts, tools and rewards. A sampling parameter names the rollout of a request;
all others are ignored, because the run defines the sampling.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import sys
from collections.abc import Mapping
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import env_config_type, load_environment, resolve_env_config

from prime_node.adapters.environments import verifiers_harness
from prime_node.envs.split import is_held_out
from prime_node.ports.environment import Ask
from prime_node.ports.web import Request, Response, Route, WebServer
from prime_protocol.assignment import HELD_OUT_START
from prime_protocol.rollout import Completion, FinishReason

TokenIds = tuple[int, ...]
KEY_VARIABLE = "PRIME_LOOPBACK_KEY"
ROLLOUT = "prime_rollout"
"""Sampling parameter that names the rollout."""
REQUEST_BYTES_MAX = 2**28
"""Limit on a request. A prompt of a million tokens is about seven million bytes; larger data is no prompt."""
FEW_TASKS = 16
"""Number of tasks below which none is held out: all are for training, and for evaluation too."""


class VerifiersEnvironment:
    """Implementation of ports.environment.TurnEnvironment.

    It is an asynchronous context manager, within which episodes are played.
    """

    def __init__(
        self,
        model: Path,
        server: WebServer,
        *,
        seed: int,
        taskset: str,
        env: str = "",
        renderer: str | None = None,
        **options: str | float | bool,
    ) -> None:
        """Load an installed taskset by its id, with `options` as its configuration.

        Raises ValueError.

        `env`: how its tasks are played, if not in its own way; the policy plays agents without a model of their own.
        `renderer`: a name of the renderers package, or auto.
        """
        sys.modules.setdefault(verifiers_harness.NAME, verifiers_harness)
        seat = {"harness": {"id": verifiers_harness.NAME}, "runtime": {"type": "subprocess"}}
        try:
            fields = env_config_type(taskset, env).model_fields
            seats = {name: seat for name, field in fields.items() if isinstance(field.default, vf.AgentConfig)}
            config = resolve_env_config({"id": env, "taskset": {"id": taskset, **options}, **seats})
            self._env = load_environment(config)
            self._tasks = list(self._env.taskset)
        except (ImportError, TypeError, AttributeError) as error:
            raise ValueError(f"taskset {taskset!r}: {error}") from error
        if not self._tasks:
            raise ValueError(f"taskset {taskset!r} holds no tasks")
        self._model, self._server, self._seed = model, server, seed
        self._renderer = renderer
        self._numbers = itertools.count(1)
        self._asks: dict[int, Ask] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._key = os.environ.setdefault(KEY_VARIABLE, secrets.token_hex(16))
        routes = [
            Route("POST", "/inference/v1/generate", self._generate, body_bytes_max=REQUEST_BYTES_MAX),
            Route("GET", "/v1/models", self._models),
        ]
        port = await self._server.start(routes, host="127.0.0.1", port=0)
        self._stack.push_async_callback(self._server.stop, grace_s=0.0)
        await self._stack.enter_async_context(self._env.serving())
        self._url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def prompt(self, index: int) -> str:
        """Return the prompt for people and for the difficulty pools: episodes render their own."""
        return str(self._task(index).data.prompt_text)

    def answer(self, index: int) -> str:
        """Return the task's own answer; empty if it has none."""
        return str(getattr(self._task(index).data, "answer", ""))

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        """Raise ValueError: a rollout is scored by playing it again."""
        raise ValueError("a rollout of verifiers can only be scored by replaying it")

    def held_out(self, count: int) -> list[HeldOutTask]:
        """Return the first `count` held-out tasks."""
        return [HeldOutTask(self, task) for task in self._split[1][:count]]

    async def play(self, index: int, prompt_token_ids: TokenIds, ask: Ask) -> float:
        return await self.episode(self._task(index), ask)

    async def play_parts(self, index: int, prompt_token_ids: TokenIds, ask: Ask) -> Mapping[str, float]:
        """Play one training episode and return its rewards by name, unweighted, and metrics: means over the trained agents."""
        trained = await self._trained(self._task(index), ask)
        scores = [
            {
                **{name: value for name, value in trace.metrics.items() if value is not None},
                **{name: reward.score for name, reward in trace.rewards.items() if reward is not None},
            }
            for trace in trained
        ]
        names = {name for its in scores for name in its} - {"reward"}  # that is the validators'
        return {name: sum(float(its.get(name, 0.0)) for its in scores) / len(scores) for name in sorted(names)}

    async def episode(self, task: Any, ask: Ask) -> float:
        """Play one episode and return the mean of its rewards over the trained agents. Raises its errors."""
        trained = await self._trained(task, ask)
        return sum(float(trace.reward) for trace in trained) / max(1, len(trained))

    async def _trained(self, task: Any, ask: Ask) -> list[Any]:
        """Play one episode and return the traces of the trained agents."""
        number = next(self._numbers)
        self._asks[number] = ask
        client = vf.TrainClientConfig(
            base_url=self._url,
            api_key_var=KEY_VARIABLE,
            renderer_model_name=str(self._model),
            renderer=self._renderer_config,
        )
        context = vf.ModelContext(
            model=self._model.name, client=client, sampling=vf.SamplingConfig.model_validate({ROLLOUT: number})
        )
        try:
            (slot,) = self._env.slots(task, 1)
            episode = await self._env.run_slot(slot, context)
        finally:
            del self._asks[number]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}"[:300])
        return [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]

    @cached_property
    def _renderer_config(self) -> Any:
        from prime_node.adapters.models.package_renderer import bounded_config

        return bounded_config(self._model, self._renderer)

    @cached_property
    def _split(self) -> tuple[list[Any], list[Any]]:
        """Training tasks and held-out ones, split by their content."""
        if len(self._tasks) < FEW_TASKS:
            return self._tasks, self._tasks
        held_out = [task for task in self._tasks if is_held_out(task.hash)]
        return [task for task in self._tasks if not is_held_out(task.hash)], held_out

    def _task(self, index: int) -> Any:
        if index >= HELD_OUT_START:
            return self._split[1][index - HELD_OUT_START]
        number = int.from_bytes(sha256(f"{self._seed} {index}".encode()).digest()[:6], "big")
        return self._split[0][number % len(self._split[0])]

    async def _generate(self, request: Request) -> Response:
        if request.headers.get("authorization") != f"Bearer {self._key}":
            return Response(status=401)
        body = json.loads(request.body)
        ask = self._asks.get(body["sampling_params"].get(ROLLOUT, 0))
        completion = None if ask is None else await ask(tuple(body["token_ids"]))
        if completion is None:
            error = {"message": "this rollout's maximum context length or number of turns is reached", "code": 400}
            return Response(json.dumps({"error": error}).encode(), status=400)
        return Response(json.dumps(_answer(completion)).encode())

    async def _models(self, request: Request) -> Response:
        model = {"id": self._model.name, "object": "model"}  # `ask` knows the limit on prompts
        return Response(json.dumps({"object": "list", "data": [model]}).encode())


class HeldOutTask:
    """Implementation of ports.environment.TurnProblem."""

    def __init__(self, environment: VerifiersEnvironment, task: Any) -> None:
        self._environment, self._task = environment, task
        self.prompt = str(task.data.prompt_text)

    async def play(self, prompt_token_ids: TokenIds, ask: Ask) -> float:
        """Play one evaluation episode and return its reward."""
        return await self._environment.episode(self._task, ask)

    def is_correct(self, completion: str, *, finished: bool) -> bool:
        """Raise ValueError: a rollout is scored by playing it."""
        raise ValueError("a rollout of verifiers can only be scored by playing it")

    def score(self, completion: str, *, finished: bool) -> float:
        """Raise ValueError: a rollout is scored by playing it."""
        raise ValueError("a rollout of verifiers can only be scored by playing it")


def _answer(completion: Completion) -> dict[str, Any]:
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    choice = {
        "index": 0,
        "token_ids": list(completion.token_ids),
        "finish_reason": "stop" if completion.finish is FinishReason.STOP else "length",
        "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]},
    }
    return {"request_id": secrets.token_hex(8), "choices": [choice]}
