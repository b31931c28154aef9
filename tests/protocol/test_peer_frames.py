"""Requests and replies between peers, byte by byte."""

from __future__ import annotations

import pytest

from prime_protocol import limits, peer_frames
from prime_protocol.errors import ErrorCode, RemoteError


def test_a_request_is_its_number_its_length_and_its_payload() -> None:
    frame = peer_frames.pack_request(7, b"abc")
    assert frame.hex() == "0000000700000003616263"
    assert peer_frames.parse_request_header(frame[: peer_frames.REQUEST_HEADER_BYTES]) == (7, 3)


def test_an_answer_names_its_request() -> None:
    frame = peer_frames.pack_answer(7, b"abc")
    assert frame.hex() == "000000070000000003616263"
    header = peer_frames.parse_reply_header(frame[: peer_frames.REPLY_HEADER_BYTES])
    assert header == peer_frames.ReplyHeader(7, refused=False, num_bytes=3)


def test_a_refusal_carries_code_detail_and_pause() -> None:
    frame = peer_frames.pack_refusal(7, RemoteError(ErrorCode.TOO_MANY_REQUESTS, "slow down", retry_after_s=2.5))
    header = peer_frames.parse_reply_header(frame[: peer_frames.REPLY_HEADER_BYTES])
    assert (header.number, header.refused) == (7, True)
    error = peer_frames.parse_refusal(frame[peer_frames.REPLY_HEADER_BYTES :])
    assert (error.code, error.detail, error.retry_after_s) == (ErrorCode.TOO_MANY_REQUESTS, "slow down", 2.5)


def test_an_undefined_status_is_refused() -> None:
    header = bytearray(peer_frames.pack_answer(7, b"")[: peer_frames.REPLY_HEADER_BYTES])
    header[4] = 2
    with pytest.raises(RemoteError) as refused:
        peer_frames.parse_reply_header(bytes(header))
    assert refused.value.code is ErrorCode.MALFORMED


def test_a_length_over_the_bound_is_refused_before_anything_is_read() -> None:
    too_long = (limits.PEER_FRAME_BYTES_MAX + 1).to_bytes(4, "big")
    for parse, header in (
        (peer_frames.parse_request_header, bytes(4) + too_long),
        (peer_frames.parse_reply_header, bytes(5) + too_long),
    ):
        with pytest.raises(RemoteError) as refused:
            parse(header)
        assert refused.value.code is ErrorCode.TOO_LARGE


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"code":"no_such_code","detail":""}', b'{"code":"expired","code":"expired"}']
)
def test_a_refusal_that_makes_no_sense_is_the_peers_fault(body: bytes) -> None:
    with pytest.raises(RemoteError):
        peer_frames.parse_refusal(body)


def test_protocols_are_named_by_run() -> None:
    assert peer_frames.stream_protocol("a" * 64, "pieces") == f"/prime-node/{'a' * 64}/pieces/1"
