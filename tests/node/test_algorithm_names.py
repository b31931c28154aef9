"""The table of names in docs/algorithms.md: each of this project's names exists, and none is missing."""

from __future__ import annotations

import re
from pathlib import Path

from prime_node.algo.advantages import ADVANTAGES, TOKEN_ADVANTAGES
from prime_node.algo.filters import FILTERS
from prime_node.algo.losses import LOSSES
from prime_node.coordinator.curriculum_config import CurriculumConfig
from prime_node.ports.train_backend import AggregationKind
from prime_node.trainer.algorithm_config import AdvantageConfig, LossConfig
from prime_node.trainer.config import TrainerConfig

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"
FRAMEWORKS = ("here", "prime-rl", "verl", "TRL", "NeMo-RL", "SkyRL", "AReaL", "slime", "OpenRLHF")
OWN_FORMS = {"aipo_stop_gradient", "sft"}
"""Losses without a counterpart to compare: another form of `aipo`, and cross-entropy."""


def table() -> list[list[str]]:
    text = DOCUMENT.read_text(encoding="utf-8").partition("## The same in other frameworks")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def names() -> list[str]:
    return [name for row in table()[2:] for name in re.findall(r"`([^`]+)`", row[0])]


def test_each_name_in_the_table_exists() -> None:
    settings = {
        name
        for config in (LossConfig, AdvantageConfig, TrainerConfig, CurriculumConfig)
        for name in config.model_fields
    }
    known = {*LOSSES, *ADVANTAGES, *TOKEN_ADVANTAGES, *FILTERS, *AggregationKind, *settings}
    assert set(names()) <= known
    assert len(names()) == len(set(names()))


def test_each_algorithm_has_a_row_and_each_framework_a_column() -> None:
    rows = table()
    assert tuple(rows[0]) == FRAMEWORKS
    assert {len(row) for row in rows} == {len(FRAMEWORKS)}
    everything = {*LOSSES, *ADVANTAGES, *TOKEN_ADVANTAGES, *FILTERS, *AggregationKind}
    assert everything - set(names()) == OWN_FORMS | {"default"}
