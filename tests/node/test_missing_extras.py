"""Commands without the optional packages: one line that names the extra and how to install it, never a traceback."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from tests.cases_world import check_each
from tests.node.clean_world import ROOT, core_distributions, make_clean_site, run_clean

import prime_node
from prime_node.cli import missing_extra
from prime_node.cli.missing_extra import (
    COMMAND_EXTRAS,
    EXTRAS,
    NEEDED,
    ROLES,
    how_to_install,
    missing_module,
    needing_extra,
)
from prime_node.cli.outcome import outcome_of
from prime_protocol.errors import LocalError

NOWHERE = f"http://127.0.0.1:1/#{'0' * 64}"
DEMO = ROOT / "configs/demo.toml"
ALONE_AT_ONCE = {"huggingface_hub": "train", "trio": "p2p", "vllm": "vllm"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Core dependencies alone."""
    return make_clean_site(tmp_path_factory.mktemp("clean") / "site")


@pytest.mark.slow
def test_each_command_without_its_extra_says_in_a_line_which_one_and_how_to_get_it(site: Path, tmp_path: Path) -> None:
    commands = {
        ("join", NOWHERE): "'worker'",
        ("up", "runs/mine"): "'operator' and 'trainer'",
        ("calibrate", "new.json", "--config", str(DEMO)): "'trainer'",
        ("new", "runs/mine", "--config", str(DEMO)): "'trainer'",
    }

    def check(case: tuple[tuple[str, ...], str]) -> None:
        command, extras = case
        ran = run_clean(site, *command, home=tmp_path)
        lines = ran.stderr.splitlines()
        assert "Traceback" not in ran.stderr, ran.stderr
        assert ran.returncode == 3
        assert extras in lines[-1]
        assert str(ROOT) in lines[-1], "how to install it from this checkout"
        assert "pip install prime-node" not in ran.stderr

    check_each(((command[0], (command, extras)) for command, extras in commands.items()), check)
    assert not (tmp_path / ".prime-node").exists(), "no key is made for a machine that cannot join"


def test_a_missing_module_names_the_extra_of_the_command_that_needs_it() -> None:
    def line(module: str, command: str = "") -> str:
        found = outcome_of(ModuleNotFoundError(f"No module named {module!r}", name=module), command)
        assert found is not None
        assert found[0] == 3
        return found[1]

    assert line("tokenizers", "coordinator").startswith("`prime-node coordinator` needs the extra 'operator'")
    assert line("tokenizers", "trainer").startswith("`prime-node trainer` needs the extra 'trainer'")
    for module, extra in ALONE_AT_ONCE.items():
        assert f"needs the extra {extra!r}" in line(f"{module}.inner", "verify")
    in_a_task = ExceptionGroup("tasks", [ModuleNotFoundError("no", name="torch")])
    assert outcome_of(in_a_task, "join") == outcome_of(in_a_task.exceptions[0], "join")


def test_a_missing_module_of_no_extra_stays_a_bug() -> None:
    assert outcome_of(ModuleNotFoundError("No module named 'prime_node.nothing'", name="prime_node.nothing")) is None
    assert missing_module(ModuleNotFoundError("no name")) is None


