"""A run's config.json, which is untrusted: read as data only, and refused before it can exhaust this machine.

Every error in it is a LocalError that names the file, because the architectures' own checks raise anything.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from prime_node import memory
from prime_node.adapters.models.model_folder import read_config, rope_table_bytes
from prime_node.adapters.training import packed_attention
from prime_node.algo.memory_plan import ModelShape
from prime_protocol.errors import LocalError, PrimeError
from prime_protocol.run_spec import CONFIG_FILE

PUBLISHED_BYTES_PER_PARAMETER = 2
"""Size of a parameter of a published policy: bf16."""


KINDS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that are supported: full attention, and attention to a window of the last tokens.

The latter are computed as full attention, which is the same while a sequence is within the window.
"""
POSITIONS_FIELD = "max_position_embeddings"


def read_model_config(folder: Path) -> Any:
    """Read the configuration of a model with full attention in all layers, or windows of all its positions.

    Raises LocalError.
    """
    config = _read(folder)
    window, positions = _window_of(config), getattr(config, POSITIONS_FIELD, None)
    if window is not None and (positions is None or positions > window):
        raise LocalError(
            f"{folder / CONFIG_FILE}: sliding_window is {window:,} and {POSITIONS_FIELD} {positions or 'missing'}; this software "
            "computes layers with windows as full attention, so a run's positions must be within the window; `prime-node new` "
            "makes them so"
        )
    return config


def fit_window(folder: Path) -> bytes | None:
    """Return config.json with as many positions as the smallest window of its layers has; None if they all fit.

    Raises LocalError.
    """
    window = _window_of(_read(folder))
    config = read_config(folder)
    if window is None or config.get(POSITIONS_FIELD, math.inf) <= window:
        return None
    return json.dumps({**config, POSITIONS_FIELD: window}, indent=2).encode()


