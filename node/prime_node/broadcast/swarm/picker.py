"""Which piece to ask of whom next. Pure: what has happened goes in, requests come out; the clock is an argument.

One picker serves one download. The rules, in the order in which they apply to a source that has room for a request:

    (1) as many requests are open as keep the source busy: up to twice its rate times its shortest answer (as BBR sizes its
        window), less where there are many sources, which keep the downlink busy between them
    (2) rarest first among the pieces that it has and nobody was asked for; of equally rare ones those of one's own share of the
        file, then any at random. Shares keep receivers from asking the origin for the same piece (Mutualcast, Li et al. 2005)
    (3) a fallback gives what no peer has, a slow source what no other has. Here slow sources do not count, nor those that let us
        wait for very long, until they give something: who gives nothing is not to keep us from the origin
    (4) where nothing is left to ask for, a piece asked elsewhere is taken over if it comes at least twice as soon from here: the
        end game and the stealing of work in one. No byte is sent twice that would have been in time. A fallback takes over what
        is late, and before the end only what is very late: what has come of a piece is lost then

A piece is open until `arrived` or `missed`. Nothing is known here of digests: the caller says `arrived` for verified pieces only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from prime_node.broadcast.swarm.piece_sets import PieceCounts, PieceSet, any_of, members, span


@dataclass(frozen=True, slots=True)
class PickerRules:
    """Settings of one download."""

    in_flight_max: int = 4
    """Requests open at one source."""
    open_max: int = 64
    """Pieces open at all sources together."""
    window_gain: float = 2.0
    """Bytes in flight at most, as a share of a source's rate times its shortest answer."""
    sources_few: int = 7
    """With so many sources or fewer, each is asked for that much, a new one for two pieces. The more there are, the more their
    answers only queue on our downlink, where they keep slots of theirs and pieces that others would bring sooner."""
    slow_piece_s: float = 1.0
    """A source that needs longer for a piece has one open request. Where all peers together need longer, a fallback helps."""
    slow_share: float = 0.05
    """A source below this share of the mean rate is slow."""
    steal_gain: float = 0.5
    """A piece is taken over where the new source needs at most this share of the time that the old one still needs."""
    fallback_patience: float = 2.0
    """A piece is very late by more than so many times the expected time and `slow_piece_s`. While there are pieces that nobody
    was asked for, a fallback takes over nothing else: a late piece holds up nothing yet, and what came of it would be lost."""
    steal_look_s: float = 0.1
    """A source with nothing else to give looks this often for a piece to take over."""
    copies_max: int = 2
    """Sources asked for one piece at the same time."""
    rate_memory_s: float = 2.0
    """Rates are averages that forget with this time constant."""
    rate_guess_bytes_s: float = 2**20
    """Of a source that has given nothing yet, while there is no other to compare with."""


@dataclass(slots=True)
class _Open:
    """A request under way."""

    asked_s: float
    due_s: float
    """When it was expected to arrive."""

    def very_late_s(self, rules: PickerRules) -> float:
        """When it will be very late."""
        return self.due_s + rules.fallback_patience * max(self.due_s - self.asked_s, rules.slow_piece_s)


