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

body_checks.py decides which requests may send a body.

Many callers may share one address, behind a proxy or a NAT. So faulty requests from it shut out only strangers: keys that
neither belong to the run nor take part. They are refused before any signature is checked.

A restart forgets the nonces and begins a new epoch with a random name (nonces.py). So no request that was signed before is
valid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from prime_node.carrier import carrier
from prime_node.coordinator.api.callers import prefix_of
from prime_node.coordinator.api.clock_readings import ClockReading
from prime_node.coordinator.api.limiter import AddressBuckets, Limiter
from prime_node.coordinator.api.nonces import Epochs, Nonces, Room
from prime_node.coordinator.state.records import State
from prime_node.ports.web import Sender
from prime_protocol import limits
from prime_protocol.envelope import PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.requests import Request, Stamped
from prime_protocol.run_spec import PinnedRun


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
    READERS = "validator, trainer or auditor"
    OPERATOR = "root or coordinator"


ROLES_OF = {
    Caller.VALIDATOR: (Role.VALIDATOR,),
    Caller.TRAINER: (Role.TRAINER,),
    Caller.READERS: (Role.VALIDATOR, Role.TRAINER, Role.AUDITOR),
    Caller.OPERATOR: (Role.ROOT, Role.COORDINATOR),
}


@carrier(frozen=True, slots=True)
class AdmittedRequest:
    """A request that has passed all checks."""

    signer: str
    sender: Sender | None
    """Sender, if it is no stranger."""
    message: Request


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
    ) -> AdmittedRequest:
        """Return a request whose signature is verified. `paid_by` is the key whose rate is charged already. Raise RemoteError."""
        now_s = now.monotonic_s
        with self.blame(address, now_s):
            envelope = open_envelope(body, bytes_max=limits.REQUEST_BYTES_MAX)  # (1)
            signer = envelope.sole_signer()  # (2)
            sender = self._sender(signer, caller, state=state, address=address, now_s=now_s)  # (2), (3)
            payload = envelope.verify(PayloadType.REQUEST, trusted=(signer,))  # (4)
        stamped = stamped_request(payload, kind, self.run)  # (5), (6)
        self._accept(signer, sender, stamped, caller=caller, state=state, address=address, now=now, paid_by=paid_by)
        return AdmittedRequest(signer, sender, stamped.request)

    def admit_verified(
        self,
        signer: str,
        payload: bytes | Stamped,
        *,
        kind: type[Request],
        caller: Caller,
        state: State,
        address: str,
        now: ClockReading,
        paid_by: str = "",
    ) -> AdmittedRequest:
        """Return the request in a payload, parsed or not, whose signature and JSON a gateway has verified. Raise RemoteError."""
        with self.blame(address, now.monotonic_s):
            sender = self._sender(signer, caller, state=state, address=address, now_s=now.monotonic_s)
        stamped = stamped_request(payload, kind, self.run, is_json=True)
        self._accept(signer, sender, stamped, caller=caller, state=state, address=address, now=now, paid_by=paid_by)
        return AdmittedRequest(signer, sender, stamped.request)

    def _sender(self, signer: str, caller: Caller, *, state: State, address: str, now_s: float) -> Sender | None:
        """Return the sender if it is no stranger. Raise RemoteError if it may not call."""
        sender = sender_of(signer, run=self.run, state=state)
        if sender is None:
            self.limiter.by_address.require(address, now_s)
        require_role(signer, caller, run=self.run, state=state)
        if caller is Caller.ANYONE and signer not in state.workers:
            self.limiter.by_address.charge(address, now_s)  # a new key costs a millisecond
        return sender

    def _accept(
        self,
        signer: str,
        sender: Sender | None,
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
        new = self.nonces.require_new(signer, stamped.nonce)  # (8)
        if signer != paid_by and (caller not in ROLES_OF or sender is None or not sender.is_role):
            self.limiter.by_key.spend(signer, now_s)  # (9)
        self.spend_nonce(signer, sender, stamped.nonce, new, state=state, address=address, now_s=now_s)

    def spend_nonce(
        self, signer: str, sender: Sender | None, nonce: str, new: int, *, state: State, address: str, now_s: float
    ) -> None:
        """Remember a nonce in the room of its signer's kind. `new` is as in `Nonces.spend`. Raise RemoteError."""
        if sender is None:
            self.nonces.spend(signer, nonce, now_s, room=Room.STRANGERS, network=prefix_of(address), new=new)
        else:
            room = Room.ROLES if sender.is_role else Room.MEMBERS
            self.nonces.spend(signer, nonce, now_s, room=room, num_members=state.num_active, new=new)

    def blame(self, address: str, now_s: float) -> _Blame:
        """Charge an address for a RemoteError raised inside the context. Used for parcels too."""
        return _Blame(self.limiter.by_address, address, now_s)

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


def stamped_request(payload: bytes | Stamped, kind: type[Request], run: PinnedRun, *, is_json: bool = False) -> Stamped:
    """Return the stamped request of a verified payload: steps (5) and (6). `is_json`: as in `parse_json`. Raise RemoteError."""
    stamped = payload if isinstance(payload, Stamped) else parse_json(payload, Stamped, is_json=is_json)
    if not isinstance(stamped.request, kind):
        raise RemoteError(ErrorCode.WRONG_TYPE, f"{kind.__name__} expected, got action {stamped.request.action}")
    if stamped.run != run.digest:
        raise wrong_run(stamped.run, run)
    return stamped


class _Blame:
    """A context that charges an address for each RemoteError that passes, except TOO_MANY_REQUESTS.

    Charging that one would block an address for as long as any caller behind it tries again.
    """

    __slots__ = ("_address", "_buckets", "_now_s")

    def __init__(self, buckets: AddressBuckets, address: str, now_s: float) -> None:
        self._buckets, self._address, self._now_s = buckets, address, now_s

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RemoteError) and error.code is not ErrorCode.TOO_MANY_REQUESTS:
            self._buckets.charge(self._address, self._now_s)


def sender_of(signer: str, *, run: PinnedRun, state: State) -> Sender | None:
    """Return the sender if it is a key of the run or of an active worker; None for a stranger's key. An auditor is a member."""
    keys = run.keys.current
    if signer in keys.root or signer in keys.coordinator or signer in keys.trainer or signer in keys.validator:
        return Sender(signer, is_role=True)
    worker = state.workers.get(signer)
    is_member = signer in keys.auditor or (worker is not None and worker.active)
    return Sender(signer, is_role=False) if is_member else None


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
