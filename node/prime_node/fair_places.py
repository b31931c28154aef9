"""Who gets a place where there are few: some networks cannot take all, however many keys they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def has_place(held: int, taken: int, *, most: int, share: int) -> bool:
    """Return whether a network that holds `held` of the `taken` places gets one more: `share` at most, of `most` in all.

    The last share is for networks without a place.
    """
    return held < share and taken < most - (share if held else 0)


def to_end(places: Mapping[T, str], network: str) -> T | None:
    """Return the newest place of the network with most, for a newcomer of `network`; None if that would make nothing fairer.

    `places`: network of each place, the oldest first. Those of a flood are newer than others. Bitcoin Core evicts alike.
    """
    counts = Counter(places.values())
    largest = max(counts, key=lambda one: counts[one], default=network)
    if counts[largest] <= counts[network] + 1:
        return None
    return next(place for place in reversed(list(places)) if places[place] == largest)
