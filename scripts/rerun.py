"""Run the failed tests of the last run once more, alone: one that passes then is unstable, not broken.

As `regrtest --rerun` of CPython does. More than a few failures are no accident, and fail at once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAILED = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
RERUNS_MAX = 3


def failed_tests(text: str) -> list[str]:
    """Return the identifiers in pytest's record of failures, without the group that pytest-xdist adds after an "@"."""
    parts = [(name, name.rpartition("@")[0]) for name in json.loads(text)]
    return sorted(head if "::" in head else name for name, head in parts)


def main() -> int:
    """Return 0 if there were few failures and each test passes now."""
    try:
        names = failed_tests(FAILED.read_text())
    except OSError:
        print("== no record of failed tests: nothing is run again")
        return 1
    if not 1 <= len(names) <= RERUNS_MAX:
        print(f"== {len(names)} failed: they are not run again (1 to {RERUNS_MAX} are)")
        return 1
    print(f"== once more, alone: {len(names)} failed", flush=True)
    result = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", *names], cwd=ROOT, check=False).returncode
    for name in names if result == 0 else ():
        print(f"== unstable (failed, then passed): {name}")
    return result


if __name__ == "__main__":
    sys.exit(main())
