from __future__ import annotations

from prime_protocol import errors, limits
from prime_protocol.codec import CodecError
from prime_protocol.errors import HTTP_STATUS, ErrorCode, LimitExceeded, LocalError, PrimeError, RemoteError
from prime_protocol.replies import ErrorBody
from prime_protocol.visible import printable


def test_every_code_has_a_status_of_a_refusal() -> None:
    assert HTTP_STATUS.keys() == set(ErrorCode)
    assert all(400 <= status <= 599 for status in HTTP_STATUS.values())
    assert [code for code, status in HTTP_STATUS.items() if status >= 500] == [
        ErrorCode.UNAVAILABLE,
        ErrorCode.INTERNAL,
    ]


def test_the_tree_is_the_one_that_the_module_draws() -> None:
    assert LimitExceeded.__bases__ == (RemoteError,)
    assert RemoteError.__bases__ == LocalError.__bases__ == (PrimeError,)
    assert issubclass(CodecError, RemoteError)
    assert not issubclass(LocalError, RemoteError)
    assert all(name in (errors.__doc__ or "") for name in ("PrimeError", "RemoteError", "LimitExceeded", "LocalError"))


def test_only_what_may_go_away_by_itself_is_transient() -> None:
    transient = {code for code in ErrorCode if RemoteError(code, "").is_transient}
    assert transient == {
        ErrorCode.UNAVAILABLE,
        ErrorCode.TOO_MANY_REQUESTS,
        ErrorCode.INTERNAL,
        ErrorCode.WRONG_EPOCH,
    }


def test_a_limit_names_itself_its_value_and_what_came() -> None:
    error = LimitExceeded("rollout_bytes_max", 70, 64)
    assert (error.code, error.http_status) == (ErrorCode.TOO_LARGE, 413)
    assert error.detail == "rollout_bytes_max is 64, got 70"
    assert LimitExceeded("rollout_bytes_max", None, 64).detail == "rollout_bytes_max is 64, got more"


def test_a_detail_cannot_steer_a_terminal_or_forge_a_log_line() -> None:
    hostile = "a\x1b[2J\r\nINFO all is well\u202e\ud800\u2028b"
    error = RemoteError(ErrorCode.MALFORMED, hostile)
    assert error.detail == "a?[2J??INFO all is well???b"
    assert str(error) == f"malformed: {error.detail}"


def test_any_error_fits_into_its_body() -> None:
    error = RemoteError(ErrorCode.MALFORMED, "\ud800" * 5_000)
    body = ErrorBody(code=error.code, detail=error.detail).model_dump_json()
    assert len(error.detail) == limits.DETAIL_CHARS_MAX
    assert len(body) < limits.ERROR_BODY_BYTES_MAX


def test_printable_text_stays_as_it_is() -> None:
    assert printable("Grüße, 世界 100 %") == "Grüße, 世界 100 %"
