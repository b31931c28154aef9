"""A run of real processes that is killed, stopped, starved and damaged at random, and what must hold after each round.

    scripts/soak --quick [--json]                 two minutes
    scripts/soak --minutes 60 --seed 7 [--json]   the same for longer; a seed gives the same order of faults
    scripts/soak --rounds 1                       so many rounds

Coordinator, trainer, validator, two workers and a seeder run the tiny model, each as a process of `prime-node`. All but the
coordinator reach it through a proxy. As root, the run has a disk of its own in memory, which can be filled.

A round is some faults, one after the other: kill -9 of a role or of all, SIGSTOP, a flipped bit in a file, a document or the
database, cut, held and refused connections, a wall clock that is wrong by at most an hour, a full disk. Whatever ended is started
again, as a service manager does. Then the run must publish a policy within PROGRESS_S_MAX, and this must hold:

- the newest policy verifies, at the end the whole chain; the ledger continues its chain. After the coordinator's clock was ahead
  by at most a timestamp's lifetime and 240 s, its timestamps may be ahead of right clocks until its clock has caught up
- each settled receipt that a worker keeps is in the ledger; no lease counts twice
- no process works in the run's folder that belongs to no role; no log has a traceback
- no role ended by itself, except with code 3 or 6 while the disk was full or the database damaged
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from checks import Output, at_least, at_most
from soak_checks import LedgerReader, open_files, orphans, receipts_in, status_of, tracebacks, verifies
from soak_faults import Faults
from soak_run import EXPECTED_CODES, SoakRun, small_disk

CONFIG = Path(__file__).parents[2] / "configs" / "demo.toml"
PROGRESS_S_MAX = 150.0
QUICK_MINUTES = 2.0
FILES_MAX = 512
FAULTS_A_ROUND = (3, 8)


def say(text: str) -> None:
    """Print a line with the time, apart from the checks."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Soak:
    """One soak, with its counts."""

    def __init__(self, run: SoakRun, faults: Faults) -> None:
        self.run, self.faults = run, faults
        self.url = f"http://127.0.0.1:{run.port}"
        self.ledger = LedgerReader(run.link.rpartition("#")[2])
        self.problems: list[str] = faults.problems
        self.lost = self.doubled = self.rounds = self.files = 0
        self.head = -1
        self.slowest_s = 0.0

    async def begin(self) -> None:
        """Start all roles, and wait for the first policies."""
        await self.run.proxy.open(self.run.link_port)
        for role in self.run.roles.values():
            role.start()
        await self.progress()

    async def round(self, kinds: list[str | None]) -> None:
        """Do some faults, and check what must hold."""
        watching = asyncio.create_task(self._watch())
        try:
            for kind in kinds:
                await self.faults.one(kind)
                await asyncio.sleep(self.faults.drawn.uniform(0.2, 2.0))
            await self.progress()
            await asyncio.to_thread(self._check)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        self.rounds += 1

    async def progress(self) -> None:
        """Wait for a new policy."""
        began_s, first = time.monotonic(), None
        while time.monotonic() - began_s < PROGRESS_S_MAX:
            self._restart()
            status = await asyncio.to_thread(status_of, self.url)
            if status is not None:
                self.head = max(self.head, status["head"])
                first = status["head"] if first is None else first
                if status["head"] > first and status["head"] > 0:
                    self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
                    return
            await asyncio.sleep(0.25)
        waits = "it does not answer" if status is None else status["waiting_for"]
        self.faults.problem(f"round {self.rounds}: no new policy in {PROGRESS_S_MAX:.0f} s: {waits}")

    async def _watch(self) -> None:
        while True:
            self._restart()
            await asyncio.sleep(0.5)

    def _restart(self) -> None:
        """Start what ended by itself, as a service manager does."""
        for role in self.run.roles.values():
            if (code := role.reap()) is not None:
                if not (self.faults.may_end and code in EXPECTED_CODES):
                    self.faults.problem(f"round {self.rounds}: {role.name} ended by itself with code {code}")
                say(f"{role.name} ended with code {code}")
            if not self.faults.is_active and role.process is None and role.starts:
                role.start()

    def _check(self) -> None:
        where = f"round {self.rounds}: "
        with contextlib.suppress(OSError):
            if wrong := self.ledger.read_on(self.url):
                self.faults.problem(f"{where}{wrong}")
        kept = [receipts_in(self.run.folder / name / "receipts.jsonl") for name in self.run.workers()]
        with contextlib.suppress(OSError):  # what was settled meanwhile
            self.ledger.read_on(self.url)
        self.lost = max(self.lost, sum(self.ledger.lost(receipts) for receipts in kept))
        self.doubled = self.ledger.counted_twice()
        may_be_ahead = time.monotonic() < self.faults.dates.until_s
        if wrong := verifies(self.url + "/#" + self.run.link.rpartition("#")[2], may_be_ahead=may_be_ahead):
            self.faults.problem(f"{where}the newest policy does not verify: {wrong}")
        alive = {role.process.pid for role in self.run.roles.values() if role.process is not None}
        if left := orphans(self.run.folder, alive):
            self.faults.problem(f"{where}processes {left} belong to no role")
        self.files = max([self.files, *map(open_files, alive)])
        say(
            f"round {self.rounds}: policy {self.head}, {len(self.ledger.digests)} bundles in the ledger, "
            f"{sum(self.faults.killed.values())} kills, {len(self.problems)} problems"
        )

    async def end(self) -> None:
        """Stop all roles, and verify the whole chain."""
        if wrong := await asyncio.to_thread(verifies, str(self.run.folder), "--chain"):
            self.faults.problem(f"the chain does not verify: {wrong}")
        for name in [*self.run.workers(), "seeder", "validator", "trainer", "coordinator"]:
            if name in self.run.roles:
                await asyncio.to_thread(self.run.roles[name].stop)
        for name, count in tracebacks(self.run.logs).items():
            self.faults.problem(f"{count} tracebacks in the log of {name}")
        if left := await asyncio.to_thread(orphans, self.run.folder, set()):
            self.faults.problem(f"processes {left} are left")
        await self.run.proxy.close()


