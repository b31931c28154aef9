"""Chooses environments by the ids that a RunSpec may name."""

from __future__ import annotations

import base64
import logging
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.cli.missing_extra import needing_extra
from prime_node.cli.wire_own_code import Renderers, build_own_environment, require_same_code, with_own_reward
from prime_node.envs.dataset import COMPARISONS, DatasetSource, Row, rows_of_json_lines
from prime_node.envs.grants import grant_of, is_granted
from prime_node.envs.registry import Around, EnvironmentFactory, as_it_is, build_environment, from_source
from prime_node.envs.settings import EnvironmentSettings
from prime_node.ports.environment import Environment
from prime_node.ports.renderer import Renderer
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import EnvironmentSpec

if TYPE_CHECKING:
    from prime_node.adapters.environments.launcher import Launcher as Launcher  # cli names it too
    from prime_node.adapters.environments.process import ProcessEnvironment
    from prime_node.adapters.environments.restrictions import ProcessRestrictions

log = logging.getLogger(__name__)

MODEL_FILES = (".json", ".jinja", ".txt", ".model", ".md")
"""Suffixes of the files in a model folder, apart from weights."""
MODEL_FILE_BYTES_MAX = 2**26
READERS = ("jsonl", "parquet")
"""Implementations that read one local file, `options.path`."""


def build_environments(
    specs: Sequence[EnvironmentSpec],
    model: Path,
    *,
    answers_as_code: Container[str] = (),
    grade_apart: bool = False,
    code: Path | None = None,
) -> dict[str, Environment]:
    """Build environments by name, in this process.

    Environments that answer need `model`, the folder of the run's tokenizer. `answers_as_code` names the environments whose
    scorers may run answers as code. `grade_apart`: run each call of third-party scorers in a process of its own. `code`:
    folder of own code. Raises LocalError.
    """
    from prime_node.adapters.environments.separate_grading import SeparateGrading, close_memory

    renderer = partial(_renderer, model)
    around: Around = SeparateGrading if grade_apart else as_it_is
    if grade_apart:
        close_memory()
    factories: dict[str, EnvironmentFactory] = {
        "reasoning_gym": partial(_reasoning_gym, renderer, around, answers_as_code, code),
        "jsonl": partial(_dataset, renderer, around, code, rows_of_json_lines),
        "parquet": partial(_parquet, renderer, around, code),
        "python": partial(build_own_environment, renderer, around, code),
        "verifiers": partial(_verifiers, model),
    }
    return {spec.name: build_environment(spec, factories) for spec in specs}


def start_environments(
    specs: Sequence[EnvironmentSpec],
    model: Path,
    *,
    hidden: Sequence[Path],
    settings: EnvironmentSettings,
    launcher: Launcher | None = None,
) -> dict[str, ProcessEnvironment]:
    """Start environments by name, in their own processes, which cannot open the paths in `hidden`.

    Raises LocalError. A role that has confined itself passes its `launcher`. Environments with access to the network share a
    process apart from the others. Blocks until all are ready.
    """
    made: dict[str, ProcessEnvironment] = {}
    try:
        for network in (False, True):
            group = [spec for spec in specs if is_granted(spec, settings.unsafe_network, "unsafe_network") is network]
            if group:
                made |= _start_process(group, model, hidden, settings, network=network, launcher=launcher)
    except LocalError:
        end_environments(made)
        raise
    return {spec.name: made[spec.name] for spec in specs}


def _start_process(
    specs: Sequence[EnvironmentSpec],
    model: Path,
    hidden: Sequence[Path],
    settings: EnvironmentSettings,
    *,
    network: bool,
    launcher: Launcher | None,
) -> dict[str, ProcessEnvironment]:
    from prime_node.adapters.environments.child import Start
    from prime_node.adapters.environments.process import (
        EnvironmentProcess,
        ProcessEnvironment,
        ProcessTurnEnvironment,
    )
    from prime_node.adapters.environments.restrictions import around_command, why_not_isolated
    from prime_node.adapters.environments.variables import module_folders, passed_on

    found = [with_file_at_hand(spec, settings, hidden=hidden) for spec in specs]
    alone = [spec for spec in specs if spec.id == "verifiers"]
    if alone and not network and launcher is None and (why := why_not_isolated()):
        raise LocalError(
            f"environment {alone[0].name} talks to itself over 127.0.0.1, which needs a network namespace: {why}; install "
            f'bubblewrap, or give it the whole network: environments.unsafe_network = ["{grant_of(alone[0])}"]'
        )
    files = [str(spec.options["path"]) for spec in found if spec.id in READERS]
    restrictions = _restrictions(
        [*files, *_readable(settings)], hidden, settings, network=network, loopback=bool(alone)
    )

    def start(folder: Path) -> Start:
        if launcher is not None:
            return Start(launch=partial(launcher.start, network=network, loopback=bool(alone), read=files))
        line, place, _ = around_command(_command(hidden), folder, restrictions, imports=module_folders())
        return Start(line, passed_on(place, network=network))

    process = EnvironmentProcess(
        start,
        {
            "environments": [spec.model_dump() for spec in found],
            "model": _model_files(model),
            "answers_as_code": [
                spec.name
                for spec in specs
                if is_granted(spec, settings.unsafe_answers_as_code, "unsafe_answers_as_code")
            ],
            "grade_together": settings.unsafe_grade_together,
            "code": None if settings.code_folder is None else str(settings.code_folder),
        },
    )
    log.info("environments run in process %d", process.pid)
    if missing := process.ready["missing"]:
        log.warning(
            "environments hold no key, but this system confines their code only partly; NOT enforced: %s",
            "; ".join(missing),
        )
    return {
        spec.name: (ProcessTurnEnvironment if spec.name in process.ready["turns"] else ProcessEnvironment)(
            process, spec.name
        )
        for spec in specs
    }


