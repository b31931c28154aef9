"""Fuzz everything that parses bytes of a stranger: they give a value or raise PeerError, and need bounded memory and time.

    python scripts/fuzz/parsers.py --seconds 300 [--only open_envelope]

Targets: open_envelope, open_parcel, unpack_tensors, parse_body, decompress, decode_chunk. With `atheris` and --only, coverage
guides the mutation (Linux, x86-64); otherwise hypothesis mutates valid messages. Anything but a PeerError is a finding, and so is
an input that needs more than MEMORY_BYTES_MAX or SECONDS_MAX. A finding ends the run with the input printed as hex.

`scripts/fuzz/chunks.py` goes deeper into the chunk decoders: it compares them with each other.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

INPUT_BYTES_MAX = 20_000
MEMORY_BYTES_MAX = 2**30
"""Address space beyond what the process holds at the start. The bounds that the targets are given are far below."""
SECONDS_MAX = 5.0
"""For one input of INPUT_BYTES_MAX."""
Target = Callable[[bytes], None]


def targets() -> dict[str, tuple[Target, list[bytes]]]:
    """Name -> what takes the bytes, and valid inputs to begin with."""
    import numpy as np

    from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
    from prime_protocol.codec import decode_chunk, encode_tensor
    from prime_protocol.digest import digest_of
    from prime_protocol.envelope import PayloadType, open_envelope, seal
    from prime_protocol.errors import PeerError
    from prime_protocol.identity import SigningKey
    from prime_protocol.limits import Limits
    from prime_protocol.parcel import ParcelHeader, open_parcel, pack_parcel
    from prime_protocol.rollout import (
        Completion,
        EngineInfo,
        FinishReason,
        RolloutHeader,
        decompress,
        pack_body,
        parse_body,
        rollouts_for,
    )
    from prime_protocol.tensor_file import pack_tensors, unpack_tensors
    from prime_protocol.turns import Turn, episodes_of, rollouts_of_turns

    key, bounds = SigningKey(bytes(32)), Limits(rollout_decompressed_bytes_max=2**20)
    layout = {"a": ("I32", 1), "b": ("F32", 2)}
    digest = digest_of(b"")
    lease = Lease(
        run=digest,
        lease_id=digest,
        worker=key.key_id,
        step=3,
        policy_version=2,
        policy_digest=digest,
        groups=(
            GroupAssignment(slot=7, problem=Problem(environment="toy", index=0), prompt_token_ids=(1, 2), seeds=(5, 6)),
        ),
        sampling=Sampling(completion_tokens_max=8, stop_token_ids=(3,)),
        issued_at_ms=0,
        expires_at_ms=1,
    )
    done = Completion((1, 3), (-0.5, -0.25), FinishReason.STOP)
    body, decompressed_bytes = pack_body(rollouts_for(lease, [done, done]))
    header = RolloutHeader(
        run=digest,
        worker=key.key_id,
        lease_id=digest,
        step=3,
        policy_version=2,
        policy_digest=digest,
        num_rollouts=2,
        decompressed_bytes=decompressed_bytes,
        body_digest=digest_of(body),
        body_bytes=len(body),
        engine=EngineInfo(name="x", version="1", dtype="fp32", device="cpu"),
        created_at_ms=0,
    )
    rng = np.random.default_rng(0)
    count = 400
    base = rng.integers(0x3C00, 0x3E00, count).astype(np.uint16)
    new = base.copy()
    new[::7] += 1

    def guarded(call: Callable[[bytes], Any]) -> Target:
        def target(data: bytes) -> None:
            with contextlib.suppress(PeerError):
                call(data)

        return target

    def chunk(data: bytes) -> None:
        held = np.full(count + 128, 0x5A5A, np.uint16)
        try:
            decode_chunk(data, held[64:-64], base, dtype="bf16", start=0, count=count)
        finally:
            assert (held[:64] == 0x5A5A).all(), "wrote before its range"
            assert (held[-64:] == 0x5A5A).all(), "wrote behind its range"

    envelope = seal(b'{"a": [1, {"b": "\\u00e9"}]}', PayloadType.LEASE, key).to_bytes()
    parcel = pack_parcel(ParcelHeader(body_digest=digest_of(b"body"), body_bytes=4), b"body", PayloadType.BLOB, key)
    tensors = pack_tensors({"a": np.arange(3, dtype=np.int32), "b": np.ones((2, 2), np.float32)})
    chunks = [encoded.data for old in (None, base) for encoded in encode_tensor(new, old, dtype="bf16")]
    plain = decompress(body, size=decompressed_bytes)
    episode = [Turn((1, 2), done), Turn((1, 2, 1, 3, 7), done), Turn((9,), done)]
    in_turns, size_in_turns = pack_body(rollouts_of_turns(lease, [episode, episode[:1]]))
    two_turns = decompress(in_turns, size=size_in_turns)

    def rollouts(data: bytes) -> None:
        """Bodies as they come, and the tensor file inside them, which mutation would seldom get to."""
        import zstandard

        found = (
            parse_body(header, data, bounds)
            if data[:4] == body[:4]
            else parse_body(
                header.model_copy(update={"decompressed_bytes": max(1, len(data))}),
                zstandard.ZstdCompressor().compress(data),
                bounds,
            )
        )
        episodes_of(found, lease)

    return {
        "open_envelope": (guarded(open_envelope), [envelope]),
        "open_parcel": (guarded(lambda data: open_parcel(data, body_bytes_max=1_000)), [parcel]),
        "unpack_tensors": (guarded(lambda data: unpack_tensors(data, layout)), [tensors]),
        "parse_body": (guarded(rollouts), [body, plain, two_turns]),
        "decompress": (guarded(lambda data: decompress(data, size=2**20)), [body]),
        "decode_chunk": (guarded(chunk), chunks),
    }


def timed(target: Target) -> Target:
    def one(data: bytes) -> None:
        began_s = time.monotonic()
        try:
            target(data)
        except BaseException:
            print(f"finding: {data.hex()}", file=sys.stderr)
            raise
        if time.monotonic() - began_s > SECONDS_MAX:
            raise TimeoutError(f"{time.monotonic() - began_s:.1f} s for {data.hex()}")

    return one


def bound_memory() -> None:
    """MemoryError for what would take more."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def with_atheris(name: str, seconds: float) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["prime_protocol"]):
        target, seeds = targets()[name]
    target = timed(target)
    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(seeds):
            Path(corpus, str(number)).write_bytes(data)
        options = [f"-max_total_time={int(seconds)}", f"-max_len={INPUT_BYTES_MAX}", "-malloc_limit_mb=256"]
        atheris.Setup([sys.argv[0], *options, "-rss_limit_mb=2048", "-print_final_stats=1", corpus], target)
        atheris.Fuzz()


def with_hypothesis(name: str, seconds: float) -> None:
    from hypothesis import HealthCheck, given, seed, settings
    from hypothesis import strategies as st

    target, seeds = targets()[name]
    target = timed(target)
    bound_memory()

    @st.composite
    def mutated(draw: Any) -> bytes:
        data = bytearray(draw(st.sampled_from(seeds)))
        for place, octet in draw(st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=8)):
            data[place % len(data)] = octet
        start, end = sorted(draw(st.tuples(st.integers(0, len(data)), st.integers(0, len(data)))))
        if draw(st.integers(0, 3)) == 0:
            data[start:end] = draw(st.binary(max_size=64)) * draw(st.integers(0, 8))
        return bytes(data)

    end_s, number = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:

        @seed(number)
        @settings(max_examples=1_000, database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.one_of(mutated(), st.binary(max_size=2_000)))
        def holds(data: bytes) -> None:
            target(data)

        holds()
        number += 1
    print(f"{name}: {number * 1_000} inputs, no finding")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--only", help="one target; atheris takes one a process")
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") and options.only:
        with_atheris(options.only, options.seconds)
    for name in [options.only] if options.only else list(targets()):
        with_hypothesis(name, options.seconds)


if __name__ == "__main__":
    main()
