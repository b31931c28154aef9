"""Golden vectors of RunSpecs and join links, and the run and lease of the other vectors. See make_vectors.py."""

from __future__ import annotations

import json
from dataclasses import replace

from prime_protocol import limits
from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.key_ring import RoleKeys
from prime_protocol.noise import SEED_MAX
from prime_protocol.replay import BundleAccess, ReplayPolicy
from prime_protocol.rollout import EngineInfo
from prime_protocol.run_spec import EnvironmentSpec, JoinLink, ModelFile, RunSpec
from prime_protocol.schedule import Schedule
from vectors.folder import COORDINATOR, NOW_MS, ROOT, STRANGER, TRAINER, VALIDATOR, WORKER, Folder, fields

CONFIG = b'{"model_type": "qwen3", "vocab_size": 264}'
STOP = 257
ENGINE = EngineInfo(name="vectors", version="1", dtype="fp32", device="cpu")
E = ErrorCode


def run_spec() -> RunSpec:
    return RunSpec(
        name="vectors",
        created_at_ms=NOW_MS,
        keys=RoleKeys(
            root=(ROOT.key_id,),
            coordinator=(COORDINATOR.key_id,),
            trainer=(TRAINER.key_id,),
            validator=(VALIDATOR.key_id,),
        ),
        model_files=(ModelFile(name="config.json", digest=digest_of(CONFIG), size=len(CONFIG)),),
        vocab_size=264,
        environments=(EnvironmentSpec(name="spell", id="reasoning_gym", options={"task": "spell_backward", "max": 6}),),
        sampling=Sampling(completion_tokens_max=4, stop_token_ids=(STOP,)),
        max_steps=10,
        groups_per_step=2,
        rollouts_per_group=2,
    )


def runs(folder: Folder) -> Envelope:
    spec = run_spec()
    envelope = seal(spec, PayloadType.RUN_SPEC, ROOT)
    folder.file("run_spec.envelope", envelope.to_bytes())
    wire = {"input": "run_spec.envelope", "pinned": envelope.digest}
    later = seal(b'{"protocol_version":2,"what":"the future"}', PayloadType.RUN_SPEC, ROOT)
    strange = seal(spec, PayloadType.RUN_SPEC, STRANGER)
    unknown = seal(json.dumps(fields(spec) | {"x": 1}).encode(), PayloadType.RUN_SPEC, ROOT)
    partial = Schedule.model_validate({"preset": "verl_partial", "trigger_parameter_sync_step": 2})
    scheduled = spec.model_copy(update={"async_level": 1, "schedule": partial})
    timed = seal(scheduled, PayloadType.RUN_SPEC, ROOT)
    ahead = Schedule.model_validate({"preset": "prime_rl_lag1", "selection": "lowest_slot_first"})
    bounded = spec.model_copy(update={"async_level": 3, "schedule": ahead})
    gated = seal(bounded, PayloadType.RUN_SPEC, ROOT)
    shared = spec.model_copy(update={"coordinators": ("https://a.example.org", "http://203.0.113.6:8400")})
    several = seal(shared, PayloadType.RUN_SPEC, ROOT)
    promised = spec.model_copy(update={"replay": ReplayPolicy(recipe=digest_of(b"recipe"), bytes_max=2**40)})
    repeatable = seal(promised, PayloadType.RUN_SPEC, ROOT)
    policy = ReplayPolicy(recipe=digest_of(b"recipe"), bundles=BundleAccess.AUDITORS)
    auditors = spec.keys.model_copy(update={"auditor": (STRANGER.key_id, TRAINER.key_id)})
    audited = spec.model_copy(update={"keys": auditors, "replay": policy})
    readable = seal(audited, PayloadType.RUN_SPEC, ROOT)
    elsewhere = seal(
        spec.model_copy(update={"coordinators": ("http://a.example.org/reboot",)}), PayloadType.RUN_SPEC, ROOT
    )
    unbounded = seal(bounded.model_copy(update={"async_level": 1}), PayloadType.RUN_SPEC, ROOT)
    folder.cases(
        "run_spec",
        [
            wire | {"name": "pinned and signed", "expect": fields(spec)},
            {
                "name": "a schedule",
                "text": timed.to_bytes().decode(),
                "pinned": timed.digest,
                "expect": fields(scheduled),
            },
            {
                "name": "a schedule with a run-ahead",
                "text": gated.to_bytes().decode(),
                "pinned": gated.digest,
                "expect": fields(bounded),
            },
            {
                "name": "several coordinators",
                "text": several.to_bytes().decode(),
                "pinned": several.digest,
                "expect": fields(shared),
            },
            {
                "name": "a promise of re-execution within bytes",
                "text": repeatable.to_bytes().decode(),
                "pinned": repeatable.digest,
                "expect": fields(promised),
            },
            {
                "name": "bundles for auditors",
                "text": readable.to_bytes().decode(),
                "pinned": readable.digest,
                "expect": fields(audited),
            },
            wire | {"name": "another run", "pinned": digest_of(b"other"), "error": E.WRONG_RUN},
            *(
                {"name": name, "text": other.to_bytes().decode(), "pinned": other.digest, "error": code}
                for name, other, code in [
                    ("signed by another key", strange, E.BAD_SIGNATURE),
                    ("another protocol version", later, E.VERSION_UNSUPPORTED),
                    ("unknown field", unknown, E.UNKNOWN_FIELD),
                    ("a coordinator's address with a path", elsewhere, E.WRONG_TYPE),
                    ("a run-ahead with another async_level", unbounded, E.WRONG_TYPE),
                ]
            ),
        ],
    )
    link = JoinLink("http://203.0.113.5:8400", envelope.digest)
    invited = replace(link, invite="eyJwYXlsb2FkIjoi_-8=")
    folder.cases(
        "join_link",
        [
            {"name": "plain", "text": str(link), "expect": {"url": link.url, "run": link.run}},
            {
                "name": "with an invitation",
                "text": str(invited),
                "expect": {"url": link.url, "run": link.run, "invite": invited.invite},
            },
        ]
        + [
            {"name": name, "text": text, "error": "value_error"}
            for name, text in [
                ("an empty invitation", f"{link}."),
                ("an invitation in other base64", f"{link}.ab+/"),
                ("a long invitation", f"{link}.{'a' * (limits.INVITE_CHARS_MAX + 1)}"),
                ("no digest", link.url),
                ("a short digest", str(link)[:-1]),
                ("upper case", f"{link.url}/#{link.run.upper()}"),
                ("another scheme", f"ftp://host/#{link.run}"),
                ("a password", f"http://user:password@host/#{link.run}"),
            ]
        ],
    )
    return envelope


def lease_of(run: Envelope, policy_digest: str) -> Lease:
    return Lease(
        run=run.digest,
        lease_id=digest_of(b"lease"),
        worker=WORKER.key_id,
        step=2,
        policy_version=1,
        policy_digest=policy_digest,
        groups=tuple(
            GroupAssignment(
                slot=slot,
                problem=Problem(environment="spell", index=slot),
                prompt_token_ids=(104, 105),
                seeds=(slot * 10, SEED_MAX - slot),
            )
            for slot in (4, 5)
        ),
        sampling=run_spec().sampling,
        issued_at_ms=NOW_MS,
        expires_at_ms=NOW_MS + 600_000,
    )
