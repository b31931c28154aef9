"""What must hold after each round of a soak: soak.py says what each means."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from prime_protocol.envelope import open_envelope, parse_json
from prime_protocol.errors import RemoteError
from prime_protocol.ledger import LedgerChain
from prime_protocol.limits import REQUEST_AGE_S_MAX
from prime_protocol.verdict import BundleStatus, Receipt

TRACEBACK = re.compile(rb"^Traceback \(most recent call last\)", re.MULTILINE)
READ_S = 10.0


def get(url: str) -> bytes:
    """Return the answer of an address. Raises OSError."""
    try:
        with urllib.request.urlopen(url, timeout=READ_S) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        error.close()
        raise


def status_of(url: str) -> dict[str, Any] | None:
    """Return the coordinator's status; None if it does not answer."""
    with contextlib.suppress(OSError, ValueError):
        status: dict[str, Any] = json.loads(get(f"{url}/v1/status"))
        return status
    return None


class LedgerReader:
    """The run's ledger, read on from line to line: a line that changes breaks the chain."""

    def __init__(self, run: str) -> None:
        self._chain = LedgerChain(run)
        self.digests: dict[str, list[Receipt]] = {}
        """All settled receipts by bundle, in the order of the ledger."""

    def read_on(self, url: str) -> str:
        """Read the lines since the last call. Return what is wrong, or nothing. Raises OSError."""
        while True:
            lines = get(f"{url}/v1/ledger/{self._chain.num_entries}").splitlines()
            if not lines:
                return ""
            for line in lines:
                try:
                    receipt, _ = self._chain.follow(line)
                except RemoteError as error:
                    return str(error)
                self.digests.setdefault(receipt.bundle, []).append(receipt)

    def counted_twice(self) -> int:
        """Return how many leases were redeemed by two bundles, or bundles accepted for two leases."""
        leases = Counter(receipts[-1].lease_id for receipts in self.digests.values())
        moved = sum(len({receipt.lease_id for receipt in receipts}) > 1 for receipts in self.digests.values())
        return moved + sum(count - 1 for count in leases.values())

    def lost(self, receipts: list[Receipt]) -> int:
        """Return how many settled receipts of a worker the ledger lacks."""
        settled = (receipt for receipt in receipts if receipt.status is not BundleStatus.PENDING)
        return sum(receipt not in self.digests.get(receipt.bundle, ()) for receipt in settled)


def receipts_in(file: Path) -> list[Receipt]:
    """Return the receipts that a worker keeps. A kill may leave half a line at the end."""
    found = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with contextlib.suppress(RemoteError):
            found.append(parse_json(open_envelope(line).payload, Receipt))
    return found


def tracebacks(logs: Path) -> dict[str, int]:
    """Return the number of tracebacks in each log that has one."""
    counts = {path.stem: len(TRACEBACK.findall(path.read_bytes())) for path in sorted(logs.glob("*.log"))}
    return {name: count for name, count in counts.items() if count}


def orphans(folder: Path, alive: set[int]) -> list[int]:
    """Return the processes that work in a folder and descend from none of these."""
    parents, working = dict[int, int](), set[int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if str(folder) in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    working.add(int(entry.name))

    def descends(pid: int) -> bool:
        while pid > 1 and pid not in alive:
            pid = parents.get(pid, 0)
        return pid in alive

    return sorted(pid for pid in working if not descends(pid))


def open_files(pid: int) -> int:
    """Return the number of a process's descriptors; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return 0


class WrongDates:
    """Until when the coordinator's timestamps may be ahead of right clocks, after its own was ahead. Monotonic seconds.

    It follows its clock back at once if it was ahead by more than the lifetime and twice the tolerance. If not, it dates
    timestamps after the last one until its clock has caught up: check 9 of `verify` fails, and no other.
    """

    def __init__(self, lifetime_s: float) -> None:
        self._reach_s = lifetime_s + 2.0 * REQUEST_AGE_S_MAX
        self._dates_s = list[float]()
        self.until_s = 0.0

    def add(self, now_s: float, ahead_s: float, seconds: float) -> None:
        """Add that the clock was ahead for some seconds, until now. It may have dated a timestamp at each moment of them."""
        stood_s = max(
            self.until_s + REQUEST_AGE_S_MAX - now_s, 0.0
        )  # while its dates stand still, a restart counts no time
        near_s, dates_s = self._reach_s + seconds + stood_s, [now_s + ahead_s]
        for earlier_s in sorted(self._dates_s):
            if dates_s[-1] < earlier_s <= dates_s[-1] + near_s:  # it may have dated one after that one
                dates_s.append(earlier_s)
        self._dates_s.append(dates_s[0])
        counting_s = (date_s for date_s in dates_s if date_s <= now_s + near_s)
        self.until_s = max([self.until_s, *(date_s - REQUEST_AGE_S_MAX for date_s in counting_s)])


def verifies(where: str, *options: str, may_be_ahead: bool = False) -> str:
    """Return what `prime-node verify` finds wrong; empty if nothing, or only a timestamp that is ahead and may be."""
    command = [sys.executable, "-P", "-m", "prime_node", "verify", where, "--json", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode == 0 or (may_be_ahead and done.returncode == 1 and is_only_ahead(done.stdout)):
        return ""
    return f"code {done.returncode}: {(done.stdout + done.stderr)[-600:]}"


def is_only_ahead(output: str) -> bool:
    """Return whether all checks of `verify --json` hold but the last, by which the timestamp is ahead of this clock."""
    with contextlib.suppress(ValueError, LookupError):
        *others, last = json.loads(output)["checks"]
        is_ahead = last["number"] == 9 and not last["passed"] and "ahead of this machine's clock" in last["detail"]
        return is_ahead and [one["number"] for one in others if one["passed"]] == list(range(1, 9))
    return False
