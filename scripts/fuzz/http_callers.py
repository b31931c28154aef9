"""Callers of the coordinator's HTTP interface, which send valid and broken requests and check each answer. See http_api.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

HERE = Path(__file__).parent
ROOT_FOLDER = HERE.parents[1]
sys.path[:0] = [str(ROOT_FOLDER), str(HERE)]

from mutate import VALUES, mutated  # noqa: E402 (the path is set above)
from tests.node import coordinator_world as cw  # noqa: E402
from valid_messages import MODEL_OF, examples  # noqa: E402

from prime_node.coordinator.api.routes import ENDPOINTS  # noqa: E402
from prime_node.ports.transport import Unreachable  # noqa: E402
from prime_protocol.body_claim import CLAIM_HEADER, REQUEST_HEADER, claim_of  # noqa: E402
from prime_protocol.digest import digest_of  # noqa: E402
from prime_protocol.envelope import PayloadType, parse_json, seal  # noqa: E402
from prime_protocol.errors import HTTP_STATUS, RemoteError  # noqa: E402
from prime_protocol.identity import SigningKey  # noqa: E402
from prime_protocol.parcel import pack_parcel  # noqa: E402
from prime_protocol.replies import ErrorBody  # noqa: E402
from prime_protocol.requests import BlobHeader  # noqa: E402

STRANGER = SigningKey(bytes([99]) * 32)
KEYS = (cw.ROOT, cw.COORDINATOR, cw.TRAINER, cw.VALIDATOR, cw.ANNA, cw.BEN, STRANGER)
REQUESTS = {one.path.removeprefix("/v1/"): one.message.__name__ for one in ENDPOINTS if one.message is not None}
"""Action -> the message that it takes."""
PAYLOADS = {
    "rollouts": PayloadType.ROLLOUT,
    "blobs": PayloadType.BLOB,
    "logprobs": PayloadType.LOGPROBS,
    "manifests": PayloadType.MANIFEST,
    "keys": PayloadType.KEY_RING,
    "calibrations": PayloadType.CALIBRATION,
}
"""Routes whose body is no request."""
GETS = (
    *("/v1/run", "/v1/head", "/v1/manifests/{}", "/v1/keys/{}", "/v1/timestamp", "/v1/ledger", "/v1/ledger/{}"),
    *("/v1/calibrations/{}", "/v1/blobs/{}", "/v1/status", "/v1/workers/{}", "/v1/standing/{}"),
    *("/healthz", "/readyz", "/metrics"),
    *("/v1/history", "/v1/events", "/v1/roster", "/v1/evidence/{}", "/v1/batches/{}/{}"),
)
ANSWER_S_MAX = 20.0
Sent = tuple[str, str, dict[str, str], bytes]


class Finding(Exception):
    """An answer of the daemon that the protocol forbids."""


class Fuzzer:
    """Callers of one daemon. Example: await Fuzzer(world, seed).for_a_while(60)."""

    def __init__(self, world: cw.World, seed: int) -> None:
        self.world, self.rng = world, random.Random(seed)
        self.known: list[Any] = [world.run.digest, digest_of(cw.CONFIG_JSON), "0" * 64, 0, 1, 2**31 - 1]
        """Names that requests may use; answers add to them."""
        self.outcomes: Counter[str] = Counter()
        self.last: Sent | None = None
        """The last request of `for_a_while`."""

    async def for_a_while(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        await self.behave()
        while time.monotonic() < end:
            self.last = self.request()
            await self.send(self.last)
            if self.rng.random() < 0.01:
                await self.behave()

    async def behave(self) -> None:
        """Join, publish, lease, upload and judge, as far as broken requests have left a way to it."""
        world = self.world
        with contextlib.suppress(RemoteError, Unreachable, AssertionError, TimeoutError):
            async with asyncio.timeout(10):
                await world.learn_epoch()
                await world.join(cw.ANNA, cw.BEN)
                if world.head is None:
                    await world.publish()
                lease = await world.lease(self.rng.choice((cw.ANNA, cw.BEN)), rollouts_max=2, holding=())
                key = next(key for key in KEYS if key.key_id == lease.worker)
                parcel = cw.make_parcel(lease, key)
                self.known += [lease.lease_id, lease.step, parcel, world.head and world.head.digest]
                if self.rng.random() < 0.7:
                    self.known.append((await world.client(key).upload(parcel)).bundle)
                if self.rng.random() < 0.5:
                    self.known.append((await world.judge()).bundle)

    def request(self) -> Sent:
        """The next one: valid, or broken in one place or several."""
        kind = self.rng.random()
        if kind < 0.15:
            return self._get()
        if kind < 0.35:
            return self._payload()
        action = self.rng.choice(list(REQUESTS))
        message = json.loads(self.rng.choice(examples()[REQUESTS[action if self.rng.random() < 0.95 else "lease"]]))
        message = self._named(message)
        fields = json.loads(self.world.stamped(_Plain(message)))  # type: ignore[arg-type]
        if self.rng.random() < 0.7:
            fields = json.loads(self._broken(fields))
        if not isinstance(fields, dict):
            fields = {"request": fields}
        key = self.rng.choice(KEYS)
        payload = json.dumps(fields).encode("utf-8", "replace")
        body = seal(payload, PayloadType.REQUEST, key).to_bytes()
        if self.rng.random() < 0.05:
            body = mutated([body], self.rng)
        return self._posted(action, body, key, in_header=self.rng.random() < 0.6)

    def _broken(self, fields: Any) -> bytes:
        text = json.dumps(fields).encode()
        while True:
            data = mutated([text], self.rng)
            try:
                json.loads(data)
            except (ValueError, RecursionError):
                continue
            return data

    def _named(self, value: Any) -> Any:
        """The same with digests, numbers and keys that the daemon knows."""
        if isinstance(value, dict):
            return {name: self._named(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._named(item) for item in value]
        if isinstance(value, str) and len(value) == 64 and self.rng.random() < 0.8:
            return self.rng.choice([known for known in self.known if isinstance(known, str)])
        if isinstance(value, str) and value.startswith("12D3Koo"):
            return self.rng.choice(KEYS).key_id
        if isinstance(value, int) and not isinstance(value, bool) and self.rng.random() < 0.5:
            return self.rng.choice([known for known in self.known if isinstance(known, int)])
        return min(value, 0.2) if isinstance(value, float) and value > 0.2 else value

    def _payload(self) -> Sent:
        """Return a request that uploads, publishes or rotates."""
        route = self.rng.choice(list(PAYLOADS))
        key = self.rng.choice(KEYS) if self.rng.random() < 0.3 else cw.TRAINER
        parcels = [known for known in self.known if isinstance(known, bytes)]
        if route == "rollouts" and parcels:
            body, key = self.rng.choice(parcels), self.rng.choice((cw.ANNA, cw.BEN))
        elif route == "blobs":
            data = self.rng.randbytes(20)
            header = BlobHeader(
                body_digest=digest_of(data),
                body_bytes=len(data),
                run=self.world.run.digest,
                issued_at_ms=self.world.parts.clock.now_ms(),
                epoch=self.world.epoch,
            )
            body = pack_parcel(header, data, PayloadType.BLOB, key)
        else:
            name = "LogprobsHeader" if route == "logprobs" else MODEL_OF[PAYLOADS[route]].__name__
            fields = self._named(json.loads(self.rng.choice(examples()[name])))
            key = {"keys": cw.ROOT, "calibrations": cw.ROOT, "logprobs": cw.VALIDATOR}.get(route, key)
            body = seal(self._broken(fields | {"run": self.world.run.digest}), PAYLOADS[route], key).to_bytes()
            if route in ("rollouts", "logprobs"):
                body = b"PRP1" + len(body).to_bytes(4, "big") + body + self.rng.randbytes(8)
        if self.rng.random() < 0.5:
            body = mutated([body], self.rng)
        return self._posted(route, body, key, in_header=False)

    def _posted(self, action: str, body: bytes, key: SigningKey, *, in_header: bool) -> Sent:
        headers: dict[str, str] = {}
        text = body.decode("latin-1")
        if in_header and len(body) < 6_000 and text.isprintable():
            return "POST", f"/v1/{action}", {REQUEST_HEADER: text}, b""
        if self.rng.random() < 0.8 and body:
            claim = claim_of(
                body,
                key,
                run=self.world.run.digest,
                action=action if self.rng.random() < 0.95 else "join",
                nonce=f"{self.rng.getrandbits(128):032x}",
                now_ms=self.world.parts.clock.now_ms(),
                epoch=self.world.epoch,
            )
            if self.rng.random() < 0.1:
                claim = mutated([claim.encode()], self.rng).decode("latin-1")
            if claim.isprintable() and claim.isascii():
                headers[CLAIM_HEADER] = claim
        return "POST", f"/v1/{action}", headers, body

    def _get(self) -> Sent:
        known = str(self.rng.choice([one for one in self.known if isinstance(one, (str, int))]))
        odd = str(self.rng.choice(VALUES)).encode("utf-8", "replace").hex()[:40]
        name = self.rng.choice((known, known, odd, "-1", "00", "9" * 15, "%2e%2e%2f", "..", "a" * 200, "%ff", "\u0661"))
        headers = {}
        if self.rng.random() < 0.3:
            headers["Range"] = self.rng.choice(
                ("bytes=0-3", "bytes=-1", "bytes=9-2", "bytes=0-3,5-6", "x", "bytes=" + "9" * 30)
            )
        if self.rng.random() < 0.2:
            headers["If-None-Match"] = known
        method = self.rng.choice(("GET",) * 8 + ("HEAD", "PUT", "DELETE", "OPTIONS"))
        return (
            method,
            self.rng.choice(GETS).replace("{}", name) + self.rng.choice(("", "", "", "/", "?a=b", "//")),
            headers,
            b"",
        )

    async def send(self, sent: Sent) -> None:
        """Raises Finding."""
        method, path, headers, body = sent
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                async with self.world.session.request(
                    method, self.world.url + path, data=body if method == "POST" else None, headers=headers
                ) as answer:
                    text = await answer.read()
                    status = answer.status
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise Finding(f"{method} {path}: no answer: {error!r}") from None
        code = ""
        if status >= 400 and method != "HEAD":
            try:
                refusal = parse_json(text, ErrorBody)
            except RemoteError as error:
                raise Finding(f"{method} {path}: {status} is no ErrorBody ({error}): {text[:200]!r}") from None
            code = refusal.code
            if HTTP_STATUS[refusal.code] != status:
                raise Finding(f"{method} {path}: {refusal.code} with status {status}")
            if refusal.epoch:
                self.world.epoch = refusal.epoch
        if status >= 500 and status != 503:
            raise Finding(f"{method} {path}: status {status}: {text[:300]!r}")
        self.outcomes[f"{status} {code}"] += 1


class _Plain:
    """A message that is written as it is."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        return self._fields
