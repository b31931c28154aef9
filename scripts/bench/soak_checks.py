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


def verifies(where: str, *options: str) -> str:
    """Return what `prime-node verify` finds wrong; empty if nothing."""
    command = [sys.executable, "-P", "-m", "prime_node", "verify", where, "--json", *options]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"code {done.returncode}: {(done.stdout + done.stderr)[-600:]}"
