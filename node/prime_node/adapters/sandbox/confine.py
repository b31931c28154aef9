"""All walls at once: `confine(rules)` binds this process and all that it starts, for good."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from prime_node.adapters.sandbox.rules import Family, Level, Rules, Wall

_TASKS = Path("/proc/self/task")


def confine(rules: Rules) -> Level:
    """Leave this process what the rules name, and nothing else; the Level says what this system does not enforce.

    To be called before the first thread is started. Raises OSError where the kernel refuses what it says that it has, and
    RuntimeError where other threads run that Landlock (before ABI 8) would leave free.
    """
    if sys.platform != "linux":
        missing = f"{sys.platform} has neither Landlock nor seccomp"
        names = ("files", "signals", "abstract sockets", "Unix sockets by path", "system calls")
        return Level(tuple(Wall(name, False, missing) for name in names))
    from prime_node.adapters.sandbox import landlock, privileges, seccomp

    threads = num_threads()
    if threads > 1 and landlock.abi() < landlock.ABI_TSYNC:
        raise RuntimeError(f"{threads - 1} other threads run already, which Landlock would leave free")
    if rules.umask is not None:
        os.umask(rules.umask)
    privileges.apply_limits(rules.limits)
    if not rules.dumpable:
        privileges.forbid_dumps()
    privileges.no_new_privileges()
    walls = landlock.restrict(rules)
    if Family.UNIX not in rules.families:
        walls = [wall for wall in walls if wall.what not in ("Unix sockets by path", "abstract sockets")]
    dropped = privileges.drop_capabilities(rules.keep_capabilities)
    filtered = seccomp.restrict(rules)
    if Family.UNIX not in rules.families:
        walls.append(Wall("Unix sockets", filtered.up, filtered.why))
    return Level((*walls, filtered, dropped))


def num_threads() -> int:
    """Of this process; 1 where the system does not say."""
    try:
        return sum(1 for _ in _TASKS.iterdir())
    except OSError:
        return 1
