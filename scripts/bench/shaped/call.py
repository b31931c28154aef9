"""A call over UDP, as video calls send: how long each packet takes one way, and which are lost.

    python call.py send ADDRESS PORT
    python call.py hear ADDRESS PORT FILE

Both ends have the clock of one machine. The kernel notes when a packet arrives, so a busy processor adds nothing. At SIGTERM
`hear` writes the delays in milliseconds, by the number of the packet.
"""

from __future__ import annotations

import json
import signal
import socket
import struct
import sys
import time
from pathlib import Path

PACKET_BYTES, EVERY_S = 1_200, 0.005
"""1.9 Mbit/s with headers."""
SO_TIMESTAMPNS = 35
HEAD = struct.Struct("=QQ")


def send(address: str, port: int) -> None:
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    number, due_s = 0, time.monotonic()
    while True:
        sender.sendto(HEAD.pack(number, time.time_ns()).ljust(PACKET_BYTES, b"\0"), (address, port))
        number, due_s = number + 1, due_s + EVERY_S
        time.sleep(max(0.0, due_s - time.monotonic()))


def hear(address: str, port: int, file: Path) -> None:
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
    listener.bind((address, port))
    delays_ms: dict[int, float] = {}

    def finish(*_: object) -> None:
        file.write_text(json.dumps(delays_ms))
        sys.exit(0)

    signal.signal(signal.SIGTERM, finish)
    while True:
        data, notes, _, _ = listener.recvmsg(PACKET_BYTES, 64)
        number, sent_ns = HEAD.unpack_from(data)
        seconds, nanoseconds = struct.unpack("=qq", notes[0][2])
        delays_ms[number] = (seconds * 10**9 + nanoseconds - sent_ns) / 1e6


if __name__ == "__main__":
    what, *where = sys.argv[1:]
    if what == "send":
        send(where[0], int(where[1]))
    else:
        hear(where[0], int(where[1]), Path(where[2]))
