"""Golden vectors of announcements of a body. See make_vectors.py."""

from __future__ import annotations

import json

from prime_protocol.body_claim import BodyClaim, claim_of
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode
from vectors.folder import NOW_MS, TRAINER, WORKER, Folder, fields

NONCE, EPOCH = "00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100"
BODY = b"the bytes of a bundle"


def body_claims(folder: Folder, run: Envelope) -> None:
    """Values of the header Prime-Body, by a worker, for a body that goes to /v1/rollouts."""
    claim = BodyClaim(
        run=run.digest,
        action="rollouts",
        nonce=NONCE,
        issued_at_ms=NOW_MS,
        epoch=EPOCH,
        body_digest=digest_of(BODY),
        body_bytes=len(BODY),
    )
    good = claim_of(BODY, WORKER, run=run.digest, action=claim.action, nonce=NONCE, now_ms=NOW_MS, epoch=EPOCH)
    elsewhere = claim_of(BODY, WORKER, run=run.digest, action="blobs", nonce=NONCE, now_ms=NOW_MS, epoch=EPOCH)
    longer = seal(claim.model_copy(update={"body_bytes": len(BODY) + 1}), PayloadType.BODY_CLAIM, WORKER)
    request = seal(claim, PayloadType.REQUEST, WORKER)
    foreign = good.replace(WORKER.key_id, TRAINER.key_id)
    unknown = seal(json.dumps({**fields(claim), "more": 1}).encode(), PayloadType.BODY_CLAIM, WORKER)
    bad = {
        "another endpoint": (elsewhere, ErrorCode.MALFORMED),
        "another length": (longer.to_bytes().decode(), ErrorCode.MALFORMED),
        "signed as a request": (request.to_bytes().decode(), ErrorCode.WRONG_PAYLOAD_TYPE),
        "another signer": (foreign, ErrorCode.BAD_SIGNATURE),
        "an unknown field": (unknown.to_bytes().decode(), ErrorCode.UNKNOWN_FIELD),
        "too long for a header": (good + " " * 6_144, ErrorCode.TOO_LARGE),
        "no envelope": ("{}", ErrorCode.WRONG_TYPE),
    }
    about = {"action": claim.action, "body": BODY.hex()}
    folder.cases(
        "body_claim",
        [
            {"name": "good", "text": good, **about, "expect": {"signer": WORKER.key_id, "claim": fields(claim)}},
            *({"name": name, "text": text, **about, "error": code} for name, (text, code) in bad.items()),
        ],
    )
