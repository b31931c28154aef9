"""The parsers of what is not JSON: frames, bundles, checkpoints, and texts that people pass on."""

from __future__ import annotations

import base64

import numpy as np
from fuzz_parser import (
    BOUNDS,
    NOW_MS,
    RUN,
    VALIDATOR,
    WORKER,
    Parser,
)
from tests.builder import build_header, build_lease, build_manifest
from valid_messages import VECTORS, examples

from prime_protocol import body_claim, parcel, peer_frames, proof, rollout, tensor_file, turns, verify
from prime_protocol import envelope as dsse
from prime_protocol.addresses import parse_ip
from prime_protocol.assignment import GroupAssignment, Problem
from prime_protocol.checkpoint import CheckpointDecoder, encode_checkpoint
from prime_protocol.chunk_index import open_index
from prime_protocol.codec import decode_chunk, encode_tensor
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.identity import PublicKey
from prime_protocol.manifest import PartEntry
from prime_protocol.parcel import LogprobsHeader, open_logprobs, pack_logprobs
from prime_protocol.run_spec import JoinLink
from prime_protocol.training_state import TrainingState, TrainingTensor, open_training_state
from prime_protocol.weights import WeightTensor


def data_parsers() -> list[Parser]:
    """Those of prime_protocol whose bytes are no signed JSON."""
    return [*_framing(), *_bundles(), *_checkpoints(), *_texts()]


def _framing() -> list[Parser]:
    envelope = seal(b'{"a": [1, {"b": "\\u00e9"}]}', PayloadType.LEASE, WORKER).to_bytes()
    header = parcel.ParcelHeader(body_digest=digest_of(b"body"), body_bytes=4)
    packed = parcel.pack_parcel(header, b"body", PayloadType.BLOB, WORKER)

    def verified(data: bytes) -> None:
        found = dsse.open_envelope(data)
        found.sole_signer()
        found.verify(PayloadType.LEASE, trusted=(WORKER.key_id,))

    def twice(data: bytes) -> None:
        found = dsse.open_envelope(data, unsigned=True)
        assert dsse.open_envelope(found.to_bytes(), unsigned=True) == found

    def opened_parcel(data: bytes) -> None:
        found = parcel.open_parcel(data, body_bytes_max=1_000)
        found.check_body(header)

    claim = body_claim.claim_of(b"body", WORKER, run=RUN.digest, action="rollouts", nonce="0" * 32, now_ms=NOW_MS)

    def claimed(payload: bytes) -> None:
        header = seal(payload, PayloadType.BODY_CLAIM, WORKER).to_bytes().decode()
        body_claim.read_claim(body_claim.open_claim(header), WORKER.key_id, action="rollouts", body_bytes=4)

    def whole_claim(data: bytes) -> None:
        found = body_claim.open_claim(data.decode("latin-1"))
        body_claim.read_claim(found, WORKER.key_id, action="rollouts", body_bytes=4)

    drives = ("body_claim.open_claim", "body_claim.read_claim")
    return [
        Parser("body_claim", claimed, [body_claim.open_claim(claim).payload], drives),
        Parser("body_claim_header", whole_claim, [claim.encode()], drives),
        Parser(
            "load_json",
            dsse.load_json,
            [b'{"a": [1, 2.5, "x", {"b": "\\ud83d\\ude00"}]}'],
            ("envelope.load_json",),
        ),
        Parser("envelope", twice, [envelope], ("envelope.open_envelope",)),
        Parser("signature", verified, [envelope], ("envelope.open_envelope", "envelope.Envelope.verify")),
        Parser("parcel", opened_parcel, [packed], ("parcel.open_parcel", "parcel.Parcel.check_body")),
        Parser(
            "peer_request_header",
            lambda data: peer_frames.parse_request_header(data[:8].ljust(8, b"\0")),
            [peer_frames.pack_request(1, b"abc")[:8]],
            ("peer_frames.parse_request_header",),
        ),
        Parser(
            "peer_reply_header",
            lambda data: peer_frames.parse_reply_header(data[:9].ljust(9, b"\0")),
            [peer_frames.pack_answer(1, b"abc")[:9]],
            ("peer_frames.parse_reply_header",),
        ),
        Parser("peer_refusal", peer_frames.parse_refusal, examples()["ErrorBody"], ("peer_frames.parse_refusal",)),
    ]


