"""Error types of the protocol.

    PrimeError                      base of every error that this project raises on purpose
    |-- RemoteError                   the other side is at fault: carries an ErrorCode, becomes an HTTP answer or a verdict
    |   `-- LimitExceeded           the other side sent more than limits.py allows
    `-- LocalError                  this machine, its disk or its configuration is at fault; the message says what to do

Parsers turn every fault of a peer into a RemoteError, never another exception type. A bug (assertion, TypeError, ...)
keeps its own type, so that it is not mistaken for a bad message.

A rollout that is well formed but not acceptable is not an error: it gets a verdict (verdict.py).
"""

from __future__ import annotations

from enum import StrEnum

from prime_protocol.visible import printable


class ErrorCode(StrEnum):
    """Machine-readable code of an error answer. Members never change their meaning; SPEC.md lists them."""

    MALFORMED = "malformed"
    """Bytes that the endpoint cannot parse: bad framing, bad JSON or a bad tensor file."""
    UNKNOWN_FIELD = "unknown_field"
    """Message with a field that this version does not define."""
    WRONG_TYPE = "wrong_type"
    """Field that is missing, has the wrong type or is out of range."""
    TOO_LARGE = "too_large"
    """Body, count or depth above its limit."""
    DECOMPRESSED_TOO_LARGE = "decompressed_too_large"
    """Compressed body that declares or yields more bytes than its limit."""
    BAD_SIGNATURE = "bad_signature"
    """Envelope whose signature does not verify under the key that it names."""
    BAD_KEY = "bad_key"
    """Unusable public key: wrong length, or of low order."""
    WRONG_PAYLOAD_TYPE = "wrong_payload_type"
    """Valid envelope of another payload type than the endpoint takes."""
    WRONG_RUN = "wrong_run"
    """Message that belongs to another run."""
    WRONG_ROLE = "wrong_role"
    """Valid key without this role in the RunSpec."""
    REVOKED = "revoked"
    """Key that had this role until a key ring of the run's root, or for a machine its person's key, removed it."""
    UNKNOWN_WORKER = "unknown_worker"
    """Key that never joined this run, or left it. Join again."""
    IN_USE = "in_use"
    """Key in use by another session: another machine uses it, or did until recently. Retry later."""
    BANNED = "banned"
    """Key banned from this run; the detail names the evidence."""
    NOT_INVITED = "not_invited"
    """Key that the operator has neither listed nor invited, in a run that requires it. Ask the operator."""
    EXPIRED = "expired"
    """Request, or statement about the newest policy, whose time stamp is too old or too far ahead. Check the clock."""
    REPLAYED = "replayed"
    """Request whose nonce the server has seen before."""
    WRONG_EPOCH = "wrong_epoch"
    """Request signed for another epoch of the server; the answer names the current one. Sign it again."""
    LEASE_UNKNOWN = "lease_unknown"
    """Unknown lease."""
    LEASE_FOREIGN = "lease_foreign"
    """Lease of another worker."""
    DIGEST_MISMATCH = "digest_mismatch"
    """Bytes without the digest that the signed header or the address names."""
    CHAIN_BROKEN = "chain_broken"
    """Manifest that does not continue the chain: wrong predecessor, version, base or root."""
    FORK = "fork"
    """Two different signed manifests for one policy version. Keep both: they are evidence."""
    NOT_FOUND = "not_found"
    """Nothing stored under this address."""
    BAD_RANGE = "bad_range"
    """Byte range that does not exist."""
    TOO_MANY_REQUESTS = "too_many_requests"
    """Rate limit reached; `retry_after_s` gives the waiting time."""
    UNAVAILABLE = "unavailable"
    """Server that is starting, stopping or busy. Try again later."""
    VERSION_UNSUPPORTED = "version_unsupported"
    """Protocol version that this side does not support; the detail names the supported ones."""
    INTERNAL = "internal"
    """Fault of the server. The answer reveals nothing about its internals."""


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
"""HTTP status of each code; a test checks that none is missing."""
_TRANSIENT = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.TOO_MANY_REQUESTS, ErrorCode.INTERNAL, ErrorCode.WRONG_EPOCH})


class PrimeError(Exception):
    """Base of all errors that this project raises on purpose."""


class RemoteError(PrimeError):
    """Error caused by the other side.

    `detail` may be shown to that side, so it never holds a secret. It may quote the other side, and it goes to logs and
    terminals. The constructor therefore makes it printable and short.
    """

    def __init__(self, code: ErrorCode, detail: str, *, retry_after_s: float | None = None, epoch: str = "") -> None:
        self.code = code
        self.epoch = epoch
        """Current epoch of the server, if the code is WRONG_EPOCH."""
        self.detail = printable(detail)
        super().__init__(f"{code}: {self.detail}")
        self.retry_after_s = retry_after_s

    @property
    def http_status(self) -> int:
        """HTTP status for the code."""
        return HTTP_STATUS[self.code]

    @property
    def is_transient(self) -> bool:
        """Whether the same request, unchanged, may succeed later."""
        return self.code in _TRANSIENT


class LimitExceeded(RemoteError):
    """Peer exceeded a limit of limits.py. Example: LimitExceeded("rollout_bytes_max", 70_000_000, 67_108_864)."""

    def __init__(self, limit: str, value: int | None, maximum: int, *, code: ErrorCode = ErrorCode.TOO_LARGE) -> None:
        seen = "more" if value is None else str(value)
        super().__init__(code, f"{limit} is {maximum}, got {seen}")
        self.limit = limit


class LocalError(PrimeError):
    """Fault of this machine: a bad configuration, a full disk, a missing extra. The message says what, where and what to do."""


class TransientFault(LocalError):
    """Fault that may pass without a change of the settings: an unreachable database. Its exit code lets a manager start again."""
