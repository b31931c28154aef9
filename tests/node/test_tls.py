"""A coordinator behind TLS: the error for an invalid certificate."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.raw_server_world import raw_server

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.cli.run_status import run_status
from prime_node.ports.transport import Unreachable
from prime_protocol.errors import LocalError

DAY = dt.timedelta(days=1)


@contextlib.asynccontextmanager
async def server_whose_certificate_has_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Return its URL. This machine trusts the certificate itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - 2 * DAY)
        .not_valid_after(now - DAY)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, secret = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, secret)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer nothing."""

    async with raw_server(answer, tls=context) as port:
        yield f"https://127.0.0.1:{port}"


async def test_a_certificate_that_has_ended_is_named_to_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server_whose_certificate_has_ended(tmp_path, monkeypatch) as url:
        with pytest.raises(LocalError, match=r"its certificate is not valid here: [a-z -]+: is the"):
            await asyncio.to_thread(run_status, url)


async def test_a_certificate_that_is_not_valid_is_named_to_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        server_whose_certificate_has_ended(tmp_path, monkeypatch) as url,
        HttpClient(url, run="0" * 64, clock=SystemClock()) as client,
    ):
        with pytest.raises(Unreachable, match=r"its certificate is not valid here: [a-z -]+$"):
            await client.run_spec()
