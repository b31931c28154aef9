"""One rank: `-m tests.security.rank_process FOLDER` joins the others and writes where it and its torchrun listen."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from prime_node.adapters.training.ranks import Ranks
from prime_node.cli.launch import meeting_place


def listening(*processes: int) -> list[str]:
    """Return the addresses, as /proc/net states them, of all TCP sockets on which these processes listen."""
    owned = set()
    for process in processes:
        for link in Path(f"/proc/{process}/fd").iterdir():
            target = str(link.readlink()) if link.is_symlink() else ""
            if target.startswith("socket:["):
                owned.add(target[len("socket:[") : -1])
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in owned:
                found.append(fields[1].rpartition(":")[0])
    return found


def main() -> None:
    ranks = Ranks.join(device="cpu", meeting=meeting_place())
    places = listening(os.getpid(), os.getppid())
    (Path(sys.argv[-1]) / f"rank-{ranks.rank}").write_text(json.dumps(places))
    assert ranks.host_group is not None
    ranks.host_group.barrier().wait()
    os._exit(0)


if __name__ == "__main__":
    main()
