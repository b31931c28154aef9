"""The documents are true: commands, options, settings, files and links that they name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cases_world import check_each
from tests.source_tree import modules

from prime_node.cli.config import all_settings
from prime_node.cli.main import Commands
from prime_node.coordinator.metrics import HOST_METRICS, METRICS

ROOT = Path(__file__).resolve().parent.parent
GUIDES = (
    "README.md",
    "docs/containers.md",
    "docs/detection.md",
    "docs/installing.md",
    "docs/joining.md",
    "docs/metrics.md",
    "docs/models.md",
    "docs/operating.md",
    "docs/python.md",
    "docs/services.md",
    "docs/tutorials/auditor.md",
    "docs/tutorials/contributor.md",
    "docs/tutorials/operator.md",
    "docs/tutorials/researcher.md",
    "docs/verifying.md",
)
DOCUMENTS = (
    *GUIDES,
    "docs/comparison.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "DECISIONS.md",
    "CHANGELOG.md",
    "scripts/bench/RESULTS.md",
)
COMMANDS = dict(Commands())


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def invocations() -> list[tuple[str, str, str]]:
    """Yield (document, command, rest of the line) for each `prime-node ...` in a document."""
    pattern = re.compile(r"prime-node ([a-z]+(?:-[a-z]+)*)([^`#\n|]*)")
    return [(name, match[1], match[2]) for name in DOCUMENTS for match in pattern.finditer(text_of(name))]


def test_the_readme_begins_with_the_two_commands() -> None:
    first_screen = text_of("README.md")[:2_000]
    assert "./scripts/up" in first_screen
    assert "./scripts/test" in first_screen


def test_every_command_that_a_document_names_exists_with_its_options() -> None:
    check_each(((f"{one[0]}: {one[1]}{one[2]}", one) for one in invocations()), lambda one: exists(*one))


def exists(document: str, command: str, rest: str) -> None:
    assert command in COMMANDS, f"{document} names prime-node {command}"
    found = COMMANDS[command]
    words = rest.split()
    if words and words[0] not in getattr(found, "commands", words) and hasattr(found, "default_command"):
        words = [found.default_command, *words]
    if words and hasattr(found, "commands"):
        assert words[0] in found.commands, f"{document} names prime-node {command} {words[0]}"
        found = found.commands[words[0]]
    known = {option for parameter in found.params for option in parameter.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest)) - {"--help"}
    assert named <= known, f"{document}: prime-node {command} has no {', '.join(sorted(named - known))}"


def test_every_command_explains_itself_and_its_options() -> None:
    every = {
        f"{name} {sub}": one for name, group in COMMANDS.items() for sub, one in getattr(group, "commands", {}).items()
    }
    for name, command in (COMMANDS | every).items():
        assert command.help, name
        assert not command.get_short_help_str(60).endswith("..."), f"{name}: its line of the overview is cut"
        silent = [p.name for p in command.params if not getattr(p, "hidden", False) and not getattr(p, "help", None)]
        assert silent == [], name


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_and_link_of_a_document_exists(name: str) -> None:
    text = text_of(name)
    paths = set(re.findall(r"`((?:scripts|configs|protocol|node|tests)/[\w./-]+)`", text))
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    missing = [path for path in paths if not (ROOT / path).exists()]
    missing += [link for link in links if not (ROOT / name).parent.joinpath(link).exists()]
    assert missing == []


COMMAND = re.compile(r"^ *(?:prime-node|\./scripts/|scripts/|pip|uvx?|docker|sudo|python3?) ", re.MULTILINE)


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the line above each fenced block without a language, and its content."""
    lines, opened = text.splitlines(), -1
    for number, line in enumerate(lines):
        if line.lstrip().startswith("```"):
            if opened < 0:
                opened = number
                continue
            if lines[opened].strip() == "```":
                yield lines[opened - 1], "\n".join(lines[opened + 1 : number])
            opened = -1


def test_every_block_of_commands_says_what_runs_it_or_why_nothing_does() -> None:
    documents = {"README.md", "CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))}
    num_run = 0
    for name in sorted(documents):
        for above, block in fenced_blocks(text_of(name)):
            if not COMMAND.search(block):
                continue
            mark = re.fullmatch(r" *<!-- (run by|not run).* -->", above)
            assert mark, f"{name}: no <!-- run by FILE --> or <!-- not run: why --> above {block}"
            paths = re.findall(r"(?:tests|scripts|docs|\.ci)/[\w/.-]+\w", above)
            assert [path for path in paths if not (ROOT / path).exists()] == [], name
            if mark[1] == "run by":
                num_run += 1
                assert all(name in text_of(path) for path in paths), f"{paths} does not read {name}"
    assert num_run > 5


def known_settings() -> set[tuple[str, str]]:
    return {(settings.section, field) for settings in all_settings() for field in settings.model_fields}


def test_settings_that_the_guides_show_exist() -> None:
    text = "\n".join(map(text_of, GUIDES))
    shown = re.findall(r"PRIME_([A-Z]+)_([A-Z_]+)=", text) + re.findall(r"--set ([a-z]+)\.([a-z_]+)=", text)
    assert shown
    assert {(section.lower(), field.lower()) for section, field in shown} <= known_settings()


def test_settings_and_metrics_that_the_guides_name_exist() -> None:
    text = "\n".join(map(text_of, GUIDES))
    settings = set(re.findall(r"\b(run|coordinator|trainer|validator|worker)\.([a-z_]+)\b(?![/.])", text))
    known = known_settings() | {("run", "json"), ("worker", "txt")}  # files
    assert settings
    assert settings <= known, settings - known
    metrics = {
        re.sub("_(bucket|count)$", "", name) for name in re.findall(r"\bprime_(?!node\b|protocol\b)[a-z0-9_]+", text)
    }
    assert metrics
    declared = {metric.name for metric in (*METRICS, *HOST_METRICS)}
    assert metrics <= declared, metrics - declared


def test_the_list_of_metrics_is_the_code_s() -> None:
    rows = {
        tuple(cell.strip() for cell in line.split("|")[1:5])
        for line in text_of("docs/metrics.md").splitlines()
        if "`prime_" in line
    }
    assert rows == {
        (f"`{one.name}`", one.kind.value, ", ".join(f"`{label}`" for label in one.labels), one.help)
        for one in (*METRICS, *HOST_METRICS)
    }


def test_the_coordinator_declares_its_metrics_in_one_file() -> None:
    made = {path.name for _, path in modules() if re.search(r"\bMetric\(MetricKind", path.read_text(encoding="utf-8"))}
    assert made == {
        "metrics.py",
        "observe.py",
    }  # observe.py: gauges of the numbers in a row; ports/metrics.py: an example
