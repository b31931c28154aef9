"""Blobs in a bucket of S3, or of any service with its API, through obstore.

    PREFIX/RUN/FOLDER/ab/abcd...      a blob under its digest; RUN is the begin of the run's digest

A blob is written with `If-None-Match: *`, so an intact one is never replaced, and with a checksum that the service verifies. A
whole blob is compared with its digest when it is read. Who writes in the bucket besides the run, or answers in its place, is not
trusted: no answer is read beyond the run's largest blob, and other bytes under a digest are replaced when the blob is put again.

Endpoint, region and credentials come from the variables AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY, or from the machine's role in AWS.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import S3Store
from pydantic import ValidationError

from prime_node.ports.blobs import DamagedBlob
from prime_protocol.digest import digest_of, is_digest
from prime_protocol.errors import LocalError, TransientFault
from prime_protocol.limits import UPLOAD_URL_S_MAX
from prime_protocol.replies import UploadUrl, upload_headers

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, OffsetRange

log = logging.getLogger(__name__)

RUN_CHARS = 16
RETRY_SECONDS = 20
REQUEST_SECONDS = 60
REASON_CHARS_MAX = 200
READ_BYTES = 2**20
_CODE = re.compile(r"<Code>(\w{1,100})</Code>")
_ADVICE = {
    "NoSuchBucket": "make the bucket, or correct coordinator.blobs",
    "InvalidAccessKeyId": "correct AWS_ACCESS_KEY_ID",
    "SignatureDoesNotMatch": "correct AWS_SECRET_ACCESS_KEY",
    "AccessDenied": "let this key list, read, write and delete there",
}
_OTHER_ADVICE = "check AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_PASSING = frozenset({"InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown"})
"""Codes of faults that may pass. A service that cannot be reached answers with no code."""
_T = TypeVar("_T")


async def open_s3(url: str, folder: str, *, run: str, bytes_max: int) -> S3Blobs:
    """Open the blobs of one run's folder in a bucket. `bytes_max` is the size of its largest blob.

    Raises LocalError if the bucket cannot be listed, TransientFault if that may pass.
    """
    parts = urlsplit(url)
    prefix = "/".join(part for part in (parts.path.strip("/"), run[:RUN_CHARS], folder) if part)
    store = S3Store(
        parts.netloc,
        prefix=prefix,
        checksum_algorithm="SHA256",
        client_options={"allow_http": True, "timeout": timedelta(seconds=REQUEST_SECONDS)},
        retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=RETRY_SECONDS)},
    )
    blobs = S3Blobs(store, f"s3://{parts.netloc}/{prefix}", bytes_max)
    try:
        async for _ in obstore.list(store, chunk_size=1):
            break
    except (BaseError, OSError) as error:
        reason = _reason(error)
        advice = _ADVICE.get(reason, _OTHER_ADVICE)
        fault = TransientFault if _may_pass(error) else LocalError
        raise fault(f"s3://{parts.netloc} cannot be used ({reason}): {advice}") from None
    return blobs


class S3Blobs:
    """Implementation of ports.blobs.Blobs. Several processes may write."""

    def __init__(self, store: S3Store, place: str, bytes_max: int) -> None:
        self._store, self._bytes_max = store, bytes_max
        self.place = place
        """URL of its folder."""

    async def put(self, data: bytes, *, digest: str | None = None) -> str:
        digest = digest or digest_of(data)
        if not await self._written(digest, data, "create") and not await self._holds(digest, data):
            log.warning(
                "%s held other bytes under %s, which is written again: check who may write there", self.place, digest
            )
            await self._written(digest, data, "overwrite")
        return digest

    async def get(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes [start, end) of a blob. Raises KeyError.

        Raises DamagedBlob if a whole blob has another digest, or if the answer is longer than a blob or than the range.
        """
        if end is not None and end <= start:
            await self.size(digest)
            return b""
        options: GetOptions | None = None if end is None and start == 0 else {"range": _range(start, end)}
        bytes_max = self._bytes_max if end is None else min(end - start, self._bytes_max)
        try:
            found = await self._asked(digest, obstore.get_async(self._store, _key(digest), options=options))
            data = await self._asked(digest, _read(found, bytes_max))
        except _OutOfRange:
            return b""
        if data is None:
            raise self._too_long(digest, bytes_max)
        if options is None and digest_of(data) != digest:
            raise DamagedBlob(errno.EIO, f"{self.place} holds other bytes under this digest", digest)
        return data

    async def size(self, digest: str) -> int:
        """Return the size of a blob. Raises KeyError, and DamagedBlob if it is larger than any blob of the run."""
        size = (await self._asked(digest, obstore.head_async(self._store, _key(digest))))["size"]
        if size > self._bytes_max:
            raise self._too_long(digest, self._bytes_max)
        return size

    async def has(self, digest: str) -> bool:
        try:
            await self.size(digest)
        except (KeyError, DamagedBlob):  # what is put again replaces a damaged one
            return False
        return True

    async def delete(self, digest: str) -> None:
        try:
            await self._asked(digest, obstore.delete_async(self._store, _key(digest)))
        except KeyError:
            return

    async def digests(self, *, before_ms: int | None = None) -> AsyncIterator[str]:
        try:
            async for page in obstore.list(self._store):
                for found in page:
                    stored_ms = 1_000 * found["last_modified"].timestamp()
                    if before_ms is not None and stored_ms >= before_ms:
                        continue
                    if is_digest(name := found["path"].rsplit("/", 1)[-1]):
                        yield name
        except (BaseError, OSError) as error:
            raise self._failed("list", "", error) from error

    async def _written(self, digest: str, data: bytes, mode: Literal["create", "overwrite"]) -> bool:
        """Write a blob. Return False if there is an object already that is not to be replaced."""
        try:
            await obstore.put_async(self._store, _key(digest), data, mode=mode, use_multipart=False)
        except AlreadyExistsError:
            return False
        except (BaseError, OSError) as error:
            raise self._failed("write", digest, error) from error
        return True

    async def _holds(self, digest: str, data: bytes) -> bool:
        try:
            return await self.get(digest) == data
        except (KeyError, DamagedBlob):
            return False

    async def _asked(self, digest: str, question: Awaitable[_T]) -> _T:
        """Return the answer of the service. Raises KeyError for a missing blob, OSError for each fault."""
        try:
            return await question
        except FileNotFoundError:
            raise KeyError(digest) from None
        except (BaseError, OSError) as error:
            if _reason(error) == "InvalidRange":
                raise _OutOfRange from None
            raise self._failed("read", digest, error) from error

    def _too_long(self, digest: str, bytes_max: int) -> DamagedBlob:
        return DamagedBlob(errno.EIO, f"{self.place} holds more than {bytes_max:,} bytes under this digest", digest)

    def _failed(self, action: str, digest: str, error: Exception) -> OSError:
        code = errno.EHOSTUNREACH if _may_pass(error) else errno.EIO
        return OSError(code, f"cannot {action} in {self.place}: {_reason(error)}", digest or None)


