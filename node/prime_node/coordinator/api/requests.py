"""The checks that every signed request passes, cheap ones before expensive ones. The first failure is the answer.

    (1) framing and size                               MALFORMED, UNKNOWN_FIELD, WRONG_TYPE, TOO_LARGE
    (2) one signer; a stranger's address has not sent
        too many faulty requests                       BAD_SIGNATURE, TOO_MANY_REQUESTS
    (3) the signer has the endpoint's role             WRONG_ROLE, REVOKED, UNKNOWN_WORKER, BANNED
    (4) payload type, signature over the raw bytes     WRONG_PAYLOAD_TYPE, BAD_SIGNATURE, BAD_KEY
    (5) schema                                         UNKNOWN_FIELD, WRONG_TYPE
    (6) this run                                       WRONG_RUN
    (7) this epoch, time stamp within the window       WRONG_EPOCH, VERSION_UNSUPPORTED, EXPIRED
    (8) nonce not seen before                          REPLAYED
    (9) the signer's own rate, and its share of the
        memory of nonces                               TOO_MANY_REQUESTS, UNAVAILABLE

The rate comes last: a recorded request that someone else sends again uses up nothing of its signer's. A request that was
announced before its body was read is charged there, and not again.

Which requests may send a body is decided before its first byte is read (`BodyChecks`). Here too the first failure is the answer:

    (1) the header Prime-Body, its framing and size; without it the body is a stranger's, and short
    (2) one signer; a stranger's address has not sent too many faulty requests BAD_SIGNATURE, TOO_MANY_REQUESTS
    (3) the signer has the endpoint's role                                     WRONG_ROLE, REVOKED, UNKNOWN_WORKER, BANNED
    (4) the signer's own rate, charged at the end                              TOO_MANY_REQUESTS
    (5) signature, schema, this endpoint and this length                       BAD_SIGNATURE, WRONG_TYPE, MALFORMED
    (6) this run, this epoch, time stamp within the window, a new nonce        WRONG_RUN, WRONG_EPOCH, EXPIRED, REPLAYED

An admitted body counts against its sender's share. The trusted roles, the members and the strangers have one share each, so no
class can use up the room of another. No key and no network can use up its class's share alone.

Many callers may share one address, behind a proxy or a NAT. So faulty requests from it shut out only strangers: keys that
neither belong to the run nor take part. They are refused before any signature is checked.

A restart forgets the nonces and begins a new epoch with a random name (nonces.py). So no request that was signed before is
valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from prime_node.coordinator.api.callers import Callers, prefix_of
from prime_node.coordinator.api.clock_readings import ClockReading, read_clocks
from prime_node.coordinator.api.limiter import Limiter
from prime_node.coordinator.api.nonces import Epochs, Nonces, Room
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.state.records import State
from prime_node.ports.clock import Clock
from prime_node.ports.web import Admit, BodyAdmission, BodyShare, Sender
from prime_node.ports.web import Request as HttpRequest
from prime_protocol import limits
from prime_protocol.body_claim import CLAIM_HEADER, open_claim, parse_claim, read_claim
from prime_protocol.envelope import PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX
from prime_protocol.requests import Request, Stamped
from prime_protocol.run_spec import PinnedRun

NETWORKS_PER_CLASS = 4
"""Parts of the members' share; members of one untrusted network together take one part at most."""


class Caller(StrEnum):
    """The callers of an endpoint."""

    ANYONE = "anyone"
    """Any usable key that is not banned: to join."""
    WORKER = "worker"
    """A key that takes part."""
    KNOWN = "known"
    """A key that takes part or did, even a banned one: to read its receipts."""
    VALIDATOR = "validator"
    TRAINER = "trainer"
    JUDGES = "validator or trainer"
    OPERATOR = "root or coordinator"


ROLES_OF = {
    Caller.VALIDATOR: (Role.VALIDATOR,),
    Caller.TRAINER: (Role.TRAINER,),
    Caller.JUDGES: (Role.VALIDATOR, Role.TRAINER),
    Caller.OPERATOR: (Role.ROOT, Role.COORDINATOR),
}


