"""The recipe: the trainer's settings that its weights depend on, as a document that a RunSpec pins by digest.

    {"code": {"my_losses:fast": DIGEST}, "trainer": {"seed": 7, "optimizer": {...}, ...}}     keys in order

`code` has the digest of the source file of each object that an import path names, not of what that file imports in turn.
What only changes how a step is computed (device, threads, ranks) is no part of the recipe: manifests name it as numerics.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prime_node.algo.registry import import_object
from prime_node.ports.train_samples import TrainingMode
from prime_node.trainer.config import TrainerConfig
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.replay import ReplayPolicy
from prime_protocol.visible import printable

NOT_PINNED = frozenset(
    (
        *(
            "threads",
            "device",
            "ranks",
            "cosign_keys",
            "publish",
            "swarm",
            "wait_seconds",
            "leave_seconds",
        ),
        *("evaluation_device", "evaluate_every", "evaluate_at", "evaluation_problems", "evaluation_samples"),
        *("evaluation_pass_at", "evaluation_seed", "checkpoint_every", "checkpoints_kept", "checkpoints_keep_every"),
        *("metrics_port", "metrics_host", "tensorboard", "wandb_project", "device_flops_max"),
    )
)
"""Settings that change no weight, or only how it is computed. Any other setting, also a future one, is part of the recipe."""


def recipe_document(config: TrainerConfig) -> bytes:
    """Return the recipe of these settings. Raises LocalError if it cannot be re-executed, or if its code cannot be imported."""
    require_repeatable(config)
    code = {path: digest_of_source(path) for path in sorted(import_paths(config))}
    pinned = _without_infinity(config.model_dump(mode="json", exclude=set(NOT_PINNED)))
    return json.dumps({"code": code, "trainer": pinned}, sort_keys=True, allow_nan=False).encode()


def require_repeatable(config: TrainerConfig) -> None:
    """Raise LocalError for settings whose steps depend on more than a training state and a batch."""
    modes = {config.mode, *config.environment_modes.values()}
    if TrainingMode.OPD in modes:
        raise LocalError(
            "run.replay: mode opd asks a teacher's server, whose answers cannot be repeated; leave out [run.replay] or the mode"
        )
    if config.advantage.import_path is None and config.advantage.type == "remax":
        raise LocalError(
            "run.replay: advantage remax samples greedy completions, which other arithmetic may not repeat, and nothing signed "
            "holds their rewards; use leave_one_out, or leave out [run.replay]"
        )
    if config.advantage.import_path is None and config.advantage.type == "gdpo":
        raise LocalError(
            "run.replay: advantage gdpo grades answers again, and nothing signed holds them; use normalized, or leave out "
            "[run.replay]"
        )
    optimizers = [config.optimizer, *([] if config.critic is None else [config.critic.optimizer])]
    if any(one.moments != "fp32" for one in optimizers):
        raise LocalError('run.replay: moments = "8bit" were never repeated on another machine; use fp32')


def require_pinned(config: TrainerConfig, policy: ReplayPolicy, document: bytes | None) -> None:
    """Check that these settings are the recipe that the run pins; `document`: the pinned one, if known. Raises LocalError."""
    mine = recipe_document(config)
    if digest_of(mine) == policy.recipe:
        return
    said = "" if document is None else f": {', '.join(differences(json.loads(document), json.loads(mine)))}"
    raise LocalError(
        f"the trainer's settings are not the recipe that the RunSpec pins{said}. Put them back; another recipe is another run"
    )


def config_of(document: bytes, policy: ReplayPolicy, *, trusted_code: Collection[str] = ()) -> TrainerConfig:
    """Return the settings of a recipe, for a re-execution on this machine's CPU.

    A recipe comes from a stranger, and to import a module runs it. So nothing is imported but what `trusted_code` names. Raises
    LocalError for other code, and if settings or code are not known here as they were pinned.
    """
    if digest_of(document) != policy.recipe:
        raise LocalError("the source's recipe is not the one that the RunSpec pins")
    try:
        found = json.loads(document)
        config = TrainerConfig.of_fields(found["trainer"])
        code: dict[str, str] = dict(found["code"])
        unpinned = sorted(NOT_PINNED & found["trainer"].keys())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ValidationError) as error:
        raise LocalError(
            f"this release cannot read the recipe ({error}): use the release that `produced_by.software` names"
        ) from None
    if unpinned or code.keys() != import_paths(config):
        raise LocalError("the recipe has settings that no recipe has, or does not pin exactly the code that it names")
    if foreign := sorted(code.keys() - set(trusted_code)):
        names = ", ".join(map(printable, foreign))
        raise LocalError(
            f"the recipe trains with code of the run's creator, {names}: get it, read it, and give --code with each name"
        )
    for path, digest in code.items():
        if digest_of_source(path) != digest:
            raise LocalError(
                f"the code of {path} here is not the one that the recipe pins: get it from the run's creator"
            )
    require_repeatable(config)
    return config


def digest_of_source(import_path: str) -> str:
    """Return the digest of the source file of an object. Raises LocalError."""
    import_object(import_path)
    module = sys.modules[import_path.replace(":", ".").rpartition(".")[0]]
    file = inspect.getsourcefile(module)
    if file is None:
        raise LocalError(f"run.replay: {import_path} has no source file to pin")
    return digest_of(Path(file).read_bytes())


def differences(pinned: Any, mine: Any, name: str = "") -> Iterator[str]:
    """Yield what two recipes disagree about, as text for people."""
    if isinstance(pinned, dict) and isinstance(mine, dict):
        for key in sorted(pinned.keys() | mine.keys()):
            yield from differences(pinned.get(key), mine.get(key), f"{name}.{key}" if name else key)
    elif pinned != mine:
        yield f"{name} is {json.dumps(mine)} here, {json.dumps(pinned)} in the recipe"


def import_paths(config: TrainerConfig) -> set[str]:
    """Return the import paths that settings name."""
    optimizers = [config.optimizer, config.sft.optimizer, *([] if config.critic is None else [config.critic.optimizer])]
    paths = [config.loss.import_path, config.advantage.import_path, *(one.import_path for one in optimizers)]
    return {path for path in paths if path is not None}


def _without_infinity(value: Any) -> Any:
    """Write infinity as text, which settings accept and JSON has."""
    if isinstance(value, dict):
        return {key: _without_infinity(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_infinity(each) for each in value]
    return "inf" if isinstance(value, float) and math.isinf(value) and value > 0 else value