def open_launcher(
    settings: EnvironmentSettings, *, hidden: Sequence[Path], changeable: Sequence[Path] = ()
) -> Launcher | None:
    """Start the launcher of a role that will confine itself and can then give no process its own namespaces.

    `changeable`: folders that the role may write. Returns None if namespaces are not available anyway. Raises LocalError if the
    role could replace what the processes read, and so have them read anything.
    """
    from prime_node.adapters.environments.data_files import cache_folder
    from prime_node.adapters.environments.launcher import Launcher, Plan
    from prime_node.adapters.environments.restrictions import why_not_isolated

    if why_not_isolated():
        return None
    data = [] if settings.data_folder is None else [settings.data_folder]
    choices = [path.resolve() for path in (*data, cache_folder()) if path.exists()]
    _require_fixed([*map(Path, _readable(settings)), *choices, *data], changeable, hidden)
    # If the role could replace a file by a link, do not bind the file alone: the link would decide what is bound.
    whole = [one for one in choices if any(other.resolve().is_relative_to(one) for other in changeable)]
    chosen = tuple(str(one) for one in choices if one not in whole)
    plans = {
        network: Plan(
            _restrictions([*_readable(settings), *map(str, whole)], hidden, settings, network=network, loopback=True),
            chosen,
        )
        for network in {False, bool(settings.unsafe_network)}
    }
    return Launcher(plans, _command(hidden))


def _require_fixed(granted: Sequence[Path], changeable: Sequence[Path], hidden: Sequence[Path]) -> None:
    """Raise LocalError if a role that may write in `changeable` could put a link in place of what environments read."""
    from prime_node.adapters.environments.variables import module_folders
    from prime_node.adapters.sandbox.links import replaceable
    from prime_node.adapters.sandbox.system_paths import python_paths

    for path in (*granted, *module_folders(), *python_paths()):
        if found := replaceable(path.absolute(), changeable):
            place, folder = found
            raise LocalError(
                f"environments read {path}, and {place} is in {folder}, which this role may write: if a run took the role "
                "over, a link there would open any file to environments; keep them apart ([sandbox] also_write, "
                "[environments], folder)"
            )
    # Around a hidden path, each entry of the folders above it is granted by its name, so a link among them would be followed.
    closed = [path.resolve() for path in hidden]
    for path in granted:
        for folder in (one.resolve() for one in changeable):
            is_closed = any(folder.is_relative_to(one) for one in closed)
            inside = next((one for one in closed if folder in one.parents), None)
            if folder.is_relative_to(path.resolve()) and inside is not None and not is_closed:
                raise LocalError(
                    f"environments read {path}, this role may write {folder} in it, and {inside} inside that is closed to them: "
                    "keep the role's folder out of [sandbox] also_write"
                )


def _readable(settings: EnvironmentSettings) -> list[str]:
    """List the paths that the settings let all environments read."""
    code = () if settings.code_folder is None else (settings.code_folder,)
    return [str(path) for path in (*settings.readable, *code) if path.exists()]


def _command(hidden: Sequence[Path]) -> list[str]:
    """Return the command. It contains the role's folder only to identify it in a process list."""
    return [sys.executable, "-P", "-m", "prime_node.cli.environment_process", *map(str, hidden[:1])]


def _restrictions(
    read: Sequence[str], hidden: Sequence[Path], settings: EnvironmentSettings, *, network: bool, loopback: bool
) -> ProcessRestrictions:
    from prime_node.adapters.environments.restrictions import ProcessRestrictions

    return ProcessRestrictions(
        read=tuple(read),
        hidden=tuple(str(path.resolve()) for path in hidden),
        network=network,
        loopback=loopback,
        memory_bytes_max=settings.memory_bytes_max,
        processes_max=settings.processes_max,
        file_bytes_max=settings.file_bytes_max,
        open_files_max=settings.open_files_max,
        tmp_bytes_max=settings.tmp_bytes_max,
        network_grants=settings.unsafe_network if network else (),
    )


