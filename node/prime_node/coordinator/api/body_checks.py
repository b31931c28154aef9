"""The checks of requests with a body, before its first byte is read. The first failure is the answer.

    (1) the header Prime-Body, its framing and size; without it the body is a stranger's, and short
    (2) one signer; a stranger's address has not sent too many faulty requests BAD_SIGNATURE, TOO_MANY_REQUESTS
    (3) the signer has the endpoint's role                                     WRONG_ROLE, REVOKED, UNKNOWN_WORKER, BANNED
    (4) the signer's own rate, charged at the end                              TOO_MANY_REQUESTS
    (5) signature, schema, this endpoint and this length                       BAD_SIGNATURE, WRONG_TYPE, MALFORMED
    (6) this run, this epoch, time stamp within the window, a new nonce        WRONG_RUN, WRONG_EPOCH, EXPIRED, REPLAYED

An admitted body counts against its sender's share. The trusted roles, the members and the strangers have one share each, so no
class can use up the room of another. No key and no network can use up its class's share alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from prime_node.coordinator.api.callers import Callers
from prime_node.coordinator.api.clock_readings import read_clocks
from prime_node.coordinator.api.requests import Caller, RequestGate, require_role, sender_of, wrong_run
from prime_node.coordinator.decisions import Decisions
from prime_node.ports.clock import Clock
from prime_node.ports.web import Admit, BodyAdmission, BodyShare
from prime_node.ports.web import Request as HttpRequest
from prime_protocol import limits
from prime_protocol.body_claim import CLAIM_HEADER, open_claim, parse_claim, read_claim
from prime_protocol.envelope import Envelope
from prime_protocol.errors import LimitExceeded
from prime_protocol.limits import Limits
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX

NETWORKS_PER_CLASS = 4
"""Parts of the members' share; members of one untrusted network together take one part at most."""


