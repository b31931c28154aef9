"""Rule by which a receipt contradicts the lease of its bundle. The coordinator signs both. SPEC.md, sections 9 and 21."""

from __future__ import annotations

from prime_protocol.assigned import assigned_in, digest_of_prompts
from prime_protocol.assignment import Lease
from prime_protocol.run_spec import RunSpec
from prime_protocol.verdict import BundleStatus, Receipt

_SAME = ("lease_id", "step", "policy_version", "num_rollouts")


def contradiction(receipt: Receipt, lease: Lease, spec: RunSpec) -> str:
    """Return, as text for people, what a receipt says of its bundle and the lease of that bundle does not; empty if they agree.

    A receipt that is dated before its lease contradicts it too: a coordinator that dates receipts back could omit one from
    the ledger.
    """
    if receipt.at_ms < lease.issued_at_ms:
        return f"the receipt is dated {lease.issued_at_ms - receipt.at_ms:,} ms before its lease"
    for name in _SAME:
        said, leased = getattr(receipt, name), getattr(lease, name)
        if said != leased:
            return f"the receipt says {name} {said}, the lease {leased}"
    assigned, groups = receipt.assigned, lease.groups
    if assigned is None:
        is_missing = spec.seed_chain is not None and receipt.status is BundleStatus.ACCEPTED
        return "the receipt accepts the bundle and lacks its assignment" if is_missing else ""
    if len(assigned.draws) not in (0, len(groups)):
        return f"the receipt says {len(assigned.draws)} groups, the lease {len(groups)}"
    prompts = digest_of_prompts(each.prompt_token_ids for each in groups) if spec.commits_to_prompts else None
    leased = assigned_in(groups, assigned.draws, prompts=prompts)
    for name, what in (("slots", "slots"), ("seeds", "problems or seeds"), ("prompts", "prompts")):
        if getattr(assigned, name) != getattr(leased, name):
            return f"the receipt says other {what} than the lease"
    return ""
