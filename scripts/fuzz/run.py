"""Run every parser's fuzzer for a while; see scripts/fuzz/all.

    scripts/fuzz/all --minutes 5 [--jobs 2] [--seed 7] [--only NAME ...]
    scripts/fuzz/all --replay NAME       a finding or an input of the corpus, by its name
    scripts/fuzz/all --corpus            only the inputs of the corpus; seconds
    scripts/fuzz/all --keep              and add inputs with new outcomes to the corpus

`--minutes` is the processor time of all jobs together. A finding is any exception that a parser may not raise, bytes that are not
written as they were read, more than SECONDS_MAX or more than MEMORY_BYTES_MAX for one input. It is kept as findings/NAME, and
the exit status is 1. Run with the same seed, a job tries the same inputs, as far as it gets.

An input whose outcome is new (another error, or another place in the message that it names) is mutated further, and with
--keep stays in the corpus: so it has one input for each outcome, and some that reached lines late.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import FrameType

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]
CORPUS, FINDINGS = HERE / "corpus", HERE / "findings"
MEMORY_BYTES_MAX = 2**30
"""Address space beyond what the process holds at its start."""
SECONDS_MAX = 5.0
"""Processor time for one input."""
KEPT_BYTES_MAX = 1_024
"""An input of the corpus."""
EACH_MAX = 40
"""Inputs of the corpus for one parser."""
DEEP = {"chunks.py": 3.0, "frames.py": 2.0, "http_api.py": 20.0}
"""Separate fuzzers, which compare several decoders or drive a daemon: each gets the time of this many parsers."""


class Slow(Exception):
    """One input took longer than SECONDS_MAX."""


@cache
def parsers() -> dict:  # type: ignore[type-arg]  # the registry is imported late: it needs the path above
    from node_registry import node_parsers
    from registry import protocol_parsers

    return {parser.name: parser for parser in [*protocol_parsers(), *node_parsers()]}


def kept(name: str) -> list[bytes]:
    """The inputs of the corpus for one parser: a line each, in base64."""
    path = CORPUS / f"{name}.txt"
    return [base64.b64decode(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep_more(name: str, more: Sequence[bytes]) -> None:
    """Add inputs to the corpus, the shortest first, as long as there is room."""
    lines = [base64.b64encode(data).decode() for data in kept(name)]
    lines += [base64.b64encode(data).decode() for data in sorted(more, key=len) if len(data) <= KEPT_BYTES_MAX]
    if lines:
        CORPUS.mkdir(exist_ok=True)
        (CORPUS / f"{name}.txt").write_text("\n".join(lines[:EACH_MAX]) + "\n")


def name_of(parser: str, data: bytes) -> str:
    return f"{parser}-{hashlib.sha256(data).hexdigest()[:12]}"


def outcome(parser, data: bytes) -> str:  # type: ignore[no-untyped-def]
    """Return the kind of outcome of an input. Raises if it is a finding."""
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_MAX)
    try:
        value = parser.parse(data)
        written = parser.again(value) if parser.again is not None else data
    except parser.refusals as error:
        if isinstance(error, (AssertionError, Slow)):
            raise
        words = re.sub(r"'[^']*'|\"[^\"]*\"|[0-9a-f]{8,}|\d+|/\S+", "#", str(error))
        return f"{type(error).__name__} {getattr(error, 'code', '')} {words[:80]}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    assert written == data, f"written as {written[:200]!r}"
    return "accepted"


def found(parser, data: bytes) -> Path | None:  # type: ignore[no-untyped-def]
    """Run one input; keep and report it if it is a finding."""
    try:
        outcome(parser, data)
    except BaseException:  # noqa: BLE001 (whatever it is, it is a finding)
        traceback.print_exc()
        FINDINGS.mkdir(exist_ok=True)
        path = FINDINGS / name_of(parser.name, data)
        path.write_bytes(data)
        return path
    return None


def fuzz(name: str, seconds: float, seed: int, keep: bool) -> bool:
    """One parser for so long, in this process. True where nothing was found."""
    from mutate import mutated

    bound_memory()
    parser = parsers()[name]
    rng, seen, pool = random.Random(f"{seed} {name}"), set(), [*parser.seeds]
    for data in [*parser.seeds, *kept(name)]:
        if path := found(parser, data):
            print(f"{name}: an input of the corpus is a finding; scripts/fuzz/all --replay {path.name}", flush=True)
            return False
        if (new := outcome(parser, data)) not in seen:
            seen.add(new)
            pool.append(data)
    more: list[bytes] = []
    end, tried, accepted = time.process_time() + seconds, 0, 0
    while time.process_time() < end:
        data = mutated(pool, rng)
        tried += 1
        try:
            new = outcome(parser, data)
        except BaseException:  # noqa: BLE001 (whatever it is, it is a finding)
            path = found(parser, data) or FINDINGS
            print(
                f"{name}: a finding after {tried} inputs (seed {seed}); scripts/fuzz/all --replay {path.name}",
                flush=True,
            )
            return False
        accepted += new == "accepted"
        if new not in seen and len(seen) < 400:
            seen.add(new)
            pool.append(data)
            more.append(data)
    if keep:
        keep_more(name, more)
    print(f"{name}: {tried:,} inputs, {accepted:,} of them accepted, {len(seen)} outcomes (seed {seed})", flush=True)
    return True


def bound_memory() -> None:
    """MemoryError for what would take more, and Slow for what would take longer."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))

    def stop(_: int, __: FrameType | None) -> None:
        raise Slow(f"more than {SECONDS_MAX} s of processor time")

    signal.signal(signal.SIGVTALRM, stop)