def test_the_advice_names_the_checkout_or_the_wheel_and_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"{ROOT}" in how_to_install("train")
    monkeypatch.setattr(prime_node, "__file__", str(tmp_path / "clone" / "node" / "prime_node" / "__init__.py"))
    assert how_to_install("envs") == f"pip install -e '{tmp_path}/clone[envs]'", "in the sandbox of environments"
    monkeypatch.setattr(prime_node, "__file__", str(tmp_path / "prime_node" / "__init__.py"))
    wheel = f"file:///downloads/prime_node-{prime_node.__version__}-py3-none-any.whl"
    recorded: list[str | None] = [json.dumps({"url": wheel, "archive_info": {}}), None, "not JSON"]

    class Installed(Distribution):
        def read_text(self, filename: str) -> str | None:
            assert filename == "direct_url.json"
            return recorded[0]

        def locate_file(self, path: object) -> Path:
            raise NotImplementedError

    monkeypatch.setattr(missing_extra, "distribution", lambda name: Installed())
    assert how_to_install("train", "coordinator") == f"pip install 'prime-node[train,coordinator] @ {wheel}'"
    for receipt, command in (("pipx_metadata.json", "pipx install"), ("uv-receipt.toml", "uv tool install")):
        (tmp_path / receipt).touch()
        monkeypatch.setattr(sys, "prefix", str(tmp_path))
        assert how_to_install("worker") == f"{command} --force 'prime-node[worker] @ {wheel}'"
    monkeypatch.undo()
    monkeypatch.setattr(prime_node, "__file__", str(tmp_path / "prime_node" / "__init__.py"))
    monkeypatch.setattr(missing_extra, "distribution", lambda name: Installed())
    for _ in range(2):
        del recorded[0]
        assert re.fullmatch(
            r"pip install 'FOLDER/prime_node-\S+-py3-none-any\.whl\[p2p\]', where .*", how_to_install("p2p")
        )


def test_the_advice_for_an_installation_from_a_release_names_its_installer_or_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {
        "source": "/releases",
        "key": "ab",
        "roles": ["worker"],
        "bin": "/bin",
        "wheel": "prime.whl",
        "sha256": "cd",
    }
    (tmp_path / "install.json").write_text(json.dumps(record))
    monkeypatch.setattr(prime_node, "__file__", str(tmp_path / "prime_node" / "__init__.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "versions" / "0.1.0"))
    assert how_to_install("coordinator").startswith(
        f"python3 -I install.py --role operator --from /releases --key ab --to {tmp_path} --bin /bin"
    )
    python, wheel = f"{tmp_path}/versions/0.1.0/bin/python", "file:///releases/prime.whl#sha256=cd"
    assert how_to_install("vllm") == f"{python} -m pip install 'prime-node[vllm] @ {wheel}'"
    (tmp_path / "install.json").unlink()  # as in the sandbox of environments; the wheel's address is a deleted file
    assert how_to_install("envs") == "`prime-node doctor` has the command"


def test_the_table_of_extras_has_every_extra_and_every_optional_module() -> None:
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(optional) - {"dev", "docs"} - set(ROLES)
    assert {role: [f"prime-node[{','.join(parts)}]"] if parts else [] for role, parts in ROLES.items()} == {
        role: optional[role] for role in ROLES
    }
    assert {role for roles in COMMAND_EXTRAS.values() for role in roles} <= set(ROLES)
    assert all(set(modules) <= set(EXTRAS[extra]) for extra, modules in NEEDED.items())
    core = {"prime_node", "prime_protocol"}
    for each in core_distributions():
        core |= {file.parts[0].removesuffix(".py") for file in each.files or ()}
    imported = re.compile(r"^ *(?:from ([a-z_]\w*)[\w.]* import |import ([a-z_]\w*)[\w.]*(?: as \w+)?$)", re.MULTILINE)
    found = {
        module
        for folder in (ROOT / "node", ROOT / "protocol")
        for path in folder.rglob("*.py")
        for pair in imported.findall(path.read_text())
        for module in pair
        if module
    }
    known = {module for modules in EXTRAS.values() for module in modules}
    assert found - core - set(sys.stdlib_module_names) == known - {"tensorboard"}  # torch imports that one


def test_an_error_of_an_extra_is_a_fault_of_this_machine() -> None:
    assert isinstance(missing_module(ModuleNotFoundError("no", name="torch"), "join"), LocalError)


def test_no_garbage_is_searched_while_an_extra_is_imported_and_what_came_is_never_searched() -> None:
    def import_torch() -> None:
        with needing_extra("trainer", "tests"):
            assert not gc.isenabled()
            raise ImportError("torch")

    with pytest.raises(LocalError, match="trainer"):
        import_torch()
    assert gc.isenabled()
    program = (
        "import gc\n"
        "from prime_node.cli.missing_extra import needing_extra\n"
        "with needing_extra('trainer', 'tests'):\n"
        "    import numpy.testing\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 10_000)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "True"]
