"""axe-core, which checks a page for people with disabilities: downloaded once from the package index, pinned by its digest."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "axe-playwright-python==0.1.8 --hash=sha256:fdd263c998388f1a8e67cad02677e612d946248bd44d163be5e8650ea31f95f8"
"""Package that holds axe-core 4.12.1 (MPL-2.0, 160 kB to download). Nothing of it is installed."""
FILE = "axe_playwright_python/axe.min.js"
RUN = (
    "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']}).then("
    "found => found.violations.map(one => `${one.id}: ${one.nodes.length} x ${one.nodes[0].html.slice(0, 160)}`))"
)
"""Expression whose value is a line for each violation."""


def axe_source() -> str:
    """Return the script, downloaded on first use. Raise OSError with a reason."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prime-node" / "axe-0.1.8.js"
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
            wanted = Path(folder) / "requirements.txt"
            wanted.write_text(PACKAGE)
            options = ["--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", folder]
            pip = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(wanted)]
            done = subprocess.run(pip, capture_output=True, text=True, check=False)
            if done.returncode:
                raise OSError(f"axe-core could not be downloaded: {(done.stderr or done.stdout).strip()[-300:]}")
            [wheel] = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                draft = Path(folder) / "axe.js"
                draft.write_bytes(archive.read(FILE))
            draft.rename(cache)
    return cache.read_text(encoding="utf-8")
