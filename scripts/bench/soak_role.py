"""A role whose wall clock another process sets: python soak_role.py CLOCK ROLE ARGUMENTS. CLOCK is a file of ClockFile."""

from __future__ import annotations

import mmap
import struct
import sys
from pathlib import Path


def main() -> None:
    """Run `prime-node` with a clock that is off by the milliseconds in the file, at each moment."""
    from prime_node.adapters.system_clock import SystemClock
    from prime_node.cli.main import main as prime_node

    with Path(sys.argv[1]).open("rb") as file:
        offset_ms = mmap.mmap(file.fileno(), 8, prot=mmap.PROT_READ)
    true_ms = SystemClock.now_ms
    SystemClock.now_ms = lambda self: true_ms(self) + struct.unpack("<q", offset_ms[:8])[0]  # type: ignore[method-assign]
    sys.argv = ["prime-node", *sys.argv[2:]]
    prime_node()


if __name__ == "__main__":
    main()
