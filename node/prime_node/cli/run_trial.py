"""Measurements of this machine for one run: disk, download, reachability, memory and engine. `prime-node doctor LINK` starts it.

It handles files of the run, so it is a child process that confines itself as a worker does: `python -m prime_node.cli.run_trial
LINK FOLDER`. Each line that it prints is a finding as JSON. The engine computes with random weights, so none are downloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prime_protocol.errors import ErrorCode, LocalError, RemoteError

if TYPE_CHECKING:
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.ports.swarm import PeerFinder
    from prime_node.ports.transport import PublicSource
    from prime_node.worker.config import WorkerConfig
    from prime_protocol.identity import SigningKey
    from prime_protocol.run_spec import JoinLink, PinnedRun


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `needed_for` is empty if nothing works without it."""

    what: str
    ok: bool
    seen: str
    advice: str = ""
    needed_for: str = ""
    tokens_per_s: float | None = None
    """Measured speed of the engine, in its own line."""


DISK_BYTES = 32 * 2**20
DISK_BYTES_PER_S_MIN = 2 * 2**20
DOWNLOAD_S_MAX, DOWNLOAD_BYTES_MAX, PIECE_BYTES = 4.0, 64 * 2**20, 2**20
DOWNLOAD_BYTES_MIN = 2**17
"""Bytes below which a download does not show the bandwidth."""
REACH_S_MAX, REACH_PAUSE_S = 8.0, 0.5
ENGINE_S = 2.0
"""Time after which the measurement of the engine is long enough."""
PROMPT_TOKENS, COMPLETION_TOKENS_MAX, SEQUENCES_MAX = 32, 64, 64
BYTES_PER_PARAMETER = 8
"""Memory of the weights: four bytes in the engine, and two policies of two bytes each."""


async def try_run(
    link: JoinLink, folder: Path, settings: WorkerConfig, grants: EnvironmentSettings
) -> AsyncGenerator[Finding, None]:
    """Yield what was measured, the quick parts first."""
    from prime_node.cli import wire
    from prime_node.ports.transport import Unreachable
    from prime_protocol.identity import SigningKey

    key = SigningKey(os.urandom(32))
    yield await asyncio.to_thread(_disk_speed, folder)
    async with wire.client(link, key) as client:
        try:
            run = await wire.pinned_run(client, link.run, folder, mirrors=settings.mirrors)
        except (RemoteError, Unreachable, LocalError) as error:
            yield Finding("run", False, "", f"its files cannot be used: {error}")
            return
        yield await _download_speed(client)
        if settings.swarm.enabled and not settings.swarm.private:
            yield await _reach(client, run, key, settings)
    model = folder / "model"
    try:
        yield (room := await asyncio.to_thread(_memory_for, model))
        if not room.ok:
            return
        await asyncio.to_thread(_check_turns, run, model, grants, folder)
        yield await _engine_speed(run, model, settings)
    except LocalError as error:
        yield Finding("engine", False, "", str(error))


