"""A run's model files as untrusted data: checked before any library reads them.

The libraries trust these files. A `num_labels` of 10^9 becomes a dictionary of that size, the file sets the length of a table
of positions, and a normalizer may double a text forty times. This module compares names, sizes, nesting and numbers with
limits.py. Nothing imports torch or transformers, and nothing large is allocated. Each refusal is a LocalError that names the
file and the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prime_node.adapters.models.regex_cost import regex_fault
from prime_node.adapters.models.tokenizer_growth import CHARACTERS, growth_of_step
from prime_protocol import limits
from prime_protocol.envelope import load_json
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.run_spec import CONFIG_FILE, ModelFile
from prime_protocol.visible import printable

TOKENIZER_FILE = "tokenizer.json"
FILE_BYTES_MAX = {
    CONFIG_FILE: limits.MODEL_FILE_BYTES_MAX,
    "generation_config.json": limits.MODEL_FILE_BYTES_MAX,
    TOKENIZER_FILE: limits.TOKENIZER_BYTES_MAX,
    "tokenizer_config.json": limits.MODEL_FILE_BYTES_MAX,
    "special_tokens_map.json": limits.MODEL_FILE_BYTES_MAX,
    "added_tokens.json": limits.MODEL_FILE_BYTES_MAX,
    "vocab.json": limits.TOKENIZER_BYTES_MAX,
    "merges.txt": limits.TOKENIZER_BYTES_MAX,
    "chat_template.jinja": 4 * limits.CHAT_TEMPLATE_CHARS_MAX,
}
"""Allowed files of a run's model and their sizes. Engines also look for other files, which would change how they read these."""

_SETTINGS = (CONFIG_FILE, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_FORBIDDEN = {
    "auto_map": "to run code that comes with the model",
    "quantization_config": "for quantized weights, and policies are bf16",
    "compression_config": "for compressed weights, and policies are bf16",
}
_ORIGINS = frozenset({"_model_name_or_path", "_name_or_path"})
"""Keys of config.json that tell where a model came from. Any other key with a path or a repository's name is refused."""
_OBJECTS = frozenset().union(
    (
        "full_attention",
        "id2label",
        "label2id",
        "rope_parameters",
        "rope_scaling",
        "sliding_attention",
        "task_specific_params",
        "text_config",
    ),
    ("transformers.js_config",),
)
"""Keys of config.json that may hold objects."""
_INERT = frozenset({"attention_types", "id2label", "js_config", "label2id", "task_specific_params"})
"""Keys of config.json below which any keys and texts may stand: no library loads what they name."""
_IMPLEMENTATIONS = ("eager", "sdpa")
"""Kinds of attention that are part of torch. transformers may download the others as code."""
_POSITIONS = ("position", "n_ctx", "seq_len", "sequence_length", "model_max_length", "window")
_BASES = ("theta", "base")
_THETA_MAX = 2**40
_ROPE_TYPES_TIMES_FACTOR = ("linear", "dynamic")
_ROPE_ENTRY_BYTES = 4
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_STEP_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
_PAD_MULTIPLE_MAX = 256
_OPERATOR = "ask the run's operator"


def require_listed(files: Iterable[ModelFile]) -> None:
    """Check, before fetching, the names and sizes of model files. Raises LocalError for one that is not allowed or too large."""
    for file in files:
        if (most := FILE_BYTES_MAX.get(file.name)) is None:
            raise LocalError(
                f"the run's model file {printable(file.name)} is not one of {', '.join(FILE_BYTES_MAX)}; {_OPERATOR}"
            )
        if file.size > most:
            raise LocalError(f"the run's model file {file.name} has {file.size:,} bytes, above {most:,}; {_OPERATOR}")


def require_plain(folder: Path) -> None:
    """Check every model file that is present. Raises LocalError."""
    for name in FILE_BYTES_MAX:
        if not (folder / name).exists():
            continue
        if name == CONFIG_FILE:
            read_config(folder)
        elif name == TOKENIZER_FILE:
            read_tokenizer(folder)
        elif name.endswith(".json"):
            read_json(folder / name)
        else:
            read_text(folder / name)


def read_text(path: Path) -> str:
    """Read a text. Raises LocalError if the file is missing, not UTF-8 or too large for its kind."""
    return _read(path).decode()


def read_json(path: Path) -> dict[str, Any]:
    """Read an object of strict JSON that does not ask to run code. Raises LocalError."""
    try:
        value = load_json(_read(path))
    except RemoteError as error:
        raise LocalError(f"{path}: {error.detail}; {_OPERATOR}") from None
    if not isinstance(value, dict):
        raise LocalError(f"{path}: not a JSON object; {_OPERATOR}")
    for _, key, entry in _entries(value) if path.name in _SETTINGS else ():
        if key in _FORBIDDEN and entry is not None:
            raise LocalError(
                f"{path}: its {key} asks {_FORBIDDEN[key]}, which this software does not support; {_OPERATOR} for a model that "
                "transformers knows by itself"
            )
    return value


def _read(path: Path) -> bytes:
    most = FILE_BYTES_MAX[path.name]
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
        data.decode()
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror}; {_OPERATOR}") from None
    except UnicodeDecodeError:
        raise LocalError(f"{path}: not UTF-8; {_OPERATOR}") from None
    if len(data) > most:
        raise LocalError(f"{path}: more than {most:,} bytes; {_OPERATOR}")
    return data


