"""Losses, one a file. Formulas are per token, to minimise; base.py says what a loss takes and gives."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from prime_node.algo.losses.aipo import aipo
from prime_node.algo.losses.base import BoundLoss, LossFunction, LossInputs, LossOutputs
from prime_node.algo.losses.sft import sft
from prime_node.algo.registry import choose, import_object
from prime_protocol.errors import LocalError

__all__ = ["LOSSES", "BoundLoss", "LossInputs", "LossOutputs", "find_loss"]

LOSSES: Mapping[str, LossFunction] = {"aipo": aipo, "sft": sft}
"""Token-wise losses by name."""


def find_loss(name: str, *, import_path: str | None = None, kwargs: Mapping[str, Any] | None = None) -> BoundLoss:
    """A loss by its name, or one's own by `import_path` ("package.module.function"), with its settings.

    A loss of one's own is called for each sequence by itself. Raises LocalError.
    """
    settings = dict(kwargs or {})
    function: LossFunction = import_object(import_path) if import_path is not None else choose("loss", name, LOSSES)
    try:
        inspect.signature(function).bind(None, **settings)
    except TypeError as error:
        raise LocalError(f"loss {import_path or name}: {error}") from None
    return BoundLoss(function, token_wise=import_path is None, **settings)
