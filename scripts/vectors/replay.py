"""Golden vectors of re-execution: what a manifest commits to, and the index of a training state. See make_vectors.py."""

from __future__ import annotations

import json

import numpy as np

from prime_protocol.checkpoint import encode_checkpoint, tensor_table
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.manifest import Manifest, PartEntry, Provenance
from prime_protocol.replay import ReplayPolicy
from prime_protocol.training_state import TrainingState, TrainingTensor
from prime_protocol.weights import WeightTensor, root_of
from vectors.folder import NOW_MS, ROOT, TRAINER, Case, Folder, fields
from vectors.runs import CONFIG, E, run_spec


def replay(folder: Folder) -> None:
    """Policy 0 of a run that promises its re-execution, with its training state."""
    policy = ReplayPolicy(recipe=digest_of(b"recipe"), state_every=4, state_days=1.5)
    run = seal(run_spec().model_copy(update={"replay": policy}), PayloadType.RUN_SPEC, ROOT)
    name = folder.file("replay_run_spec.envelope", run.to_bytes())
    state = TrainingState(
        run=run.digest,
        policy_version=4,
        progress='{"step":4,"lr_multiplier":0.75}',
        tensors=(
            TrainingTensor(name="model.w", dtype="fp32", shape=(2, 3)),
            TrainingTensor(name="optimizer.w.step", dtype="fp32", shape=()),
        ),
        parts=(PartEntry(digest=digest_of(b"a"), size=20), PartEntry(digest=digest_of(b"b"), size=8)),
    )
    valid = fields(state)
    tensors = valid["tensors"]
    cases: list[Case] = []
    for what, change, code in (
        ("four policies", {}, None),
        ("another policy", {"policy_version": 8}, E.CHAIN_BROKEN),
        ("another run", {"run": digest_of(b"other")}, E.CHAIN_BROKEN),
        ("two tensors of one name", {"tensors": [tensors[1]] * 7}, E.CHAIN_BROKEN),
        ("an unknown type", {"tensors": [tensors[0] | {"dtype": "fp31"}, tensors[1]]}, E.CHAIN_BROKEN),
        ("parts that hold less", {"parts": valid["parts"][:1]}, E.CHAIN_BROKEN),
        ("no parts", {"parts": []}, E.WRONG_TYPE),
    ):
        text = json.dumps(valid | change)
        case = {"name": what, "text": text, "digest": digest_of(text.encode()), "run": run.digest, "policy_version": 4}
        cases.append(case | ({"expect": valid} if code is None else {"error": code}))
    cases.append(cases[0] | {"name": "another digest", "digest": digest_of(b"other"), "error": E.DIGEST_MISMATCH})
    cases[-1].pop("expect")
    folder.cases("training_state", cases)
    weights = {"w": WeightTensor("bf16", (4,), np.arange(4, dtype=np.uint16))}
    root, committed = root_of(weights), digest_of(json.dumps(valid).encode())
    made = {"step": 3, "optimizer_steps": 9, "batch": digest_of(b"batch"), "software": "vectors 1"}
    said = {
        "lr": 3.0000000000000004e-07,
        "lr_multiplier": 0.75,
        "numerics": "torch-2.13.0/cpu/avx512/fp32/ranks1/tree128",
    }
    manifests: list[Case] = []
    rows: list[tuple[str, int, dict[str, object], ErrorCode | None]] = [
        ("a training state that is due", 4, said | {"training_state": committed}, None),
        ("none is due", 5, said, None),
        ("one that is not due", 5, said | {"training_state": committed}, None),
        ("a missing training state", 4, said, E.CHAIN_BROKEN),
        ("no learning rate", 5, {key: value for key, value in said.items() if key != "lr"}, E.CHAIN_BROKEN),
        ("no numerics", 5, {key: value for key, value in said.items() if key != "numerics"}, E.CHAIN_BROKEN),
    ]
    for what, version, its, code in rows:
        manifest = Manifest(
            run=run.digest,
            policy_version=version,
            previous=digest_of(b"previous"),
            model_config_digest=digest_of(CONFIG),
            state_root=root,
            tensors=tensor_table(weights),
            encodings=(encode_checkpoint(weights).encoding,),
            produced_by=Provenance.model_validate({**made, "step": version - 1, **its}),
            created_at_ms=NOW_MS,
        )
        case = {
            "name": what,
            "run_spec": name,
            "text": seal(manifest, PayloadType.MANIFEST, TRAINER).to_bytes().decode(),
        }
        manifests.append(case | ({"expect": fields(manifest.produced_by)} if code is None else {"error": code}))
    folder.cases("commitments", manifests)
