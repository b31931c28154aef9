"""Golden vectors of validators' logprobs. See make_vectors.py."""

from __future__ import annotations

import numpy as np

from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType
from prime_protocol.errors import ErrorCode
from prime_protocol.parcel import LogprobsHeader, open_logprobs, pack_logprobs, pack_parcel
from prime_protocol.run_spec import open_run_spec
from vectors.folder import VALIDATOR, WORKER, Case, Folder, fields, flipped


def judged_logprobs(folder: Folder, run: Envelope) -> None:
    """A validator's logprobs of a bundle."""
    bundle = digest_of(b"a bundle")
    good = pack_logprobs(np.array([-0.5, -1.25, 0.0], np.float32), run=run.digest, bundle=bundle, key=VALIDATOR)
    header, logprobs_T = open_logprobs(
        good, run=run.digest, keys=open_run_spec(run, pinned=run.digest).keys, bytes_max=2**20
    )
    foreign = pack_logprobs(np.array([-0.5], np.float32), run=run.digest, bundle=bundle, key=WORKER)
    body = np.array([0.5], "<f4").tobytes()
    above = LogprobsHeader(body_digest=digest_of(body), body_bytes=4, run=run.digest, bundle=bundle, num_tokens=1)
    many = above.model_copy(update={"num_tokens": 2})
    bad = {
        "signed by a worker": (foreign, ErrorCode.BAD_SIGNATURE),
        "a changed byte of the body": (flipped(good, -1), ErrorCode.DIGEST_MISMATCH),
        "above 0": (pack_parcel(above, body, PayloadType.LOGPROBS, VALIDATOR), ErrorCode.MALFORMED),
        "fewer than it says": (pack_parcel(many, body, PayloadType.LOGPROBS, VALIDATOR), ErrorCode.MALFORMED),
    }
    expect = {**fields(header), "logprobs": logprobs_T.tolist()}
    cases: list[Case] = [{"name": "good", "input": folder.file("logprobs.parcel", good), "expect": expect}]
    for number, (name, (parcel, code)) in enumerate(bad.items()):
        cases.append({"name": name, "input": folder.file(f"logprobs_bad_{number}.parcel", parcel), "error": code})
    folder.cases("logprobs", [case | {"run_spec": "run_spec.envelope"} for case in cases])