def _one(job: tuple[str, float, int, bool]) -> bool:
    name, seconds, seed, keep = job
    if name in DEEP:
        done = subprocess.run(
            [sys.executable, HERE / name, "--seconds", str(seconds), "--seed", str(seed), *random_of(name)]
        )
        return done.returncode == 0
    with contextlib.redirect_stderr(sys.stdout):
        return fuzz(name, seconds, seed, keep)


def random_of(name: str) -> Iterator[str]:
    if name == "chunks.py":
        yield "--random"


def replay(name: str) -> int:
    """Run one input again, by the name that a finding or an input of the corpus has."""
    bound_memory()
    of = name.rpartition("-")[0]
    parser = parsers().get(of)
    inputs = [(FINDINGS / name).read_bytes()] if (FINDINGS / name).is_file() else []
    inputs += [data for data in kept(of) if name_of(of, data) == name]
    if parser is None or not inputs:
        print(f"no finding and no input of the corpus is called {name}")
        return 2
    if found(parser, inputs[0]):
        return 1
    print(f"{name}: {outcome(parser, inputs[0])}")
    return 0


def corpus() -> int:
    """All that is kept, and the valid inputs. Exit status 1 where one is a finding."""
    bound_memory()
    wrong = [
        path
        for name, parser in parsers().items()
        for data in [*parser.seeds, *kept(name)]
        if (path := found(parser, data)) is not None
    ]
    return int(bool(wrong))


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--minutes", type=float, default=5.0)
    asked.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked.add_argument("--seed", type=int)
    asked.add_argument("--only", nargs="+", default=())
    asked.add_argument("--replay")
    asked.add_argument("--corpus", action="store_true")
    asked.add_argument("--keep", action="store_true")
    options = asked.parse_args()
    if options.replay:
        return replay(options.replay)
    if options.corpus:
        return corpus()
    seed = options.seed if options.seed is not None else random.randrange(2**32)
    names = list(options.only) or [*parsers(), *DEEP]
    shares = {name: DEEP.get(name, 0.3 if name.startswith("model.") else 1.0) for name in names}
    each = options.minutes * 60 / sum(shares.values())
    print(f"seed {seed}: {len(names)} fuzzers for {options.minutes:g} minutes in {options.jobs} jobs", flush=True)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        jobs = [(name, each * share, seed, options.keep) for name, share in shares.items()]
        outcomes = pool.map(_one, jobs, chunksize=1)
    wrong = [name for name, is_well in zip(names, outcomes, strict=True) if not is_well]
    print("findings: " + ", ".join(wrong) if wrong else "no finding")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
