"""SPEC.md and the code agree: its tables are read and compared."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from tests.cases_world import check_each

import prime_protocol
from prime_protocol import limits
from prime_protocol.envelope import PayloadType, WireModel
from prime_protocol.errors import HTTP_STATUS, ErrorCode
from prime_protocol.limits import Limits
from prime_protocol.rollout import BODY_LAYOUT, FinishReason
from prime_protocol.run_spec import PROTOCOL_VERSION
from prime_protocol.verdict import RejectReason

SPEC = (Path(__file__).parents[2] / "protocol" / "SPEC.md").read_text(encoding="utf-8")
MODULES = tuple(
    importlib.import_module(module.name)
    for module in pkgutil.iter_modules(prime_protocol.__path__, "prime_protocol.")
    if not module.ispkg
)
MESSAGES = re.findall(r"^\*\*(\w+)\*\*[^\n]*\n\n\| field \|", SPEC, re.MULTILINE)


def rows_after(marker: str) -> list[list[str]]:
    """Return the cells of the first table after a marker, without its head."""
    lines = SPEC[SPEC.index(marker) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|---"))
    table = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip().strip("`") for cell in line.strip("|").split(" | ")])
    return table


def docstrings(body: list[ast.stmt]) -> dict[str, str]:
    """Return the docstring behind each assignment, by the assigned name."""
    found = {}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(text))
            ):
                found[name] = text
    return found


def number(text: str) -> float:
    return float(text.replace(",", ""))


def model(name: str) -> Any:
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


def test_the_error_codes_and_their_statuses_are_those_of_the_code() -> None:
    assert [(code, int(status)) for code, status, _ in rows_after("## 15. Errors")] == [
        (c.value, HTTP_STATUS[c]) for c in ErrorCode
    ]


def test_the_reasons_and_their_strikes_are_those_of_the_code() -> None:
    listed = [(reason, strike) for reason, strike, _ in rows_after("**Reasons.**")]
    assert listed == [(reason.value, "yes" if reason.is_dishonest else "no") for reason in RejectReason]


def test_the_fixed_limits_are_those_of_the_code() -> None:
    listed = [(name, number(value), meaning) for name, value, meaning in rows_after("## 16. Limits")]
    meanings = docstrings(ast.parse(inspect.getsource(limits)).body)
    assert listed == [(name, value, meanings[name]) for name, value in vars(limits).items() if name.isupper()]


def test_the_limits_of_a_run_are_those_of_the_code() -> None:
    listed = {
        name: (number(default), number(low), number(high), meaning)
        for name, default, low, high, meaning in rows_after("Set by the run")
    }
    (tree,) = ast.parse(inspect.getsource(Limits)).body
    assert isinstance(tree, ast.ClassDef)
    meanings = docstrings(tree.body)
    assert listed == {
        name: (
            field.default,
            next(bound.ge for bound in field.metadata if hasattr(bound, "ge")),
            next(bound.le for bound in field.metadata if hasattr(bound, "le")),
            meanings[name],
        )
        for name, field in Limits.model_fields.items()
    }


def test_every_message_has_its_table() -> None:
    named = {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, WireModel) and value is not WireModel
    }
    assert sorted(MESSAGES) == sorted(named)


def test_a_message_has_the_fields_of_its_table() -> None:
    check_each(((name, name) for name in MESSAGES), has_its_table)


def has_its_table(name: str) -> None:
    rows = rows_after(f"\n**{name}**")
    fields = model(name).model_fields
    assert [row[0] for row in rows] == list(fields)
    for row, field in zip(rows, fields.values(), strict=True):
        has_default = not field.is_required() and row[0] != "action"
        assert ("default" in row[1]) == has_default, f"{name}.{row[0]}"


SENT_AT_ITS_DEFAULT = """
    AdapterSpec.targets AdminRequest.reason AdminRequest.worker AuditPolicy.escrow_bundles
    AuditPolicy.newcomer_bundles AuditPolicy.share_min BatchRequest.wait_s BodyClaim.epoch
    Calibration.hidden_size_max Calibration.note Calibration.num_layers_max CalibrationAmendment.note
    CheckPolicy.logprob_error_max CheckPolicy.logprob_error_mean_max CheckPolicy.seed_flips_share_max
    CheckPolicy.strikes_max CheckRequest.wait_s CheckResultRequest.measured CheckResultRequest.num_tokens
    DownloadReport.all_bytes DownloadReport.done_bytes EnvironmentSpec.options EnvironmentSpec.seed
    EnvironmentSpec.weight ErrorBody.retry_after_s HeartbeatReply.draining HeartbeatReply.notice
    HeldOutFigures.greedy HeldOutFigures.sampled HoldingReply.lost JoiningAsked.invites_needed
    JoiningAsked.workers_max JoiningAsked.workers_per_network_max KeyRing.reason LeaseRequest.holding
    LeaseRequest.wait_s PeerRecord.addresses PeerRecord.urls PeerUpdate.cursor PeerUpdate.head PeerUpdate.pieces
    PeersReply.reachable PeersRequest.addresses PeersRequest.peers_max PeersRequest.port Receipt.detail
    Receipt.reason ReceiptsRequest.after ReplayPolicy.bundle_days ReplayPolicy.bundles ReplayPolicy.state_days
    ReplayPolicy.state_every RoleKeys.root_threshold RoleKeys.trainer_threshold RunSpec.async_level RunSpec.checks
    RunSpec.heartbeat_seconds RunSpec.lease_seconds RunSpec.limits RunSpec.protocol_version Sampling.temperature
    Schedule.group_rollouts_min Schedule.leases_per_slot_max Schedule.max_off_policy_steps Schedule.preset
    Schedule.require_batches Schedule.selection Schedule.slow_factor Schedule.stale Schedule.staleness_from
    Schedule.staleness_threshold Schedule.straggler_factor Schedule.swap Schedule.trigger_parameter_sync_step
    Schedule.window_steps Standing.rank UploadReply.verdict Verdict.detail Verdict.reason