@dataclass(slots=True)
class RequestGate:
    """The gate of all requests, with the memory that steps (2) and (7) to (9) need."""

    run: PinnedRun
    limiter: Limiter
    nonces: Nonces
    epochs: Epochs = field(default_factory=Epochs)

    def admit(
        self,
        body: bytes,
        *,
        kind: type[Request],
        caller: Caller,
        state: State,
        address: str,
        now: ClockReading,
        paid_by: str = "",
    ) -> tuple[str, Request]:
        """Return the verified signer and its request. `paid_by` is the key whose rate is charged already. Raise RemoteError."""
        now_s = now.monotonic_s
        with self.blame(address, now_s):
            envelope = open_envelope(body, bytes_max=limits.REQUEST_BYTES_MAX)  # (1)
            signer = envelope.sole_signer()  # (2)
            self._require_caller(signer, caller, state=state, address=address, now_s=now_s)  # (2), (3)
            payload = envelope.verify(PayloadType.REQUEST, trusted=(signer,))  # (4)
        stamped = stamped_request(payload, kind, self.run)  # (5), (6)
        self._accept(signer, stamped, caller=caller, state=state, address=address, now=now, paid_by=paid_by)
        return signer, stamped.request

    def admit_verified(
        self,
        signer: str,
        payload: bytes,
        *,
        kind: type[Request],
        caller: Caller,
        state: State,
        address: str,
        now: ClockReading,
        paid_by: str = "",
    ) -> Request:
        """Return the request in a payload whose signature a gateway has verified. Raise RemoteError."""
        with self.blame(address, now.monotonic_s):
            self._require_caller(signer, caller, state=state, address=address, now_s=now.monotonic_s)
        stamped = stamped_request(payload, kind, self.run)
        self._accept(signer, stamped, caller=caller, state=state, address=address, now=now, paid_by=paid_by)
        return stamped.request

    def _require_caller(self, signer: str, caller: Caller, *, state: State, address: str, now_s: float) -> None:
        if sender_of(signer, run=self.run, state=state) is None:
            self.limiter.by_address.require(address, now_s)
        require_role(signer, caller, run=self.run, state=state)
        if signer not in state.workers and caller is Caller.ANYONE:
            self.limiter.by_address.charge(address, now_s)  # a new key costs a millisecond

    def _accept(
        self,
        signer: str,
        stamped: Stamped,
        *,
        caller: Caller,
        state: State,
        address: str,
        now: ClockReading,
        paid_by: str,
    ) -> None:
        """Check what only the writer knows: epoch, time, nonce, rate. Raise RemoteError."""
        now_s = now.monotonic_s
        self.require_fresh(stamped.epoch, stamped.issued_at_ms, now)  # (7)
        self.nonces.require_new(signer, stamped.nonce)  # (8)
        if signer != paid_by and caller in (Caller.ANYONE, Caller.WORKER, Caller.KNOWN):
            self.limiter.by_key.spend(signer, now_s)  # (9)
        self.spend_nonce(signer, stamped.nonce, state=state, address=address, now_s=now_s)

    def spend_nonce(self, signer: str, nonce: str, *, state: State, address: str, now_s: float) -> None:
        """Remember a nonce in the room of its signer's kind. Raise RemoteError."""
        sender = sender_of(signer, run=self.run, state=state)
        if sender is None:
            self.nonces.spend(signer, nonce, now_s, room=Room.STRANGERS, network=prefix_of(address))
        else:
            room = Room.ROLES if sender.is_role else Room.MEMBERS
            self.nonces.spend(signer, nonce, now_s, room=room, num_members=state.num_active)

    def blame(self, address: str, now_s: float) -> _Blame:
        """Charge an address for a RemoteError raised inside the context. Used for parcels too."""
        return _Blame(lambda: self.limiter.by_address.charge(address, now_s))

    def require_fresh(self, epoch: str, issued_at_ms: int, now: ClockReading, *, on_its_way_s: float = 0.0) -> None:
        """Check that a statement is of this epoch and recent.

        Raise RemoteError: WRONG_EPOCH for another epoch, EXPIRED outside the window around its time stamp. `on_its_way_s` is the
        time in seconds that its bytes may take to arrive.
        """
        self.epochs.require(epoch, now)
        skew_s = abs(now.unix_ms - issued_at_ms) / 1_000
        if skew_s > limits.REQUEST_AGE_S_MAX + on_its_way_s:
            raise RemoteError(
                ErrorCode.EXPIRED,
                f"signed {skew_s:.0f} s away from the coordinator's time, {limits.REQUEST_AGE_S_MAX:.0f} s are "
                "allowed; check the clock",
            )


