"""A hostile tokenizer that its checks accept still makes texts longer: none that would take much memory is encoded or decoded."""

from __future__ import annotations

import base64
import contextlib
import json
import unicodedata
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.tiny_model_world import charsmap, write_tiny_model
from tokenizers import Tokenizer

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
    with pytest.raises(ValueError, match=rf"steps of {folder}/tokenizer\.json may make 200 times as long"):
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
GREETING = "\ufdfa"
"""Three bytes of which NFKC makes 33, most of all characters."""
TABLE = {
    "type": "Precompiled",
    "precompiled_charsmap": charsmap(GREETING, unicodedata.normalize("NFKC", GREETING)),
}
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
    assert read_tokenizer(folder) == 11 * 1.5 * 3


@pytest.mark.parametrize("key", ["a", "\u00e4", GREETING, "\U0001d161", "e\u0301\u0302"])
def test_a_table_lengthens_a_text_by_its_replacement_in_place_of_its_key(folder: Path, key: str) -> None:
    """A longer key is never found: the library looks up groups of five bytes at most."""
    plain, normalizer = read_tokenizer(folder), {"type": "Precompiled", "precompiled_charsmap": charsmap(key, "b" * 60)}
    change(folder / "tokenizer.json", normalizer=normalizer)
    made = Tokenizer.from_file(str(folder / "tokenizer.json")).normalizer.normalize_str(key)
    assert read_tokenizer(folder) == plain * len(made.encode()) / len(key.encode())
    assert HfTokenizer(folder).decode(HfTokenizer(folder).encode(key * 100)) == made * 100


def test_a_table_with_circles_is_read_once_and_a_large_one_not_at_all(folder: Path) -> None:
    plain = read_tokenizer(folder)
    circles = base64.b64encode((1024).to_bytes(4, "little") + b"".join(map(_to_itself, range(256)))).decode()
    for table, why in ((circles, None), (base64.b64encode(b"\0\0\x20\0" + bytes(2**21)).decode(), "a large one")):
        change(folder / "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": table})
        with contextlib.nullcontext() if why is None else pytest.raises(LocalError, match=why):
            assert read_tokenizer(folder) == plain


def _to_itself(place: int) -> bytes:
    """Return a unit that is found from row 0, and whose own row is 0, with a leaf."""
    return (place << 10 | 1 << 8 | place).to_bytes(4, "little")