"""
"""Optional fields of version 1 that are sent in any case. No name is added: a receiver of an earlier release rejects a field."""


def test_a_field_that_is_added_within_a_version_is_omitted_at_its_default() -> None:
    found = [
        f"{name}.{field}"
        for name in MESSAGES
        for field, declared in model(name).model_fields.items()
        if not (declared.is_required() or field == "action" or _is_omitted(declared))
    ]
    assert sorted(found) == SENT_AT_ITS_DEFAULT.split(), "declare a new field with `exclude_if` (SPEC.md, section 18)"


def _is_omitted(declared: FieldInfo) -> bool:
    default = declared.get_default(call_default_factory=True, validated_data={})
    return declared.exclude_if is not None and declared.exclude_if(default)


def test_the_kinds_of_envelope_are_those_of_the_code() -> None:
    rows = rows_after("The **digest of an envelope**")
    assert [f"application/vnd.prime.{row[0]}+json" for row in rows] == [
        kind.value for kind in sorted(PayloadType, key=order(rows))
    ]
    assert len(rows) == len(PayloadType)


def order(rows: list[list[str]]) -> Any:
    kinds = [row[0] for row in rows]
    return lambda kind: kinds.index(kind.value.removeprefix("application/vnd.prime.").removesuffix("+json"))


def test_the_tensors_of_a_bundle_are_those_of_the_code() -> None:
    rows = rows_after("N completions, T tokens in all, S spans")
    assert [(row[0], row[1], 1 + row[2].count(",")) for row in rows] == [
        (name, *kind) for name, kind in BODY_LAYOUT.items()
    ]
    assert [int(reason) for reason in FinishReason] == [0, 1]


def test_every_request_has_its_endpoint() -> None:
    listed = {row[0].removeprefix("/v1/"): row[2] for row in rows_after("**Signed.**")}
    actions = {
        model(name).model_fields["action"].default: name
        for name in MESSAGES
        if name.endswith("Request") and name != "AdminRequest"
    }
    assert listed == actions | {"admin": "AdminRequest"}


def test_the_version_is_the_code_s() -> None:
    assert f"`protocol_version` of the RunSpec is {PROTOCOL_VERSION}." in SPEC
    assert SPEC.startswith(f"# The wire\n\nVersion {PROTOCOL_VERSION}.")


def test_every_code_and_limit_that_the_text_names_exists() -> None:
    for name in re.findall(r"`([A-Z][A-Z_]+_MAX)`", SPEC):
        assert hasattr(limits, name), name
    for field in re.findall(r"`limits\.([a-z_]+)`", SPEC):
        assert field in Limits.model_fields, field
    known = {*ErrorCode, *RejectReason}
    for code in re.findall(r"\(`([a-z_]+)`\)", SPEC):
        assert code in known, code


def test_every_section_is_in_the_contents() -> None:
    sections = re.findall(r"^## (\d+)\. (.+)$", SPEC, re.MULTILINE)
    assert [int(index) for index, _ in sections] == list(range(1, len(sections) + 1))
    for index, title in sections:
        anchor = f"{index}-{title.lower().replace(' ', '-')}"
        assert (
            f"[{index} {title[0].lower() if title != 'HTTP' and title != 'JSON' else title[0]}{title[1:]}](#{anchor})"
            in SPEC
        )
