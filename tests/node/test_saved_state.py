"""A training state is written as it was when it was saved, with as few copies as possible."""

from __future__ import annotations

import threading

import torch

from prime_node.adapters.training.train_state import SavedState


def test_a_state_that_nobody_changes_is_not_copied() -> None:
    tensor = torch.zeros(3)
    with SavedState({"tensor": tensor}).writing() as state:
        assert state["tensor"] is tensor


def test_a_state_that_would_change_before_it_is_written_is_copied_once() -> None:
    tensor = torch.zeros(3)
    saved = SavedState({"tensor": tensor, "note": 1})
    for _ in range(2):
        saved.before_change()
        tensor += 1
    with saved.writing() as state:
        assert state["tensor"].tolist() == [0.0, 0.0, 0.0]
        assert state["note"] == 1


def test_a_change_waits_until_the_state_is_written() -> None:
    tensor = torch.zeros(3)
    saved = SavedState({"tensor": tensor})
    begun, may_end, written = threading.Event(), threading.Event(), list[float]()

    def write() -> None:
        with saved.writing() as state:
            begun.set()
            may_end.wait()
            written.extend(state["tensor"].tolist())

    def change() -> None:
        saved.before_change()
        tensor.add_(1)

    threads = [threading.Thread(target=write), threading.Thread(target=change)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join()
    assert written == [0.0, 0.0, 0.0]
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_a_failed_write_delays_no_later_change() -> None:
    saved = SavedState({})
    try:
        with saved.writing():
            raise OSError
    except OSError:
        saved.before_change()
