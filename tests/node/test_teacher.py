"""On-policy distillation: the step waits for a teacher's logprobs, and the student approaches the teacher."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from tests.node.batch_coordinator import BatchCoordinator, make_run
from tests.node.teacher_world import BackendTeacher
from tests.node.trainer_world import CONFIG, make_trainer, rows
from tests.time_world import VirtualClock
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.engines.vllm_teacher import VllmTeacher
from prime_node.adapters.models.pretrained_model import pretrained_weights
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.broadcast.audit.safetensors_file import write_safetensors
from prime_node.ports.teacher import TeacherRefusal
from prime_node.ports.train_samples import TrainingMode, TrainSample
from prime_node.ports.transport import Unreachable
from prime_node.trainer.algorithm_config import TeacherConfig
from prime_node.trainer.loop import run_trainer
from prime_node.trainer.teaching import check_teacher, taught
from prime_protocol.errors import LocalError

SEQUENCES = [(1, 2, 3), (7, 8, 9, 10, 11), (4, 5)]
OPD = CONFIG.model_copy(update={"mode": TrainingMode.OPD, "teacher": TeacherConfig(url="http://unused", model="t")})


async def test_a_student_comes_nearer_to_its_teacher_and_waits_for_one_that_is_away(tmp_path: Path) -> None:
    coordinator = BatchCoordinator(make_run(max_steps=6))
    trainer = make_trainer(tmp_path, coordinator, config=OPD)
    teacher = BackendTeacher(tmp_path / "model", seed=99, away=3)
    trainer.teacher = teacher
    assert await run_trainer(trainer, asyncio.Event())
    distances = [float(str(row["teacher_kl"])) for row in rows(tmp_path, "teacher_kl")]
    assert teacher.away == 0
    assert len(distances) == 6
    assert distances[-1] < distances[0]


class Choosy(BackendTeacher):
    """Teacher that refuses sequences which contain a token."""

    def __init__(self, folder: Path, *, lacks: int) -> None:
        super().__init__(folder, seed=99)
        self._lacks = lacks

    async def logprobs(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        if any(self._lacks in sequence for sequence in sequences):
            raise TeacherRefusal("HTTP 400: token id is out of vocabulary")
        return await super().logprobs(sequences)

    async def sequence_tokens_max(self) -> int | None:
        return 2


async def test_a_sample_that_the_teacher_refuses_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before, one worker's sample ended the trainer, at each start."""
    await make_trainer(tmp_path, BatchCoordinator(make_run(max_steps=1)), config=OPD).close()
    samples = [TrainSample((1,), (2, token), (0.0, 0.0), 1.0, mode=TrainingMode.OPD) for token in (3, 4, 5)]
    teacher = Choosy(tmp_path / "model", lacks=4)
    found = await taught(samples, teacher, clock=VirtualClock(), vocab_size=264)
    assert [one.completion_token_ids for one in found] == [(2, 3), (2, 5)]
    assert all(len(one.teacher_logprobs or ()) == 2 for one in found)
    assert len([line for line in caplog.messages if "a sample is left out" in line]) == 1


async def test_what_the_teacher_lacks_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make_run(max_steps=1)
    await make_trainer(tmp_path, BatchCoordinator(run), config=OPD).close()
    await check_teacher(Choosy(tmp_path / "model", lacks=run.spec.vocab_size - 1), run.spec, clock=VirtualClock())
    assert any("the teacher lacks some of the run's" in line for line in caplog.messages)
    assert any("the teacher scores sequences of at most 2 tokens" in line for line in caplog.messages)
    with pytest.raises(LocalError, match="the teacher refuses a sequence of two tokens"):
        await check_teacher(Choosy(tmp_path / "model", lacks=0), run.spec, clock=VirtualClock())


async def test_stopping_ends_the_wait_for_a_teacher(tmp_path: Path) -> None:
    stop = asyncio.Event()

    class Gone(BackendTeacher):
        async def logprobs(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
            stop.set()
            raise Unreachable("gone")

    trainer = make_trainer(tmp_path, BatchCoordinator(make_run(max_steps=6)), config=OPD)
    trainer.teacher = Gone(tmp_path / "model", seed=1)
    assert not await run_trainer(trainer, stop)
    assert trainer.state.step == 0


async def test_distillation_without_a_teacher_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"environment_modes": {"echo": TrainingMode.OPD}})
    with pytest.raises(LocalError, match=r"mode opd needs a teacher: set trainer\.teacher\.url"):
        await run_trainer(
            make_trainer(tmp_path, BatchCoordinator(make_run(max_steps=1)), config=config), asyncio.Event()
        )