@dataclass(slots=True)
class _Source:
    is_fallback: bool
    has: PieceSet = 0
    open: dict[int, _Open] = field(default_factory=dict)
    open_bytes: int = 0
    rate_bytes_s: float | None = None
    answer_s_min: float = math.inf
    looked_s: float = -math.inf
    """When it last looked for a piece to take over."""
    counted_s: float = 0.0
    """The rate has taken in everything until then."""
    is_doubted: bool = False
    """Its answer is very late, and nothing has come since."""
    is_slow: bool = False

    @property
    def is_counted(self) -> bool:
        """Whether what it has is left to it."""
        return not (self.is_fallback or self.is_doubted or self.is_slow)


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
        """`have` is here already. `share` is the part of the file, from 0 to 1, that this receiver asks for first."""
        self.have = have
        self._sizes = sizes
        self._all = span(0, len(sizes))
        self._share = span(round(share[0] * len(sizes)), round(share[1] * len(sizes)))
        self._rng = rng
        self._rules = rules or PickerRules()
        self._sources: dict[str, _Source] = {}
        self._counts = PieceCounts()
        """Of the sources that are counted."""
        self._askers: dict[int, list[str]] = {}
        """Open pieces, and the sources that were asked for them."""
        self._open: PieceSet = 0
        self._piece_bytes = sum(sizes) / max(1, len(sizes))
        self._rate_bytes_s_max = 0.0
        """No source was ever faster."""

    # What is known

    @property
    def is_done(self) -> bool:
        return self.have == self._all

    @property
    def missing(self) -> PieceSet:
        return self._all & ~self.have

    @property
    def unasked(self) -> PieceSet:
        """Missing pieces that nobody was asked for: only these make a new announcement worth a `pick`."""
        return self._all & ~self.have & ~self._open

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def add(self, name: str, *, has: PieceSet = 0, is_fallback: bool = False) -> None:
        """A new source. A fallback (the origin, whose uplink is scarce) is asked for what no peer has."""
        assert name not in self._sources
        self._sources[name] = _Source(is_fallback)
        self.has(name, has)

    def has_all(self, name: str) -> None:
        self.has(name, self._all)

    def has(self, name: str, announced: PieceSet) -> None:
        """A source says that it has these pieces too. Those that are here already are no longer counted."""
        source = self._sources[name]
        new = announced & self._all & ~(source.has | self.have)
        if new:
            source.has |= new
            if source.is_counted:
                self._counts.add(new)

    def remove(self, name: str) -> None:
        """A source is gone. What it was asked for is free again."""
        source = self._sources[name]
        for piece in list(source.open):
            self._close(name, piece)
        if source.is_counted and source.has:
            self._counts.remove(source.has)
        del self._sources[name]

    def idle(self) -> list[str]:
        """The sources that were asked for nothing."""
        return [name for name, source in self._sources.items() if not source.open]

    def rate_bytes_s(self, name: str) -> float | None:
        """What a source gives, as measured; None before its first piece."""
        return self._sources[name].rate_bytes_s

    # What happens

    def pick(self, name: str, now_s: float) -> int | None:
        """The piece to ask of this source now, from here on open; None where it has nothing to do for the moment."""
        source = self._sources[name]
        if source.is_slow != self._is_slow(source):
            self._judge(source, is_doubted=source.is_doubted, is_slow=not source.is_slow)
        if len(self._askers) >= self._rules.open_max:  # (1)
            return None
        if source.open and len(source.open) >= self._window(source):  # (1)
            return None
        free = source.has & ~self.have & ~self._open
        if free and (source.is_slow or (source.is_fallback and not self._is_starved())):
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
        """A verified piece. Returns the other sources that were asked for it: those requests can be cancelled."""
        source = self._sources[name]
        if source.is_doubted:
            self._judge(source, is_doubted=False, is_slow=source.is_slow)
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
        """A request that came to nothing: refused, cut, cancelled, or with wrong bytes."""
        if piece in self._sources[name].open:
            self._close(name, piece)

    # Inside

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
            weight = -math.expm1(-passed_s / self._rules.rate_memory_s)
            source.rate_bytes_s += weight * (size / passed_s - source.rate_bytes_s)
        self._rate_bytes_s_max = max(self._rate_bytes_s_max, source.rate_bytes_s)

    def _window(self, source: _Source) -> int:
        num_sources = len(self._sources)
        if source.is_doubted:
            return 1
        if source.rate_bytes_s is None:
            return 2 if num_sources <= self._rules.sources_few else 1
        if self._piece_bytes / source.rate_bytes_s > self._rules.slow_piece_s:
            return 1
        gain = 1 + (self._rules.window_gain - 1) * min(1.0, self._rules.sources_few / num_sources)
        in_flight_bytes = gain * source.rate_bytes_s * source.answer_s_min
        return max(2, min(self._rules.in_flight_max, math.ceil(in_flight_bytes / self._piece_bytes)))

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
        """Do all peers together, of which an unknown one is taken to be like the others, need long for a piece?"""
        rates = [source.rate_bytes_s for source in self._sources.values() if not source.is_fallback]
        unknown_bytes_s = self._mean_rate() or self._rules.rate_guess_bytes_s
        together_bytes_s = sum(unknown_bytes_s if rate is None else rate for rate in rates)
        return together_bytes_s * self._rules.slow_piece_s < self._piece_bytes

    def _to_steal(self, source: _Source, now_s: float) -> int | None:
        """Of the open pieces that this source has, the one that the others would bring last."""
        if now_s - source.looked_s < self._rules.steal_look_s or source.is_doubted:
            return None
        source.looked_s = now_s
        if source.is_fallback:
            self._doubt(now_s)
        # What it would bring sooner is not known, or is dear.
        only_late = source.is_fallback or source.rate_bytes_s is None
        is_end = not self.unasked
        only_very_late = source.is_fallback and not is_end
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
                # An open request takes as long as was expected when it was sent. Once it is late, it takes as long again as it
                # is late or, at the end, where it alone is waited for, as it has taken so far.
                late_since_s = asked.asked_s if is_end else due_s
                left_s = min(left_s, due_s - now_s if now_s < due_s else now_s - late_since_s)
            if left_s > longest_s:
                latest, longest_s = piece, left_s
        if latest is None:
            return None
        here_s = (source.open_bytes + self._sizes[latest]) / self._rate(source)
        return latest if here_s <= self._rules.steal_gain * longest_s else None

    def _num_copies(self, askers: Sequence[str]) -> int:
        """Of a piece under way; a doubted source's does not keep it from others."""
        if len(askers) < self._rules.copies_max:  # nearly always, and enough to know
            return len(askers)
        return sum(not self._sources[asker].is_doubted for asker in askers)

    def _doubt(self, now_s: float) -> None:
        """Sources that let us wait for very long, and have given nothing since."""
        for source in self._sources.values():
            if source.is_counted and any(
                source.counted_s < asked.due_s and now_s >= asked.very_late_s(self._rules)
                for asked in source.open.values()
            ):
                self._judge(source, is_doubted=True, is_slow=source.is_slow)

    def _judge(self, source: _Source, *, is_doubted: bool, is_slow: bool) -> None:
        was_counted = source.is_counted
        source.is_doubted, source.is_slow = is_doubted, is_slow
        if was_counted and not source.is_counted:
            self._counts.remove(source.has)
        elif source.is_counted and not was_counted:
            self._counts.add(source.has)
