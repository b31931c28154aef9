"""Bytes as a fluid: every transfer runs at its max-min fair share of its sender's uplink and its receiver's downlink.

TCP tends to this, and the lower bound of Kumar & Ross (2006) assumes it. Time advances in strides with constant rates.
A transfer that ends inside a stride leaves capacity unused, which is credited to its two hosts in the next stride. So
strides cost resolution and no throughput. Max-min uses progressive filling (Bertsekas & Gallager 1992, section 6.5.2),
all bottlenecks of a round at once, as numpy arrays: 80,000 transfers take some milliseconds a stride.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Rates = NDArray[np.float64]
Hosts = NDArray[np.int32]

ROUNDS_MAX = 12
"""Rounds of progressive filling. The remaining transfers then get their fair share of the rest: feasible, slightly
below max-min."""


class Fluid:
    """Transfers between numbered hosts with `up` and `down` in bytes per second."""

    def __init__(self, up: Rates, down: Rates) -> None:
        self.up = up.astype(np.float64)
        self.down = down.astype(np.float64)
        self.sent = np.zeros(len(up))
        """Bytes sent by each host in the whole run."""
        self._up_credit = np.zeros(len(up))  # bytes
        self._down_credit = np.zeros(len(up))
        self._senders: Hosts = np.zeros(1_024, np.int32)
        self._receivers: Hosts = np.zeros(1_024, np.int32)
        self._left = np.zeros(1_024)  # bytes
        self._is_open = np.zeros(1_024, np.bool_)
        self._free = list(range(1_023, -1, -1))

    def __len__(self) -> int:
        return len(self._left) - len(self._free)

    def open(self, sender: int, receiver: int, num_bytes: float) -> int:
        """Start a transfer and return its number, which is reused once it has ended."""
        if not self._free:
            self._grow()
        number = self._free.pop()
        self._senders[number] = sender
        self._receivers[number] = receiver
        self._left[number] = num_bytes
        self._is_open[number] = True
        return number

    def cut(self, number: int) -> float:
        """End a transfer early. Returns the bytes that were left."""
        left = float(self._left[number])
        self._is_open[number] = False
        self._free.append(number)
        return left

    def advance(self, stride_s: float) -> list[tuple[float, int]]:
        """Advance time. Returns (seconds into the stride, transfer) for each finished one, in order."""
        numbers = np.flatnonzero(self._is_open)
        if not len(numbers):
            self._up_credit[:] = self._down_credit[:] = 0.0
            return []
        senders, receivers = self._senders[numbers], self._receivers[numbers]
        up = self.up + self._up_credit / stride_s
        down = self.down + self._down_credit / stride_s
        rates = max_min_rates(senders, receivers, up, down)
        left = self._left[numbers]
        took_s = left / np.maximum(rates, 1e-9)
        moved = np.minimum(left, rates * stride_s)
        self._left[numbers] = left - moved
        sent = np.bincount(senders, moved, len(self.up))
        self.sent += sent
        ended = np.flatnonzero(took_s <= stride_s)
        unused = rates[ended] * (stride_s - took_s[ended])
        self._up_credit = np.minimum(np.bincount(senders[ended], unused, len(up)), self.up * stride_s)
        self._down_credit = np.minimum(np.bincount(receivers[ended], unused, len(up)), self.down * stride_s)
        ended = ended[np.argsort(took_s[ended], kind="stable")]
        gone = numbers[ended]
        self._is_open[gone] = False
        finished = gone.tolist()
        self._free.extend(finished)
        return list(zip(took_s[ended].tolist(), finished, strict=True))

    def _grow(self) -> None:
        size = len(self._left)
        self._senders = np.resize(self._senders, 2 * size)
        self._receivers = np.resize(self._receivers, 2 * size)
        self._left = np.resize(self._left, 2 * size)
        self._is_open = np.concatenate([self._is_open, np.zeros(size, np.bool_)])
        self._free.extend(range(2 * size - 1, size - 1, -1))


def max_min_rates(senders: Hosts, receivers: Hosts, up: Rates, down: Rates) -> Rates:
    """Return the rate of each transfer from senders[i] to receivers[i], in the unit of `up` and `down`."""
    rates = np.zeros(len(senders))
    up_left, down_left = up.copy(), down.copy()
    open_ = np.arange(len(senders))
    for turn in range(ROUNDS_MAX):
        at_sender, at_receiver = senders[open_], receivers[open_]
        fair_up = up_left / np.maximum(np.bincount(at_sender, minlength=len(up)), 1)
        fair_down = down_left / np.maximum(np.bincount(at_receiver, minlength=len(up)), 1)
        share_up, share_down = fair_up[at_sender], fair_down[at_receiver]
        rate = np.minimum(share_up, share_down)
        if turn == ROUNDS_MAX - 1:
            rates[open_] = rate
            break
        # A host is a bottleneck if no transfer of its is limited more at its other end: those transfers are settled.
        least_up = np.full(len(up), np.inf)
        np.minimum.at(least_up, at_sender, rate)
        least_down = np.full(len(up), np.inf)
        np.minimum.at(least_down, at_receiver, rate)
        settled = (least_up[at_sender] >= fair_up[at_sender] * (1 - 1e-9)) | (
            least_down[at_receiver] >= fair_down[at_receiver] * (1 - 1e-9)
        )
        done = open_[settled]
        rates[done] = rate[settled]
        up_left -= np.bincount(at_sender[settled], rate[settled], len(up))
        down_left -= np.bincount(at_receiver[settled], rate[settled], len(up))
        np.maximum(up_left, 0.0, out=up_left)
        np.maximum(down_left, 0.0, out=down_left)
        open_ = open_[~settled]
        if not len(open_):
            break
    return rates