_PLACE = {"5": {"logprob": -0.5, "rank": 1}}


def _wide(number: int) -> dict[str, dict[str, float]]:
    return {str(token): {"logprob": -0.5, "rank": 1} for token in range(number)}


def _top(places: list[dict[str, dict[str, float]]]) -> str:
    return json.dumps({"choices": [{"index": 0, "prompt_logprobs": [None, *places]}]})


@pytest_asyncio.fixture
async def broken_server() -> AsyncIterator[str]:
    """Answer as a server that is not a teacher, chosen by the model's name."""

    async def answer(request: web.Request) -> web.Response:
        asked = await request.json()
        status, text = {
            "busy": (503, "starting"),
            "long": (400, "the prompt is longer than the model's context"),
            "unknown": (404, "the model does not exist"),
            "html": (200, "<html>"),
            "other": (200, '{"choices": [{"index": 0, "text": "hello"}]}'),
            "nested": (200, "[" * 100_000),
            "large": (200, "[" + "0, " * 2_000 + "0]"),
            "good": (
                200,
                '{"choices": [{"index": 0, "prompt_logprobs": [null, {"5": {"logprob": -0.5, "rank": 1}}]}]}',
            ),
            "short": (200, '{"choices": [{"index": 0, "prompt_logprobs": [null]}]}'),
            "infinite": (200, '{"choices": [{"index": 0, "prompt_logprobs": [null, {"5": {"logprob": -Infinity}}]}]}'),
            "endless": (200, _top([_PLACE] * 4 + [_wide(2_000)])),
            "wide": (200, _top([_wide(2_000)] * 5)),
            "huge": (200, _top([{str(2**70): {"logprob": -0.5, "rank": 1}}] * 5)),
            "certain": (200, _top([{"5": {"logprob": float("inf"), "rank": 1}}] * 5)),
            "few": (200, _top([_PLACE] * 3)),
        }[asked["model"]]
        return web.Response(status=status, text=text)

    app = web.Application()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "long", "max_model_len": 64}, {"id": "busy"}]})

    app.router.add_post("/v1/completions", answer)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield "http://{}:{}".format(*runner.addresses[0][:2])
    await runner.cleanup()


@pytest.mark.parametrize(
    ("model", "fault", "why"),
    [
        ("busy", Unreachable, "HTTP 503: starting"),
        ("long", TeacherRefusal, "refuses: HTTP 400: the prompt is longer"),
        ("unknown", LocalError, "refuses: HTTP 404: the model does not exist"),
        ("html", LocalError, "is not JSON"),
        ("nested", LocalError, "is not JSON"),
        ("large", LocalError, r"more than 4,096 bytes; lower trainer\.distillation\.topk"),
        ("other", LocalError, "no prompt logprobs"),
        ("short", LocalError, "no prompt logprobs"),
        ("infinite", LocalError, "not finite"),
    ],
)
async def test_a_server_that_is_no_teacher_is_explained(
    broken_server: str, model: str, fault: type[Exception], why: str
) -> None:
    teacher = VllmTeacher(broken_server + "/v1/", model=model, answer_bytes_max=2**17 if model == "nested" else 4_096)
    with pytest.raises(fault, match=why):
        await teacher.logprobs([(4, 5)])
    await teacher.close()
    await teacher.close()


@pytest.mark.parametrize(
    ("model", "count"), [("endless", -1), ("wide", 4), ("huge", 4), ("certain", 4), ("few", 4), ("few", -1)]
)
async def test_likeliest_tokens_that_are_none_are_refused(broken_server: str, model: str, count: int) -> None:
    """Before, one long place of many cost its length at each, a large token id ended the trainer, and +inf reached the loss."""
    teacher = VllmTeacher(broken_server, model=model)
    with pytest.raises(LocalError, match="no prompt logprobs"):
        await teacher.top_logprobs([(4, 5, 6, 7, 8, 9)], count)
    await teacher.close()


