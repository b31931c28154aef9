"""The faults of a soak. Each is one coroutine that disturbs a run and, where it must, undoes what no software can heal."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from soak_checks import WrongDates
from soak_run import LIFETIME_S, SoakRun

DATABASE = ("state.sqlite", "state.sqlite-wal", "state.sqlite-tail")
CLOCK_S_MAX = 3_600.0
START_S_MAX = 60.0


class Faults:
    """The faults, each drawn by one seed, and what was done."""

    def __init__(self, run: SoakRun, drawn: random.Random, *, disk: bool, say: Callable[[str], None]) -> None:
        self.run, self.drawn, self.say = run, drawn, say
        self.done: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.problems: list[str] = []
        self.is_active = False
        """Whether a fault is active that may end a role with an error of its own, and keep it from starting."""
        self.dates = WrongDates(LIFETIME_S)
        self._excused_until_s = 0.0
        self._kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "kill": (10, self.kill),
            "kill all": (5, self.kill_all),
            "stop": (3, self.stop),
            "flipped file": (3, self.flip_file),
            "flipped document": (1, self.flip_document),
            "flipped database": (1, self.flip_database),
            "cut connections": (2, self.cut),
            "held connections": (1, self.hold),
            "refused connections": (1, self.refuse),
            "wrong clock": (2, self.set_clock),
            **({"full disk": (1, self.fill_disk)} if disk else {}),
        }

    async def one(self, kind: str | None = None) -> None:
        """Do one fault, by default a random one."""
        if kind is None:
            weights = [weight for weight, _ in self._kinds.values()]
            (kind,) = self.drawn.choices(list(self._kinds), weights)
        self.done[kind] += 1
        await self._kinds[kind][1]()

    @property
    def may_end(self) -> bool:
        """Whether a role may end with an error of its own: a fault is active, or was when the role met it."""
        return self.is_active or time.monotonic() < self._excused_until_s

    def problem(self, text: str) -> None:
        """Say what does not hold, and keep it for the checks."""
        self.say(f"PROBLEM {text}")
        self.problems.append(text)

    def kinds(self) -> list[str]:
        """Return the names of all faults."""
        return list(self._kinds)

    def _kill(self, name: str) -> None:
        if self.run.roles[name].kill():
            self.killed[name.partition("-")[0]] += 1

    async def kill(self) -> None:
        """Kill one role, and start it again after a moment."""
        name = self.drawn.choice(list(self.run.roles))
        self.say(f"kill {name}")
        self._kill(name)
        await asyncio.sleep(self.drawn.uniform(0.0, 1.5))
        self.run.roles[name].start()

    async def kill_all(self) -> None:
        """Kill all roles, as a power cut does."""
        self.say("kill all")
        for name in self.run.roles:
            self._kill(name)
        for role in self.run.roles.values():
            role.start()

    async def stop(self) -> None:
        """Stop one role for a while, as a machine that sleeps, and continue it."""
        role = self.run.roles[self.drawn.choice(list(self.run.roles))]
        seconds = self.drawn.uniform(1.0, 20.0)
        self.say(f"stop {role.name} for {seconds:.0f} s")
        role.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        role.send(signal.SIGCONT)

    async def cut(self) -> None:
        """Reset all connections to the coordinator."""
        self.say("cut all connections")
        self.run.proxy.cut()

    async def hold(self) -> None:
        """Let no byte through for a while: the connections stay open on both sides."""
        seconds = self.drawn.uniform(1.0, 15.0)
        self.say(f"hold all connections for {seconds:.0f} s")
        self.run.proxy.flows.clear()
        await asyncio.sleep(seconds)
        self.run.proxy.flows.set()

    async def refuse(self) -> None:
        """Reset all connections, and close each new one for a while."""
        seconds = self.drawn.uniform(1.0, 10.0)
        self.say(f"refuse connections for {seconds:.0f} s")
        self.run.proxy.refuses = True
        self.run.proxy.cut()
        await asyncio.sleep(seconds)
        self.run.proxy.refuses = False

    async def set_clock(self) -> None:
        """Set one role's wall clock off for a while, at most an hour in either direction."""
        role = self.run.roles[self.drawn.choice(list(self.run.roles))]
        ahead_s, seconds = self.drawn.uniform(-CLOCK_S_MAX, CLOCK_S_MAX), self.drawn.uniform(2.0, 10.0)
        self.say(f"set the clock of {role.name} off by {ahead_s:+.0f} s, for {seconds:.0f} s")
        role.clock.set(ahead_s)
        await asyncio.sleep(seconds)
        role.clock.set(0.0)
        if role.name == "coordinator":
            self.dates.add(time.monotonic(), ahead_s, seconds)

    async def flip_file(self) -> None:
        """Flip a bit of a file that a role keeps and that it, or another role, can replace."""
        folder = self.run.folder
        places = {
            "bundle": folder / "coordinator" / "bundles",
            "checkpoint": folder / "trainer" / "checkpoints",
            "copy of a bundle": folder / "trainer" / "bundles",
            "spool": folder / "worker-1" / "spool",
            "part": folder / self.drawn.choice(["worker-1", "validator", "seeder"]) / "checkpoints",
        }
        what = self.drawn.choice(list(places))
        path = self._some_file(places[what])
        if path is None:
            return
        self.say(f"flip a bit of a {what}, {path.relative_to(folder)}")
        self._flip(path)
        owner = {"checkpoint": "trainer", "copy of a bundle": "trainer", "spool": "worker-1"}.get(what)
        if owner is not None:  # what is written once and read at a start
            self._kill(owner)
            self.run.roles[owner].start()

    async def flip_document(self) -> None:
        """Flip a bit of one of the coordinator's documents while it is down."""
        public = self.run.folder / "coordinator" / "public"
        path = self.drawn.choice(
            [public / "head.json", public / "timestamp.json", public.parent / "evidence" / "ledger_head.json"]
        )
        self._kill("coordinator")
        if path.exists():
            self.say(f"flip a bit of {path.name}")
            self._flip(path)
        self.run.roles["coordinator"].start()

    async def flip_database(self) -> None:
        """Flip a bit of the database while its coordinator is down. If it refuses to start, put the copy back."""
        folder, role = self.run.folder / "coordinator", self.run.roles["coordinator"]
        self._kill("coordinator")
        kept = {name: (folder / name).read_bytes() for name in DATABASE if (folder / name).exists()}
        name = self.drawn.choices(list(kept), [len(data) for data in kept.values()])[0]
        self.say(f"flip a bit of {name}")
        self._flip(folder / name)
        before, self.is_active = role.log.stat().st_size, True
        role.start()
        for _ in range(round(10 * START_S_MAX)):
            await asyncio.sleep(0.1)
            if not role.is_running:
                break
            if b"serving run" in role.log.read_bytes()[before:]:
                self.is_active = False
                self.done["flips without effect, or healed"] += 1
                return
        said = role.log.read_bytes()[before:].decode(errors="replace").strip().split("\n")[-1]
        code = role.reap()
        if code not in (3, None) or ("state.sqlite" not in said and "store" not in said):
            self.problem(f"a flipped bit of {name}: the coordinator ended with code {code} and said {said[:300]}")
        self.say(f"the coordinator refuses the database: {said[:160]}")
        self.done["flips that were named"] += 1
        role.kill()
        (folder / "state.sqlite-shm").unlink(missing_ok=True)
        for one, data in kept.items():
            (folder / one).write_bytes(data)
        self.is_active = False
        role.start()

    async def fill_disk(self) -> None:
        """Fill the disk of all roles for a while. Those that end for it are started again once there is room."""
        seconds = self.drawn.uniform(2.0, 8.0)
        self.say(f"fill the disk for {seconds:.0f} s")
        self.is_active = True
        balloon = self.run.folder.parent / "balloon"
        try:
            with balloon.open("wb", buffering=0) as file:
                piece = bytes(2**22)
                while piece:
                    try:
                        file.write(piece)
                    except OSError as error:
                        if error.errno != errno.ENOSPC:
                            raise
                        piece = piece[: len(piece) // 2]
            await asyncio.sleep(seconds)
        finally:
            balloon.unlink(missing_ok=True)
            await asyncio.sleep(1.0)
            self.is_active = False
            self._excused_until_s = time.monotonic() + START_S_MAX  # a role that was starting ends later

    def _some_file(self, folder: Path) -> Path | None:
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".partial")
        return self.drawn.choice(files) if files else None

    def _flip(self, path: Path) -> None:
        try:
            with path.open("r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if size:
                    place = self.drawn.randrange(size)
                    file.seek(place)
                    (byte,) = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte ^ (1 << self.drawn.randrange(8))]))
        except FileNotFoundError:  # deleted meanwhile
            pass
