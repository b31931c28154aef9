"""The parts of a new run: its model's files, and the digests of its datasets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prime_node.cli import wire, wire_environments
from prime_node.envs.settings import EnvironmentSettings
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import CONFIG_FILE, EnvironmentSpec

if TYPE_CHECKING:
    from prime_node.coordinator.new_run import PretrainedModel, RunConfig, TinyModel


@dataclass(frozen=True, slots=True)
class NewModel:
    """Files of a new run's model, and its description in the RunSpec."""

    files: dict[str, bytes]
    vocab_size: int
    stop_token_ids: tuple[int, ...]


def make_model_files(model: TinyModel | PretrainedModel, folder: Path) -> NewModel:
    """Write configuration and tokenizer of the run's model to `folder`. Raises LocalError."""
    from prime_node.coordinator.new_run import TinyModel

    try:
        if isinstance(model, TinyModel):
            from prime_node.adapters.models.tiny_model import tiny_model_files

            files = tiny_model_files(**model.model_dump(exclude={"kind"}))
        else:
            from prime_node.adapters.models.pretrained_model import pretrained_model_files

            files = pretrained_model_files(model.name_or_path)
    except ValueError as error:
        raise LocalError(f"[run.model] {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if not isinstance(model, TinyModel):
        from prime_node.adapters.models.model_config import fit_window, require_supported, vocabulary_of

        if (fitted := fit_window(folder)) is not None:
            files = {**files, CONFIG_FILE: fitted}
            (folder / CONFIG_FILE).write_bytes(fitted)
        require_supported(folder)
        return NewModel(files, vocabulary_of(folder), (wire.tokenizer(folder).stop_token_id,))
    read = wire.tokenizer(folder)
    return NewModel(files, read.vocab_size, (read.stop_token_id,))


def pin_datasets(config: RunConfig, settings: EnvironmentSettings) -> RunConfig:
    """Add the digests of each dataset file and of own code, which a config may omit and the RunSpec must name.

    Raises LocalError for a missing file.
    """
    from prime_node.adapters.environments.data_files import find_file
    from prime_node.cli.wire_own_code import pin_code
    from prime_node.files import digest_of_file

    def pinned(environment: EnvironmentSpec) -> EnvironmentSpec:
        environment = pin_code(environment, settings.code_folder)
        if environment.id not in wire_environments.READERS or "digest" in environment.options:
            return environment
        path = str(environment.options.get("path", ""))
        try:
            digest = digest_of_file(find_file(path, settings.data_folder, hub_bytes_max=settings.hub_file_bytes_max))
        except (OSError, ValueError) as error:
            what = f"{path}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
            where = settings.data_folder or "the data folder"
            raise LocalError(
                f"environment {environment.name}: {what}; put the dataset into {where}, or set options.path"
            ) from None
        return environment.model_copy(update={"options": {**environment.options, "digest": digest}})

    return config.model_copy(update={"environments": tuple(map(pinned, config.environments))})