def verify_request(body: bytes, kind: type[Request], run: PinnedRun) -> tuple[str, bytes]:
    """Return the signer of a request and the signed payload, by the checks that need no state. Raise RemoteError."""
    envelope = open_envelope(body, bytes_max=limits.REQUEST_BYTES_MAX)
    signer = envelope.sole_signer()
    payload = envelope.verify(PayloadType.REQUEST, trusted=(signer,))
    stamped_request(payload, kind, run)
    return signer, payload


def stamped_request(payload: bytes, kind: type[Request], run: PinnedRun) -> Stamped:
    """Return the stamped request of a verified payload: steps (5) and (6). Raise RemoteError."""
    stamped = parse_json(payload, Stamped)
    if not isinstance(stamped.request, kind):
        raise RemoteError(ErrorCode.WRONG_TYPE, f"{kind.__name__} expected, got action {stamped.request.action}")
    if stamped.run != run.digest:
        raise wrong_run(stamped.run, run)
    return stamped


class _Blame:
    """A context that calls `charge` for each RemoteError that passes, except TOO_MANY_REQUESTS.

    Charging that one would block an address for as long as any caller behind it tries again.
    """

    def __init__(self, charge: Callable[[], None]) -> None:
        self._charge = charge

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RemoteError) and error.code is not ErrorCode.TOO_MANY_REQUESTS:
            self._charge()


def sender_of(signer: str, *, run: PinnedRun, state: State) -> Sender | None:
    """Return the sender if it is a key of the run or of an active worker; None for a stranger's key."""
    keys, worker = run.keys.current, state.workers.get(signer)
    if any(signer in held for held in (keys.root, keys.coordinator, keys.trainer, keys.validator)):
        return Sender(signer, is_role=True)
    return Sender(signer, is_role=False) if worker is not None and worker.active else None


def claimed_sender(signed: bytes, *, run: PinnedRun, state: State) -> Sender | None:
    """Return the sender that a header's envelope names, unverified; None if that is a stranger, or if the header is invalid."""
    try:
        signer = open_envelope(signed, bytes_max=limits.HEADER_ENVELOPE_BYTES_MAX).sole_signer()
    except RemoteError:
        return None
    return sender_of(signer, run=run, state=state)


def require_role(signer: str, caller: Caller, *, run: PinnedRun, state: State) -> None:
    """Raise RemoteError if a key that is assumed to have signed may not call. Free, so it comes before the signature check."""
    keys = run.keys.current
    if caller in ROLES_OF:
        if not any(signer in keys.of(role) for role in ROLES_OF[caller]):
            if any(run.keys.is_revoked(signer, role) for role in ROLES_OF[caller]):
                raise RemoteError(ErrorCode.REVOKED, f"key ring {run.keys.version} has revoked this key")
            raise RemoteError(ErrorCode.WRONG_ROLE, f"only {caller} keys of the run may send this request")
        return
    worker = state.workers.get(signer)
    if caller is Caller.KNOWN and worker is not None:
        return
    if worker is not None and worker.banned is not None:
        raise RemoteError(ErrorCode.BANNED, f"this key is banned: {worker.banned.reason}")
    if caller in (Caller.WORKER, Caller.KNOWN) and (worker is None or not worker.active):
        raise RemoteError(ErrorCode.UNKNOWN_WORKER, "this key has not joined the run; join first")


