"""The gateway's side of the link: one connection to the writer, over which all calls go side by side.

Waiting: each call waits for its answer or for the end of the link; `keep` waits for the end of the link, then tries all addresses
side by side. While a writer is silent, it tries the others. Only the coordinator that leads answers there: the link to one that
is stopped or cut off ends when the next one leads. Calls in progress fail with the link: their clients try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

from prime_node.adapters.link.sealed_frames import (
    LARGE_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    BrokenLink,
    FrameKind,
    FrameOpener,
    FrameSealer,
    LinkFrame,
    is_proof,
    proof,
)
from prime_node.patience import SAY_AGAIN_S, Backoff, cancel_all, first_of
from prime_node.ports.web import Response, Sender
from prime_node.ports.writer_link import Addresses, ForwardedAnswer, ForwardedCall, HeldParcel, fault_head, fault_of
from prime_protocol.errors import ErrorCode, PrimeError, RemoteError

log = logging.getLogger(__name__)

CONNECT_S_MAX = 5.0
ALIVE_S, SILENT_S_MAX = 0.5, 3.0
"""Seconds between two signs of life, and without one of the writer after which the link is given up."""
SUSPECT_S = 1.5
"""Seconds without one after which other addresses are tried, too."""
STORAGE_RETRY_S = 5.0
RETRY_S = 0.5
"""Time after which a client may ask again while there is no writer."""
READ_BYTES = 2**18
_FAULTS = (OSError, TimeoutError, BrokenLink, asyncio.IncompleteReadError)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A connection whose other side has proved that it is the writer."""

    address: tuple[str, int]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    sealer: FrameSealer
    opener: FrameOpener


