"""Grants to environments. The name of an environment is the run's to choose, so a grant is bound to what that name means there.

A grant is NAME@DIGEST, of the implementation and its options. Datasets and the digest of own code are left out: these files are
this machine's own, and the RunSpec pins them.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import EnvironmentSpec

GRANT_DIGITS = 24
_PINS = {
    "jsonl": {"path", "digest", "code_digest"},
    "parquet": {"path", "digest", "code_digest"},
    "reasoning_gym": {"code_digest"},
    "python": {"code_digest"},
}
"""Options that name such files and digests, by implementation. Elsewhere one of that name is an option like others."""


def grant_of(spec: EnvironmentSpec) -> str:
    """Return the grant for exactly this environment."""
    pins = _PINS.get(spec.id, set())
    options = {name: value for name, value in spec.options.items() if name not in pins}
    digest = digest_of(json.dumps([spec.id, options], sort_keys=True).encode())
    return f"{spec.name}@{digest[:GRANT_DIGITS]}"


def is_granted(spec: EnvironmentSpec, grants: Collection[str], setting: str) -> bool:
    """Return whether a setting grants something to an environment.

    Raises LocalError if it names an environment that is called the same and is not, or might not be, this one.
    """
    if (needed := grant_of(spec)) in grants:
        return True
    others = [grant for grant in grants if spec.name in (grant, grant.rpartition("@")[0])]
    if others:
        raise LocalError(
            f"environments.{setting} names {', '.join(others)}, and the run's environment of that name is {needed} "
            f"({spec.id}): if you trust this one with it, write {needed}"
        )
    return False
