from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import Role
from prime_protocol.run_spec import PROTOCOL_VERSION, JoinLink, RunSpec, open_run_spec

Raises = Callable[..., RemoteError]
RUN = "ab" * 32


def fields_of(sample: Any) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(sample.run.envelope.payload)
    return fields


def test_a_pinned_run_spec_is_opened(sample: Any) -> None:
    opened = open_run_spec(sample.run.envelope, pinned=sample.run.digest)
    assert opened == sample.run
    assert (opened.spec.step_of(0), opened.spec.step_of(5)) == (0, 2)


def test_every_changed_byte_of_a_run_spec_makes_it_another_run(sample: Any, raises: Raises) -> None:
    good = sample.run.envelope
    for i in range(0, len(good.payload), 7):
        payload = good.payload[:i] + bytes([good.payload[i] ^ 1]) + good.payload[i + 1 :]
        tampered = Envelope(good.payload_type, payload, good.signatures)
        raises(ErrorCode.WRONG_RUN, open_run_spec, tampered, pinned=sample.run.digest)


def test_a_run_spec_without_its_roots_signature_is_refused(sample: Any, raises: Raises) -> None:
    for key in (sample.stranger, sample.trainer):
        forged = seal(sample.run.spec, PayloadType.RUN_SPEC, key)
        raises(ErrorCode.BAD_SIGNATURE, open_run_spec, forged, pinned=forged.digest)


def test_every_root_key_has_to_sign(sample: Any, raises: Raises) -> None:
    keys = sample.run.spec.keys.model_copy(update={"root": (sample.root.key_id, sample.stranger.key_id)})
    spec = sample.run.spec.model_copy(update={"keys": keys})
    one = seal(spec, PayloadType.RUN_SPEC, sample.root)
    raises(ErrorCode.BAD_SIGNATURE, open_run_spec, one, pinned=one.digest)
    both = seal(spec, PayloadType.RUN_SPEC, sample.root, sample.stranger)
    assert open_run_spec(both, pinned=both.digest).spec == spec


def test_another_kind_of_envelope_is_no_run_spec(sample: Any, raises: Raises) -> None:
    envelope = seal(sample.run.spec, PayloadType.MANIFEST, sample.root)
    raises(ErrorCode.WRONG_PAYLOAD_TYPE, open_run_spec, envelope, pinned=envelope.digest)


@pytest.mark.parametrize("version", [PROTOCOL_VERSION + 1, 0, -1, "1", None, [], 10**30])
def test_another_protocol_version_is_refused_by_name(version: object, sample: Any, raises: Raises) -> None:
    envelope = seal(
        json.dumps({"protocol_version": version, "from": "the future"}).encode(), PayloadType.RUN_SPEC, sample.root
    )
    raises(ErrorCode.VERSION_UNSUPPORTED, open_run_spec, envelope, pinned=envelope.digest)


def test_an_oversize_run_spec_is_refused(sample: Any, raises: Raises) -> None:
    envelope = seal(b" " * (limits.RUN_SPEC_BYTES_MAX + 1), PayloadType.RUN_SPEC, sample.root)
    raises(ErrorCode.TOO_LARGE, open_run_spec, envelope, pinned=envelope.digest)


def set_in(*path: str | int, to: object) -> Callable[[Any], None]:
    def change(fields: Any) -> None:
        for step in path[:-1]:
            fields = fields[step]
        fields[path[-1]] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_in("protocol_version", to=True),
        set_in("name", to=""),
        set_in("name", to="a\nb"),
        set_in("name", to="x" * 201),
        set_in("created_at_ms", to=2**53 + 1),
        set_in("keys", "root", to=[]),
        set_in("keys", "trainer", to=["12D3KooW"]),
        set_in("keys", "root_threshold", to=0),
        set_in("keys", "root_threshold", to=2),
        set_in("keys", "trainer_threshold", to=2),
        set_in("model_files", to=[]),
        set_in("model_files", 0, "name", to="../config.json"),
        set_in("model_files", 0, "name", to=".config.json"),
        set_in("model_files", 0, "name", to="a/b"),
        set_in("model_files", 0, "name", to="a\\b"),
        set_in("model_files", 0, "name", to="config.json\n"),
        set_in("model_files", 0, "name", to="other.json"),
        set_in("model_files", 0, "name", to="modeling_x.py"),
        set_in("model_files", 0, "name", to="kernel.so"),
        set_in("model_files", 0, "name", to="tokens.pkl"),
        set_in("model_files", 0, "name", to="pytorch_model.bin"),
        set_in("model_files", 0, "name", to="config.json.py"),
        set_in("model_files", 0, "name", to="config"),
        set_in("model_files", 0, "digest", to="AB" * 32),
        set_in("model_files", 0, "digest", to=RUN + "\n"),
        set_in("model_files", 0, "size", to=2**40),
        set_in("vocab_size", to=257),
        set_in("vocab_size", to=2**24 + 1),
        set_in("environments", to=[]),
        set_in("environments", 0, "weight", to=0),
        set_in("environments", 0, "options", "x", to=None),
        set_in("environments", 0, "options", "x", to={}),
        set_in("environments", 0, "options", "x", to="x" * 4_097),
        set_in("sampling", "temperature", to=-0.1),
        set_in("sampling", "completion_tokens_max", to=32_769),
        set_in("async_level", to=-1),
        set_in("max_steps", to=2**31),
        set_in("groups_per_step", to=0),
        set_in("rollouts_per_group", to=4_097),
        set_in("lease_seconds", to=0),
        set_in("heartbeat_seconds", to=1e9),
        set_in("heartbeat_seconds", to=0.09),
        set_in("limits", "rollout_bytes_max", to="1024"),
        set_in("limits", "rollout_bytes_max", to=1024.0),
        set_in("limits", "rollout_bytes_max", to=2**40),
        set_in("checks", "strikes_max", to=0),
    ],
)
def test_a_run_spec_outside_its_bounds_is_refused(change: Callable[[Any], None], sample: Any, raises: Raises) -> None:
    fields = fields_of(sample)
    parse_json(json.dumps(fields).encode(), RunSpec)
    change(fields)
    envelope = seal(json.dumps(fields).encode(), PayloadType.RUN_SPEC, sample.root)
    raises(ErrorCode.WRONG_TYPE, open_run_spec, envelope, pinned=envelope.digest)


