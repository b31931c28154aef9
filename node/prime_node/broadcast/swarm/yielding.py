"""How fast to upload so that others' packets do not queue on this machine's uplink. Pure.

A home's router holds packets for up to seconds while its uplink is full, and a call over the same line waits behind them. A
link's round trip, less its smallest one, is the time for which packets queue, as in LEDBAT (RFC 6817). Unlike there the queue is
not kept at a length. While it is short the limit grows; once it is longer than `queue_s` the limit falls until the queue has
left, and then returns to nearly the rate that the full line carried. So most of the time nothing queues. A program that sends
more makes the queue longer, and gets what it asks for.

A queue can also be at the other side's downlink, which is none of ours. Ours delays all links, so a low one of their delays is
taken; not the lowest, since a link to a host that came while the queue was long has never seen a short round trip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prime_node.ports.swarm import LinkReading


@dataclass(frozen=True, slots=True)
class YieldRules:
    """Settings of the control."""

    queue_s: float = 0.04
    """Seconds that packets may queue."""
    quantile: float = 0.25
    """Place of the delay that counts among those of all links, from the lowest."""
    drain_s: float = 0.3
    """Seconds in which a queue leaves, after a reduction."""
    share_left_min: float = 0.5
    """Share of the rate that remains while a queue leaves, at least."""
    resumed_share: float = 0.95
    """Share of the rate of a full line to which the limit returns afterwards."""
    growth: float = 0.01
    """Growth of the limit in one look while nothing queues, as a share. Each second it grows by as much."""
    growth_max: float = 0.1
    start_s: float = 0.3
    """Seconds after a pause for which no rate is known, so nothing is reduced."""
    used_share: float = 0.7
    """Share of its own limit that a link uses when the limit grows. One far above the rate would be without effect for long."""
    recent_memory_s: float = 10.0
    """Time constant of the highest rate of late, in seconds. Neither a pause between two pieces counts, nor a short delay of
    another kind, as of radio links or of a busy processor."""
    rate_bytes_s_min: float = 32_000.0
    """Limit that remains, however long the queue is: the broadcast still ends."""
    memory_s: float = 0.2
    """Time constant of what is measured, in seconds."""
    share_min: float = 0.02
    """Share of all rates above which a link's delay counts."""


@dataclass(slots=True)
class _Link:
    acked_bytes: int
    rate_bytes_s: float = 0.0
    unacked_bytes: float = 0.0
    limit_bytes_s: float = math.inf


class Yielding:
    """The control of one uplink. Call `look` every 0.1 s while something is uploaded."""

    def __init__(self) -> None:
        self._rules = YieldRules()
        self.limit_bytes_s = 0.0
        """Limit for all links together; 0 is none."""
        self.queue_s = 0.0
        """Seconds that packets queued at the last look."""
        self._looked_s = -math.inf
        self._waits_until_s = -math.inf
        """Time before which no reduction can be seen in the round trips."""
        self._full_s = -math.inf
        """Time of the last look at which packets queued for too long."""
        self._resumed_bytes_s = 0.0
        """Limit once the queue has left."""
        self._links: dict[int, _Link] = {}
        self._rate = self._rate_recent = 0.0
        """Rate of all links together, and its highest one, which fades fast."""

    def look(self, readings: Sequence[LinkReading], now_s: float) -> Mapping[int, float]:
        """Return the limit of each link in bytes per second; 0 is none."""
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        self._links = {one.link: self._measured(one, passed_s) for one in readings}
        self._rate = sum(link.rate_bytes_s for link in self._links.values())
        self._rate_recent = max(self._rate, self._rate_recent * math.exp(-passed_s / self._rules.recent_memory_s))
        sending = [one for one in readings if self._links[one.link].rate_bytes_s > self._rules.share_min * self._rate]
        if not sending:
            self._waits_until_s = now_s + self._rules.start_s
        else:
            self.queue_s = self._queue_s(sending)
            self._control(now_s)
        if not self.limit_bytes_s or not readings:
            return dict.fromkeys(self._links, 0.0)
        least = max(1.0, self._rate / max(1, len(sending)))  # for one that was slow or idle
        weights = {name: max(link.rate_bytes_s, least) for name, link in self._links.items()}
        each = self.limit_bytes_s / sum(weights[one.link] for one in sending or readings)
        for name, link in self._links.items():
            link.limit_bytes_s = each * weights[name]
        return {name: link.limit_bytes_s for name, link in self._links.items()}

    def _measured(self, reading: LinkReading, passed_s: float) -> _Link:
        link = self._links.get(reading.link)
        if link is None:
            return _Link(reading.acked_bytes)
        weight = -math.expm1(-passed_s / self._rules.memory_s)
        link.rate_bytes_s += weight * ((reading.acked_bytes - link.acked_bytes) / passed_s - link.rate_bytes_s)
        link.unacked_bytes += weight * (reading.unacked_bytes - link.unacked_bytes)
        link.acked_bytes = reading.acked_bytes
        return link

    def _queue_s(self, sending: Sequence[LinkReading]) -> float:
        """Return for how long packets queue, the smaller of two estimates.

        The system's round trips lag behind on links that send little. The unacknowledged bytes over their rate are too many
        while the rate grows, and count the queues of others' downlinks.
        """
        delays = sorted(one.round_trip_s - one.round_trip_s_min for one in sending)
        links = [(self._links[one.link], one.round_trip_s_min) for one in sending]
        rate_bytes_s = sum(link.rate_bytes_s for link, _ in links)
        queued_bytes = sum(link.unacked_bytes - link.rate_bytes_s * smallest_s for link, smallest_s in links)
        return max(0.0, min(delays[int(self._rules.quantile * len(delays))], queued_bytes / rate_bytes_s))

    def _control(self, now_s: float) -> None:
        rules = self._rules
        if self.queue_s > rules.queue_s:
            self._full_s = now_s
            if now_s >= self._waits_until_s:
                # The line is full, so our rate is what it leaves to us. A shorter queue shows once it has left.
                rate_bytes_s = min(self._rate_recent, self.limit_bytes_s or math.inf)
                share = max(rules.share_left_min, 1 - self.queue_s / rules.drain_s)
                self._resumed_bytes_s = rules.resumed_share * self._rate_recent
                self.limit_bytes_s = max(rules.rate_bytes_s_min, share * rate_bytes_s)
                self._waits_until_s = now_s + rules.memory_s + self.queue_s / (1 - share)
        elif any(link.rate_bytes_s > rules.used_share * link.limit_bytes_s for link in self._links.values()):
            growth = min(rules.growth_max, rules.growth * (1 + now_s - self._full_s))
            self.limit_bytes_s = max(self._resumed_bytes_s, self.limit_bytes_s * (1 + growth))
