"""The program of docs/python.md is the only worker of a whole run."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from tests.e2e.conftest import Up
from tests.source_tree import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

JOIN_EXAMPLE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)[1]


def test_the_example_works_for_a_run_until_it_is_over(up: Up) -> None:
    up.start("up.num_workers=0", "run.max_steps=3")
    up.until(lambda status: True, timeout_s=120, what="the coordinator")
    program = up.directory.with_name("work.py")
    program.write_text(JOIN_EXAMPLE)
    link = (up.directory / "join-link").read_text().strip()
    ran = subprocess.run(
        [sys.executable, str(program), link],
        cwd=program.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (ran.returncode, ran.stdout) == (0, "drained\n"), ran.stderr + up.everything()
    assert up.finish(timeout_s=120) == 0, up.everything()
    assert up.summary()["rollouts"]["accepted"] == 3 * 6 * 4
