"""Leases that went through a gateway: for each it lets one body in and stores one bundle before it asks the writer.

So an upload is one message to the writer, not three: may the body be read, take the bundle, it is stored. Each costs the writer
more by the cold start of its code than by its work. For a worker that uploads elsewhere than it leases, the writer is asked.

The writer judges the bundle as any other, and charges its worker then. What it does not take was stored for nothing. So this
happens once, until the writer takes another bundle of that worker. A claim is let in here once. It may be used once more where
the writer is asked; the bundle counts once.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TypeVar

from prime_node.coordinator.api.direct_uploads import lease_bytes_max
from prime_node.ports.web import Response
from prime_protocol import limits
from prime_protocol.envelope import Envelope, open_envelope
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.replies import UploadReply
from prime_protocol.rollout import RolloutHeader
from prime_protocol.run_spec import PinnedRun

REMEMBERED = 65_536
"""Leases, workers and claims that are remembered, each."""
LEASE_BYTES_MAX = 2**16
"""A longer lease is not remembered: to look into it would delay other requests."""
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class KnownLeases:
    """The leases of one gateway."""

    def __init__(self, run: PinnedRun) -> None:
        self._run = run
        self._leases: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """Worker of each lease whose bundle has not come, and the most bytes of its body, by the digest that the bundle names."""
        self._bodies: OrderedDict[str, int] = OrderedDict()
        """Bodies that are let in, by worker."""
        self._admitted: OrderedDict[bytes, None] = OrderedDict()
        """Signatures of the claims that were let in."""
        self._in_doubt: OrderedDict[str, None] = OrderedDict()
        """Workers of whose bundles the last one that was stored here may not be wanted."""

    def add(self, worker: str, granted: Response) -> None:
        """Remember the lease in an answer of the writer, if it is one."""
        if granted.status == 200 and isinstance(granted.body, bytes) and len(granted.body) <= LEASE_BYTES_MAX:
            lease = open_envelope(granted.body)
            num_groups = len(json.loads(lease.payload)["groups"])
            _remember(self._leases, lease.digest, (worker, lease_bytes_max(num_groups, self._run)))
            _remember(self._bodies, worker, self._bodies.pop(worker, 0) + 1)

    def admits(self, claim: Envelope, issued_at_ms: int, now_ms: int) -> bool:
        """Return whether the body of a verified claim is let in. Raise RemoteError if it was before."""
        worker = claim.sole_signer()
        if self.has_admitted(claim):
            raise RemoteError(ErrorCode.REPLAYED, "this body was announced before; sign a new announcement")
        left = self._bodies.get(worker, 0)
        if not left or abs(now_ms - issued_at_ms) > 1_000 * limits.REQUEST_AGE_S_MAX:
            return False
        self._bodies[worker] = left - 1
        _remember(self._admitted, claim.signatures[0].signature, None)
        return True

    def has_admitted(self, claim: Envelope) -> bool:
        """Return whether the body of a claim was let in here, so that the writer does not know of it."""
        return claim.signatures[0].signature in self._admitted

    def may_store(self, signer: str, header: RolloutHeader) -> bool:
        """Return whether the bundle of a lease is stored before the writer is asked. It is asked for the next one of the lease.

        Until `note` is called with an answer that takes it, it is asked for others of this worker, too.
        """
        worker, body_bytes_max = self._leases.get(header.lease_digest or "", ("", 0))
        if worker != signer or header.body_bytes > body_bytes_max or worker in self._in_doubt:
            return False
        assert header.lease_digest is not None
        del self._leases[header.lease_digest]
        _remember(self._in_doubt, worker, None)
        return True

    def note(self, worker: str, answer: Response) -> None:
        """Note the writer's answer to a bundle."""
        if worker in self._in_doubt and answer.status == 200 and isinstance(answer.body, bytes):
            verdict = UploadReply.model_validate_json(answer.body).verdict
            if verdict is None or verdict.accepted:
                del self._in_doubt[worker]


def _remember(known: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> None:
    known[key] = value
    if len(known) > REMEMBERED:
        known.popitem(last=False)
