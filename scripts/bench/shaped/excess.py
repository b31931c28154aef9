"""Parts of a broadcast's time beyond the bound, from the bytes that all receivers' links had carried at each moment.

At the bound's rate the links carry N * F bytes in the bound. Their lag behind that at a moment is the time lost until then: in
the first tenth of the bytes (the notification, the first pieces), in the middle, and in the last tenth (the end game). Bytes
beyond N * F (headers, acknowledgements, duplicate pieces) are a separate part. The four add up to the ratio less one.
"""

from __future__ import annotations

from collections.abc import Sequence

PARTS = ("start", "middle", "end", "more bytes")

Sample = tuple[float, int]
"""(seconds after the start, bytes received by all)."""


def excess(samples: Sequence[Sample], file_bytes: float, bound_s: float) -> dict[str, float]:
    """Shares of the bound; nothing where the last sample does not hold all files. `file_bytes` is N * F."""
    if not samples or samples[-1][1] < file_bytes:
        return {}

    def lost(sample: Sample) -> float:
        return sample[0] / bound_s - sample[1] / file_bytes

    first = next(sample for sample in samples if sample[1] >= 0.1 * file_bytes)
    late = next(sample for sample in samples if sample[1] >= 0.9 * samples[-1][1])
    places = [lost(first), lost(late), lost(samples[-1])]
    shares = (places[0], places[1] - places[0], places[2] - places[1], samples[-1][1] / file_bytes - 1)
    return {name: round(share, 3) for name, share in zip(PARTS, shares, strict=True)}
