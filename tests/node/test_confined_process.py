"""What a process of environments may open, and what it is told: nothing that is not its business."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.node.test_environment_process import model  # noqa: F401 (a fixture)

from prime_node.adapters.environments.confine import around
from prime_node.adapters.environments.process import passed_on
from prime_node.cli.wire_environments import start_environments, with_file_at_hand
from prime_node.envs.settings import EnvironmentSettings
from prime_protocol.digest import digest_of
from prime_protocol.run_spec import EnvironmentSpec, Option

CONFINED = (
    "import sys\nfrom pathlib import Path\nfrom prime_node.adapters.environments.confine import confine\n"
    "data, key, work = map(Path, sys.argv[1:])\n"
    "if not confine([data], [work], hidden=[key.parent]): sys.exit(77)\n"
    "assert data.read_text() == 'data'\n(work / 'new').write_text('x')\n"
    "for forbidden in (lambda: key.read_text(), lambda: list(key.parent.iterdir()), lambda: data.write_text('y'),\n"
    "                  lambda: open(f'/proc/{__import__(\"os\").getppid()}/environ').read(),\n"
    "                  lambda: list(Path('/etc').iterdir()), lambda: list(Path.home().iterdir())):\n"
    "    try: forbidden()\n"
    "    except PermissionError: continue\n"
    "    sys.exit('it could')\n"
)


def test_a_confined_process_opens_what_it_is_given_and_no_key(tmp_path: Path) -> None:
    data, key, work = tmp_path / "data.txt", tmp_path / "run" / "keys" / "trainer.key", tmp_path / "work"
    for folder in (key.parent, work):
        folder.mkdir(parents=True)
    data.write_text("data")
    key.write_text("secret")
    ran = subprocess.run([sys.executable, "-c", CONFINED, data, key, work], capture_output=True, text=True, check=False)
    if ran.returncode == 77:
        pytest.skip("this kernel has no Landlock")
    assert (ran.returncode, ran.stderr) == (0, "")


HUB_FILE = (
    "import sys\nfrom pathlib import Path\nfrom prime_node.cli.wire_environments import confined\n"
    "file, work = map(Path, sys.argv[1:])\n"
    "if not confined([], [file], work, hidden=[]): sys.exit(77)\n"
    "assert file.read_text()\n"
    "for forbidden in (lambda: file.write_text('y'), lambda: (file.parent / 'more').write_text('y'),\n"
    "                  lambda: list(file.parents[3].iterdir())):\n"
    "    try: forbidden()\n"
    "    except PermissionError: continue\n"
    "    sys.exit('it could')\n"
)


def test_a_file_of_the_hub_is_fetched_outside_and_its_cache_is_out_of_reach_inside(
    tmp_path: Path,
    model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, commit = tmp_path / "hub", "0" * 40
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))  # of this process alone
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    snapshot = cache / "datasets--us--sums" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (cache / "datasets--us--sums" / "refs").mkdir()
    (cache / "datasets--us--sums" / "refs" / "main").write_text(commit)
    rows = "".join(f'{{"question": "{n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(50))
    (snapshot / "train.jsonl").write_text(rows)
    options: dict[str, Option] = {"path": "hf://datasets/us/sums/train.jsonl", "digest": digest_of(rows.encode())}
    spec = EnvironmentSpec(name="sums", id="jsonl", options=options)
    world = start_environments([spec], model, hidden=[], settings=EnvironmentSettings())["sums"]
    assert world.prompt(0).endswith("?")
    world.process.close()
    file = Path(str(with_file_at_hand(spec, EnvironmentSettings()).options["path"]))
    work = tmp_path / "work"
    work.mkdir()
    ran = subprocess.run([sys.executable, "-c", HUB_FILE, file, work], capture_output=True, text=True, check=False)
    if ran.returncode == 77:
        pytest.skip("this kernel has no Landlock")
    assert (ran.returncode, ran.stderr) == (0, "")


HUB_CACHE = (
    "import sys\nfrom pathlib import Path\nfrom prime_node.adapters.environments.hub_files import hub_file\n"
    "from prime_node.cli.wire_environments import confined\nfrom prime_protocol.run_spec import EnvironmentSpec\n"
    "work, home = map(Path, sys.argv[1:])\n"
    "if not confined([EnvironmentSpec(name='a', id='verifiers')], [work, home / 'hub'], work, hidden=[work]): sys.exit(77)\n"
    "assert hub_file('hf://datasets/us/sums/train.jsonl', bytes_max=0).read_text() == 'data'\n"
    "for forbidden in (lambda: (home / 'token').read_text(), lambda: list(home.iterdir()),\n"
    "                  lambda: (home / 'hub' / 'more').write_text('y')):\n"
    "    try: forbidden()\n"
    "    except PermissionError: continue\n"
    "    sys.exit('it could')\n"
)


def test_a_taskset_reads_the_cache_of_the_hub_and_no_token(tmp_path: Path) -> None:
    home, commit, work = tmp_path / "hf", "0" * 40, tmp_path / "work"
    repo = home / "hub" / "datasets--us--sums"
    for folder in (work, repo / "refs", repo / "snapshots" / commit):
        folder.mkdir(parents=True)
    (home / "token").write_text("secret")
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit / "train.jsonl").write_text("data")
    variables = os.environ | passed_on(work) | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", HUB_CACHE, work, home], capture_output=True, text=True, check=False, env=variables
    )
    if ran.returncode == 77:
        pytest.skip("this kernel has no Landlock")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_what_is_hidden_is_cut_out_of_what_is_granted(tmp_path: Path) -> None:
    for name in ("lib", "runs/one/keys", "runs/two"):
        (tmp_path / name).mkdir(parents=True)
    granted = around([tmp_path], [tmp_path / "runs" / "one"])
    assert granted == [tmp_path / "lib", tmp_path / "runs" / "two"]
    assert around([tmp_path / "runs" / "one" / "keys"], [tmp_path / "runs" / "one"]) == []


def test_only_harmless_variables_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a")
    monkeypatch.setenv("HF_TOKEN", "b")
    monkeypatch.setenv("PRIME_ENVIRONMENT_JUDGE_API_KEY", "c")
    passed = passed_on(tmp_path)
    assert "AWS_SECRET_ACCESS_KEY" not in passed
    assert "HF_TOKEN" not in passed
    assert passed["JUDGE_API_KEY"] == "c"
    assert passed["HOME"] == str(tmp_path)
