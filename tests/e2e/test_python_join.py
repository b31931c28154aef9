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


def test_the_example_works_for_a_run_until_it_is_drained(up: Up) -> None:
    up.start("up.num_workers=0", "run.max_steps=5000")
    up.until(lambda status: True, timeout_s=120, what="the coordinator")
    program = up.directory.with_name("work.py")
    program.write_text(JOIN_EXAMPLE)
    link = (up.directory / "join-link").read_text().strip()
    with subprocess.Popen(
        [sys.executable, str(program), link],
        cwd=program.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            up.until(lambda status: status["step"] >= 2, timeout_s=180, what="step 2")
            subprocess.run([sys.executable, "-m", "prime_node", "operate", "drain", str(up.directory)], check=True)
            printed, errors = started.communicate(timeout=120)
        finally:
            started.kill()
    assert (started.returncode, printed) == (0, "drained\n"), errors + up.everything()
    up.interrupt()
    assert up.finish(timeout_s=90) == 130, up.everything()
