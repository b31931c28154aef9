"""Entry to all layers of the sandbox: `confine(rules)` binds this process and all that it starts, irrevocably."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from prime_node.adapters.sandbox.rules import (
    CLOSED_BY_OWN_ROOT,
    Family,
    ModeChanges,
    Restriction,
    SandboxLevel,
    SandboxRules,
)

_TASKS = Path("/proc/self/task")
_OF_UNIX = ("abstract sockets", "Unix sockets by path")


def confine(rules: SandboxRules) -> SandboxLevel:
    """Restrict this process to what the rules name, and return what this system does and does not enforce.

    Call it before the first thread starts. Raises OSError if the kernel refuses a feature that it claims to have, and
    RuntimeError if other threads run that Landlock (before ABI 8) would leave unconfined.
    """
    if sys.platform != "linux":
        missing = f"{sys.platform} has neither Landlock nor seccomp"
        names = ("files", "signals", "abstract sockets", "Unix sockets by path", "system calls")
        return SandboxLevel(tuple(Restriction(name, False, missing) for name in names))
    from prime_node.adapters.sandbox import landlock, namespaces, privileges, seccomp
    from prime_node.adapters.sandbox.bubblewrap import View

    threads = num_threads()
    if threads > 1 and landlock.abi() < landlock.ABI_TSYNC:
        raise RuntimeError(f"{threads - 1} other threads run already, and Landlock would not confine them")
    if rules.umask is not None:
        os.umask(rules.umask)
    privileges.apply_limits(rules.limits)
    restrictions, further = [], rules.write_in_shared_root
    if rules.own_root:
        view = View(read=tuple(landlock.readable(rules)), write=rules.write, devices=rules.devices)
        restrictions.append(namespaces.enter_namespaces(view))
        if restrictions[0].up:
            further, rules = (
                tuple(map(Path, namespaces.EMPTY)),
                replace(rules, mode_changes=ModeChanges.ALLOWED, shared_ipc=True),
            )
    rules = replace(rules, write=(*rules.write, *further))
    if not rules.dumpable:
        privileges.forbid_dumps()
    privileges.no_new_privileges()
    restrictions += landlock.restrict_access(rules)
    dropped = privileges.drop_capabilities(rules.keep_capabilities)
    filtered = seccomp.restrict_calls(rules)
    return SandboxLevel((*_with_other_layers(restrictions, rules, filtered), filtered, dropped))


def _with_other_layers(
    restrictions: list[Restriction], rules: SandboxRules, filtered: Restriction
) -> list[Restriction]:
    """Add what the other layers enforce of Landlock's restrictions.

    Without the family of Unix sockets none can be reached; in a root of its own, none by a path that leads outside.
    """
    if rules.own_root and restrictions[0].up:
        restrictions = [restriction for restriction in restrictions if restriction.what not in CLOSED_BY_OWN_ROOT]
    if Family.UNIX not in rules.families and filtered.up:
        return [
            *(restriction for restriction in restrictions if restriction.what not in _OF_UNIX),
            Restriction("Unix sockets", True),
        ]
    has_own_root = rules.own_root and restrictions[0].up
    return [
        Restriction(restriction.what, True) if restriction.what == _OF_UNIX[1] and has_own_root else restriction
        for restriction in restrictions
    ]


def num_threads() -> int:
    """Return this process's number of threads; 1 if it is unknown."""
    try:
        return sum(1 for _ in _TASKS.iterdir())
    except OSError:
        return 1
