"""A training state on its way to the disk. It is copied only if it would change before a thread writes it.

The state of AdamW is two or three times the weights. A copy of it would be the largest part of a trainer's memory, for seconds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor


class SavedState:
    """Tensors that another thread writes. Who changes them calls `before_change` first."""

    def __init__(self, state: dict[str, Any], *, is_copy: bool = False) -> None:
        """Keep a state. `is_copy`: nothing changes its tensors."""
        self._state = state
        self._is_copy, self._is_begun = is_copy, False
        self._guard = threading.Lock()
        self._written = threading.Event()

    @contextlib.contextmanager
    def writing(self) -> Iterator[dict[str, Any]]:
        """Give the state to the thread that writes it, once."""
        with self._guard:
            self._is_begun = True
        try:
            yield self._state
        finally:
            self._state = {}
            self._written.set()

    def before_change(self) -> None:
        """Wait until the state is written; copy it if its writing has not begun."""
        with self._guard:
            if not self._is_copy and not self._is_begun:
                self._state = {key: _cloned(value) for key, value in self._state.items()}
                self._is_copy = True
        if not self._is_copy:
            self._written.wait()


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
