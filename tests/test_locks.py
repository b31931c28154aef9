"""locks/: each role's packages with digests, in the versions that the set-up installs."""

from __future__ import annotations

import re
import runpy
import tomllib

import pytest
from packaging.requirements import Requirement
from tests.source_tree import ROOT

from prime_node.adapters.environments.reasoning_gym import NEEDS
from prime_node.cli.missing_extra import ROLES

LOCKS = {path.stem: path.read_text() for path in sorted((ROOT / "locks").glob("*.txt"))}
INSTALL_LOCKS: dict[str, tuple[str, ...]] = runpy.run_path(str(ROOT / "scripts" / "install.py"))["LOCKS"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(text: str) -> dict[str, set[str]]:
    """Return the versions of each package."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^ ;\\\n]+)", text, re.MULTILINE):
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    return found


def test_each_set_of_packages_has_a_lock() -> None:
    assert {ROLES.get(name, (name,)) for name in LOCKS} == {*ROLES.values(), ("envs",)}
    made_of = {
        role: {part for lock in locks for part in ROLES.get(lock, (lock,))} for role, locks in INSTALL_LOCKS.items()
    }
    brings_environments = {"operator", "trainer", "validator"}
    assert made_of == {role: {*ROLES[role], *(["envs"] if role in brings_environments else [])} for role in ROLES}


def test_no_lock_has_a_package_that_a_machine_would_have_to_build() -> None:
    """scripts/lock refuses packages without a wheel. What it excludes is what the environments say is missing."""
    excluded = re.search(r"printf '(.*)' \|", (ROOT / "scripts" / "lock").read_text())
    assert excluded
    assert {name for name in excluded[1].split("\\n") if name} == set(NEEDS.values())
    assert "--only-binary :all:" in (ROOT / "scripts" / "lock").read_text()


@pytest.mark.parametrize("role", LOCKS)
def test_a_lock_has_the_versions_of_the_set_up_with_digests(role: str) -> None:
    found = pins(LOCKS[role])
    held = pins((ROOT / "constraints.txt").read_text())
    assert {name: versions for name, versions in found.items() if versions - held.get(name, versions)} == {}
    entries = re.split(r"\n(?=[\w.-]+==)", LOCKS[role])[1:]
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    parts = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(line for part in ROLES.get(role, (role,)) for line in parts[part])]
    asked = {re.sub(r"[-_.]+", "-", Requirement(line).name).lower(): Requirement(line) for line in wanted}
    assert sorted(asked.keys() - found.keys()) == [], "run scripts/lock"
    unmet = [name for name, one in asked.items() if not all(one.specifier.contains(each) for each in found[name])]
    assert unmet == [], "run scripts/lock"