def _model_files(model: Path) -> dict[str, str]:
    """Return the tokenizer's files by name, in base64: the process gets no access to the role's folder. Raises LocalError."""
    if not model.is_dir():
        return {}
    found: dict[str, str] = {}
    for path in sorted(model.iterdir()):
        if path.suffix in MODEL_FILES and path.is_file():
            if path.stat().st_size > MODEL_FILE_BYTES_MAX:
                raise LocalError(f"{path} has more than {MODEL_FILE_BYTES_MAX} bytes, too many for a tokenizer file")
            found[path.name] = base64.b64encode(path.read_bytes()).decode()
    return found


def end_environments(made: Mapping[str, Environment]) -> None:
    """End the processes that hold these environments. Idempotent."""
    from prime_node.adapters.environments.process import ProcessEnvironment

    for environment in made.values():
        if isinstance(environment, ProcessEnvironment):
            environment.process.close()


def with_file_at_hand(
    spec: EnvironmentSpec, settings: EnvironmentSettings, *, hidden: Sequence[Path] = ()
) -> EnvironmentSpec:
    """Return the spec with the absolute path of its dataset file. The RunSpec names the digests of this file and of own code.

    Raises LocalError. Files of the hub are fetched here: other programs share their cache, and environment code must not change
    it.
    """
    from prime_node.adapters.environments.data_files import find_file
    from prime_node.files import digest_of_file

    require_same_code(spec, settings.code_folder)
    if spec.id not in READERS:
        return spec
    path = str(spec.options.get("path", ""))
    try:
        found = find_file(
            path, settings.data_folder, hidden=hidden, hub_bytes_max=settings.hub_file_bytes_max
        ).resolve()
        digest, wanted = digest_of_file(found), spec.options.get("digest")
        if digest != wanted:
            raise ValueError(f"{found} has digest {digest}, the run wants {wanted}")
    except (OSError, ValueError) as error:
        raise LocalError(f"environment {spec.name} ({spec.id}): {error}") from None
    return spec.model_copy(update={"options": {**spec.options, "path": str(found)}})


def _verifiers(model: Path, spec: EnvironmentSpec) -> Environment:
    with needing_extra("verifiers", "environments of verifiers"):
        from prime_node.adapters.environments.verifiers_v1 import VerifiersEnvironment
        from prime_node.adapters.web.aiohttp_server import AiohttpServer
    if spec.turns_max < 2:
        raise ValueError("set turns_max above 1: verifiers renders the prompts of its rollouts itself")
    options = dict(spec.options)
    taskset, renderer = str(options.pop("taskset", "")), options.pop("renderer", None)
    return VerifiersEnvironment(
        model,
        AiohttpServer(),
        seed=spec.seed,
        taskset=taskset,
        env=str(options.pop("env", "")),
        renderer=None if renderer is None else str(renderer),
        **options,
    )


def _reasoning_gym(
    renderer: Renderers, around: Around, answers_as_code: Container[str], code: Path | None, spec: EnvironmentSpec
) -> Environment:
    with needing_extra("envs", "reasoning-gym environments"):
        from prime_node.adapters.environments.reasoning_gym import ReasoningGymSource
    if "reward" in spec.options:
        return with_own_reward(partial(ReasoningGymSource, True), renderer, around, code, spec)
    make = partial(ReasoningGymSource, spec.name in answers_as_code)
    return from_source(make, renderer, as_it_is if spec.options.get("compare") else around)(spec)


def _parquet(renderer: Renderers, around: Around, code: Path | None, spec: EnvironmentSpec) -> Environment:
    with needing_extra("parquet", "environments over Parquet files"):
        from prime_node.adapters.environments.parquet_rows import read_parquet
    return _dataset(renderer, around, code, read_parquet, spec)


def _dataset(
    renderer: Renderers,
    around: Around,
    code: Path | None,
    read: Callable[[bytes], Iterator[Row]],
    spec: EnvironmentSpec,
) -> Environment:
    if "reward" in spec.options:
        return with_own_reward(partial(DatasetSource, read, COMPARISONS, True), renderer, around, code, spec)
    comparisons = dict(COMPARISONS)
    grading: Around = as_it_is  # the comparisons above are ours, and parse nothing
    if spec.options.get("compare") == "math":
        with needing_extra("envs", 'environments that compare = "math"'):
            from prime_node.adapters.environments.math_answers import is_same_math
        comparisons["math"] = is_same_math
        grading = around
    return from_source(partial(DatasetSource, read, comparisons), renderer, grading)(spec)


def _renderer(model: Path, name: str) -> Renderer:
    """Return the renderer of that name. Raises ValueError and LocalError."""
    if name == "template":
        from prime_node.adapters.models.template_renderer import TemplateRenderer

        return TemplateRenderer(model)
    with needing_extra("verifiers", "renderers of model families"):
        from prime_node.adapters.models.package_renderer import PackageRenderer
    return PackageRenderer(model, name=name)
