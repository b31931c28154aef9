"""Key rings: the rules for a new version, and what a replaced key may still sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import ChainPoint, KeyChain, KeyRing, Role
from prime_protocol.manifest import Manifest, SignedManifest, open_manifest, sign_manifest
from prime_protocol.run_spec import PinnedRun, open_run_spec

Raises = Callable[..., RemoteError]
ROOTS = [SigningKey(bytes([40 + number]) * 32) for number in range(3)]
NEW_TRAINER, NEW_COORDINATOR = SigningKey(b"\x50" * 32), SigningKey(b"\x51" * 32)


@pytest.fixture
def run(sample: Any) -> PinnedRun:
    """A fresh run, since rings are added to it."""
    return open_run_spec(sample.run.envelope, pinned=sample.run.digest)


def ring(chain: KeyChain, *signers: SigningKey, keys: dict[str, object] | None = None, **changes: object) -> Envelope:
    """Return the next ring of a chain, with `changes`."""
    fields: dict[str, Any] = {
        "run": chain.run,
        "version": chain.version + 1,
        "previous": chain.digest,
        "keys": chain.current.model_copy(update=keys or {}),
        "published": chain.published,
        "created_at_ms": 0,
    }
    return seal(KeyRing.model_construct(**(fields | changes)), PayloadType.KEY_RING, *signers)


def ids(*keys: SigningKey) -> tuple[str, ...]:
    return tuple(key.key_id for key in keys)


def two_of_three(run: PinnedRun, root: SigningKey) -> KeyChain:
    """The run after its one root key was replaced by three, of which two must sign."""
    run.keys.add(ring(run.keys, root, *ROOTS[:2], keys={"root": ids(*ROOTS), "root_threshold": 2}))
    return run.keys


def test_a_ring_by_the_old_and_the_new_root_replaces_the_keys(run: PinnedRun, sample: Any) -> None:
    keys = two_of_three(run, sample.root)
    assert (keys.version, keys.current.root, keys.current.threshold(Role.ROOT)) == (1, ids(*ROOTS), 2)
    keys.add(ring(keys, ROOTS[0], ROOTS[2], keys={"coordinator": ids(NEW_COORDINATOR)}))
    assert keys.current.coordinator == ids(NEW_COORDINATOR)
    assert keys.is_revoked(sample.coordinator.key_id, Role.COORDINATOR)


def test_a_ring_that_is_shown_twice_is_the_same_ring(run: PinnedRun, sample: Any) -> None:
    again = ring(run.keys, sample.root)
    assert run.keys.add(again) == run.keys.add(again)
    assert run.keys.version == 1


@pytest.mark.parametrize("signers", [(0,), (1,), (0, 0), ()], ids=str)
def test_a_compromise_below_the_threshold_gains_nothing(
    run: PinnedRun, sample: Any, raises: Raises, signers: tuple[int, ...]
) -> None:
    keys = two_of_three(run, sample.root)
    stolen = [ROOTS[number] for number in signers] + [sample.root, sample.trainer, sample.coordinator, sample.stranger]
    raises(ErrorCode.BAD_SIGNATURE, keys.add, ring(keys, *stolen, keys={"root": ids(sample.stranger)}))
    raises(ErrorCode.BAD_SIGNATURE, keys.add, ring(keys, *stolen, keys={"root_threshold": 1}))
    assert keys.version == 1


def test_the_old_root_alone_cannot_name_keys_that_do_not_agree(run: PinnedRun, sample: Any, raises: Raises) -> None:
    raises(ErrorCode.BAD_SIGNATURE, run.keys.add, ring(run.keys, sample.root, keys={"root": ids(ROOTS[0])}))


def test_the_new_root_alone_cannot_take_over(run: PinnedRun, sample: Any, raises: Raises) -> None:
    raises(ErrorCode.BAD_SIGNATURE, run.keys.add, ring(run.keys, ROOTS[0], keys={"root": ids(ROOTS[0])}))


def test_a_spoilt_signature_of_a_root_key_is_no_signature(run: PinnedRun, sample: Any, raises: Raises) -> None:
    good = ring(run.keys, sample.root)
    spoilt = type(good.signatures[0])(sample.root.key_id, good.signatures[0].signature[:-1] + b"\0")
    raises(ErrorCode.BAD_SIGNATURE, run.keys.add, Envelope(good.payload_type, good.payload, (spoilt,)))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"version": 3}, ErrorCode.CHAIN_BROKEN),
        ({"version": 1}, ErrorCode.CHAIN_BROKEN),
        ({"previous": digest_of(b"another")}, ErrorCode.CHAIN_BROKEN),
        ({"run": digest_of(b"another")}, ErrorCode.WRONG_RUN),
        ({"version": limits.KEY_RINGS_MAX + 1}, ErrorCode.WRONG_TYPE),
        ({"version": 0}, ErrorCode.WRONG_TYPE),
        ({"reason": "a\nb"}, ErrorCode.WRONG_TYPE),
        ({"extra": 1}, ErrorCode.UNKNOWN_FIELD),
    ],
    ids=str,
)
def test_gaps_rollbacks_and_foreign_rings_are_refused(
    run: PinnedRun, sample: Any, raises: Raises, changes: dict[str, Any], code: ErrorCode
) -> None:
    run.keys.add(ring(run.keys, sample.root))
    envelope = ring(run.keys, sample.root, **changes)
    if "extra" in changes:
        envelope = seal(envelope.payload[:-1] + b',"extra":1}', PayloadType.KEY_RING, sample.root)
    raises(code, run.keys.add, envelope)


def test_every_changed_byte_of_a_ring_is_noticed(run: PinnedRun, sample: Any) -> None:
    data = ring(run.keys, sample.root, keys={"trainer": ids(NEW_TRAINER)}).to_bytes()
    for place in range(0, len(data), 5):
        with pytest.raises(RemoteError):
            run.keys.add(open_envelope(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]))
    assert run.keys.version == 0


def test_another_kind_of_envelope_is_no_ring(run: PinnedRun, sample: Any, raises: Raises) -> None:
    payload = ring(run.keys, sample.root).payload
    raises(ErrorCode.WRONG_PAYLOAD_TYPE, run.keys.add, seal(payload, PayloadType.RUN_SPEC, sample.root))


def test_an_oversize_ring_is_refused_before_it_is_verified(run: PinnedRun, sample: Any, raises: Raises) -> None:
    payload = b" " * (limits.KEY_RING_BYTES_MAX + 1)
    raises(ErrorCode.TOO_LARGE, run.keys.add, seal(payload, PayloadType.KEY_RING, sample.stranger))


def test_a_ring_does_not_go_back_behind_a_policy_that_an_earlier_one_named(
    run: PinnedRun, sample: Any, raises: Raises
) -> None:
    point = ChainPoint(policy_version=5, manifest=digest_of(b"5"))
    run.keys.add(ring(run.keys, sample.root, published=point))
    for back in (
        None,
        ChainPoint(policy_version=4, manifest=digest_of(b"4")),
        ChainPoint(policy_version=5, manifest="0" * 64),
    ):
        raises(ErrorCode.CHAIN_BROKEN, run.keys.add, ring(run.keys, sample.root, published=back))
    run.keys.add(ring(run.keys, sample.root, published=point))
    assert run.keys.published == point


def test_the_former_keys_of_a_role_are_refused_by_a_code_of_their_own(
    run: PinnedRun, sample: Any, raises: Raises
) -> None:
    fields = {
        key: seal(b"{}", PayloadType.RECEIPT, key) for key in (sample.coordinator, NEW_COORDINATOR, sample.stranger)
    }
    verify, kind, role = run.keys.verify, PayloadType.RECEIPT, Role.COORDINATOR
    assert verify(fields[sample.coordinator], kind, role) == b"{}"
    run.keys.add(ring(run.keys, sample.root, keys={"coordinator": ids(NEW_COORDINATOR)}))
    assert verify(fields[NEW_COORDINATOR], kind, role) == b"{}"
    raises(ErrorCode.REVOKED, verify, fields[sample.coordinator], kind, role)
    raises(ErrorCode.BAD_SIGNATURE, verify, fields[sample.stranger], kind, role)
    assert run.keys.verify_kept(fields[sample.coordinator], kind, role) == b"{}"
    raises(ErrorCode.BAD_SIGNATURE, run.keys.verify_kept, fields[sample.stranger], kind, role)


# Manifests, before and after


def after_policy_0(run: PinnedRun, sample: Any) -> SignedManifest:
    """The run after its trainer key was replaced at policy 0."""
    first: SignedManifest = sample.manifests[0]
    run.keys.add(ring(run.keys, sample.root, keys={"trainer": ids(NEW_TRAINER)}, published=first.point))
    return first


def at(signed: SignedManifest, **changes: object) -> Manifest:
    return signed.manifest.model_copy(update=changes)


def test_what_an_outgoing_trainer_has_signed_stays_verifiable(run: PinnedRun, sample: Any) -> None:
    first = after_policy_0(run, sample)
    assert open_manifest(first.envelope, run).digest == first.digest


def test_an_outgoing_trainer_signs_no_further_policy(run: PinnedRun, sample: Any, raises: Raises) -> None:
    after_policy_0(run, sample)
    raises(ErrorCode.REVOKED, open_manifest, sample.manifests[1].envelope, run)
    resigned = sign_manifest(sample.manifests[1].manifest, NEW_TRAINER)
    assert open_manifest(resigned.envelope, run).digest == sample.manifests[1].digest


def test_a_stolen_trainer_key_cannot_write_another_history(run: PinnedRun, sample: Any, raises: Raises) -> None:
    first = after_policy_0(run, sample)
    forged = sign_manifest(at(first, created_at_ms=1), sample.trainer)
    raises(ErrorCode.FORK, open_manifest, forged.envelope, run)


def test_a_new_trainer_key_signs_no_policy_before_its_time(run: PinnedRun, sample: Any, raises: Raises) -> None:
    first = after_policy_0(run, sample)
    raises(ErrorCode.REVOKED, open_manifest, sign_manifest(first.manifest, NEW_TRAINER).envelope, run)


def test_a_manifest_needs_as_many_trainers_as_the_ring_asks_for(run: PinnedRun, sample: Any, raises: Raises) -> None:
    both = {"trainer": ids(sample.trainer, NEW_TRAINER), "trainer_threshold": 2}
    run.keys.add(ring(run.keys, sample.root, keys=both, published=sample.manifests[0].point))
    second = sample.manifests[1].manifest
    raises(ErrorCode.BAD_SIGNATURE, open_manifest, sign_manifest(second, NEW_TRAINER).envelope, run)
    assert open_manifest(sign_manifest(second, NEW_TRAINER, sample.trainer).envelope, run).manifest == second
    assert open_manifest(sample.manifests[0].envelope, run).manifest == sample.manifests[0].manifest


def test_each_policy_belongs_to_the_ring_of_its_time(run: PinnedRun, sample: Any, raises: Raises) -> None:
    """Rings at policies 4 and 9: three trainers, one after another."""
    trainers = [sample.trainer, NEW_TRAINER, NEW_COORDINATOR]
    for trainer, version in zip(trainers[1:], (4, 9), strict=True):
        point = ChainPoint(policy_version=version, manifest=digest_of(b"%d" % version))
        run.keys.add(ring(run.keys, sample.root, keys={"trainer": ids(trainer)}, published=point))
    for version in range(12):
        place = ChainPoint(policy_version=version, manifest=digest_of(b"%d" % version))
        for number, trainer in enumerate(trainers):
            envelope = seal(b"{}", PayloadType.MANIFEST, trainer)
            expected = 0 if version <= 4 else 1 if version <= 9 else 2
            if number == expected:
                run.keys.verify_manifest(envelope, place)
            else:
                raises(ErrorCode.REVOKED, run.keys.verify_manifest, envelope, place)
