"""Every error that the wire knows, in one place.

    PrimeError                      anything this project raises on purpose
    |-- PeerError                   the other side is at fault: carries an ErrorCode, becomes an HTTP answer or a verdict
    |   `-- LimitExceeded           ... by sending more than limits.py allows
    `-- LocalError                  our own machine, disk or configuration is at fault; the message says what to do next

A peer's fault never surfaces as another exception type: parsers turn every surprise into a PeerError. A bug
(assertion, TypeError, ...) stays what it is, so that nobody mistakes it for a bad message.

A rollout that is well formed but not acceptable is no error: it gets a verdict (verdict.py).
"""

from __future__ import annotations

from enum import StrEnum

from prime_protocol.visible import printable


class ErrorCode(StrEnum):
    """The machine-readable half of an error answer. Members never change their meaning; SPEC.md lists them."""

    MALFORMED = "malformed"
    """The bytes are not what the endpoint expects: bad framing, bad JSON, bad tensor file."""
    UNKNOWN_FIELD = "unknown_field"
    """A message carries a field that this version does not define."""
    WRONG_TYPE = "wrong_type"
    """A field is missing, has the wrong type or is out of its range."""
    TOO_LARGE = "too_large"
    """A body, a count or a depth is over its limit."""
    DECOMPRESSED_TOO_LARGE = "decompressed_too_large"
    """A compressed body declares or yields more bytes than its limit."""
    BAD_SIGNATURE = "bad_signature"
    """The envelope's signature does not verify under the key that it names."""
    BAD_KEY = "bad_key"
    """The public key is not usable: wrong length, or of low order."""
    WRONG_PAYLOAD_TYPE = "wrong_payload_type"
    """A valid envelope of another kind than the endpoint takes."""
    WRONG_RUN = "wrong_run"
    """The message belongs to another run."""
    WRONG_ROLE = "wrong_role"
    """The key is valid but the RunSpec does not give it this role."""
    REVOKED = "revoked"
    """The key had this role, and a key ring of the run's root has ended that."""
    UNKNOWN_WORKER = "unknown_worker"
    """The key never joined this run, or left it. Join again."""
    IN_USE = "in_use"
    """The key takes part in another session: another machine uses it, or did until lately. Ask again later."""
    BANNED = "banned"
    """The key is banned from this run; the detail names the evidence."""
    NOT_INVITED = "not_invited"
    """The run's operator takes listed or invited keys, and this is none. Ask him."""
    EXPIRED = "expired"
    """The time stamp of a request, or of a statement of the newest policy, is too old or too far ahead. Check the clock."""
    REPLAYED = "replayed"
    """The request's nonce was seen before."""
    WRONG_EPOCH = "wrong_epoch"
    """The request was signed for another epoch of the server; the answer names the present one. Sign it again."""
    LEASE_UNKNOWN = "lease_unknown"
    """No such lease."""
    LEASE_FOREIGN = "lease_foreign"
    """The lease belongs to another worker."""
    DIGEST_MISMATCH = "digest_mismatch"
    """The bytes do not have the digest that the signed header or the address names."""
    CHAIN_BROKEN = "chain_broken"
    """A manifest does not continue the chain: wrong predecessor, version, base or root."""
    FORK = "fork"
    """Two different signed manifests for one policy version. Keep both: they are evidence."""
    NOT_FOUND = "not_found"
    """Nothing under this address."""
    BAD_RANGE = "bad_range"
    """The requested byte range does not exist."""
    TOO_MANY_REQUESTS = "too_many_requests"
    """Slow down; `retry_after_s` says for how long."""
    UNAVAILABLE = "unavailable"
    """The server is starting, stopping or busy. Try again later."""
    VERSION_UNSUPPORTED = "version_unsupported"
    """The peer speaks a protocol version that this side does not; the detail names the supported ones."""
    INTERNAL = "internal"
    """A fault of the server. Nothing of its inside is shown."""


HTTP_STATUS: dict[ErrorCode, int] = {
    ErrorCode.MALFORMED: 400,
    ErrorCode.UNKNOWN_FIELD: 400,
    ErrorCode.WRONG_TYPE: 400,
    ErrorCode.TOO_LARGE: 413,
    ErrorCode.DECOMPRESSED_TOO_LARGE: 413,
    ErrorCode.BAD_SIGNATURE: 401,
    ErrorCode.BAD_KEY: 401,
    ErrorCode.WRONG_PAYLOAD_TYPE: 415,
    ErrorCode.WRONG_RUN: 409,
    ErrorCode.WRONG_ROLE: 403,
    ErrorCode.REVOKED: 403,
    ErrorCode.UNKNOWN_WORKER: 403,
    ErrorCode.IN_USE: 409,
    ErrorCode.BANNED: 403,
    ErrorCode.NOT_INVITED: 403,
    ErrorCode.EXPIRED: 401,
    ErrorCode.REPLAYED: 409,
    ErrorCode.WRONG_EPOCH: 409,
    ErrorCode.LEASE_UNKNOWN: 404,
    ErrorCode.LEASE_FOREIGN: 403,
    ErrorCode.DIGEST_MISMATCH: 422,
    ErrorCode.CHAIN_BROKEN: 409,
    ErrorCode.FORK: 409,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.BAD_RANGE: 416,
    ErrorCode.TOO_MANY_REQUESTS: 429,
    ErrorCode.UNAVAILABLE: 503,
    ErrorCode.VERSION_UNSUPPORTED: 426,
    ErrorCode.INTERNAL: 500,
}
"""One status per code; a test holds that none is missing."""
_TRANSIENT = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.TOO_MANY_REQUESTS, ErrorCode.INTERNAL, ErrorCode.WRONG_EPOCH})


class PrimeError(Exception):
    """Base of all errors that this project raises on purpose."""


class PeerError(PrimeError):
    """The other side sent something wrong. `detail` may be shown to that side: it never holds a secret.

    A detail may quote the other side, so it is made printable and short here: it goes to logs and terminals.
    """

    def __init__(self, code: ErrorCode, detail: str, *, retry_after_s: float | None = None, epoch: str = "") -> None:
        self.code = code
        self.epoch = epoch
        """The server's present epoch, where the code is WRONG_EPOCH."""
        self.detail = printable(detail)
        super().__init__(f"{code}: {self.detail}")
        self.retry_after_s = retry_after_s

    @property
    def http_status(self) -> int:
        return HTTP_STATUS[self.code]

    @property
    def is_transient(self) -> bool:
        """True where the same request may succeed later without being changed."""
        return self.code in _TRANSIENT


class LimitExceeded(PeerError):
    """A peer went over a limit of limits.py. Example: LimitExceeded("rollout_bytes_max", 70_000_000, 67_108_864)."""

    def __init__(self, limit: str, value: int | None, maximum: int, *, code: ErrorCode = ErrorCode.TOO_LARGE) -> None:
        seen = "more" if value is None else str(value)
        super().__init__(code, f"{limit} is {maximum}, got {seen}")
        self.limit = limit


class LocalError(PrimeError):
    """This machine cannot go on: a bad configuration, a full disk, a missing extra. Says what, where, what next."""