class LinkClient:
    """Implementation of ports.writer_link.WriterLink."""

    def __init__(self, addresses: Addresses, *, secret: bytes, run: str) -> None:
        self.linked = asyncio.Event()
        """Whether the link is open."""
        self._addresses, self._secret, self._run = tuple(addresses), secret, run
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[LinkFrame]] = {}
        self._streams: dict[int, asyncio.Queue[LinkFrame]] = {}
        self._held: dict[int, HeldParcel] = {}
        self._giving: set[asyncio.Task[None]] = set()
        self._sealer: FrameSealer | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heard_s = 0.0
        """Time of the last bytes of the writer."""
        self._unsent: list[LinkFrame] = []
        """Frames of this turn of the loop: one packet for all of them."""

    async def ask(self, call: ForwardedCall) -> ForwardedAnswer:
        if self._writer is None or self._sealer is None:
            raise _unlinked()
        number = next(self._numbers)
        answer: asyncio.Future[LinkFrame] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        if call.parcel is not None:
            self._held[number] = call.parcel
        is_streamed = False
        try:
            self._send(LinkFrame(FrameKind.CALL, number, call_head(call), call.body))
            frame = await answer
            is_streamed = bool(frame.head.get("streams"))
            return self._answer_of(number, frame)
        except asyncio.CancelledError:
            if not answer.cancelled() and answer.done() and answer.exception() is None:
                self._decline(answer.result())
            raise
        finally:
            self._waiting.pop(number, None)
            self._held.pop(number, None)
            if not is_streamed:
                self._streams.pop(number, None)

    async def keep(self) -> None:
        opened: _Opened | None = None
        while True:
            opened = opened or await self._first_opened(self._addresses)
            address = opened.address
            try:
                opened = await self._link(opened)
            except _FAULTS as error:
                opened = None
                log.warning("the link to the writer at %s:%d: %s", *address, str(error) or type(error).__name__)
                await asyncio.sleep(Backoff().next_s(error))

    # Internals

    async def _first_opened(self, addresses: Addresses) -> _Opened:
        """Return a connection to the first address at which a writer answers."""
        asking = [asyncio.ensure_future(self._open(address)) for address in addresses]
        found: asyncio.Future[_Opened] | None = None
        try:
            try:
                await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_all(*asking)
            found = next(each for each in asking if not each.cancelled())
            return found.result()
        finally:
            for each in asking:
                if each is not found:
                    each.add_done_callback(_hang_up)

    async def _open(self, address: tuple[str, int]) -> _Opened:
        """Return a connection to this address, as soon as a writer answers there."""
        backoff, loop = Backoff(), asyncio.get_running_loop()
        say_s = loop.time() + SILENT_S_MAX
        while True:
            try:
                async with asyncio.timeout(CONNECT_S_MAX):
                    reader, writer = await asyncio.open_connection(*address, limit=2 * READ_BYTES)
                try:
                    async with asyncio.timeout(CONNECT_S_MAX):
                        return await self._shake(address, reader, writer)
                except BaseException:
                    writer.close()
                    raise
            except _FAULTS as error:
                if loop.time() >= say_s:
                    say_s = loop.time() + SAY_AGAIN_S
                    log.warning("no link to a writer at %s:%d: %s", *address, str(error) or type(error).__name__)
                await asyncio.sleep(min(backoff.next_s(error), RETRY_S))

    async def _link(self, opened: _Opened) -> _Opened | None:
        """Read from a link until it ends, or until another writer answers, and return the connection to that one.

        Raises OSError and BrokenLink.
        """
        writer = opened.writer
        self._writer, self._sealer, self._heard_s = writer, opened.sealer, asyncio.get_running_loop().time()
        self.linked.set()
        log.info("linked to the writer at %s:%d", *opened.address)
        following = asyncio.ensure_future(self._followed(opened.address))
        try:
            # No TaskGroup: up to Python 3.12 it forgets a cancellation that arrives while it ends with an error.
            await first_of(self._read(opened), self._say_alive(), following)
            return following.result()
        except BaseException:
            following.add_done_callback(_hang_up)
            raise
        finally:
            self.linked.clear()
            self._writer = self._sealer = None
            self._unsent.clear()
            writer.transport.abort()  # a writer that is cut off would never take what is on its way
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(_unlinked())
            for number, stream in self._streams.items():
                stream.put_nowait(
                    LinkFrame(FrameKind.FAULT, number, {"code": "unavailable", "detail": "the link has ended"})
                )

    async def _followed(self, address: tuple[str, int]) -> _Opened:
        """Return a connection to another writer, which answers while the one at this address is silent."""
        others = [other for other in self._addresses if other != address]
        while True:
            await asyncio.sleep(ALIVE_S)
            if others and asyncio.get_running_loop().time() - self._heard_s > SUSPECT_S:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SUSPECT_S):
                        return await self._first_opened(others)

    async def _shake(
        self, address: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> _Opened:
        greeting = await reader.readexactly(len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise BrokenLink("it is no writer of this release")
        mine = secrets.token_bytes(NONCE_BYTES)
        nonces = greeting[len(MAGIC) :] + mine
        writer.write(mine + proof(self._secret, "gateway", nonces, self._run))
        try:
            given = await reader.readexactly(PROOF_BYTES)
        except asyncio.IncompleteReadError:
            raise BrokenLink(
                "it refuses this gateway: gateway.key must be the coordinator's, of the same run"
            ) from None
        if not is_proof(given, self._secret, "writer", nonces, self._run):
            raise BrokenLink("it does not know the secret: it is no writer of this run")
        sealer = FrameSealer(proof(self._secret, "from the gateway", nonces, self._run))
        opener = FrameOpener(proof(self._secret, "from the writer", nonces, self._run))
        return _Opened(address, reader, writer, sealer, opener)

    async def _say_alive(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            self._send(LinkFrame(FrameKind.ALIVE))

    async def _read(self, opened: _Opened) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENT_S_MAX):
                    data = await opened.reader.read(READ_BYTES)
            except TimeoutError:
                raise BrokenLink("the writer is silent") from None
            if not data:
                raise BrokenLink("the writer has ended the link")
            self._heard_s = asyncio.get_running_loop().time()
            for frame in opened.opener.feed(data):
                self._take(frame)

    def _take(self, frame: LinkFrame) -> None:
        if frame.kind in (FrameKind.ANSWER, FrameKind.FAULT) and frame.call in self._waiting:
            answer = self._waiting.pop(frame.call)
            if answer.done():
                self._decline(frame)
            elif frame.kind is FrameKind.FAULT:
                answer.set_exception(fault_of(frame.head))
            else:
                if frame.head.get("streams"):
                    self._streams[frame.call] = asyncio.Queue()
                answer.set_result(frame)
        elif frame.kind is FrameKind.WANT and frame.call in self._held:
            task = asyncio.ensure_future(self._give(frame.call, self._held[frame.call]))
            self._giving.add(task)
            task.add_done_callback(self._giving.discard)
        elif frame.call in self._streams:
            self._streams[frame.call].put_nowait(frame)
        else:
            self._decline(frame)

    def _decline(self, frame: LinkFrame) -> None:
        """Tell the writer that a stream has no reader or a parcel no sender: who asked has left."""
        if frame.kind is FrameKind.ANSWER and frame.head.get("streams"):
            self._send(LinkFrame(FrameKind.STOP, frame.call))
        elif frame.kind is FrameKind.WANT:
            left = RemoteError(ErrorCode.UNAVAILABLE, "the caller has left its gateway")
            self._send(LinkFrame(FrameKind.GIVEN, frame.call, fault_head(left)))

    async def _give(self, number: int, parcel: HeldParcel) -> None:
        try:
            self._send(LinkFrame(FrameKind.GIVEN, number, body=await parcel.fetch()))
        except Exception as error:  # at the edge of the task: the writer waits for this answer
            is_bug = not isinstance(error, (PrimeError, OSError))
            log.error("a bundle cannot be stored: %s", error, exc_info=is_bug)
            failed = RemoteError(ErrorCode.UNAVAILABLE, "the storage failed", retry_after_s=STORAGE_RETRY_S)
            self._send(LinkFrame(FrameKind.GIVEN, number, fault_head(failed)))

    def _answer_of(self, number: int, frame: LinkFrame) -> ForwardedAnswer:
        head = frame.head
        found = head.get("sender")
        body = self._pieces(number) if head.get("streams") else frame.body
        return ForwardedAnswer(
            Response(
                body,
                head["status"],
                head["type"],
                head.get("headers", {}),
                (lambda: self._stop(number)) if head.get("streams") else None,
            ),
            None if found is None else Sender(found[0], is_role=found[1]),
            is_vouched="sender" in head,
        )

    async def _pieces(self, number: int) -> AsyncIterator[bytes]:
        """Yield the pieces of a stream, and ask for more as they are taken. Raises RemoteError if it breaks off."""
        stream = self._streams[number]
        while True:
            frame = await stream.get()
            if frame.kind is FrameKind.FAULT:
                raise fault_of(frame.head)
            if frame.kind is FrameKind.END:
                return
            yield frame.body
            self._send(LinkFrame(FrameKind.MORE, number))

    def _stop(self, number: int) -> None:
        if self._streams.pop(number, None) is not None:
            self._send(LinkFrame(FrameKind.STOP, number))

    def _send(self, frame: LinkFrame) -> None:
        if self._writer is not None and self._sealer is not None:
            if len(frame.body) >= LARGE_BYTES:
                self._flush(self._writer)
                self._writer.write(self._sealer.seal(frame))
                return
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._flush, self._writer)
            self._unsent.append(frame)

    def _flush(self, writer: asyncio.StreamWriter) -> None:
        if self._unsent and writer is self._writer and self._sealer is not None:
            unsent, self._unsent = self._unsent, []
            writer.write(self._sealer.seal(*unsent))


def call_head(call: ForwardedCall) -> dict[str, object]:
    """Return the head of a call's frame."""
    found: dict[str, object] = {"path": call.path, "address": call.address, "signer": call.signer}
    if call.parcel is not None:
        found["parcel"] = [call.parcel.digest, call.parcel.num_bytes, call.parcel.signature.hex()]
        if call.parcel.is_stored:
            found["stored"] = True
    if call.claimant:
        found["claimant"] = call.claimant
    return found | {
        name: dict(value)
        for name, value in (("params", call.params), ("query", call.query), ("headers", call.headers))
        if value
    }


def _hang_up(opening: asyncio.Future[_Opened]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().writer.close()


def _unlinked() -> RemoteError:
    return RemoteError(ErrorCode.UNAVAILABLE, "this gateway has no link to the coordinator", retry_after_s=RETRY_S)
