"""The systems that run against each other. What the baselines import is installed on demand, into a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from .race import NODES, PRODUCT, Row, System

BASELINES = ("aiohttp==3.14.5", "libtorrent==2.1.1", "shardcast==0.3.2")
"""shardcast is Prime Intellect's, libtorrent the strongest BitTorrent there is."""


def baseline_python(folder: Path) -> Path:
    """Return a Python with the baselines, which it installs first. None of them is a dependency of the product."""
    python = folder / "baselines" / "bin" / "python"
    stamp = folder / "baselines" / "installed"
    if not stamp.exists() or stamp.read_text() != " ".join(BASELINES):
        print("installing the baselines:", *BASELINES, file=sys.stderr)
        venv.create(folder / "baselines", with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *BASELINES], check=True, stdout=sys.stderr)
        stamp.write_text(" ".join(BASELINES))
    return python


def ours() -> System:
    """With the settings that a contributor gets. The kernels are compiled first, since a dozen processes would do so at once."""
    program = "from prime_protocol.codec import warm_up; warm_up()"
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, **PRODUCT})
    return System("prime-node", Path(sys.executable), NODES / "product_node.py", {}, PRODUCT, writes_later=True)


def baselines(folder: Path, row: Row) -> dict[str, System]:
    python = baseline_python(folder)
    is_nat = any(link.is_nat for link in row.links)
    relays = 0 if is_nat else max(2, row.num_receivers // 3)
    shard_bytes = str(int(max(1e6, row.size_mb * 1e6 / 12)))
    return {
        "naive HTTP": System("naive HTTP", python, NODES / "http_node.py"),
        "libtorrent": System("libtorrent", python, NODES / "bittorrent_node.py", {"piece_kib": 256, "utp": is_nat}),
        "shardcast": System(
            "shardcast",
            python,
            NODES / "shardcast_node.py",
            {"relays": relays},
            {"SHARDCAST_SHARD_SIZE": shard_bytes, "SHARDCAST_LOG_LEVEL": "INFO"},
        ),
    }
