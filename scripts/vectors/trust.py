"""Golden vectors of key rings and timestamps. See make_vectors.py."""

from __future__ import annotations

from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import ChainPoint, KeyRing, RoleKeys
from prime_protocol.timestamp import Timestamp
from vectors.folder import COORDINATOR, NOW_MS, ROOT, STRANGER, TRAINER, VALIDATOR, WORKER, Case, Folder, fields

E = ErrorCode
HEAD = ChainPoint(policy_version=3, manifest=digest_of(b"manifest 3"))
KEYS = RoleKeys(
    root=(ROOT.key_id,),
    coordinator=(COORDINATOR.key_id,),
    trainer=(TRAINER.key_id,),
    validator=(VALIDATOR.key_id,),
)


def trust(folder: Folder, run: Envelope) -> None:
    """Ring 1 gives the root a second key and asks for both; ring 2 takes the coordinator's key away."""
    first = _ring(run, 1, run.digest, KEYS.model_copy(update={"root": (ROOT.key_id, WORKER.key_id)}), ROOT, WORKER)
    moved = _keys(first).model_copy(update={"coordinator": (STRANGER.key_id,)})
    second = _ring(run, 2, first.digest, moved, ROOT, WORKER)
    folder.file("key_ring_1.envelope", first.to_bytes())
    folder.file("key_ring_2.envelope", second.to_bytes())
    known = ["key_ring_1.envelope"]
    bad: list[tuple[str, Envelope, ErrorCode]] = [
        ("a gap", _ring(run, 3, first.digest, moved, ROOT, WORKER), E.CHAIN_BROKEN),
        ("a ring of the same version", _ring(run, 1, run.digest, moved, ROOT, WORKER), E.CHAIN_BROKEN),
        ("after another ring", _ring(run, 2, digest_of(b"other"), moved, ROOT, WORKER), E.CHAIN_BROKEN),
        ("below the threshold", _ring(run, 2, first.digest, moved, ROOT), E.BAD_SIGNATURE),
        (
            "not signed by its own root",
            _ring(run, 2, first.digest, moved.model_copy(update={"root": (STRANGER.key_id,)}), ROOT, WORKER),
            E.BAD_SIGNATURE,
        ),
        (
            "behind an earlier policy",
            _ring(run, 2, first.digest, moved, ROOT, WORKER, at=HEAD.model_copy(update={"policy_version": 2})),
            E.CHAIN_BROKEN,
        ),
        ("of another run", _ring(run, 2, first.digest, moved, ROOT, WORKER, of="00" * 32), E.WRONG_RUN),
    ]
    base: Case = {"run_spec": "run_spec.envelope"}
    folder.cases(
        "key_ring",
        [
            base | {"name": "ring 1", "rings": known, "expect": _expected(first)},
            base | {"name": "ring 2", "rings": [*known, "key_ring_2.envelope"], "expect": _expected(second)},
            *(
                base
                | {
                    "name": name,
                    "rings": [*known, folder.file(f"key_ring_bad_{name.replace(' ', '_')}.envelope", ring.to_bytes())],
                    "error": code,
                }
                for name, ring, code in bad
            ),
        ],
    )
    _timestamps(folder, run, [*known, "key_ring_2.envelope"])


def _timestamps(folder: Folder, run: Envelope, rings: list[str]) -> None:
    stamp = Timestamp(run=run.digest, head=HEAD, key_ring=2, issued_at_ms=NOW_MS, expires_at_ms=NOW_MS + 600_000)
    other, amended = stamp.model_copy(update={"run": "00" * 32}), stamp.model_copy(update={"calibration": 2})
    named = amended.model_copy(update={"amendment": "77" * 32})
    cases: list[Case] = []
    for name, timestamp, key, now_ms, result in [
        ("fresh", stamp, STRANGER, NOW_MS + 1_000, None),
        ("with an amended calibration", amended, STRANGER, NOW_MS, None),
        ("with the digest of its amendment", named, STRANGER, NOW_MS, None),
        ("expired within the clocks' difference", stamp, STRANGER, NOW_MS + 719_000, None),
        ("expired", stamp, STRANGER, NOW_MS + 721_000, E.EXPIRED),
        ("ahead of the clock", stamp, STRANGER, NOW_MS - 121_000, E.EXPIRED),
        ("by the key of an earlier ring", stamp, COORDINATOR, NOW_MS, E.REVOKED),
        ("by no key of the run", stamp, SigningKey(b"\x09" * 32), NOW_MS, E.BAD_SIGNATURE),
        ("of another run", other, STRANGER, NOW_MS, E.WRONG_RUN),
    ]:
        envelope = seal(timestamp, PayloadType.TIMESTAMP, key).to_bytes().decode()
        case: Case = {"name": name, "run_spec": "run_spec.envelope", "rings": rings, "text": envelope, "now_ms": now_ms}
        cases.append(case | ({"expect": fields(timestamp)} if result is None else {"error": result}))
    folder.cases("timestamp", cases)


def _ring(
    run: Envelope,
    version: int,
    previous: str,
    keys: RoleKeys,
    *signers: SigningKey,
    at: ChainPoint = HEAD,
    of: str | None = None,
) -> Envelope:
    ring = KeyRing(
        run=of or run.digest, version=version, previous=previous, keys=keys, published=at, created_at_ms=NOW_MS
    )
    return seal(ring, PayloadType.KEY_RING, *signers)


def _keys(ring: Envelope) -> RoleKeys:
    return KeyRing.model_validate_json(ring.payload).keys


def _expected(ring: Envelope) -> Case:
    return {"fields": fields(KeyRing.model_validate_json(ring.payload)), "digest": ring.digest}
