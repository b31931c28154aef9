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
announced before its body was read is charged there, and not again (bodies.py).

Many callers may share one address, behind a proxy or a NAT. So faulty requests from it shut out only strangers: keys that
neither belong to the run nor take part. They are refused before any signature is checked.

A restart forgets the nonces and begins a new epoch with a random name (nonces.py). So no request that was signed before is
valid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from prime_node.coordinator.api.callers import prefix_of
from prime_node.coordinator.api.limiter import Limiter
from prime_node.coordinator.api.nonces import Epochs, Nonces, Room
from prime_node.coordinator.state.records import State
from prime_node.ports.web import Sender
from prime_protocol import limits
from prime_protocol.envelope import PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.messages import Request, Stamped
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
    JUDGES = "validator or trainer"
    OPERATOR = "root or coordinator"


_ROLES = {
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
        now_ms: int,
        now_s: float,
        paid_by: str = "",
    ) -> tuple[str, Request]:
        """Return the verified signer and its request. `paid_by` is the key whose rate is charged already. Raise RemoteError."""
        with self.blame(address, now_s):
            envelope = open_envelope(body, bytes_max=limits.REQUEST_BYTES_MAX)  # (1)
            signer = envelope.sole_signer()  # (2)
            if sender_of(signer, run=self.run, state=state) is None:
                self.limiter.by_address.require(address, now_s)
            require_role(signer, caller, run=self.run, state=state)  # (3)
            if signer not in state.workers and caller is Caller.ANYONE:
                self.limiter.by_address.charge(address, now_s)  # a new key costs a millisecond
            payload = envelope.verify(PayloadType.REQUEST, trusted=(signer,))  # (4)
        stamped = parse_json(payload, Stamped)  # (5)
        if not isinstance(stamped.request, kind):
            raise RemoteError(ErrorCode.WRONG_TYPE, f"{kind.__name__} expected, got action {stamped.request.action}")
        if stamped.run != self.run.digest:  # (6)
            raise wrong_run(stamped.run, self.run)
        self.require_fresh(stamped.epoch, stamped.issued_at_ms, now_ms=now_ms, now_s=now_s)  # (7)
        self.nonces.require_new(signer, stamped.nonce)  # (8)
        if signer != paid_by and caller in (Caller.ANYONE, Caller.WORKER, Caller.KNOWN):
            self.limiter.by_key.spend(signer, now_s)  # (9)
        self.spend_nonce(signer, stamped.nonce, state=state, address=address, now_s=now_s)
        return signer, stamped.request

    def spend_nonce(self, signer: str, nonce: str, *, state: State, address: str, now_s: float) -> None:
        """Remember a nonce in the room of its signer's kind. Raise RemoteError."""
        sender = sender_of(signer, run=self.run, state=state)
        if sender is None:
            self.nonces.spend(signer, nonce, now_s, room=Room.STRANGERS, network=prefix_of(address))
        else:
            self.nonces.spend(signer, nonce, now_s, room=Room.ROLES if sender.is_role else Room.MEMBERS)

    def blame(self, address: str, now_s: float) -> _Blame:
        """Charge an address for a RemoteError raised inside the context. Used for parcels too."""
        return _Blame(lambda: self.limiter.by_address.charge(address, now_s))

    def require_fresh(
        self, epoch: str, issued_at_ms: int, *, now_ms: int, now_s: float, on_its_way_s: float = 0.0
    ) -> None:
        """Check that a statement is of this epoch and recent.

        Raise RemoteError: WRONG_EPOCH for another epoch, EXPIRED outside the window around its time stamp. `on_its_way_s` is the
        time in seconds that its bytes may take to arrive.
        """
        self.epochs.require(epoch, now_ms=now_ms, now_s=now_s)
        skew_s = abs(now_ms - issued_at_ms) / 1_000
        if skew_s > limits.REQUEST_AGE_S_MAX + on_its_way_s:
            raise RemoteError(
                ErrorCode.EXPIRED,
                f"signed {skew_s:.0f} s away from the coordinator's time, {limits.REQUEST_AGE_S_MAX:.0f} s are "
                "allowed; check the clock",
            )


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
    if signer in keys.root + keys.coordinator + keys.trainer + keys.validator:
        return Sender(signer, is_role=True)
    return Sender(signer, is_role=False) if worker is not None and worker.active else None


def require_role(signer: str, caller: Caller, *, run: PinnedRun, state: State) -> None:
    """Raise RemoteError if a key that is assumed to have signed may not call. Free, so it comes before the signature check."""
    keys = run.keys.current
    if caller in _ROLES:
        if not any(signer in keys.of(role) for role in _ROLES[caller]):
            if any(run.keys.is_revoked(signer, role) for role in _ROLES[caller]):
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
