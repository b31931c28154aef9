"""Hidden states for proofs, without making the engine's step wait: the step copies rows and queues them, a thread does the rest.

On a GPU the copy runs on its own stream into pinned memory, and the thread waits for it. The thread assigns rows to completions
and commits to whole chunks (hidden_rows.py), in the order in which the step queued them, so proofs are the same as without it.
Whole rows are copied, not their largest values: choosing those on the device would lengthen the step, while the thread needs
0.2 ms for a chunk of 32 tokens of 1,024 values, 0.4 ms of 4,096.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from prime_node.adapters.engines.hidden_rows import HiddenRows

STEPS_QUEUED_MAX = 256
"""Steps that the thread may lag behind. Then a step waits, as memory is bounded."""


class QueuedRows:
    """Rows of many completions, each identified by any hashable name, processed in a thread of its own.

    The thread is a daemon: it ends with the engine's process. An error in it is raised by the next call.
    """

    def __init__(self) -> None:
        self._rows = HiddenRows()
        self._queue: queue.Queue[Callable[[], None]] = queue.Queue(STEPS_QUEUED_MAX)
        self._asked: set[Hashable] = set()
        self._proofs: dict[Hashable, bytes] = {}
        self._error: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None
        threading.Thread(target=self._work, name="proofs", daemon=True).start()

    def add(self, names: Sequence[Hashable], positions: Sequence[int], hidden_ND: Tensor) -> None:
        """Queue row n of `hidden_ND`, from which the token at positions[n] of completion names[n] is chosen; skip None."""
        copy_ND, copied = self._copied(hidden_ND.detach())

        def process() -> None:
            copied()
            self._rows.add(names, positions, copy_ND)

        self._put(process)

    def take(self, lengths: Sequence[tuple[Hashable, int]]) -> list[bytes | None]:
        """Return the proofs of finished completions with these numbers of tokens, None for those that are not ready.

        The first call for a completion queues it; ask again for what is missing. What is returned is forgotten.
        """
        wanted = {name: length for name, length in lengths if name not in self._asked}
        if wanted:
            self._asked.update(wanted)
            self._put(lambda: self._proofs.update(self._rows.take(wanted)))
        self._raise()
        found = [self._proofs.pop(name, None) for name, _ in lengths]
        self._asked.difference_update(
            name for (name, _), proof in zip(lengths, found, strict=True) if proof is not None
        )
        return found

    def drop(self, names: Sequence[Hashable]) -> None:
        """Forget completions whose proofs are no longer needed."""

        def forget() -> None:
            self._rows.drop(names)
            for name in names:
                self._proofs.pop(name, None)
                self._asked.discard(name)

        if names:
            self._put(forget)

    def _copied(self, hidden_ND: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Begin a copy of the rows, in bf16, to the CPU's memory. Return it, and a function that waits for its end."""
        if not hidden_ND.is_cuda:
            return hidden_ND.to(torch.bfloat16, copy=True), lambda: None
        stream = self._stream = self._stream or torch.cuda.Stream(hidden_ND.device)
        stream.wait_stream(torch.cuda.current_stream(hidden_ND.device))
        with torch.cuda.stream(stream):
            rounded_ND = hidden_ND.to(torch.bfloat16)
            hidden_ND.record_stream(stream)  # its memory is not reused before this stream has read it
            copy_ND = torch.empty(rounded_ND.shape, dtype=torch.bfloat16, pin_memory=True)
            copy_ND.copy_(rounded_ND, non_blocking=True)
            done = stream.record_event()
        return copy_ND, done.synchronize

    def _put(self, work: Callable[[], None]) -> None:
        self._raise()
        self._queue.put(work)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            work = self._queue.get()
            try:
                if self._error is None:
                    work()
            except Exception as error:  # noqa: BLE001 (the thread's edge: stored, and raised at the engine's next call)
                self._error = error