def _read(folder: Path) -> Any:
    read_config(folder)
    with config_at_fault(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _require_own_class(folder, config)
    unknown = set(getattr(config, "layer_types", None) or ()) - KINDS
    if unknown:
        raise LocalError(
            f"{folder}: layers of kind {', '.join(sorted(unknown))}; this software knows full and sliding attention only"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise LocalError(f"{folder}: use_bidirectional_attention is set; this software knows causal models only")
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise LocalError(
            f"{folder / CONFIG_FILE}: attn_logit_softcapping is set (Gemma 2); the trainer's attention has no bound on its "
            "logits, so it would compute another model; use one without"
        )
    return config


def _window_of(config: Any) -> int | None:
    """Return the window of the layers that have one; without a list of layers it is for all of them."""
    layers, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    has_windows = layers is None or "sliding_attention" in layers
    return window if has_windows and window is not None else None


def require_supported(folder: Path) -> None:
    """Check that the trainer and the engines can compute this model. Nothing is allocated. Raises LocalError."""
    config = read_model_config(folder)
    with config_at_fault(folder), torch.device("meta"), no_init_weights():
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation=packed_attention.NAME, trust_remote_code=False)
    if not model._supports_attention_backend:
        raise LocalError(
            f"{folder / CONFIG_FILE}: transformers gives a {config.model_type} model no attention but its own; this software "
            "brings one that packs sequences, so it cannot train this model"
        )
    if any("sink" in name.rpartition(".")[2] for name, _ in model.named_parameters()):
        raise LocalError(
            f"{folder / CONFIG_FILE}: a {config.model_type} model has attention sinks (gpt-oss), which the trainer's attention "
            "cannot compute; use a model without"
        )


def require_memory(folder: Path, config: Any, *, bytes_per_parameter: int, device: torch.device) -> None:
    """Check, without allocating, that the memory holds the model's parameters and tables. Raises LocalError if not."""
    parameters, table_bytes = _planned(folder, config)
    needed, available = parameters * bytes_per_parameter + table_bytes, _available_bytes(device)
    if available is not None and needed > available:
        raise LocalError(
            f"{folder / CONFIG_FILE}: {parameters:,} parameters and {table_bytes / 2**30:.1f} GiB of tables need "
            f"{needed / 2**30:.1f} GiB of memory, and {available / 2**30:.1f} GiB are available ({device}); free some, or use "
            "a larger machine"
        )


def require_within(folder: Path, *, checkpoint_bytes_max: int) -> None:
    """Check that a policy of this model is within the run's limit: no larger manifest would be accepted.

    Raises LocalError if not.
    """
    parameters, _ = _planned(folder, read_model_config(folder))
    published = parameters * PUBLISHED_BYTES_PER_PARAMETER
    if published > checkpoint_bytes_max:
        raise LocalError(
            f"{folder / CONFIG_FILE}: {parameters:,} parameters are {published:,} bytes, and the run's "
            f"limits.checkpoint_bytes_max is {checkpoint_bytes_max:,}; its operator makes a new run with a higher limit"
        )


def vocabulary_of(folder: Path) -> int:
    """Return the number of a model's token ids. Raises LocalError."""
    config = read_model_config(folder)
    with config_at_fault(folder):
        size: int = config.vocab_size
    return size


def require_fitting(folder: Path, *, vocab_size: int, context_tokens_max: int) -> None:
    """Check that a run's vocabulary and longest sequence are possible with its model. Raises LocalError if not.

    An engine fails on token ids beyond the model's, and samples ids beyond a smaller vocabulary, for which an honest worker
    would be banned. Beyond the model's positions vLLM ends completions too early, with the same result.
    """
    found = vocabulary_of(folder)
    if found != vocab_size:
        raise LocalError(
            f"{folder / CONFIG_FILE}: the model has {found:,} token ids, and the run's vocab_size is "
            f"{vocab_size:,}, so honest work would be rejected; ask the run's operator"
        )
    positions = getattr(read_model_config(folder), POSITIONS_FIELD, None)
    if positions is not None and context_tokens_max > positions:
        raise LocalError(
            f"{folder / CONFIG_FILE}: the model has {positions:,} positions, and the run's sequences have up to "
            f"{context_tokens_max:,} tokens; ask the run's operator"
        )


def model_shape(folder: Path) -> ModelShape:
    """Return the sizes of a model, counted without memory. Raises LocalError."""
    config = read_model_config(folder)
    with config_at_fault(folder), torch.device("meta"), no_init_weights():
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, trust_remote_code=False)
        model.tie_weights()
        names = dict(model.named_parameters())
        root = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
        queries = getattr(config, "num_attention_heads", 1)
        head_size = getattr(config, "head_dim", None) or config.hidden_size // queries
        return ModelShape(
            parameters=sum(parameter.numel() for parameter in names.values()),
            root_parameters=sum(parameter.numel() for parameter in {id(each): each for each in root}.values()),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            mlp=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            queries=queries * head_size,
            keys=(getattr(config, "num_key_value_heads", None) or queries) * head_size,
            has_head_norms=any(name.endswith("q_norm.weight") for name in names),
            vocab=config.vocab_size,
        )


def _planned(folder: Path, config: Any) -> tuple[int, int]:
    """Return (parameters, bytes of tables), counted on a model without memory.

    Tables are what the model stores besides its weights, such as masks and positions, and the sines and cosines that another
    engine stores for the same configuration.
    """
    with config_at_fault(folder), torch.device("meta"), no_init_weights():
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, trust_remote_code=False)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        buffers = sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    return parameters, buffers + rope_table_bytes(read_config(folder))


def _require_own_class(folder: Path, config: Any) -> None:
    """Check that all engines build the same model.

    Raises LocalError if not. Some choose by `architectures`, transformers by `model_type`.
    """
    own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    named = config.architectures or []
    if any(name != own for name in named):
        raise LocalError(
            f"{folder / CONFIG_FILE}: architectures is {', '.join(map(str, named))[:200]}, and a {config.model_type} "
            f"model for text is {own}; ask the run's operator"
        )


def _available_bytes(device: torch.device) -> int | None:
    """Return the memory still available to this process, on the device or within its control group; None if unknown."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory.available_bytes()


@contextlib.contextmanager
def config_at_fault(folder: Path) -> Iterator[None]:
    """Report any error inside as an error in the run's config.json."""
    try:
        yield
    except PrimeError:
        raise
    except Exception as error:  # the architectures raise anything for unexpected values
        reason = " ".join(str(error).split())[:300] or "no reason given"
        raise LocalError(
            f"{folder / CONFIG_FILE}: transformers cannot build this run's model ({type(error).__name__}: {reason}); "
            "update transformers if it is older than the model, else ask the run's operator"
        ) from error
