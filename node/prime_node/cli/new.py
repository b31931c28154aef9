"""`prime-node new`: make the folder of a run: keys, model files, RunSpec, join link."""

from __future__ import annotations

import shlex
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from prime_node.cli.config import check_settings
from prime_node.cli.options import ConfigFile, Options, Set
from prime_node.cli.run_calibration import calibration_for
from prime_node.cli.run_dir import RunDir
from prime_node.cli.say import say
from prime_node.cli.shipped import config_path
from prime_node.files import write_durably
from prime_node.keyfile import create_key, keep_secret
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import CONFIG_FILE, JoinLink, PinnedRun


def new(
    directory: Annotated[Path, typer.Argument(help="New run directory.")],
    url: Annotated[
        str, typer.Option(help="URL at which contributors will reach the coordinator.")
    ] = "http://127.0.0.1:8400",
    config: ConfigFile = None,
    assignments: Set = [],  # noqa: B006 - typer reads it, nothing changes it
) -> None:
    """Make a run: keys, model files, the signed RunSpec and the join link."""
    from prime_node.coordinator.config import CoordinatorConfig
    from prime_node.coordinator.new_run import RunConfig

    options = Options(config, assignments)
    if config is None and "environments" not in options.overrides.get("run", {}):
        raise LocalError(
            "a run needs a config that names its environments and model: copy an example, change it, and give it with "
            f"--config; the demo's is {config_path('demo.toml')}"
        )
    check_settings(options, with_run=True)
    try:
        has_tls = JoinLink.parse(f"{url.rstrip('/')}/#{'0' * 64}").url.startswith("https:")
    except ValueError:
        raise LocalError(f"--url {url}: expected http://host:port, as contributors will reach it") from None
    unasked = [each for each in options.load(RunConfig).coordinators if has_tls and not each.startswith("https:")]
    if unasked:
        raise LocalError(f"--url {url} has TLS, so clients would not ask {', '.join(unasked)} of run.coordinators")
    run = make_run(RunDir(directory), options, config_file=config)
    link = write_join_link(RunDir(directory), run, url=url)
    say(f"run {run.digest[:12]} made in {directory}", f"join link: {link}", "")
    say("start it, each in a terminal or a service of its own:")
    for role in ("coordinator", "trainer", "validator"):
        say(f"  prime-node {role} {shlex.quote(str(directory))}")
    if options.load(CoordinatorConfig).invites_needed:
        say("and make links for contributors:", f"  prime-node operate invite {shlex.quote(str(directory))}")
    else:
        say("and on each machine that works for it:", f"  prime-node join {shlex.quote(str(link))}")


def make_run(run_dir: RunDir, options: Options, *, config_file: Path | None) -> PinnedRun:
    """Make a run without its join link.

    The RunSpec is written last: a folder without it is incomplete and is made again. Raises LocalError if the folder already
    holds a run.
    """
    from prime_node.cli import wire, wire_adapters, wire_new
    from prime_node.coordinator.assignments import secret_of
    from prime_node.coordinator.new_run import ROLES, RunConfig, build_run_spec
    from prime_node.envs.settings import EnvironmentSettings

    if run_dir.exists:
        raise LocalError(
            f"{run_dir.path} already holds a run; choose another folder, or resume it with `prime-node up`. "
            f"Its address is in {run_dir.join_link_file}, which may be edited"
        )
    grants = options.load(EnvironmentSettings)
    settings = wire_new.pin_datasets(options.load(RunConfig), grants)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    for leftover in (run_dir.path / "keys", run_dir.model):
        if leftover.exists():
            shutil.rmtree(leftover)
    model = wire_new.make_model_files(settings.model, run_dir.model)
    # Before the keys exist: a measurement runs environments, which may not see them.
    calibration = calibration_for(options, settings, model.files[CONFIG_FILE], config_file=config_file)
    keys = {role: create_key(run_dir.key(role)) for role in ROLES}
    secret = run_dir.assignment_secret
    secret.unlink(missing_ok=True)
    keep_secret(secret, secret_of(keys["coordinator"]))
    run = build_run_spec(
        settings,
        keys=keys,
        model_files=model.files,
        vocab_size=model.vocab_size,
        stop_token_ids=model.stop_token_ids,
        now_ms=time.time_ns() // 1_000_000,
        adapters=wire_adapters.adapter_spec(settings),
        calibration=calibration,
        recipe=b"" if settings.replay is None else _recipe(options),
    )
    # Report an error in the environments' options before anything is signed.
    wire.check_environments(run.spec, run_dir.model, grants, folder=run_dir.path / "keys")
    write_durably(run_dir.config, b"" if config_file is None else config_file.read_bytes())
    write_durably(run_dir.overrides_file, "".join(f"{line}\n" for line in options.assignments).encode())
    write_durably(run_dir.run_spec, run.envelope.to_bytes())
    return run


def _recipe(options: Options) -> bytes:
    from prime_node.trainer.config import TrainerConfig
    from prime_node.trainer.pinned_recipe import recipe_document

    return recipe_document(options.load(TrainerConfig))


def write_join_link(run_dir: RunDir, run: PinnedRun, *, url: str) -> JoinLink:
    """Write the link for contributors. It changes with the address; its digest never changes."""
    link = JoinLink.parse(f"{url.rstrip('/')}/#{run.digest}")
    write_durably(run_dir.join_link_file, f"{link}\n".encode())
    return link
