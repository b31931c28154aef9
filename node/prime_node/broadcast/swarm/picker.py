"""Decide which piece to request from which source next. Pure: events go in, requests come out; the clock is an argument.

One picker serves one download. The rules, in the order in which they apply to a source that has room for a request:

    (1) keep as many requests open as the source needs to stay busy: up to twice its rate times its shortest answer (as BBR sizes
        its window), less where there are many sources, which keep the downlink busy between them
    (2) rarest first among the pieces that it has and that are not requested yet; of equally rare ones, those of this receiver's
        share of the file, then any at random. Shares keep receivers from asking the origin for the same piece (Mutualcast, Li et
        al. 2005)
    (3) a fallback gives what no peer has; a slow source gives what no other has. Slow sources do not count here, nor do snubbed
        ones (very late with an answer) until they give something: a source that gives nothing must not keep us from the origin
    (4) if nothing is left to request, take over a piece requested elsewhere if it comes at least twice as soon from here. This is
        end game and work stealing in one. No byte is sent twice that would have been in time. A fallback takes over what is late,
        and before the end only what is very late, because what has already come of a piece is lost

A piece is open until `arrived` or `missed`. The picker knows nothing of digests: the caller reports `arrived` only for
verified pieces.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from prime_node.broadcast.swarm.piece_sets import PieceCounts, PieceSet, any_of, members, span
from prime_protocol.pieces import PIECE_BYTES_MIN


@dataclass(frozen=True, slots=True)
class PickerRules:
    """Settings of one download."""

    in_flight_max: int = 4
    """Requests open at one source, or more while they have fewer than `in_flight_bytes` together."""
    in_flight_bytes: int = 2**21
    first_bytes: int = 2**19
    """Bytes asked of new sources, all together. At least one piece is asked of each."""
    window_gain: float = 2.0
    """Bytes in flight at most, as a multiple of a source's rate times its shortest answer, if it is the only source.

    With more sources, their answers only queue on our downlink. There they hold upload slots, and pieces that others would
    bring sooner.
    """
    slow_piece_s: float = 1.0
    """Seconds a piece above which a source has one open request. If all peers together need longer, a fallback helps."""
    slow_share: float = 0.05
    """Share of the mean rate below which a source is slow."""
    steal_gain: float = 0.5
    """Largest ratio of the new source's time to the old one's remaining time at which a piece is taken over."""
    web_seed_patience: float = 2.0
    """Multiple of the expected time (at least `slow_piece_s`) by which a piece must be overdue to be very late.

    While there are unrequested pieces, a fallback takes over nothing else: a late piece delays nothing yet, and its
    received bytes would be lost.
    """
    steal_look_s: float = 0.1
    """Seconds between two attempts of an otherwise idle source to take over a piece."""
    copies_max: int = 2
    """Sources asked for one piece at the same time."""
    rate_memory_s: float = 2.0
    """Time constant of the moving averages of rates, in seconds."""
    rate_guess_bytes_s: float = 2**20
    """Rate assumed for a source that has given nothing yet, while there is no other to compare with."""


@dataclass(slots=True)
class _Open:
    """A request in progress."""

    asked_s: float
    due_s: float
    """Time at which it was expected to arrive."""

    def very_late_s(self, rules: PickerRules) -> float:
        """Return the time from which it is very late."""
        return self.due_s + rules.web_seed_patience * max(self.due_s - self.asked_s, rules.slow_piece_s)


@dataclass(slots=True)
class _Source:
    is_web_seed: bool
    has: PieceSet = 0
    open: dict[int, _Open] = field(default_factory=dict)
    open_bytes: int = 0
    rate_bytes_s: float | None = None
    answer_s_min: float = math.inf
    looked_s: float = -math.inf
    """Time of its last look for a piece to take over."""
    counted_s: float = 0.0
    """Time up to which the rate includes everything."""
    is_snubbed: bool = False
    """Whether it is snubbed: its answer is very late, and nothing has arrived since."""
    is_slow: bool = False
    num_pieces: int = 0
    """Pieces since the first. They count alike in the rate until they fill its time constant: the first one is slow."""

    @property
    def is_counted(self) -> bool:
        """Whether its pieces are left to it and count as available."""
        return not (self.is_web_seed or self.is_snubbed or self.is_slow)


class Picker:
    """One download of pieces with `sizes` in bytes."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        rng: random.Random,
        rules: PickerRules | None = None,
        have: PieceSet = 0,
        share: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Start with the pieces in `have`. `share` is the part of the file, from 0 to 1, that this receiver requests first."""
        self.have = have
        self._sizes = sizes
        self._all = span(0, len(sizes))
        self._share = span(round(share[0] * len(sizes)), round(share[1] * len(sizes)))
        self._rng = rng
        self._rules = rules or PickerRules()
        self._sources: dict[str, _Source] = {}
        self._counts = PieceCounts()
        """Availability of each piece, over the sources that are counted."""
        self._askers: dict[int, list[str]] = {}
        """Sources asked for each open piece."""
        self._open: PieceSet = 0
        self._piece_bytes = sum(sizes) / max(1, len(sizes))
        self._rate_bytes_s_max = 0.0
        """Highest rate of any source so far."""

    # State

    @property
    def is_done(self) -> bool:
        """Whether all pieces have arrived."""
        return self.have == self._all

    @property
    def missing(self) -> PieceSet:
        """Pieces that are not here."""
        return self._all & ~self.have

    @property
    def unasked(self) -> PieceSet:
        """Missing pieces that are not requested: only these make a new announcement worth a `pick`."""
        return self._all & ~self.have & ~self._open

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources."""
        return tuple(self._sources)

    def add(self, name: str, *, has: PieceSet = 0, is_web_seed: bool = False) -> None:
        """Add a source. A fallback (the origin, whose uplink is scarce) is asked for what no peer has."""
        assert name not in self._sources
        self._sources[name] = _Source(is_web_seed)
        self.has(name, has)

    def has(self, name: str, announced: PieceSet) -> None:
        """Record that a source has these pieces too. Those that have arrived already are no longer counted."""
        source = self._sources[name]
        new = announced & self._all & ~(source.has | self.have)
        if new:
            source.has |= new
            if source.is_counted:
                self._counts.add(new)

    def remove(self, name: str) -> None:
        """Remove a source and free the pieces requested from it."""
        source = self._sources[name]
        for piece in list(source.open):
            self._close(name, piece)
        if source.is_counted and source.has:
            self._counts.remove(source.has)
        del self._sources[name]

    def has_room(self, name: str) -> bool:
        """Return whether one more request would keep this source busier."""
        source = self._sources[name]
        return not source.open or len(source.open) < self._window(source)

    def idle(self) -> list[str]:
        """Return the sources without open requests."""
        return [name for name, source in self._sources.items() if not source.open]

    # Events

    def pick(self, name: str, now_s: float) -> int | None:
        """Return the piece to request from this source now, and mark it open.

        Return None if there is nothing to request at present.
        """
        source = self._sources[name]
        if source.is_slow != self._is_slow(source):
            self._judge(source, is_snubbed=source.is_snubbed, is_slow=not source.is_slow)
        if not self.has_room(name):  # (1)
            return None
        free = source.has & ~self.have & ~self._open
        if free and (source.is_slow or (source.is_web_seed and not self._is_starved())):
            free &= ~self._counts.is_held()  # (3)
        if free:
            rarest = self._counts.rarest(free)  # (2)
            piece = any_of(rarest & self._share or rarest, self._rng)
        else:
            stolen = self._to_steal(source, now_s)  # (4)
            if stolen is None:
                return None
            piece = stolen
        if not source.open:
            source.counted_s = now_s
        source.open_bytes += self._sizes[piece]
        source.open[piece] = _Open(now_s, now_s + source.open_bytes / self._rate(source))
        self._askers.setdefault(piece, []).append(name)
        self._open |= 1 << piece
        return piece

    def arrived(self, name: str, piece: int, now_s: float) -> tuple[str, ...]:
        """Record a verified piece. Return the other sources that were asked for it: those requests can be cancelled."""
        source = self._sources[name]
        if source.is_snubbed:
            self._judge(source, is_snubbed=False, is_slow=source.is_slow)
        request = source.open.get(piece)
        if request is not None:
            self._measure(source, request, self._sizes[piece], now_s)
            self._close(name, piece)
        others = tuple(self._askers.get(piece, ()))
        for other in others:
            self._close(other, piece)
        self.have |= 1 << piece
        return others

    def missed(self, name: str, piece: int) -> None:
        """Record a request that failed: refused, cut, cancelled, or with wrong bytes."""
        if piece in self._sources[name].open:
            self._close(name, piece)

    # Internals

    def _close(self, name: str, piece: int) -> None:
        source = self._sources[name]
        del source.open[piece]
        source.open_bytes -= self._sizes[piece]
        askers = self._askers[piece]
        askers.remove(name)
        if not askers:
            del self._askers[piece]
            self._open &= ~(1 << piece)

    def _measure(self, source: _Source, request: _Open, size: int, now_s: float) -> None:
        source.answer_s_min = min(source.answer_s_min, max(1e-6, now_s - request.asked_s))
        passed_s = max(1e-6, now_s - source.counted_s)
        source.counted_s = now_s
        if source.rate_bytes_s is None:
            source.rate_bytes_s = size / passed_s
        else:
            source.num_pieces += 1
            weight = max(-math.expm1(-passed_s / self._rules.rate_memory_s), 1 / (1 + source.num_pieces))
            source.rate_bytes_s += weight * (size / passed_s - source.rate_bytes_s)
        self._rate_bytes_s_max = max(self._rate_bytes_s_max, source.rate_bytes_s)

    def _window(self, source: _Source) -> int:
        num_sources = len(self._sources)
        if source.is_snubbed:
            return 1
        rules = self._rules
        if source.rate_bytes_s is None:
            return max(1, int(rules.first_bytes / num_sources / max(self._piece_bytes, PIECE_BYTES_MIN)))
        if self._piece_bytes / source.rate_bytes_s > rules.slow_piece_s:
            return 1
        gain = 1 + (rules.window_gain - 1) / num_sources
        most = max(rules.in_flight_max, int(rules.in_flight_bytes / max(self._piece_bytes, PIECE_BYTES_MIN)))
        in_flight_bytes = gain * source.rate_bytes_s * source.answer_s_min
        return max(2, min(most, math.ceil(in_flight_bytes / self._piece_bytes)))

    def _rate(self, source: _Source) -> float:
        return source.rate_bytes_s or self._mean_rate() or self._rules.rate_guess_bytes_s

    def _mean_rate(self) -> float | None:
        known = [source.rate_bytes_s for source in self._sources.values() if source.rate_bytes_s is not None]
        return sum(known) / len(known) if known else None

    def _is_slow(self, source: _Source) -> bool:
        rate = source.rate_bytes_s
        if rate is None or rate >= self._rules.slow_share * self._rate_bytes_s_max:  # no mean is above the largest
            return False
        mean = self._mean_rate()
        return mean is not None and rate < self._rules.slow_share * mean

    def _is_starved(self) -> bool:
        """Return whether all peers together need long for a piece. A peer of unknown rate is assumed to be like the others."""
        rates = [source.rate_bytes_s for source in self._sources.values() if not source.is_web_seed]
        unknown_bytes_s = self._mean_rate() or self._rules.rate_guess_bytes_s
        together_bytes_s = sum(unknown_bytes_s if rate is None else rate for rate in rates)
        return together_bytes_s * self._rules.slow_piece_s < self._piece_bytes

    def _to_steal(self, source: _Source, now_s: float) -> int | None:
        """Return the open piece of this source that the others would bring last."""
        if now_s - source.looked_s < self._rules.steal_look_s or source.is_snubbed:
            return None
        source.looked_s = now_s
        if source.is_web_seed:
            self._snub(now_s)
        # It is unknown whether this source is faster, or its bytes are expensive.
        only_late = source.is_web_seed or source.rate_bytes_s is None
        is_end = not self.unasked
        only_very_late = source.is_web_seed and not is_end
        latest, longest_s = None, 0.0
        for piece in members(source.has & self._open & ~self.have):
            askers = self._askers[piece]
            if piece in source.open or self._num_copies(askers) >= self._rules.copies_max:
                continue
            left_s = math.inf
            for asker in askers:
                asked = self._sources[asker].open[piece]
                due_s = asked.due_s
                if only_late and now_s < (asked.very_late_s(self._rules) if only_very_late else due_s):
                    left_s = 0.0
                # Estimate: a request takes as long as was expected when it was sent. A late one takes as long again as it is
                # late. At the end, where only such requests are left, it takes as long again as it has taken so far.
                late_since_s = asked.asked_s if is_end else due_s
                left_s = min(left_s, due_s - now_s if now_s < due_s else now_s - late_since_s)
            if left_s > longest_s:
                latest, longest_s = piece, left_s
        if latest is None:
            return None
        here_s = (source.open_bytes + self._sizes[latest]) / self._rate(source)
        return latest if here_s <= self._rules.steal_gain * longest_s else None

    def _num_copies(self, askers: Sequence[str]) -> int:
        """Return the number of requests for a piece in progress; requests to snubbed sources do not count at the limit."""
        if len(askers) < self._rules.copies_max:  # nearly always, and a sufficient answer
            return len(askers)
        return sum(not self._sources[asker].is_snubbed for asker in askers)

    def _snub(self, now_s: float) -> None:
        """Mark sources as snubbed that are very late and have given nothing since."""
        for source in self._sources.values():
            if source.is_counted and any(
                source.counted_s < asked.due_s and now_s >= asked.very_late_s(self._rules)
                for asked in source.open.values()
            ):
                self._judge(source, is_snubbed=True, is_slow=source.is_slow)

    def _judge(self, source: _Source, *, is_snubbed: bool, is_slow: bool) -> None:
        was_counted = source.is_counted
        source.is_snubbed, source.is_slow = is_snubbed, is_slow
        if was_counted and not source.is_counted:
            self._counts.remove(source.has)
        elif source.is_counted and not was_counted:
            self._counts.add(source.has)
