"""Files and information that an environment process may access. Escapes: tests/security."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.security.hostile_world import BOUNDS, package, running, tried

from prime_node.adapters.environments.restrictions import ProcessRestrictions, around_command, read_order
from prime_node.adapters.environments.variables import passed_on
from prime_node.adapters.sandbox import bubblewrap
from prime_node.cli.wire_environments import start_environments
from prime_node.envs.grants import grant_of
from prime_node.envs.settings import EnvironmentSettings
from prime_protocol.digest import digest_of
from prime_protocol.run_spec import EnvironmentSpec, Option


def test_a_file_of_the_hub_is_fetched_outside_and_read_inside(
    tmp_path: Path,
    model: Path,
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


@pytest.mark.parametrize("isolated", [True, False])
def test_what_the_settings_name_is_read_and_not_written_but_for_what_is_hidden_below(
    tmp_path: Path, isolated: bool
) -> None:
    named = tmp_path / "named"
    for name in ("data", "run/keys"):
        (named / name).mkdir(parents=True)
    (named / "data" / "rows").write_text("data")
    (named / "run" / "keys" / "trainer.key").write_text("secret")
    settings = BOUNDS.model_copy(update={"readable": (named,)})
    with running(tmp_path / "inside", isolated=isolated, settings=settings, hidden=(named / "run",)) as world:
        assert tried(world, "read", str(named / "data" / "rows")) == "did: data"
        assert tried(world, "write", str(named / "data" / "rows")).startswith("refused")
        assert tried(world, "write", str(named / "data" / "more")).startswith("refused")
        assert tried(world, "read", str(named / "run" / "keys" / "trainer.key")).startswith("refused")
        for probe in ("read", "write"):
            assert tried(world, probe, str(tmp_path / "inside" / "model" / "config.json")).startswith("refused")


def test_only_environments_that_the_settings_name_get_the_network_and_keys_of_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(package(tmp_path / "package")))
    specs = [
        EnvironmentSpec(name=name, id="reasoning_gym", options={"task": "probe"})
        for name in ("judge", "other", "third")
    ]
    (tmp_path / "model").mkdir()
    settings = BOUNDS.model_copy(update={"unsafe_network": (grant_of(specs[0]),)})
    made = start_environments(specs, tmp_path / "model", hidden=[], settings=settings)
    try:
        assert list(made) == ["judge", "other", "third"]
        assert made["other"].process is made["third"].process
        assert made["judge"].process is not made["other"].process
        assert tried(made["judge"], "open_socket", "2,2,0") == "did: opened"
        assert tried(made["other"], "open_socket", "2,2,0").startswith("refused")
    finally:
        for each in made.values():
            each.process.close()


def test_root_becomes_another_user_only_where_all_that_is_read_is_readable_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := bubblewrap.find_bubblewrap()[1]:
        pytest.skip(why)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    file = tmp_path / "rows"
    file.write_text("data")
    restrictions = ProcessRestrictions(
        read=(str(file),),
        hidden=(),
        network=False,
        loopback=False,
        memory_bytes_max=2**30,
        processes_max=128,
        file_bytes_max=2**20,
        open_files_max=128,
        tmp_bytes_max=2**20,
    )
    for mode, user in ((0o644, 65_534), (0o600, None)):
        file.chmod(mode)
        line, folder, inside = around_command(["true"], tmp_path, restrictions, imports=[])
        assert (inside.user, inside.isolated, folder) == (user, True, Path("/tmp"))
        assert ("--unshare-user-try" in line) is (user is None)
        assert read_order(line[-1]) == (inside, folder)


def test_only_harmless_variables_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a")
    monkeypatch.setenv("HF_TOKEN", "b")
    monkeypatch.setenv("LD_PRELOAD", "c")
    monkeypatch.setenv("PRIME_ENVIRONMENT_JUDGE_API_KEY", "d")
    passed = passed_on(tmp_path)
    assert passed.keys().isdisjoint({"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "LD_PRELOAD", "JUDGE_API_KEY"})
    assert passed["HOME"] == str(tmp_path)
    assert passed_on(tmp_path, network=True)["JUDGE_API_KEY"] == "d"