class Watched(tuple[int, ...]):
    """Sequence that notes which threads read a part of it."""

    __slots__ = ()
    readers: ClassVar[set[str]] = set()

    def __getitem__(self, place: Any) -> Any:
        self.readers.add(threading.current_thread().name)
        return super().__getitem__(place)


async def test_answers_are_parsed_in_another_thread(broken_server: str) -> None:
    teacher = VllmTeacher(broken_server, model="good")
    assert await teacher.logprobs([Watched((4, 5))]) == [(-0.5,)]
    assert Watched.readers
    assert threading.current_thread().name not in Watched.readers
    (top,) = await teacher.top_logprobs([(4, 5)], 1)
    assert (top.token_ids_NK.tolist(), top.logprobs_NK.tolist()) == ([[5]], [[-0.5]])
    await teacher.close()


@pytest.mark.parametrize(("model", "tokens_max"), [("long", 63), ("busy", None), ("unknown", None)])
async def test_a_server_s_list_of_models_says_how_long_sequences_may_be(
    broken_server: str, model: str, tokens_max: int | None
) -> None:
    teacher = VllmTeacher(broken_server, model=model)
    assert await teacher.sequence_tokens_max() == tokens_max
    await teacher.close()


async def test_a_server_that_is_away_may_be_asked_again() -> None:
    with socket.socket() as held:  # bound and not listening: nothing answers there
        held.bind(("127.0.0.1", 0))
        teacher = VllmTeacher(f"http://127.0.0.1:{held.getsockname()[1]}", model="t")
        with pytest.raises(Unreachable, match="teacher http"):
            await teacher.logprobs([(4, 5)])
        await teacher.close()


@pytest.fixture
def vllm_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Start what `vllm serve` starts, on a tiny model's folder."""
    folder = tmp_path / "teacher"
    folder.mkdir()
    write_tiny_model(folder, hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128)
    weights = TorchBackend(folder, seed=5, threads=1, published_dtype="fp32").snapshot()
    write_safetensors(folder / "model.safetensors", weights)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "teacher"]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "64"]
    command += ["--enforce-eager", "--skip-tokenizer-init"]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(
        command, env=os.environ | quiet, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert server.stdout is not None
    errors: list[str] = []
    changed = threading.Event()

    def listen(lines: Iterable[str]) -> None:
        for line in lines:
            errors.append(line)
            if "Application startup complete" in line:
                changed.set()
        changed.set()

    listener = threading.Thread(target=listen, args=(server.stdout,))
    listener.start()
    try:
        assert changed.wait(200.0), "".join(errors[-20:])
        assert server.poll() is None, "".join(errors[-20:])
        yield f"http://127.0.0.1:{port}", folder
    finally:
        server.terminate()
        server.wait(60.0)
        listener.join()
        server.stdout.close()
        print("".join(errors[-40:]))


@pytest.mark.vllm
@pytest.mark.timeout(300)
async def test_a_real_vllm_server_returns_what_the_model_computes(vllm_server: tuple[str, Path]) -> None:
    """Tolerance: 1e-3 nats, between two engines in fp32."""
    url, folder = vllm_server
    local = TorchBackend(folder, pretrained_weights(str(folder)), threads=1, published_dtype="fp32")
    samples = [TrainSample(ids[:1], ids[1:], (0.0,) * (len(ids) - 1), 0.0) for ids in SEQUENCES]
    teacher, unknown = VllmTeacher(url, model="teacher"), VllmTeacher(url, model="another")
    try:
        found = await teacher.logprobs(SEQUENCES)
        likeliest = await teacher.top_logprobs(SEQUENCES, 5)
        with pytest.raises(TeacherRefusal, match="HTTP 400"):
            await teacher.top_logprobs(SEQUENCES, 21)
        with pytest.raises(LocalError, match="refuses: HTTP 404"):
            await unknown.logprobs(SEQUENCES)
    finally:
        await teacher.close()
        await unknown.close()
    for values, expected in zip(found, local.logprobs(samples), strict=True):
        assert values == pytest.approx(expected, abs=1e-3)
    for top, expected_top in zip(likeliest, local.top_logprobs(samples, 5), strict=True):
        assert top.token_ids_NK.shape == expected_top.token_ids_NK.shape
        np.testing.assert_allclose(top.logprobs_NK, expected_top.logprobs_NK, atol=1e-3)
