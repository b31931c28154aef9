"""Fuzz the coordinator's whole HTTP interface: a real daemon, and callers of every role with valid and broken requests.

    .venv/bin/python scripts/fuzz/http_api.py --seconds 60 [--seed 7] [--replay FILE]

Requests are made from valid ones, changed field by field, signed again with the keys of each role and of strangers, and sent to
all routes in sequences: later requests name what the daemon has answered (leases, bundles, batches, digests). Some callers follow
the protocol, so that such names exist. Then these must hold: no answer of 500 or above except an explained 503; every answer of
400 or above is an ErrorBody with the status of its code; no traceback in the log; the daemon still answers; after a kill it
starts again from what it kept, with the same run; the state that each daemon leaves on its disk keeps its invariants. A finding
is kept as findings/http_api-NAME; --replay sends it to a new daemon.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import aiohttp

HERE = Path(__file__).parent
ROOT_FOLDER = HERE.parents[1]
sys.path[:0] = [str(ROOT_FOLDER), str(HERE)]

from http_callers import Finding, Fuzzer, Sent  # noqa: E402 (the path is set above)
from tests.node import coordinator_world as cw  # noqa: E402
from tests.node.coordinator_process import crash_run  # noqa: E402

from prime_node.adapters.storage.sqlite_store import open_sqlite  # noqa: E402
from prime_node.coordinator.state import invariants  # noqa: E402
from prime_node.coordinator.state.rules import rules_of  # noqa: E402
from prime_node.coordinator.state_follower import restore_state  # noqa: E402
from prime_protocol.errors import LocalError  # noqa: E402

FINDINGS = HERE / "findings"
WALLS = ("connects_per_second=1e9", "public_requests_per_second=1e9")
"""Settings of the daemon. An answer to a broken request ends its connection, so that the callers, who have one address,
connect faster than one network may. With these settings no connection is reset by design, and every reset is a finding."""


@contextlib.asynccontextmanager
async def daemon(folder: Path, log: Path) -> AsyncIterator[int]:
    """A coordinator in a process of its own; killed in the end. Gives its port."""
    with _appended(log) as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.node.coordinator_process", str(folder), "0", "0.0", *WALLS),
            cwd=ROOT_FOLDER,
            stdout=asyncio.subprocess.PIPE,
            stderr=out,
        )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        if not line:
            raise Finding(f"the daemon did not start: {_text_of(log)[-2_000:]}")
        yield int(line)
        if process.returncode is not None:
            raise Finding(f"the daemon ended by itself: {_text_of(log)[-2_000:]}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def fuzz(seconds: float, seed: int, replayed: Sent | None = None) -> None:
    """Raises Finding."""
    with tempfile.TemporaryDirectory(prefix="prime-http-") as folder:
        await _fuzz_in(Path(folder), seconds, seed, replayed)


async def _fuzz_in(folder: Path, seconds: float, seed: int, replayed: Sent | None) -> None:
    log = folder / "log"
    run = cw.make_run(**crash_run())
    for again in (False, True):
        async with daemon(folder, log) as port, aiohttp.ClientSession() as session:
            world = cw.World(run, cw.memory_parts(run), f"http://127.0.0.1:{port}", session)
            fuzzer = Fuzzer(world, seed)
            try:
                await world.learn_epoch()
                if replayed is not None:
                    await fuzzer.send(replayed)
                elif again:
                    await fuzzer.send(("GET", "/v1/status", {}, b""))
                else:
                    await _kept_where_wrong(fuzzer, seconds)
                    print(
                        f"{sum(fuzzer.outcomes.values()):,} requests: "
                        + ", ".join(f"{count} x {outcome}" for outcome, count in fuzzer.outcomes.most_common())
                    )
                _, text, _ = await world.get("/healthz")
                if json.loads(text)["run"] != run.digest:
                    raise Finding("the daemon answers for another run")
            finally:
                for client in world.clients.values():
                    await client.close()
        await _check_kept(folder)
    logged = _text_of(log)
    if "Traceback" in logged:
        raise Finding(f"a traceback in the log: {logged[logged.index('Traceback') :][:3_000]}")


async def _check_kept(folder: Path) -> None:
    """Raises Finding where the state that a killed daemon left breaks an invariant."""
    run = cw.make_run(**crash_run())
    store = await open_sqlite(folder / "state.db", run=run.digest)
    try:
        number, state = await restore_state(store, rules_of(run))
        invariants.check_invariants(state)
        print(f"state of {number} events: its invariants hold")
    except (AssertionError, LocalError) as error:
        raise Finding(f"what the daemon kept is wrong: {error!r}") from None
    finally:
        await store.close()


def _appended(log: Path) -> BinaryIO:
    return log.open("ab")


def _text_of(log: Path) -> str:
    return log.read_text(errors="replace")


async def _kept_where_wrong(fuzzer: Fuzzer, seconds: float) -> None:
    """Raises Finding, after the last request was kept."""
    try:
        await fuzzer.for_a_while(seconds)
    except Finding as finding:
        if fuzzer.last is None:
            raise
        method, path, headers, body = fuzzer.last
        text = json.dumps([method, path, headers, base64.b64encode(body).decode()])
        FINDINGS.mkdir(exist_ok=True)
        kept = FINDINGS / f"http_api-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        kept.write_text(text)
        raise Finding(f"{finding}\nscripts/fuzz/http_api.py --replay {kept}") from None


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--seconds", type=float, default=60)
    asked.add_argument("--seed", type=int, default=None)
    asked.add_argument("--replay", type=Path)
    options = asked.parse_args()
    seed = options.seed if options.seed is not None else random.randrange(2**32)
    replayed: Sent | None = None
    if options.replay is not None:
        method, path, headers, body = json.loads(options.replay.read_text())
        replayed = method, path, headers, base64.b64decode(body)
    print(f"http_api: seed {seed}", flush=True)
    try:
        asyncio.run(fuzz(options.seconds, seed, replayed))
    except Finding as finding:
        print(f"http_api: {finding}")
        return 1
    print("http_api: no finding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
