"""Scripts are run by hand and rarely. Each one at least starts, with all its imports, and prints its help."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
INSTALL = SCRIPTS / "install.py"
COMMANDS = [path for path in sorted(SCRIPTS.rglob("*.py")) if "ArgumentParser" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    "script", [path for path in COMMANDS if path != INSTALL], ids=lambda path: str(path.relative_to(SCRIPTS))
)
def test_every_script_answers_help(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: its imports cost seconds, and most of them are shared."""
    modules = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
    for name in set(sys.modules) - modules:  # two folders of scripts may each have a module of one name
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(SCRIPTS)):
            del sys.modules[name]


def test_the_installer_answers_help_if_it_is_isolated() -> None:
    asked = [str(INSTALL), "--help"]
    assert "usage: " in subprocess.run([sys.executable, "-I", *asked], capture_output=True, text=True).stdout
    refused = subprocess.run([sys.executable, *asked], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "call `python3 -I install.py ...`" in refused.stderr