@pytest.mark.parametrize(
    "place", [(), ("keys",), ("limits",), ("checks",), ("sampling",), ("model_files", 0), ("environments", 0)]
)
def test_an_unknown_field_is_refused_at_any_place(place: tuple[str | int, ...], sample: Any, raises: Raises) -> None:
    fields = fields_of(sample)
    set_in(*place, "unheard_of", to=1)(fields)
    raises(ErrorCode.UNKNOWN_FIELD, parse_json, json.dumps(fields).encode(), RunSpec)


def test_two_files_or_environments_cannot_share_a_name(sample: Any, raises: Raises) -> None:
    for field, other in (("model_files", {"name": "Config.JSON"}), ("environments", {})):
        fields = fields_of(sample)
        fields[field].append(fields[field][0] | other)
        raises(ErrorCode.WRONG_TYPE, parse_json, json.dumps(fields).encode(), RunSpec)


def test_a_key_may_have_several_roles(sample: Any) -> None:
    fields = fields_of(sample)
    fields["keys"] = {role.value: [sample.root.key_id] for role in Role}
    parse_json(json.dumps(fields).encode(), RunSpec)


# Join links


@pytest.mark.parametrize(
    ("text", "url"),
    [
        (f"http://host:8400/#{RUN}", "http://host:8400"),
        (f"http://host:8400#{RUN}", "http://host:8400"),
        (f"  https://host/a/b/#{RUN}\n", "https://host/a/b"),
        (f"<http://host:8400/#{RUN}>", "http://host:8400"),
        (f"http://[2001:db8::1]:80/#{RUN}", "http://[2001:db8::1]:80"),
    ],
)
def test_a_join_link_is_read_and_written_back(text: str, url: str) -> None:
    link = JoinLink.parse(text)
    assert link == JoinLink(url, RUN)
    assert JoinLink.parse(str(link)) == link


def test_an_invitation_may_follow_the_digest() -> None:
    link = JoinLink.parse(f"http://host:8400/#{RUN}.abc_-9==\n")
    assert link == JoinLink("http://host:8400", RUN, "abc_-9==")
    assert JoinLink.parse(str(link)) == link


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host:8400",
        f"ftp://host/#{RUN}",
        f"file:///etc/passwd#{RUN}",
        f"http:///#{RUN}",
        f"http://#{RUN}",
        "http://host/",
        "http://host/#",
        f"http://host/#{RUN[1:]}",
        f"http://host/#{RUN}0",
        f"http://host/#{RUN.upper()}",
        f"http://host/?run=1#{RUN}",
        f"http://user@host/#{RUN}",
        f"http://user:password@host/#{RUN}",
        f"http://host:99999/#{RUN}",
        f"http://host:0/#{RUN}",
        f"http://host:x/#{RUN}",
        f"http://[::1/#{RUN}",
        f"http://host/#{RUN}.",
        f"http://host/#{RUN}.a.b",
        f"http://host/#{RUN}.a b",
        f"http://host/#{RUN}.{'a' * (limits.INVITE_CHARS_MAX + 1)}",
    ],
)
def test_what_is_no_join_link_is_the_users_mistake(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        JoinLink.parse(text)


def test_a_mistake_in_a_join_link_is_named() -> None:
    with pytest.raises(ValueError, match=r"the join link 'http://host:84OO/.* has no valid address: Port"):
        JoinLink.parse(f"http://host:84OO/#{RUN}")
    with pytest.raises(ValueError, match=r"has 60 characters there\. Ask the operator"):
        JoinLink.parse(f"http://host:8400/#{RUN[:60]}")


def test_the_digest_in_the_link_is_the_payloads(sample: Any) -> None:
    assert sample.run.digest == digest_of(sample.run.envelope.payload)
    assert SigningKey(b"\1" * 32).key_id == sample.run.spec.keys.root[0]