class S3UploadUrls:
    """Implementation of ports.blobs.UploadUrls, with the keys of the AWS_* variables.

    obstore.sign binds the host alone. These URLs bind length, SHA-256 and the object's absence, as far as a service enforces it:
    https://docs.aws.amazon.com/AmazonS3/latest/API/sigv4-query-string-auth.html
    """

    def __init__(self, place: str) -> None:
        """Sign for blobs below `place`, for example "s3://bucket/prefix/run/incoming".

        Raise LocalError without keys, as those of a machine's role in AWS are not used here, and if workers would refuse a URL.
        """
        try:
            self._access_key, self._secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        except KeyError as error:
            raise LocalError(f'coordinator.uploads = "direct" needs the variable {error.args[0]}') from None
        self._token = os.environ.get("AWS_SESSION_TOKEN", "")
        self._region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        endpoint = os.environ.get("AWS_ENDPOINT_URL") or f"https://s3.{self._region}.amazonaws.com"
        self._base = f"{endpoint.rstrip('/')}/{place.removeprefix('s3://')}"
        try:
            UploadUrl(url=self.url("0" * 64, body_bytes=1, sha256=bytes(32)))
        except ValidationError as error:
            detail = "AWS_ENDPOINT_URL has another host than letters, digits, dots and hyphens, or AWS_SESSION_TOKEN is too long"
            raise LocalError(f'coordinator.uploads = "direct" would name URLs that workers refuse: {detail}') from error

    def url(self, name: str, *, body_bytes: int, sha256: bytes) -> str:
        base = urlsplit(f"{self._base}/{_key(name)}")
        path, now = quote(base.path), time.gmtime()
        day, moment = time.strftime("%Y%m%d", now), time.strftime("%Y%m%dT%H%M%SZ", now)
        scope = f"{day}/{self._region}/s3/aws4_request"
        headers = {"host": base.netloc} | upload_headers(body_bytes, sha256)
        query = {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{self._access_key}/{scope}",
            "X-Amz-Date": moment,
            "X-Amz-Expires": str(UPLOAD_URL_S_MAX),
            "X-Amz-SignedHeaders": ";".join(sorted(headers)),
        }
        if self._token:
            query["X-Amz-Security-Token"] = self._token
        asked = urlencode(sorted(query.items()), quote_via=quote, safe="")
        lines = [f"{name}:{headers[name]}\n" for name in sorted(headers)]
        request = "\n".join(["PUT", path, asked, "".join(lines), query["X-Amz-SignedHeaders"], "UNSIGNED-PAYLOAD"])
        text = "\n".join(["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(request.encode()).hexdigest()])
        key = f"AWS4{self._secret}".encode()
        for part in scope.split("/"):
            key = _hmac(key, part)
        return f"{base.scheme}://{base.netloc}{path}?{asked}&X-Amz-Signature={_hmac(key, text).hex()}"


async def _read(found: GetResult, bytes_max: int) -> bytes | None:
    """Return an answer's bytes, None if there are more than expected, whatever their number was said to be."""
    pieces, left = [], bytes_max
    async for piece in found.stream(READ_BYTES):
        left -= len(piece)
        if left < 0:
            return None
        pieces.append(piece)
    return b"".join(pieces)


class _OutOfRange(Exception):
    """The range begins at or after the end of the blob."""


def _key(digest: str) -> str:
    """Return a blob's key. Raises KeyError if it is no digest: it may come from a peer and must not name another object."""
    if not is_digest(digest):
        raise KeyError(digest)
    return f"{digest[:2]}/{digest}"


def _range(start: int, end: int | None) -> OffsetRange | tuple[int, int]:
    return {"offset": start} if end is None else (start, end)


def _may_pass(error: Exception) -> bool:
    """Return whether the service cannot be reached, or fails by its own account."""
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return False
    code = _CODE.search(str(error))
    return code is None or code.group(1) in _PASSING


def _reason(error: Exception) -> str:
    """Return the service's error code, or else the begin of the message."""
    text = str(error)
    code = _CODE.search(text)
    return code.group(1) if code else text.split("\n", 1)[0][:REASON_CHARS_MAX]


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
