"""The ledger's chain: valid and invalid entries, and the binding of a signed head."""

from __future__ import annotations

import json

import pytest
from tests.node.coordinator_world import ANNA, COORDINATOR, TRAINER, make_run

from prime_protocol import limits
from prime_protocol.assigned import Assigned
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.ledger import LedgerChain, open_ledger_head
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason

RUN = make_run()


def receipt(number: int, **changes: object) -> bytes:
    fields: dict[str, object] = {
        "run": RUN.digest,
        "worker": ANNA.key_id,
        "lease_id": digest_of(b"lease %d" % number),
        "bundle": digest_of(b"bundle %d" % number),
        "step": number,
        "policy_version": 0,
        "num_rollouts": 4,
        "num_tokens": 100,
        "status": BundleStatus.ACCEPTED,
        "detail": "grüße",
        "at_ms": number,
    }
    return Receipt.model_validate(fields | changes).model_dump_json().encode()


def lines(count: int) -> list[bytes]:
    chain = LedgerChain(RUN.digest)
    return [chain.add(receipt(number)) for number in range(count)]


def chain_of(*read: bytes) -> LedgerChain:
    chain = LedgerChain(RUN.digest)
    for line in read:
        chain.follow(line)
    return chain


def refused(code: ErrorCode, *read: bytes) -> None:
    *good, bad = read
    chain = chain_of(*good)
    before = (chain.num_entries, chain.digest)
    with pytest.raises(RemoteError) as caught:
        chain.follow(bad)
    assert caught.value.code is code, caught.value
    assert (chain.num_entries, chain.digest) == before


def test_a_chain_is_read_as_it_was_written_and_names_each_receipt_by_its_digest() -> None:
    writing, reading = LedgerChain(RUN.digest), LedgerChain(RUN.digest)
    for number in range(3):
        payload = receipt(number)
        read, digest = reading.follow(writing.add(payload))
        assert (read.step, digest) == (number, digest_of(payload))
        assert reading == writing
    assert reading.num_entries == 3


def test_a_lost_a_repeated_and_an_exchanged_line_do_not_follow() -> None:
    first, second, third = lines(3)
    refused(ErrorCode.CHAIN_BROKEN, first, third)
    refused(ErrorCode.CHAIN_BROKEN, first, first)
    refused(ErrorCode.CHAIN_BROKEN, second)


def test_a_changed_receipt_breaks_the_line_after_it() -> None:
    first, second = lines(2)
    refused(ErrorCode.CHAIN_BROKEN, first.replace(b'"num_tokens":100', b'"num_tokens":900'), second)


@pytest.mark.parametrize(
    ("code", "old", "new"),
    [
        (ErrorCode.MALFORMED, b'"index":0', b'"index": 0'),
        (ErrorCode.MALFORMED, b"}}", b"} }"),
        (ErrorCode.MALFORMED, b'"receipt":', b'"receipt": '),
        (ErrorCode.MALFORMED, b'"index":0,', b'"index":0,"index":0,'),
        (ErrorCode.UNKNOWN_FIELD, b"}}", b'},"x":1}'),
        (ErrorCode.WRONG_TYPE, b'"index":0', b'"index":"0"'),
        (ErrorCode.WRONG_TYPE, b'"accepted"', b'"pending"'),
    ],
)
def test_a_line_is_written_in_one_way(code: ErrorCode, old: bytes, new: bytes) -> None:
    (line,) = lines(1)
    assert old in line
    refused(code, line.replace(old, new, 1))


def test_a_line_with_its_fields_in_another_order_is_malformed() -> None:
    (line,) = lines(1)
    fields = json.loads(line)
    moved = {name: fields[name] for name in ("previous", "index", "receipt")}
    refused(ErrorCode.MALFORMED, json.dumps(moved, separators=(",", ":"), ensure_ascii=False).encode())


def test_a_receipt_of_another_run_and_a_line_without_end_are_refused() -> None:
    chain = LedgerChain(RUN.digest)
    refused(ErrorCode.WRONG_RUN, chain.add(receipt(0, run="00" * 32)))
    refused(ErrorCode.TOO_LARGE, b" " * (limits.LEDGER_LINE_BYTES_MAX + 1))


def test_the_longest_receipt_fits_into_a_line() -> None:
    longest = receipt(
        2**53 - 1 >> 22,
        status=BundleStatus.REFUSED,
        reason=RejectReason.WRONG_ASSIGNMENT,
        detail="\U0001f600" * limits.TEXT_CHARS_MAX,
    )
    assert len(LedgerChain(RUN.digest, 2**52).add(longest)) <= limits.LEDGER_LINE_BYTES_MAX


def test_the_longest_list_of_slots_fits_into_a_line_and_a_receipt_s_text() -> None:
    slots = tuple((2**51 + 2 * place, 1) for place in range(limits.LEASE_ROLLOUTS_MAX))
    assigned = Assigned(slots=slots, draws=(10**6,) * len(slots), seeds="0" * 64)
    longest = Receipt.model_validate_json(receipt(0)).model_copy(update={"assigned": assigned})
    assert len(LedgerChain(RUN.digest, 2**52).add(longest.model_dump_json().encode())) <= limits.LEDGER_LINE_BYTES_MAX
    assert len(seal(longest, PayloadType.RECEIPT, COORDINATOR).to_bytes()) <= limits.RECEIPT_CHARS_MAX


def test_a_head_is_believed_by_the_coordinator_s_key_and_for_its_run_alone() -> None:
    head = chain_of(*lines(2)).head(5)
    assert open_ledger_head(seal(head, PayloadType.LEDGER_HEAD, COORDINATOR), RUN) == head
    for envelope, code in [
        (seal(head, PayloadType.LEDGER_HEAD, TRAINER), ErrorCode.BAD_SIGNATURE),
        (seal(head, PayloadType.RECEIPT, COORDINATOR), ErrorCode.WRONG_PAYLOAD_TYPE),
        (
            seal(head.model_copy(update={"run": "00" * 32}), PayloadType.LEDGER_HEAD, COORDINATOR),
            ErrorCode.WRONG_RUN,
        ),
        (seal(b" " * (limits.LEDGER_LINE_BYTES_MAX + 1), PayloadType.LEDGER_HEAD, COORDINATOR), ErrorCode.TOO_LARGE),
    ]:
        with pytest.raises(RemoteError) as caught:
            open_ledger_head(envelope, RUN)
        assert caught.value.code is code
