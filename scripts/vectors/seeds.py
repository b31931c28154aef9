"""Golden vectors of the seed chain and of what follows from its secrets. See make_vectors.py."""

from __future__ import annotations

from typing import Any

from prime_protocol.assigned import SeedRule, assigned_in, digest_of_prompts
from prime_protocol.assignment import GroupAssignment
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.run_spec import EnvironmentSpec
from prime_protocol.seed_chain import OpenSecret, chain_from, committed
from prime_protocol.verdict import BundleStatus, Receipt
from vectors.folder import NOW_MS, ROOT, WORKER, Case, Folder, fields
from vectors.runs import run_spec

LAST = bytes(range(32))
LENGTH = 4


def seeds(folder: Folder) -> None:
    """A run of two environments and three groups a step, and a bundle of step 2 by policy 1."""
    secrets = chain_from(LAST, LENGTH)
    chain = committed(secrets)
    opened = OpenSecret(number=2, secret=secrets[2].hex())
    base: Case = {"chain": fields(chain)}
    folder.cases(
        "seed_chain",
        [
            base
            | {"name": "three of four", "told": fields(opened), "expect": [secret.hex() for secret in secrets[:3]]}
            | {"last": LAST.hex()},
            base
            | {"name": "all", "told": {"number": 3, "secret": LAST.hex()}, "last": LAST.hex()}
            | {"expect": [secret.hex() for secret in secrets]},
            *(
                base | {"name": name, "told": fields(opened) | changed, "error": ErrorCode.CHAIN_BROKEN}
                for name, changed in [
                    ("another secret", {"secret": digest_of(b"another")}),
                    ("another number", {"number": 1}),
                    ("beyond the chain", {"number": 4}),
                ]
            ),
        ],
    )
    one = EnvironmentSpec(name="spell", id="reasoning_gym", weight=0.75)
    other = EnvironmentSpec(name="caf\u00e9", id="reasoning_gym", weight=2.0)
    update = {"environments": (one, other), "groups_per_step": 3, "seed_chain": chain}
    spec = run_spec().model_copy(update=update)
    run = seal(spec, PayloadType.RUN_SPEC, ROOT)
    rule, draws = SeedRule(run.digest, spec), (0, 5, 1)
    groups = []
    for slot, draw in zip((6, 7, 8), draws, strict=True):
        problem = rule.problem(secrets[2], slot, draw)
        drawn = rule.seeds(secrets[2], 1, problem, slot)
        groups.append(GroupAssignment(slot=slot, problem=problem, prompt_token_ids=(1,), seeds=drawn))
    receipt = Receipt(
        run=run.digest,
        worker=WORKER.key_id,
        lease_id=digest_of(b"lease"),
        bundle=digest_of(b"bundle"),
        step=2,
        policy_version=1,
        num_rollouts=6,
        num_tokens=24,
        status=BundleStatus.ACCEPTED,
        at_ms=NOW_MS,
        assigned=assigned_in(groups, draws),
    )
    receipt_fields = fields(receipt)
    expect = [[group.slot, group.problem.environment, group.problem.index, list(group.seeds)] for group in groups]
    shown: Case = {"run_spec": run.to_bytes().decode(), "secret": secrets[2].hex()}
    bad: list[tuple[str, dict[str, Any]]] = [
        ("another policy", receipt_fields | {"policy_version": 2}),
        ("another step", receipt_fields | {"step": 1}),
        ("fewer rollouts", receipt_fields | {"num_rollouts": 4}),
        ("other draws", receipt_fields | {"assigned": receipt_fields["assigned"] | {"draws": [0, 4, 1]}}),
        (
            "other slots",
            receipt_fields | {"assigned": receipt_fields["assigned"] | {"slots": [[6, 1], [8, 1], [7, 1]]}},
        ),
    ]
    promising = seal(
        spec.model_copy(update={"seed_chain": committed(secrets, prompts=True)}), PayloadType.RUN_SPEC, ROOT
    )
    prompts = [[1, 2], [300], [0, 2**31 - 1, 5]]
    bound: Case = shown | {"run_spec": promising.to_bytes().decode(), "prompts": prompts}
    rule = SeedRule(promising.digest, spec)
    promised = []
    for slot, draw in zip((6, 7, 8), draws, strict=True):
        problem = rule.problem(secrets[2], slot, draw)
        drawn = rule.seeds(secrets[2], 1, problem, slot)
        promised.append(GroupAssignment(slot=slot, problem=problem, prompt_token_ids=(1,), seeds=drawn))
    stated = assigned_in(promised, draws, prompts=digest_of_prompts(prompts))
    promise = fields(receipt.model_copy(update={"run": promising.digest, "assigned": stated}))
    rows = [[group.slot, group.problem.environment, group.problem.index, list(group.seeds)] for group in promised]
    lacking = {name: value for name, value in promise["assigned"].items() if name != "prompts"}
    unasked = receipt_fields | {"assigned": receipt_fields["assigned"] | {"prompts": promise["assigned"]["prompts"]}}
    folder.cases(
        "assigned",
        [
            bound | {"name": "three groups with their prompts", "receipt": promise, "expect": rows},
            *(
                bound | changed | {"name": name, "error": ErrorCode.MALFORMED}
                for name, changed in [
                    ("other prompts", {"receipt": promise, "prompts": [*prompts[:2], [0, 2**31 - 1]]}),
                    ("prompts in another order", {"receipt": promise, "prompts": prompts[::-1]}),
                    ("no digest of the prompts", {"receipt": promise | {"assigned": lacking}}),
                ]
            ),
            shown
            | {"name": "prompts to which the run does not commit", "receipt": unasked, "error": ErrorCode.MALFORMED},
            shown | {"name": "three groups of two environments", "receipt": receipt_fields, "expect": expect},
            *(shown | {"name": name, "receipt": opened, "error": ErrorCode.MALFORMED} for name, opened in bad),
        ],
    )
