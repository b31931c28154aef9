"""The folder of golden vectors, and their common keys and time. See make_vectors.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from prime_protocol.envelope import WireModel
from prime_protocol.identity import SigningKey

NOW_MS = 1_790_000_000_000
ROOT, COORDINATOR, TRAINER, VALIDATOR, WORKER, STRANGER = (SigningKey(bytes([i]) * 32) for i in range(1, 7))
Case = dict[str, Any]


class Folder:
    """A folder of vectors that does not exist yet."""

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            sys.exit(f"{path} exists. Vectors are never changed: give a new folder.")
        self.path = path

    def file(self, name: str, data: bytes) -> str:
        assert not (self.path / name).exists()
        (self.path / name).write_bytes(data)
        return name

    def cases(self, kind: str, cases: list[Case]) -> None:
        names = [case["name"] for case in cases]
        assert len(set(names)) == len(names)
        text = json.dumps(cases, indent=1, ensure_ascii=False)
        (self.path / f"{kind}.json").write_text(text + "\n", encoding="utf-8")


def fields(message: WireModel) -> Any:
    return json.loads(message.model_dump_json())


def flipped(data: bytes, place: int) -> bytes:
    place %= len(data)
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
