"""How far a re-execution is: a step of a real model takes minutes. Any of its threads writes, and one reader shows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class ReplayProgress:
    """Place of a re-execution. Example of its text: "step 41 of 40 to 49: passes 12 of 64"."""

    step: str = ""
    """What is worked on."""
    _parts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def note(self, part: str, done: int, total: int) -> None:
        """Note that `done` of `total` pieces of a part are done. A complete part is shown no longer."""
        if done < total:
            self._parts[part] = (done, total)
        else:
            self._parts.pop(part, None)

    @contextlib.contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Note a part without pieces, as long as the context lasts."""
        self.note(part, 0, 1)
        try:
            yield
        finally:
            self.note(part, 1, 1)

    @property
    def text(self) -> str:
        """The place as text for people; empty before the beginning."""
        parts = [
            part if total == 1 else f"{part} {done} of {total}" for part, (done, total) in list(self._parts.items())
        ]
        return ": ".join(filter(None, (self.step, ", ".join(parts))))