async def soak(arguments: argparse.Namespace, folder: Path, logs: Path, *, disk: bool) -> Soak:
    """Run a soak and return it."""
    run = SoakRun(folder, logs, workers=arguments.workers, seeder=not arguments.small)
    run.make(CONFIG)
    faults = Faults(run, random.Random(arguments.seed), disk=disk, say=say)
    made = Soak(run, faults)
    try:
        await made.begin()
        ends_s = time.monotonic() + 60.0 * arguments.minutes
        while made.rounds < arguments.rounds if arguments.rounds else time.monotonic() < ends_s:
            kinds = arguments.faults or [None] * faults.drawn.randint(*FAULTS_A_ROUND)
            await made.round(list(kinds))
        await made.end()
    finally:
        run.close()
    return made


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MINUTES:g} minutes")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON alone")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=0, help="a number of rounds, in place of minutes")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="without a seeder")
    parser.add_argument("--faults", nargs="*", default=[], help="these faults in each round, in place of random ones")
    parser.add_argument("--keep", type=Path, help="folder for the logs, kept")
    arguments = parser.parse_args()
    output = Output(as_json=arguments.json)
    arguments.minutes = QUICK_MINUTES if arguments.quick else arguments.minutes
    arguments.seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    say(f"seed {arguments.seed}")
    began_s = time.monotonic()
    with small_disk() as (disk, mounted), tempfile.TemporaryDirectory(prefix="soak-logs-") as logs:
        if not mounted:
            say("no disk of its own: only root may mount one, so no disk is filled")
        made = asyncio.run(soak(arguments, disk / "run", Path(logs), disk=mounted))
        if arguments.keep:
            shutil.copytree(logs, arguments.keep, dirs_exist_ok=True)
    say(f"faults: {dict(made.faults.done)}; kills by role: {dict(made.faults.killed)}; up to {made.files} descriptors")
    return output.finish(
        [
            at_least("seed", arguments.seed, 0),
            at_least("minutes", (time.monotonic() - began_s) / 60.0, 0),
            at_least("rounds", made.rounds, 1),
            at_least("faults", sum(made.faults.done[kind] for kind in made.faults.kinds()), 1),
            at_least("kill -9", sum(made.faults.killed.values()), 0),
            at_least("policies published", made.head, 1),
            at_least("bundles settled", len(made.ledger.digests), 1),
            at_most("settled receipts that the ledger lacks", made.lost, 0),
            at_most("bundles counted twice", made.doubled, 0),
            at_most("descriptors of one role", made.files, FILES_MAX),
            at_most("seconds without a new policy after a round", made.slowest_s, PROGRESS_S_MAX),
            at_most("other problems", len(made.problems), 0),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
