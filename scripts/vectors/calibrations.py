"""Golden vectors of amendments of a calibration. See make_vectors.py."""

from __future__ import annotations

from prime_protocol.amendment import CalibrationAmendment
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.evidence import Moments
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import KeyRing
from vectors.folder import NOW_MS, ROOT, STRANGER, WORKER, Case, Folder, fields
from vectors.runs import run_spec

E = ErrorCode
OLD, NEW, THIRD = "vectors/fp32/cpu", "vectors/bf16/cpu", "vectors/bf16/cuda"


def calibrations(folder: Folder, run: Envelope) -> None:
    """Amendment 1 adds two pairs of a new class, amendment 2 one more. `run` has no calibration; key ring 1 replaces the root."""
    first = Calibration(pairs=(_pair(OLD, OLD),), note="the run's own")
    spec = run_spec().model_copy(update={"checks": CheckPolicy(calibration=first)})
    calibrated = seal(spec, PayloadType.RUN_SPEC, ROOT)
    folder.file("calibrated_run_spec.envelope", calibrated.to_bytes())
    one = _amendment(calibrated, 1, calibrated.digest, _pair(NEW, OLD), _pair(NEW, NEW))
    two = _amendment(calibrated, 2, one.digest, _pair(THIRD, NEW))
    by_new_root = _amendment(calibrated, 2, one.digest, _pair(THIRD, NEW), key=WORKER)
    ring = KeyRing(
        run=calibrated.digest,
        version=1,
        previous=calibrated.digest,
        keys=spec.keys.model_copy(update={"root": (WORKER.key_id,)}),
        published=None,
        created_at_ms=NOW_MS,
    )
    folder.file("calibrated_key_ring.envelope", seal(ring, PayloadType.KEY_RING, ROOT, WORKER).to_bytes())
    rings = ["calibrated_key_ring.envelope"]
    good: list[tuple[str, list[Envelope], list[str]]] = [
        ("amendment 1", [one], []),
        ("amendment 2", [one, two], []),
        ("amendment 1 by the former root", [one], rings),
        ("amendment 2 by the new root", [one, by_new_root], rings),
    ]
    bad: list[tuple[str, list[Envelope], list[str], ErrorCode]] = [
        ("a gap", [two], [], E.CHAIN_BROKEN),
        (
            "another one of the same version",
            [one, _amendment(calibrated, 1, one.digest, _pair(THIRD, OLD))],
            [],
            E.CHAIN_BROKEN,
        ),
        ("after another one", [one, _amendment(calibrated, 2, digest_of(b"x"), _pair(THIRD, OLD))], [], E.CHAIN_BROKEN),
        ("a pair of the RunSpec", [_amendment(calibrated, 1, calibrated.digest, _pair(OLD, OLD))], [], E.MALFORMED),
        ("a pair of an earlier one", [one, _amendment(calibrated, 2, one.digest, _pair(NEW, OLD))], [], E.MALFORMED),
        (
            "the same pair twice",
            [_amendment(calibrated, 1, calibrated.digest, _pair(NEW, OLD), _pair(NEW, OLD))],
            [],
            E.MALFORMED,
        ),
        (
            "another statistic",
            [_amendment(calibrated, 1, calibrated.digest, _pair(NEW, OLD, name="margin"))],
            [],
            E.MALFORMED,
        ),
        (
            "another number of lambdas",
            [_amendment(calibrated, 1, calibrated.digest, _pair(NEW, OLD, rates=(1.0,)))],
            [],
            E.MALFORMED,
        ),
        (
            "by no root key",
            [_amendment(calibrated, 1, calibrated.digest, _pair(NEW, OLD), key=STRANGER)],
            [],
            E.BAD_SIGNATURE,
        ),
        (
            "of another run",
            [_amendment(calibrated, 1, calibrated.digest, _pair(NEW, OLD), of="00" * 32)],
            [],
            E.WRONG_RUN,
        ),
        (
            "by the former root after one by the new root",
            [one, by_new_root, _amendment(calibrated, 3, by_new_root.digest, _pair(THIRD, OLD))],
            rings,
            E.BAD_SIGNATURE,
        ),
    ]
    base: Case = {"run_spec": "calibrated_run_spec.envelope"}
    uncalibrated = _amendment(run, 1, run.digest, _pair(NEW, OLD))
    folder.cases(
        "calibration",
        [
            *(
                base | {"name": name, "rings": known, "amendments": _texts(found), "expect": _expected(found[-1])}
                for name, found, known in good
            ),
            *(
                base | {"name": name, "rings": known, "amendments": _texts(found), "error": code}
                for name, found, known, code in bad
            ),
            {
                "name": "of a run without a calibration",
                "run_spec": "run_spec.envelope",
                "rings": [],
                "amendments": _texts([uncalibrated]),
                "error": E.MALFORMED,
            },
        ],
    )


def _pair(worker: str, validator: str, *, name: str = "logprob", rates: tuple[float, ...] = (1.0, 10.0)) -> PairMoments:
    moments = Moments(cap=0.5, lambdas=rates, log_moments=tuple(rate / 100 for rate in rates), num_tokens=10_000)
    return PairMoments(worker=worker, validator=validator, moments={name: moments})


def _amendment(
    run: Envelope, version: int, previous: str, *pairs: PairMoments, key: SigningKey = ROOT, of: str | None = None
) -> Envelope:
    amendment = CalibrationAmendment(
        run=of or run.digest, version=version, previous=previous, pairs=pairs, created_at_ms=NOW_MS, note="measured"
    )
    return seal(amendment, PayloadType.CALIBRATION, key)


def _texts(amendments: list[Envelope]) -> list[str]:
    return [one.to_bytes().decode() for one in amendments]


def _expected(amendment: Envelope) -> Case:
    return {"fields": fields(CalibrationAmendment.model_validate_json(amendment.payload)), "digest": amendment.digest}