def _disk_speed(folder: Path) -> Finding:
    """Write and sync a file."""
    data, path = os.urandom(2**20), folder / "disk-speed"
    began_s = time.monotonic()
    try:
        with path.open("wb") as file:
            for _ in range(DISK_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding("disk speed", False, str(error.strerror), "free some space, or name another --folder")
    finally:
        path.unlink(missing_ok=True)
    speed = DISK_BYTES / (time.monotonic() - began_s)
    seen = f"{speed / 1e6:.0f} MB/s written"
    return Finding(
        "disk speed", speed >= DISK_BYTES_PER_S_MIN, seen, "name a --folder on a faster disk", "quick starts"
    )


async def _download_speed(source: PublicSource) -> Finding:
    """Download a part of the newest policy."""
    from prime_node.ports.transport import Unreachable
    from prime_protocol.envelope import parse_json
    from prime_protocol.manifest import Manifest

    needed = "new policies in time"
    try:
        head = await source.head()
        if head is None:
            return Finding("download", True, "not measured: no policy is published yet")
        blobs = sorted(parse_json(head.payload, Manifest).blobs, key=lambda blob: -blob.size)
        num_bytes, began_s = 0, time.monotonic()
        for blob in blobs:
            for start in range(0, blob.size, PIECE_BYTES):
                num_bytes += len(await source.blob(blob.digest, start=start, end=min(blob.size, start + PIECE_BYTES)))
                taken_s = time.monotonic() - began_s
                if taken_s > DOWNLOAD_S_MAX or num_bytes > DOWNLOAD_BYTES_MAX:
                    break
            else:
                continue
            break
    except RemoteError as error:
        return Finding("download", True, f"not measured: the coordinator serves no checkpoints ({error.code})")
    except Unreachable as error:
        return Finding("download", False, str(error), "check the network between this machine and the run", needed)
    if num_bytes < DOWNLOAD_BYTES_MIN:
        return Finding("download", True, f"not measured: a policy has {num_bytes:,} bytes only")
    return Finding("download", True, f"{8 * num_bytes / taken_s / 1e6:.0f} Mbit/s from the coordinator")


async def _reach(finder: PeerFinder, run: PinnedRun, key: SigningKey, settings: WorkerConfig) -> Finding:
    """Have the coordinator dial this machine back, as it does before it lists a peer."""
    from prime_node.cli import wire
    from prime_node.ports.transport import Unreachable
    from prime_node.ports.web import Request, Response, Route
    from prime_protocol.envelope import PayloadType, seal
    from prime_protocol.peers import PeerAnswer
    from prime_protocol.requests import PeersRequest

    needed = "serving other workers over HTTP"

    async def identity(request: Request) -> Response:
        answer = PeerAnswer(run=run.digest, nonce=request.headers.get("prime-nonce", ""))
        return Response(seal(answer, PayloadType.PEER_ANSWER, key).to_bytes())

    server, reachable = wire.web_server(), None
    try:
        port = await server.start(
            [Route("GET", "/v1/identity", identity)], host=settings.swarm.host, port=settings.swarm.port
        )
        end_s = time.monotonic() + REACH_S_MAX
        while reachable is None and time.monotonic() < end_s:
            reachable = (await finder.find_peers(PeersRequest(port=port, peers_max=0))).reachable
            if reachable is None:
                await asyncio.sleep(REACH_PAUSE_S)
        await finder.find_peers(PeersRequest(peers_max=0))  # withdraws the offer
    except RemoteError as error:
        closed = error.code is ErrorCode.NOT_INVITED
        why = "only members of this run are dialled back" if closed else str(error)
        return Finding("reachability", True, f"not measured: {why}")
    except (Unreachable, LocalError) as error:
        return Finding("reachability", False, str(error), "set worker.swarm.port to a free port", needed)
    finally:
        await server.stop(grace_s=0.1)
    if reachable is None:
        return Finding("reachability", True, "not measured: the coordinator dials this address back later")
    advice = "forward a port to it and set worker.swarm.port; without one it still works, and fetches from others"
    seen = "the run reaches this machine" if reachable else f"behind a NAT or firewall ({socket.gethostname()})"
    return Finding("reachability", reachable, seen, advice, needed)


def _memory_for(model: Path) -> Finding:
    from prime_node.cli import wire
    from prime_node.memory import available_bytes

    parameters, available = wire.num_parameters(model), available_bytes()
    needed = parameters * BYTES_PER_PARAMETER
    seen = f"{parameters / 1e6:,.1f} M parameters need about {needed / 2**30:.2g} GiB"
    if available is None:
        return Finding("model", True, seen)
    seen += f" of {available / 2**30:.1f} GiB available"
    return Finding("model", needed < available, seen, "end other programs, or join a run with a smaller model")


def _check_turns(run: PinnedRun, model: Path, grants: EnvironmentSettings, folder: Path) -> None:
    """Build the environments that a worker of this run must run. Raises LocalError."""
    from prime_node.cli import wire
    from prime_node.cli.wire_environments import end_environments

    end_environments(wire.turn_environments(run.spec, model, grants, None, folder=folder))


async def _engine_speed(run: PinnedRun, model: Path, settings: WorkerConfig) -> Finding:
    """Generate with random weights, more completions and longer ones each time, until it takes long enough to count."""
    from prime_node.cli import wire
    from prime_node.cli.wire_classes import slow_arithmetic, worker_kind
    from prime_node.ports.engine import GenerateRequest
    from prime_protocol.assignment import Sampling

    spec, kind = run.spec, worker_kind(settings)
    engine = wire.plain_engine(
        kind,
        model,
        threads=settings.threads,
        context_tokens_max=PROMPT_TOKENS + COMPLETION_TOKENS_MAX,
        cpu_cache_gib=settings.cpu_cache_gib,
        gpu_memory_share=settings.gpu_memory_share,
    )
    try:
        await engine.load(await asyncio.to_thread(wire.plain_weights, model, random_seed=0), policy_version=0)
        num_sequences, num_tokens, speed = min(spec.rollouts_per_group, SEQUENCES_MAX), 8, 0.0
        while True:
            sampling = Sampling(
                temperature=spec.sampling.temperature or 1.0, completion_tokens_max=num_tokens, stop_token_ids=()
            )
            requests = [
                GenerateRequest(
                    tuple(
                        (7 * place + number // spec.rollouts_per_group) % spec.vocab_size
                        for place in range(PROMPT_TOKENS)
                    ),
                    seed=number,
                )
                for number in range(num_sequences)
            ]
            began_s = time.monotonic()
            completions = await engine.generate(requests, sampling)
            taken_s = time.monotonic() - began_s
            speed = sum(len(one.token_ids) for one in completions) / max(taken_s, 1e-9)
            is_full = num_sequences >= SEQUENCES_MAX and num_tokens >= COMPLETION_TOKENS_MAX
            if taken_s > ENGINE_S or is_full:
                break
            num_sequences = min(SEQUENCES_MAX, 2 * num_sequences)
            num_tokens = min(COMPLETION_TOKENS_MAX, 2 * num_tokens)
    finally:
        await engine.close()
    threads = "1 thread" if settings.threads == 1 else f"{settings.threads} threads"
    seen = f"{kind} with {threads}: {speed:,.0f} tokens/s"
    slow = slow_arithmetic(kind)
    return Finding("engine", not slow, seen, slow, "generating at full speed", tokens_per_s=round(speed, 1))


def print_trial() -> None:
    """Measure, and print each finding."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start threads that cannot be confined
    from prime_node.cli.place import parse_link
    from prime_node.cli.wire_sandbox import confine_role, worker_needs
    from prime_node.envs.settings import EnvironmentSettings
    from prime_node.worker.config import WorkerConfig

    link, folder = parse_link(sys.argv[1]), Path(sys.argv[2])
    settings, grants = WorkerConfig.load(), EnvironmentSettings.load()
    confine_role(settings.sandbox, folder, worker_needs(settings, grants, None))

    async def measure() -> None:
        async with contextlib.aclosing(try_run(link, folder, settings, grants)) as findings:
            async for finding in findings:
                print(json.dumps(asdict(finding)), flush=True)

    asyncio.run(measure())


if __name__ == "__main__":
    print_trial()
