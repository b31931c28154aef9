"""Golden vectors that need no run: keys, JSON, envelopes, noise. See make_vectors.py."""

from __future__ import annotations

import base64
import json
from typing import Any

from prime_protocol.envelope import Envelope, PayloadType, pre_authentication_encoding, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.identity import SigningKey
from prime_protocol.noise import SEED_MAX, gumbel_noise
from vectors.folder import ROOT, WORKER, Case, Folder, flipped

E = ErrorCode


def keys(folder: Folder) -> None:
    p = 2**255 - 19
    weak = {
        "order 1, the identity": 1,
        "order 2": p - 1,
        "order 4": 0,
        "order 4, the other sign": 1 << 255,
        "order 8": 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,
        "order 8, y negated": p - 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826,
        "order 1, not canonical": p + 1,
        "order 4, not canonical": p,
        "order 1, with a sign that x = 0 cannot have": 1 | 1 << 255,
        "not canonical": p + 3,
        "not on the curve": 2,
    }
    key_id = WORKER.key_id
    folder.cases(
        "seed",
        [
            {"name": name, "hex": seed.hex(), "expect": {"public": key.public.raw.hex(), "key_id": key.key_id}}
            for name, seed in [
                (
                    "libp2p peer-id specification",
                    bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"),
                ),
                ("RFC 8032 test 1", bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")),
                ("worker of these vectors", WORKER.to_bytes()),
            ]
            for key in [SigningKey(seed)]
        ],
    )
    folder.cases(
        "public_key",
        [{"name": "usable", "hex": WORKER.public.raw.hex(), "expect": key_id}]
        + [
            {"name": name, "hex": value.to_bytes(32, "little").hex(), "error": E.BAD_KEY}
            for name, value in weak.items()
        ]
        + [{"name": "31 bytes", "hex": "02" * 31, "error": E.BAD_KEY}],
    )
    folder.cases(
        "key_id",
        [{"name": "usable", "text": key_id, "expect": WORKER.public.raw.hex()}]
        + [
            {"name": name, "text": text, "error": E.BAD_KEY}
            for name, text in [
                ("empty", ""),
                ("a leading 1 too many", "1" + key_id),
                ("no leading 1", key_id[1:]),
                ("a character that base58 lacks", key_id[:-1] + "0"),
                ("a CIDv1 peer id", "bafzaajaiaejcbsgnq5i6txrmuyowa3z4o3iur3mezejulcwjhwtmxcxhihq6kcav"),
                ("an RSA peer id", "QmcgpsyWgH8Y8ajJz1Cu72KnS5uo2Aa2LpzU7kinSupNKC"),
            ]
        ],
    )


def json_texts(folder: Folder) -> None:
    good = ['{"a":[1,-0.5,1e3,true,null]}', ' {"\\ud83d\\ude00":"é"} \n', "[" * 16 + "]" * 16, '["[[[[[[[[[[[[[[[[["]']
    bad = {
        "duplicate key": b'{"a":1,"a":1}',
        "duplicate key, escaped": b'{"a":1,"\\u0061":1}',
        "NaN": b"[NaN]",
        "Infinity": b"[-Infinity]",
        "overflow": b"[1e999]",
        "lone surrogate": b'["\\ud800"]',
        "surrogate in UTF-8": b'["\xed\xa0\x80"]',
        "byte order mark": b"\xef\xbb\xbf{}",
        "UTF-16": "{}".encode("utf-16"),
        "trailing bytes": b"{} {}",
        "trailing comma": b"[1,]",
        "control character in a string": b'["\n"]',
        "leading zero": b"[01]",
        "unclosed string": b'["',
        "empty": b"",
    }
    folder.cases(
        "json",
        [{"name": f"valid {i}", "hex": text.encode().hex(), "expect": json.loads(text)} for i, text in enumerate(good)]
        + [{"name": name, "hex": data.hex(), "error": E.MALFORMED} for name, data in bad.items()]
        + [{"name": "too deep", "hex": (b"[" * 17 + b"]" * 17).hex(), "error": E.TOO_LARGE}],
    )


def envelopes(folder: Folder) -> None:
    def case(name: str, envelope: str, **more: Any) -> Case:
        return {
            "name": name,
            "text": envelope,
            "payload_type": PayloadType.LEASE,
            "trusted": [ROOT.key_id],
            "threshold": 1,
        } | more

    def parsed(envelope: Envelope) -> Any:
        return {
            "payload": envelope.payload.hex(),
            "digest": envelope.digest,
            "signed_bytes": pre_authentication_encoding(envelope.payload_type, envelope.payload).hex(),
        }

    one = seal("é{}".encode(), PayloadType.LEASE, ROOT)
    two = seal(b"{}", PayloadType.LEASE, ROOT, WORKER)
    text = one.to_bytes().decode()
    plain: Case = json.loads(text)
    signature = base64.b64decode(plain["signatures"][0]["sig"])
    sig = [{"keyid": ROOT.key_id, "sig": base64.b64encode(flipped(signature, 40)).decode()}]
    both = [ROOT.key_id, WORKER.key_id]
    twice = seal(b"", PayloadType.LEASE, ROOT, ROOT).to_bytes().decode()
    beside = json.dumps(plain | {"signatures": [*plain["signatures"], sig[0] | {"keyid": WORKER.key_id}]})
    renamed = text.replace("lease", "receipt")
    padded = seal(b"AB", PayloadType.LEASE, ROOT).to_bytes().decode().replace('"QUI="', '"QUJ="')
    folder.cases(
        "envelope",
        [
            case("one signature", text, expect=parsed(one)),
            case("fields in another order, with spaces", json.dumps(dict(reversed(plain.items())), indent=2), expect=parsed(one)),
            case("two of two", two.to_bytes().decode(), trusted=both, threshold=2, expect=parsed(two)),
            case("a signature by an unknown key is ignored", two.to_bytes().decode(), expect=parsed(two)),
            case("one key twice is one", twice, trusted=both, threshold=2, error=E.BAD_SIGNATURE),
            case("no trusted key", text, trusted=[WORKER.key_id], error=E.BAD_SIGNATURE),
            case("changed payload", json.dumps(plain | {"payload": "e30="}), error=E.BAD_SIGNATURE),
            case("changed signature", json.dumps(plain | {"signatures": sig}), error=E.BAD_SIGNATURE),
            case("a trusted signature that fails beside a good one", beside, trusted=both, error=E.BAD_SIGNATURE),
            case("another kind", text, payload_type=PayloadType.RECEIPT, error=E.WRONG_PAYLOAD_TYPE),
            case("another kind, renamed", renamed, payload_type=PayloadType.RECEIPT, error=E.BAD_SIGNATURE),
            case("unknown field", json.dumps(plain | {"x": 1}), error=E.UNKNOWN_FIELD),
            case("no signatures", json.dumps(plain | {"signatures": []}), error=E.WRONG_TYPE),
            case("17 signatures", json.dumps(plain | {"signatures": plain["signatures"] * 17}), error=E.TOO_LARGE),
            case("base64 with unused bits set", padded, error=E.MALFORMED),
            case("base64 without padding", json.dumps(plain | {"payload": "e30"}), error=E.MALFORMED),
            case("base64 for URLs", json.dumps(plain | {"payload": "_-8="}), error=E.MALFORMED),
        ],
    )  # fmt: skip


def noise(folder: Folder) -> None:
    cases = []
    for seed, position in [(0, 0), (7, 0), (7, 1), (2**32, 5), (SEED_MAX, 2**20)]:
        values = gumbel_noise([seed], [position], 152_064)[0]
        expected = {
            "first_8": [float(x) for x in values[:8]],
            "argmax_of_264": int(values[:264].argmax()),
            "argmax_of_152064": int(values.argmax()),
        }
        name = f"seed {seed}, position {position}"
        cases.append({"name": name, "seed": seed, "position": position, "expect": expected})
    folder.cases("noise", cases)
