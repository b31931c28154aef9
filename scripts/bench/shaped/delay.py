"""Carries packets between TUN devices of several namespaces, shaped and delayed: netem for kernels that have none.

    python delay.py '[["namespace", "10.77.0.2", up_mbit, down_mbit, delay_ms, loss, queue_ms], ...]'

A packet leaves its sender's uplink when that is free, takes the delays of the sender's and the receiver's access network, and
leaves the receiver's downlink when that is free. A link loses its share of packets in each direction, and drops where its queue
is longer than 100 ms, or at its uplink than `queue_ms`. Prints `ready` once all devices are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
CLONE_NEWNET = 0x40000000
QUEUE_S_MAX = 0.1


def open_tun(namespace: str) -> int:
    """A device `eth0` in that namespace; this process moves there and stays until the next call."""
    with Path("/run/netns", namespace).open("rb") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    return tun


def carry(rows: list[tuple[str, str, float, float, float, float, float]]) -> None:
    tuns = [open_tun(row[0]) for row in rows]
    place = {socket.inet_aton(row[1]): index for index, row in enumerate(rows)}
    up = [row[2] * 125_000 for row in rows]
    down = [row[3] * 125_000 for row in rows]
    delay_s = [row[4] / 1e3 for row in rows]
    loss = [row[5] for row in rows]
    queue_s_max = [row[6] / 1e3 or QUEUE_S_MAX for row in rows]
    dice = random.Random(1)
    up_free, down_free = [0.0] * len(rows), [0.0] * len(rows)
    index_of = {tun: index for index, tun in enumerate(tuns)}
    poller = select.epoll()
    for tun in tuns:
        poller.register(tun, select.EPOLLIN)
    on_the_way: list[tuple[float, int, int, bytes]] = []  # (arrives, turn, receiver, packet)
    at_the_door: list[tuple[float, int, int, bytes]] = []
    turn = 0
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        while on_the_way and on_the_way[0][0] <= now:
            arrives, turn_, receiver, packet = heapq.heappop(on_the_way)
            begins = max(arrives, down_free[receiver])
            if begins - arrives <= QUEUE_S_MAX:
                down_free[receiver] = begins + len(packet) / down[receiver]
                heapq.heappush(at_the_door, (down_free[receiver], turn_, receiver, packet))
        while at_the_door and at_the_door[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(at_the_door)
            try:
                os.write(tuns[receiver], packet)
            except OSError:
                continue  # the device is not up: lost
        wake = min((queue[0][0] for queue in (on_the_way, at_the_door) if queue), default=now + 0.1)
        for tun, _ in poller.poll(max(0.0, wake - time.monotonic())):
            sender = index_of[tun]
            for _ in range(64):
                try:
                    packet = os.read(tun, 65_535)
                except BlockingIOError:
                    break
                receiver_ = place.get(packet[16:20])
                now = time.monotonic()
                begins = max(now, up_free[sender])
                if receiver_ is None or begins - now > queue_s_max[sender]:
                    continue
                up_free[sender] = begins + len(packet) / up[sender]
                lost = loss[sender] + loss[receiver_]
                if lost and dice.random() < lost:
                    continue
                turn += 1
                arrives = up_free[sender] + delay_s[sender] + delay_s[receiver_]
                heapq.heappush(on_the_way, (arrives, turn, receiver_, packet))


if __name__ == "__main__":
    with contextlib.suppress(PermissionError):  # a line does not wait for a processor
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    carry(json.loads(sys.argv[1]))
