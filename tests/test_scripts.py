"""Scripts are run by hand and rarely. Each one at least starts, with all its imports, and prints its help."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
COMMANDS = [path for path in sorted(SCRIPTS.rglob("*.py")) if "ArgumentParser" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("script", COMMANDS, ids=lambda path: str(path.relative_to(SCRIPTS)))
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