def _entries(value: object, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (place, key, value) for everything in a JSON value. An element of a list has the list's key."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{place}{key}", key, item
            yield from _entries(item, f"{place}{key}.")
    elif isinstance(value, list):
        key = place[:-1].rpartition(".")[2]
        for number, item in enumerate(value):
            if not isinstance(item, str):
                yield f"{place}{number}", key, item
                yield from _entries(item, f"{place}{number}.")


# config.json


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json, with every count in the range of published models. Raises LocalError."""
    path = folder / CONFIG_FILE
    config = read_json(path)
    for place, key, value in _entries(config):
        fault = _fault(key, value) or (None if _INERT.intersection(place.split(".")[:-1]) else _unknown(key, value))
        if fault is not None:
            raise LocalError(f"{path}: {printable(place)[:200]} is {fault}; {_OPERATOR}")
    for part in (config, *(value for _, _, value in _entries(config) if isinstance(value, dict))):
        layers, experts = (max(_counts(part, word), default=1) for word in ("layer", "expert"))
        if layers * experts > limits.MODEL_EXPERTS_TOTAL_MAX:
            raise LocalError(
                f"{path}: {layers:,} layers of {experts:,} experts, above {limits.MODEL_EXPERTS_TOTAL_MAX:,} in total; "
                f"{_OPERATOR}"
            )
    return config


def rope_table_bytes(config: Mapping[str, Any]) -> int:
    """Return the maximum bytes of sines and cosines that an engine may store for any one part of a configuration."""
    most = 0
    for part in (config, *(value for _, _, value in _entries(dict(config)) if isinstance(value, dict))):
        scaling = part.get("rope_parameters") or part.get("rope_scaling") or {}
        scaling = scaling if isinstance(scaling, dict) else {}
        given = scaling.get("factor")
        factor = given if isinstance(given, (int, float)) else 1
        positions = max(_counts(part, "position"), default=0)
        original = max(_counts(scaling, "position"), default=0)
        times_factor = scaling.get("rope_type", scaling.get("type")) in _ROPE_TYPES_TIMES_FACTOR
        length = max(positions * factor if times_factor else positions, original * factor)
        most = max(most, int(length) * _head_size(part) * _ROPE_ENTRY_BYTES)
    return most


def _head_size(part: Mapping[str, Any]) -> int:
    sizes = [part.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads")]
    head, hidden, heads = (size if isinstance(size, int) and size > 0 else 0 for size in sizes)
    return head or hidden // max(1, heads)


def _counts(part: Mapping[str, Any], word: str) -> list[int]:
    return [
        value
        for key, value in part.items()
        if word in key and not ("size" in key or "dim" in key) and isinstance(value, int) and value > 0
    ]


def _fault(key: str, value: object) -> str | None:
    """Return what is wrong with one entry of config.json."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        most = _most(key.lower())
        if value > most:
            return f"{value:,}, above {most:,}" if value < 10**30 else f"above {most:,}"
        if isinstance(value, int) and value < -1:
            return f"{value:,}, below 0" if value > -(10**30) else "below 0"
    if isinstance(value, str) and len(value) > limits.MODEL_CONFIG_CHARS_MAX:
        return f"a text of {len(value):,} characters, above {limits.MODEL_CONFIG_CHARS_MAX:,}"
    if isinstance(value, list) and len(value) > limits.MODEL_CONFIG_ITEMS_MAX:
        return f"a list of {len(value):,} items, above {limits.MODEL_CONFIG_ITEMS_MAX:,}"
    return None


def _unknown(key: str, value: object) -> str | None:
    """Return why an entry of config.json could name what else a library, or its next version, loads."""
    texts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
    if "_implementation" in key and (texts or isinstance(value, (dict, list))):
        if isinstance(value, str) and value in _IMPLEMENTATIONS:
            return None
        return f"not {' or '.join(_IMPLEMENTATIONS)}: it asks to run code that comes with the model, which is not supported"
    if isinstance(value, dict) and key not in _OBJECTS:
        return "an object that this software does not know"
    if key not in _ORIGINS and any(mark in text for text in texts for mark in "/\\:"):
        return "a path or the name of a repository"
    return None


def _most(key: str) -> int:
    """Return the largest allowed number for an entry of this name."""
    if any(word in key for word in _BASES):
        return _THETA_MAX
    if any(word in key for word in _POSITIONS):
        return limits.MODEL_POSITIONS_MAX
    if "vocab" in key or key.endswith(("token_id", "token_ids", "_index")):
        return limits.VOCABULARY_MAX
    if "size" in key or "dim" in key:
        return limits.MODEL_SIZE_MAX
    if "label" in key or "expert" in key:
        return limits.MODEL_EXPERTS_MAX
    if any(word in key for word in ("layer", "block", "depth", "stage", "loop", "head", "factor")):
        return limits.MODEL_LAYERS_MAX
    return limits.MODEL_SIZE_MAX


# tokenizer.json


def read_tokenizer(folder: Path) -> float:
    """Check tokenizer.json: a bounded vocabulary, and steps of bounded growth. Return the growth.

    That is the largest factor by which its steps lengthen a text. Raises LocalError.
    """
    path = folder / TOKENIZER_FILE
    tokenizer = read_json(path)
    model = tokenizer.get("model")
    if not isinstance(model, dict):
        raise LocalError(f"{path}: has no model; {_OPERATOR}")
    for name in ("vocab", "merges"):
        size = len(model[name]) if isinstance(model.get(name), (dict, list)) else 0
        if size > limits.TOKENIZER_ENTRIES_MAX:
            raise LocalError(
                f"{path}: model.{name} has {size:,} entries, above {limits.TOKENIZER_ENTRIES_MAX:,}; {_OPERATOR}"
            )
    vocab, added = model.get("vocab"), tokenizer.get("added_tokens") or []
    ids = [*vocab.values()] if isinstance(vocab, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if any(type(one) is not int or not 0 <= one < limits.VOCABULARY_MAX for one in ids):
        raise LocalError(f"{path}: a token's id is not a number from 0 to {limits.VOCABULARY_MAX - 1:,}; {_OPERATOR}")
    _require_short(path, model)
    _require_few_added(path, added)
    if not _pads_little(tokenizer.get("padding")):
        raise LocalError(f"{path}: its padding lengthens every text; {_OPERATOR}")
    truncation = tokenizer.get("truncation")
    if isinstance(truncation, dict) and truncation.get("stride") not in (None, 0):
        raise LocalError(f"{path}: its truncation repeats a text (stride is not 0); {_OPERATOR}")
    steps, regexes, chars, growth = 0, 0, 0, 1.0
    for part in _STEPS:
        for place, key, value in _entries({part: tokenizer.get(part)}):
            is_list = key in _STEP_LISTS and place.endswith(key)
            if key in (*_STEPS, *_STEP_LISTS) and value is not None and not is_list and not _has_type(value):
                raise LocalError(f"{path}: {printable(place)[:200]} is a step without a type; {_OPERATOR}")
            steps += key == "type"
            if isinstance(value, str) and key != CHARACTERS:
                chars += len(value)
            if key == "Regex" and isinstance(value, str):
                regexes += 1
                if fault := regex_fault(value):
                    raise LocalError(f"{path}: {printable(place)[:200]} {fault}; {_OPERATOR}")
            if isinstance(value, dict):
                try:
                    growth *= growth_of_step(value, part)
                except ValueError as error:
                    raise LocalError(f"{path}: {error}; {_OPERATOR}") from None
    if regexes > limits.TOKENIZER_REGEXES_MAX:
        raise LocalError(f"{path}: {regexes:,} expressions, above {limits.TOKENIZER_REGEXES_MAX}; {_OPERATOR}")
    if steps > limits.TOKENIZER_STEPS_MAX:
        raise LocalError(f"{path}: {steps:,} steps, above {limits.TOKENIZER_STEPS_MAX}; {_OPERATOR}")
    if growth > limits.TOKENIZER_GROWTH_MAX:
        raise LocalError(
            f"{path}: its replacements make a text up to {growth:,.0f} times as long, above {limits.TOKENIZER_GROWTH_MAX}; "
            f"{_OPERATOR}"
        )
    if chars > limits.TOKENIZER_STEP_CHARS_MAX:
        raise LocalError(
            f"{path}: its steps have {chars:,} characters, above {limits.TOKENIZER_STEP_CHARS_MAX:,}; {_OPERATOR}"
        )
    return growth


def _require_short(path: Path, model: Mapping[str, Any]) -> None:
    """Raise LocalError if a text of the model is so long that the library's time or a decoded text has no sensible bound.

    WordPiece takes the third power of a word's length, Unigram the product of those of a text and of the longest token. The
    library keeps the text of each token found: one for unknown characters, or of an id that another token has, is no text's part.
    """
    vocab, most, least = model.get("vocab"), limits.TOKENIZER_WORD_CHARS_MAX, limits.TOKENIZER_WORD_CHARS_MAX // 8
    texts = [(model.get(name), least) for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token")]
    if isinstance(vocab, dict):
        bound = most if len(set(vocab.values())) == len(vocab) else least
        texts += [(text, bound) for text in vocab]
    elif isinstance(vocab, list):
        texts += [(one[0], least) for one in vocab if isinstance(one, list) and one]
    for text, bound in texts:
        if isinstance(text, str) and len(text) > bound:
            raise LocalError(f"{path}: model has a token of {len(text):,} characters, above {bound:,}; {_OPERATOR}")
    word = model.get("max_input_chars_per_word")
    if isinstance(word, int) and word > least:
        raise LocalError(f"{path}: model.max_input_chars_per_word is {word:,}, above {least:,}; {_OPERATOR}")


def _require_few_added(path: Path, added: object) -> None:
    """Raise LocalError if the library would take long to find the added tokens in texts."""
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if len(tokens) > limits.TOKENIZER_ADDED_MAX:
        raise LocalError(f"{path}: {len(tokens):,} added tokens, above {limits.TOKENIZER_ADDED_MAX:,}; {_OPERATOR}")
    texts = [token["content"] for token in tokens if isinstance(token.get("content"), str)]
    if (longest := max(map(len, texts), default=0)) > limits.TOKENIZER_WORD_CHARS_MAX:
        most = limits.TOKENIZER_WORD_CHARS_MAX
        raise LocalError(f"{path}: an added token has {longest:,} characters, above {most:,}; {_OPERATOR}")
    chars = sum(map(len, texts))
    if chars > limits.TOKENIZER_ADDED_CHARS_MAX:
        most = limits.TOKENIZER_ADDED_CHARS_MAX
        raise LocalError(f"{path}: its added tokens have {chars:,} characters, above {most:,}; {_OPERATOR}")


def _pads_little(padding: object) -> bool:
    """Return whether a single text keeps its length, up to the rounding of published files."""
    if padding is None:
        return True
    if not isinstance(padding, dict) or padding.get("strategy") != "BatchLongest":
        return False
    multiple = padding.get("pad_to_multiple_of") or 1
    return isinstance(multiple, int) and multiple <= _PAD_MULTIPLE_MAX


def _has_type(step: object) -> bool:
    """Return whether a step has a type. The library takes steps without one, and lists of their values."""
    return isinstance(step, dict) and isinstance(step.get("type"), str)
