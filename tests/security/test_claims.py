"""Each claim of SECURITY.md has a number and names tests that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "SECURITY.md").read_text()
CLAIM = re.compile(r"^\*\*S(\d+)\.\*\* (.+?)(?=\n\n|\n\*\*S\d|\Z)", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"`([\w/]*test_\w+)\.py::(test_\w+|\d+)`")
"""A test function, or the least number of them in a file that holds the claim: a lost one is noticed."""


def claims() -> Iterator[tuple[int, str]]:
    for match in CLAIM.finditer(SECURITY):
        yield int(match[1]), match[2]


@cache
def functions_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, functions))


def test_claims_are_numbered_without_gaps() -> None:
    numbers = sorted(number for number, _ in claims())
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_claim_names_a_test() -> None:
    assert [number for number, text in claims() if not TEST.search(text)] == []


def test_every_named_test_exists() -> None:
    missing = [
        f"{file}.py::{name}"
        for file, name in TEST.findall(SECURITY)
        if not (path := ROOT / "tests" / f"{file}.py").is_file()
        or (
            name not in functions_in(path)
            if name.startswith("test_")
            else sum(each.startswith("test_") for each in functions_in(path)) < int(name)
        )
    ]
    assert missing == []


def test_every_reference_to_a_claim_or_a_gap_names_one_that_exists() -> None:
    known = {f"S{number}" for number, _ in claims()} | set(re.findall(r"^\*\*(G\d+)[. ]", SECURITY, re.MULTILINE))
    assert set(re.findall(r"\b[SG]\d+\b", SECURITY)) <= known


def test_every_attack_on_checkpoints_leads_to_a_claim() -> None:
    """The attacks are those of The Update Framework, and those that a checkpoint codec adds."""
    rows = dict(re.findall(r"^- (.+): (S\d+(?:, S\d+)*)$", SECURITY, re.MULTILINE))
    attacks = " / ".join(rows)
    for attack in (
        "arbitrary weights", "rollback", "freeze", "fork or equivocation", "mix and match", "wrong base", "endless data",
        "slow retrieval", "truncated, extra or reordered chunks", "bombs", "key compromise below the threshold",
        "another run's checkpoint", "other configuration or tokenizer",
    ):  # fmt: skip
        assert attack in attacks, attack