def wrong_run(named: str, run: PinnedRun) -> RemoteError:
    """Return the error for a statement that was signed for another run."""
    return RemoteError(ErrorCode.WRONG_RUN, f"signed for run {named[:12]}, this is run {run.digest[:12]}")


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

    def admit(
        self, request: HttpRequest, num_bytes: int, *, action: str, caller: Caller, is_verified: bool = False
    ) -> BodyAdmission:
        """Decide on a body by its request's header. A gateway `is_verified` the header's signature before. Raise RemoteError."""
        now, address, state = read_clocks(self.clock), self.callers.address_of(request), self.decisions.state
        now_s = now.monotonic_s
        network = self.callers.network_of(address)
        header = request.headers.get(CLAIM_HEADER.lower())
        if header is None:
            return _of_stranger(num_bytes, network)
        with self.gate.blame(address, now_s):
            envelope = open_claim(header)  # (1)
            signer = envelope.sole_signer()  # (2)
            sender = sender_of(signer, run=self.gate.run, state=state)
            if sender is None:
                self.gate.limiter.by_address.require(address, now_s)
                require_role(signer, caller, run=self.gate.run, state=state)  # (3)
                return _of_stranger(num_bytes, network)  # its signature would gain it nothing
            require_role(signer, caller, run=self.gate.run, state=state)  # (3)
            if signer in state.workers:
                self.gate.limiter.by_key.require(signer, now_s)  # (4)
            if is_verified:
                claim = parse_claim(envelope.payload, action=action, body_bytes=num_bytes)
            else:
                claim = read_claim(envelope, signer, action=action, body_bytes=num_bytes)  # (5)
        if claim.run != self.gate.run.digest:  # (6)
            raise wrong_run(claim.run, self.gate.run)
        self.gate.require_fresh(claim.epoch, claim.issued_at_ms, now)
        self.gate.nonces.require_new(signer, claim.nonce)  # a recorded header costs its signer nothing
        if signer in state.workers:
            self.gate.limiter.by_key.spend(signer, now_s)
        self.gate.spend_nonce(signer, claim.nonce, state=state, address=address, now_s=now_s)
        request.vouch(sender)
        return BodyAdmission(self._of_known(signer, network), claim.body_digest)

    def paid_by(self, request: HttpRequest) -> str:
        """Return the key whose rate was charged before this body was read; empty if none was. Raise RemoteError."""
        header = request.headers.get(CLAIM_HEADER.lower())
        if header is None or not request.body:  # without a body the header was not checked
            return ""
        signer = open_claim(header).sole_signer()
        is_known = sender_of(signer, run=self.gate.run, state=self.decisions.state) is not None
        return signer if is_known and signer in self.decisions.state.workers else ""

    def _of_known(self, signer: str, network: str) -> tuple[BodyShare, ...]:
        """Return the shares that a known key's body counts against.

        A key may send two of the largest bodies at once, however small its class's share is.
        """
        bounds = self.gate.run.spec.limits
        if signer not in self.decisions.state.workers:
            each_max = 2 * (bounds.blob_bytes_max + PARCEL_OVERHEAD_BYTES_MAX)
            all_max = max(limits.ROLES_BODY_BYTES_MAX, each_max)
            return (
                BodyShare(f"key {signer}", all_max, limits.BODIES_EACH_MAX),
                BodyShare("the run's own keys", all_max, limits.HTTP_CONNECTIONS_MAX),
            )
        each_max = 2 * (bounds.rollout_bytes_max + PARCEL_OVERHEAD_BYTES_MAX)
        all_max = max(limits.MEMBERS_BODY_BYTES_MAX, each_max)
        shares = (
            BodyShare(f"key {signer}", each_max, limits.BODIES_EACH_MAX),
            BodyShare("members", all_max, limits.HTTP_CONNECTIONS_MAX),
        )
        if self.callers.is_trusted(network):
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
