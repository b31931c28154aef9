"""The PUT of a body to a URL that a coordinator has named.

A coordinator may be hostile, and the URL has any path. So the body goes to a public address, or to an address at which the
coordinator itself answers, and nowhere else: not into the network around this machine, to no metadata service, through no proxy,
along no redirect. The connection is made to the address that was checked.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import ResolveResult

from prime_node.adapters.name_lookups import PatientResolver
from prime_node.adapters.web.http_answers import Patience, new_session, pieces_of_body, reason_of
from prime_node.adapters.web.noted_resolver import has_tls, proxy_for
from prime_node.ports.transport import Unreachable
from prime_protocol.addresses import GLOBAL, is_name, may_be_named, parse_ip, place_of
from prime_protocol.replies import upload_headers

STORED = (200, 412)
"""Statuses after which the object exists; 412: it did before."""


async def put_directly(
    url: str, body: bytes, sha256: bytes, *, near: Collection[str], needs_tls: bool, stall_s: float
) -> None:
    """Send a body. `near` are the addresses at which the coordinator answers. Raise Unreachable.

    No error holds the URL: who knows it may use it until it expires.
    """
    try:
        address = urlsplit(url)
    except ValueError:  # such as http://[::::]/
        raise Unreachable("the coordinator names an address that is none") from None
    host = address.hostname or ""
    if needs_tls and not has_tls(url):
        raise Unreachable(f"{host}: the coordinator is asked over TLS, and this address is not")
    if not _may_be_asked(host, near):
        raise Unreachable(f"{host} is not a public address, nor one of the coordinator")
    if proxy_for(url) is not None:
        raise Unreachable(f"{host}: nothing is sent there through this machine's proxy")
    try:
        async with (
            Patience(stall_s, wait_s=0.0) as patience,
            new_session(aiohttp.TCPConnector(resolver=_CheckedResolver(near))) as session,
            session.put(
                url,
                data=pieces_of_body(body, patience),
                headers=upload_headers(len(body), sha256),
                allow_redirects=False,
            ) as answer,
        ):
            if answer.status not in STORED:
                raise Unreachable(f"{host} answers {answer.status}")
    except TimeoutError:
        raise Unreachable(f"{host}: no answer") from None
    except aiohttp.ClientResponseError as error:
        raise Unreachable(f"{host}: {error.message[:200]}") from None
    except ValueError:
        raise Unreachable(f"{host}: an address that cannot be used") from None
    except (aiohttp.ClientError, OSError) as error:
        raise Unreachable(f"{host}: {reason_of(error)}") from None


def _may_be_asked(host: str, near: Collection[str]) -> bool:
    """Return whether a name or an IP address may be asked. Where a name leads is checked when it is resolved."""
    return is_name(host) or may_receive(host, near)


def may_receive(address: str, near: Collection[str]) -> bool:
    """Return whether a body may be sent to an IP address."""
    if place_of(address) == GLOBAL:
        return True
    found = parse_ip(address)
    return found is not None and str(found) in near and may_be_named(address, between=near)


class _CheckedResolver(PatientResolver):
    def __init__(self, near: Collection[str]) -> None:
        super().__init__()
        self._near = near

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = [one for one in await super().resolve(host, port, family) if may_receive(one["host"], self._near)]
        if not found:
            raise OSError(f"{host} leads to no public address")
        return found