@dataclass(slots=True)
class BodyChecks:
    """The checks of requests with a body, before their first byte is read."""

    clock: Clock
    decisions: Decisions
    gate: RequestGate
    callers: Callers

    def admits(self, action: str, caller: Caller) -> Admit:
        """Return the check for bodies that are sent to /v1/`action`."""
        return partial(self.admit, action=action, caller=caller)

    def admit(self, request: HttpRequest, num_bytes: int, *, action: str, caller: Caller) -> BodyAdmission:
        """Decide on a body by its request's header. Raise RemoteError."""
        address = self.callers.address_of(request)
        header = request.headers.get(CLAIM_HEADER.lower())
        if header is None:
            return _of_stranger(num_bytes, self.callers.network_of(address))
        with self.gate.blame(address, self.clock.monotonic_s()):
            envelope = open_claim(header)  # (1)
            signer = envelope.sole_signer()  # (2)
        request = replace(request, remote=address, body=envelope.payload)
        return self.admit_claim(request, num_bytes, action=action, caller=caller, signer=signer, envelope=envelope)

    def admit_claim(
        self,
        request: HttpRequest,
        num_bytes: int,
        *,
        action: str,
        caller: Caller,
        signer: str,
        envelope: Envelope | None = None,
    ) -> BodyAdmission:
        """Decide on a body by the claim to it, the request's body. Raise RemoteError.

        Without `envelope`, a gateway has verified the signature. Without a signer, it is a stranger's body.
        """
        now, address, state = read_clocks(self.clock), request.remote, self.decisions.state
        now_s = now.monotonic_s
        network = self.callers.network_of(address)
        if not signer:
            return _of_stranger(num_bytes, network)
        with self.gate.blame(address, now_s):
            sender = sender_of(signer, run=self.gate.run, state=state)
            if sender is None:
                self.gate.limiter.by_address.require(address, now_s)
                require_role(signer, caller, run=self.gate.run, state=state)  # (3)
                return _of_stranger(num_bytes, network)  # its signature would gain it nothing
            require_role(signer, caller, run=self.gate.run, state=state)  # (3)
            if signer in state.workers:
                self.gate.limiter.by_key.require(signer, now_s)  # (4)
            if envelope is None:
                claim = parse_claim(request.body, action=action, body_bytes=num_bytes, is_json=True)
            else:
                claim = read_claim(envelope, signer, action=action, body_bytes=num_bytes)  # (5)
        if claim.run != self.gate.run.digest:  # (6)
            raise wrong_run(claim.run, self.gate.run)
        self.gate.require_fresh(claim.epoch, claim.issued_at_ms, now)
        new = self.gate.nonces.require_new(signer, claim.nonce)  # a recorded header costs its signer nothing
        if signer in state.workers:
            self.gate.limiter.by_key.spend(signer, now_s)
        self.gate.spend_nonce(signer, sender, claim.nonce, new, state=state, address=address, now_s=now_s)
        request.vouch(sender)
        return BodyAdmission(self._of_known(signer, network), claim.body_digest)

    def paid_by(self, request: HttpRequest) -> str:
        """Return the key whose rate was charged before this body was read; empty if none was. Raise RemoteError."""
        header = request.headers.get(CLAIM_HEADER.lower())
        if header is None or not request.body:  # without a body the header was not checked
            return ""
        return self.paid_by_key(open_claim(header).sole_signer())

    def paid_by_key(self, claimant: str) -> str:
        """Return the key whose claim to a body was admitted, if its rate was charged; else an empty text."""
        state = self.decisions.state
        is_charged = claimant in state.workers and sender_of(claimant, run=self.gate.run, state=state) is not None
        return claimant if is_charged else ""

    def _of_known(self, signer: str, network: str) -> tuple[BodyShare, ...]:
        """Return the shares that a known key's body counts against.

        A key may send two of the largest bodies at once, however small its class's share is.
        """
        bounds = self.gate.run.spec.limits
        if signer not in self.decisions.state.workers:
            each_max = 2 * (bounds.blob_bytes_max + PARCEL_OVERHEAD_BYTES_MAX)
            all_max = max(limits.ROLES_BODY_BYTES_MAX, 2 * each_max)
            return (
                BodyShare(f"key {signer}", all_max // 2, limits.BODIES_EACH_MAX),
                BodyShare("the run's own keys", all_max, limits.HTTP_CONNECTIONS_MAX),
            )
        return member_shares(signer, network, bounds, self.callers)


def member_shares(worker: str, network: str, bounds: Limits, callers: Callers) -> tuple[BodyShare, ...]:
    """Return the shares that the body of a worker counts against."""
    each_max = 2 * (bounds.rollout_bytes_max + PARCEL_OVERHEAD_BYTES_MAX)
    all_max = max(limits.MEMBERS_BODY_BYTES_MAX, each_max)
    shares = (
        BodyShare(f"key {worker}", each_max, limits.BODIES_EACH_MAX),
        BodyShare("members", all_max, limits.HTTP_CONNECTIONS_MAX),
    )
    if callers.is_trusted(network):
        return shares
    network_max = max(all_max // NETWORKS_PER_CLASS, each_max)
    return (*shares, BodyShare(f"members at {network}", network_max, limits.HTTP_CONNECTIONS_MAX))


def _of_stranger(num_bytes: int, network: str) -> BodyAdmission:
    """Return the admission of a stranger's body. Raise LimitExceeded."""
    if num_bytes > limits.STRANGER_BODY_BYTES_MAX:
        raise LimitExceeded(
            f"STRANGER_BODY_BYTES_MAX (a longer body needs the header {CLAIM_HEADER} of a member)",
            num_bytes,
            limits.STRANGER_BODY_BYTES_MAX,
        )
    each_max, all_max = limits.STRANGERS_BODY_BYTES_EACH_MAX, limits.STRANGERS_BODY_BYTES_MAX
    return BodyAdmission(
        (
            BodyShare(f"strangers at {network}", each_max, limits.BODIES_EACH_MAX),
            BodyShare("strangers", all_max, limits.HTTP_STRANGERS_MAX),
        )
    )
