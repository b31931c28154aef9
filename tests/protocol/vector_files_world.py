"""The files of golden vectors, and what many kinds read from a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prime_protocol.envelope import (
    open_envelope,
)
from prime_protocol.limits import Limits
from prime_protocol.run_spec import PinnedRun, open_run_spec

Case = dict[str, Any]
ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "tests" / "vectors"
LISTS = sorted(VECTORS.glob("v*/*.json"))
CASES = [(path, case) for path in LISTS for case in json.loads(path.read_text(encoding="utf-8"))]
BOUNDS = Limits()


def data_of(case: Case, folder: Path) -> bytes:
    if "input" in case:
        return (folder / case["input"]).read_bytes()
    return bytes.fromhex(case["hex"]) if "hex" in case else case["text"].encode()


def fields(message: Any) -> Any:
    return json.loads(message.model_dump_json())


def run_of(case: Case, folder: Path) -> PinnedRun:
    spec = open_envelope((folder / case["run_spec"]).read_bytes())
    run = open_run_spec(spec, pinned=spec.digest)
    for name in case.get("rings", ()):
        run.keys.add(open_envelope((folder / name).read_bytes()))
    return run
