"""What a presigned URL binds, at a real service of S3: SeaweedFS. Others may enforce less (coordinator/api/direct_uploads.py)."""

from __future__ import annotations

import asyncio
import hashlib
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from prime_lab.s3_server import BUCKET, S3Server
from prime_node.adapters.storage.s3_blobs import S3UploadUrls, open_s3
from prime_protocol.errors import LocalError
from prime_protocol.replies import UploadUrl, upload_headers

RUN = "ab" * 32
BODY = bytes(range(256)) * 300
SHA256 = hashlib.sha256(BODY).digest()
HEADERS = upload_headers(len(BODY), SHA256)


def put(url: str, body: bytes, headers: Mapping[str, str]) -> int:
    """Return the status of one PUT."""
    request = urllib.request.Request(url, data=body, headers=dict(headers), method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def test_a_signed_url_takes_these_bytes_once_and_no_others(tmp_path: Path, s3: S3Server) -> None:
    """SeaweedFS enforces all three: length, checksum, and that the object does not exist."""
    blobs = await open_s3(f"s3://{BUCKET}/a folder/{tmp_path.name}", "incoming", run=RUN, bytes_max=2**20)
    urls, other = S3UploadUrls(blobs.place), BODY[:-1] + b"x"
    without = {name: value for name, value in HEADERS.items() if name != "x-amz-checksum-sha256"}
    tries: list[tuple[bytes, Mapping[str, str]]] = [
        (other, HEADERS),
        (other, upload_headers(len(other), hashlib.sha256(other).digest())),
        (BODY + b"x", {**HEADERS, "content-length": str(len(BODY) + 1)}),
        (BODY[:-1], {**HEADERS, "content-length": str(len(BODY) - 1)}),
        (BODY, without),
        (BODY, {**HEADERS, "if-none-match": "another"}),
    ]
    for number, (body, headers) in enumerate(tries):
        name = f"{number:064d}"
        url = urls.url(name, body_bytes=len(BODY), sha256=SHA256)
        assert await asyncio.to_thread(put, url, body, headers) in (400, 403), number
        assert not await blobs.has(name)
    name = "f" * 64
    url = urls.url(name, body_bytes=len(BODY), sha256=SHA256)
    assert UploadUrl(url=url).url == url
    assert await asyncio.to_thread(put, url.replace("f" * 64, "e" * 64), BODY, HEADERS) == 403, "another name"
    assert await asyncio.to_thread(put, url, BODY, HEADERS) == 200
    assert await blobs.get(name, start=0, end=len(BODY)) == BODY
    assert await asyncio.to_thread(put, url, BODY, HEADERS) == 412
    assert await blobs.get(name, start=0, end=len(BODY)) == BODY


def test_uploads_need_keys_that_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    with pytest.raises(LocalError, match="AWS_ACCESS_KEY_ID"):
        S3UploadUrls("s3://bucket/incoming")


def test_a_url_leads_to_aws_itself_without_an_endpoint_and_names_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key/with+signs")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token/+=")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    url = S3UploadUrls("s3://bucket/incoming").url("0" * 64, body_bytes=1, sha256=bytes(32))
    assert url.startswith(f"https://s3.eu-west-1.amazonaws.com/bucket/incoming/00/{'0' * 64}?")
    assert "X-Amz-Credential=key%2Fwith%2Bsigns%2F" in url
    assert "X-Amz-Security-Token=token%2F%2B%3D" in url


@pytest.mark.parametrize(
    ("variable", "value"), [("AWS_ENDPOINT_URL", "http://seaweed_fs:8333"), ("AWS_SESSION_TOKEN", "/" * 700)]
)
def test_urls_that_no_worker_would_take_end_the_coordinator_at_its_start(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """Before, each request for one failed, and large bundles did not arrive."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv(variable, value)
    with pytest.raises(LocalError, match=variable):
        S3UploadUrls("s3://bucket/incoming")