def _bundles() -> list[Parser]:
    group = GroupAssignment(
        slot=7, problem=Problem(environment="letters", index=0), prompt_token_ids=(1, 2), seeds=(5, 6)
    )
    lease = build_lease(RUN, WORKER, [group])
    done = rollout.Completion((1, 3), (-0.5, -0.25), rollout.FinishReason.STOP)
    body, size = rollout.pack_body(rollout.rollouts_for(lease, [done, done]))
    header = build_header(lease, body, size)
    episode = [turns.Turn((1, 2), done), turns.Turn((1, 2, 1, 3, 7), done), turns.Turn((9,), done)]
    in_turns, turns_size = rollout.pack_body(turns.rollouts_of_turns(lease, [episode, episode[:1]]))
    layout = {"a": ("I32", 1), "b": ("F32", 2)}
    tensors = tensor_file.pack_tensors({"a": np.arange(3, dtype=np.int32), "b": np.ones((2, 2), np.float32)})
    hidden = np.random.default_rng(0).integers(0, 2**16, (40, 128)).astype(np.uint16)
    proofs = proof.build_proofs(hidden, [40]).tobytes()

    def judged(found: rollout.Rollouts) -> None:
        rollout.check_turn_rows(found, 2)
        turns.episodes_of(found, lease)
        verify.check_assignment(header, found, lease, vocab_size=256)

    def compressed(data: bytes) -> None:
        judged(rollout.parse_body(header, data, BOUNDS))

    def plain(data: bytes) -> None:
        """The tensor file inside, which mutation of compressed bytes seldom reaches."""
        import zstandard

        packed = zstandard.ZstdCompressor().compress(data)
        sized = header.model_copy(update={"decompressed_bytes": max(1, len(data))})
        judged(rollout.parse_body(sized, packed, BOUNDS))

    def proven(data: bytes) -> None:
        rows = np.frombuffer(data[: len(data) // proof.PROOF_BYTES * proof.PROOF_BYTES], np.uint8)
        proof.compare_proofs(rows.reshape(-1, proof.PROOF_BYTES), hidden, [40])

    def unpack(data: bytes) -> bytes:
        named = LogprobsHeader(
            body_digest=digest_of(data),
            body_bytes=len(data),
            run=RUN.digest,
            bundle=RUN.digest,
            num_tokens=max(1, len(data) // 4),
        )
        parcelled = parcel.pack_parcel(named, data, PayloadType.LOGPROBS, VALIDATOR)
        _, logprobs = open_logprobs(parcelled, run=RUN.digest, keys=RUN.keys, bytes_max=1_000)
        return logprobs.tobytes()

    logprobs = np.linspace(-3.0, 0.0, 8, dtype=np.float32)
    whole = pack_logprobs(logprobs, run=RUN.digest, bundle=RUN.digest, key=VALIDATOR)

    def whole_logprobs(data: bytes) -> None:
        open_logprobs(data, run=RUN.digest, keys=RUN.keys, bytes_max=1_000)

    return [
        Parser("logprobs", unpack, [logprobs.tobytes()], ("parcel.open_logprobs",), again=lambda same: bytes(same)),
        Parser("logprobs_parcel", whole_logprobs, [whole], ("parcel.open_logprobs",)),
        Parser(
            "tensor_file",
            lambda data: tensor_file.unpack_tensors(data, layout),
            [tensors],
            ("tensor_file.unpack_tensors",),
        ),
        Parser("bundle", compressed, [body, in_turns], ("rollout.parse_body", "rollout.decompress_body")),
        Parser(
            "bundle_inside",
            plain,
            [rollout.decompress_body(body, size=size), rollout.decompress_body(in_turns, size=turns_size)],
            ("rollout.parse_body", "tensor_file.unpack_tensors"),
        ),
        Parser(
            "decompress", lambda data: rollout.decompress_body(data, size=2**20), [body], ("rollout.decompress_body",)
        ),
        Parser("proofs", proven, [proofs], ("proof.parse_proofs", "proof.compare_proofs")),
    ]


def _checkpoints() -> list[Parser]:
    count = 400
    base = np.random.default_rng(0).integers(0x3C00, 0x3E00, count).astype(np.uint16)
    new = base.copy()
    new[::7] += 1
    after = {"w": WeightTensor("bf16", (count,), new)}
    made = encode_checkpoint(after)
    manifest = build_manifest(RUN, None, after, made)
    chunks = [encoded.data for old in (None, base) for encoded in encode_tensor(new, old, dtype="bf16")]
    index, *parts = made.blobs
    found = [path.read_bytes() for path in sorted(VECTORS.glob("v1/*.index"))[:8]]

    def indexed(data: bytes) -> None:
        named = PartEntry(digest=digest_of(data), size=max(1, len(data)))
        open_index(data, made.encoding.model_copy(update={"index": named}), manifest.tensors)

    def chunk(data: bytes) -> None:
        held = np.full(count + 128, 0x5A5A, np.uint16)
        try:
            decode_chunk(data, held[64:-64], base, dtype="bf16", start=0, count=count)
        finally:
            assert (held[:64] == 0x5A5A).all(), "wrote before its range"
            assert (held[-64:] == 0x5A5A).all(), "wrote behind its range"

    def part(data: bytes) -> None:
        """A part with another digest never reaches a decoder."""
        decoder = CheckpointDecoder(manifest, made.encoding, open_index(index, made.encoding, manifest.tensors))
        decoder.feed_part(0, data)
        decoder.finish()

    named = TrainingTensor(name="model.w", dtype="fp32", shape=(2,))
    stored = PartEntry(digest=digest_of(b"w"), size=8)
    state = TrainingState(run=RUN.digest, policy_version=4, progress="{}", tensors=(named,), parts=(stored,))

    def training_state(data: bytes) -> None:
        open_training_state(data, digest=digest_of(data), run=RUN.digest, policy_version=4)

    return [
        Parser(
            "training_state",
            training_state,
            [state.model_dump_json().encode()],
            ("training_state.open_training_state",),
        ),
        Parser(
            "chunk_index",
            indexed,
            [index, *found],
            ("chunk_index.open_index",),
        ),
        Parser("chunk", chunk, chunks, ("codec.api.decode_chunk", "codec.api.decode_chunks")),
        Parser(
            "checkpoint_part",
            part,
            [parts[0]],
            ("checkpoint.CheckpointDecoder.feed_part", "checkpoint.CheckpointDecoder.feed_chunks"),
        ),
    ]


def _texts() -> list[Parser]:
    link = f"http://203.0.113.5:8400/#{'0' * 64}".encode()
    return [
        Parser(
            "join_link",
            lambda data: JoinLink.parse(data.decode("latin-1")),
            [link, link.replace(b"http", b"https") + b"/path"],
            ("run_spec.JoinLink.parse",),
            (ValueError,),
        ),
        Parser(
            "key_id",
            lambda data: PublicKey.from_key_id(data.decode("latin-1")).key_id.encode("latin-1"),
            [WORKER.key_id.encode()],
            ("identity.PublicKey.from_key_id",),
            again=lambda same: bytes(same),
        ),
        Parser(
            "ip_address",
            lambda data: parse_ip(data.decode("latin-1")),
            [b"203.0.113.5", b"2001:db8::1", b"::ffff:10.0.0.1", b"fe80::1%eth0"],
            ("addresses.parse_ip",),
        ),
        Parser("public_key", PublicKey, [WORKER.public.raw], ("identity.PublicKey.__init__",)),
        Parser(
            "base64_text", lambda data: dsse.open_envelope(base64.b64encode(data)), [b"x"], ("envelope.open_envelope",)
        ),
    ]
