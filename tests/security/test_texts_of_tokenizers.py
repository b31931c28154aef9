"""A hostile tokenizer that its checks accept still makes texts longer: none that would take much memory is encoded or decoded."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.models.model_folder import read_tokenizer
from prime_protocol import limits
from prime_protocol.errors import LocalError

SHOWN, SHOWN_TOO = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)


def change(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | entries))


def test_no_tokenizer_repeats_or_cuts_a_text_or_makes_it_too_long(folder: Path) -> None:
    """Before, one text of 131,000 characters took 400 GiB, by a stride or a template that repeats it."""
    plain = HfTokenizer(folder).encode("sun " * 10)
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    often = {"type": "TemplateProcessing", "single": [SHOWN] * 100, "pair": [SHOWN, SHOWN_TOO], "special_tokens": {}}
    change(folder / "tokenizer.json", truncation=cut, post_processor=often)
    tokenizer = HfTokenizer(folder)
    assert tokenizer.encode("sun " * 10) == plain
    with pytest.raises(ValueError, match=r"times as long"):
        tokenizer.encode("a" * (limits.TOKENIZER_TEXT_BYTES_MAX // 200 + 1))
    (folder / "chat_template.jinja").write_text("x" * 90_000 + "{{ messages[0].content }}")
    with pytest.raises(LocalError, match="90,000 bytes"):
        HfTokenizer(folder)


def test_no_tokens_are_decoded_to_a_text_that_fills_the_memory(folder: Path) -> None:
    grow = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    change(folder / "tokenizer.json", decoder={"type": "Sequence", "decoders": [level, grow]})
    tokenizer = HfTokenizer(folder)
    assert tokenizer.decode([97] * 1_000) == "a" * 100_000
    with pytest.raises(ValueError, match="tokens may be above"):
        tokenizer.decode([97] * 400_000)


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
BACK = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
META = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
NFKC_TABLE = base64.b64encode(b"\0\0\0\0" + b"x" * 33 + b"\0").decode()  # its longest entry is U+FDFA's, of 33 bytes
TABLE = {"type": "Precompiled", "precompiled_charsmap": NFKC_TABLE}
END = {"type": "Strip", "strip_left": False, "strip_right": True}
BLANKS = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}


def steps(name: str, *of: Mapping[str, object]) -> dict[str, object]:
    return {"type": "Sequence", name: of}


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "NFC"}, "pre_tokenizer": steps("pretokenizers", BYTES), "post_processor": BYTES},
        {
            "normalizer": steps("normalizers", {"type": "Prepend", "prepend": "\u2581"}, SPACES),
            "decoder": steps("decoders", BACK, {"type": "ByteFallback"}, {"type": "Fuse"}, STRIP),
        },
        {"normalizer": steps("normalizers", {"type": "NFKC"}, BLANKS), "pre_tokenizer": META, "decoder": META},
    ],
    ids=["Qwen", "Llama 2", "XGLM"],
)
def test_the_steps_of_published_tokenizers_pass(folder: Path, parts: dict[str, object]) -> None:
    change(folder / "tokenizer.json", **parts)
    assert HfTokenizer(folder).encode("sun " * 30_000)


def test_the_steps_that_transformers_writes_for_a_model_of_sentencepiece_pass(folder: Path) -> None:
    """Before, two blanks were counted as if they could match an empty text, and such files of T5 were refused."""
    last = BLANKS | {"content": "\u2581"}
    change(folder / "tokenizer.json", normalizer=steps("normalizers", TABLE, END, last), pre_tokenizer=META)
    assert read_tokenizer(folder) * 50_000 < limits.TOKENIZER_TEXT_BYTES_MAX
