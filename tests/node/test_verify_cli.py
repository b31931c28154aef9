"""`prime-node verify` on real published folders: its output and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.testing
from tests.node.table_engine import table_weights
from tests.node.worker_world import TRAINER, MemorySource, make_run

from prime_node.broadcast.audit.safetensors_file import read_weights, write_safetensors
from prime_node.cli import main
from prime_node.keyfile import create_key
from prime_protocol.checkpoint import tensor_table
from prime_protocol.chunk_index import open_index
from prime_protocol.digest import digest_of
from prime_protocol.envelope import open_envelope
from prime_protocol.manifest import SignedManifest, open_manifest
from prime_protocol.weights import Weights, WeightTensor, root_of

RUN = make_run()


def weights_of(seed: int) -> Weights:
    """Return two tensors: a large one of several chunks, and a small one."""
    bits = np.random.default_rng(0).integers(0x3C00, 0x3E00, 600_000).astype(np.uint16)
    bits[seed::1000] += 1
    return {"large": WeightTensor("bf16", (600, 1000), bits), **table_weights(seed)}


def published(*, policies: int = 4) -> MemorySource:
    """Publish an anchor, two deltas one after another, an anchor, ..."""
    source = MemorySource(RUN)
    last: SignedManifest | None = None
    for version in range(policies):
        base = None if last is None or version % 3 == 0 else (last, weights_of(version - 1))
        last = source.publish(weights_of(version), base=base, part_bytes=400_000)
    return source


@dataclass
class World:
    folder: Path
    source: MemorySource

    def verify(self, *arguments: str | Path, code: int = 0) -> str:
        runner = typer.testing.CliRunner()
        result = runner.invoke(main.app, ["verify", str(self.folder), "--run", RUN.digest, *map(str, arguments)])
        assert result.exit_code == code, result.output
        # Kept apart: stderr may also report that kernels are compiled, if a file of the codec has changed.
        return result.stdout if code < 2 else result.stderr

    def verify_json(self, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.verify(*arguments, "--json", code=code))
        assert report["ok"] == (code == 0)
        return report

    def flip(self, digest: str, *, at: int) -> None:
        path = self.folder / "blobs" / digest[:2] / digest
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)


@pytest.fixture
def world(tmp_path: Path) -> World:
    source = published()
    source.save(tmp_path / "public")
    return World(tmp_path / "public", source)


def test_every_check_is_printed_with_what_it_established(world: World) -> None:
    output = world.verify()
    assert [line[:8] for line in output.splitlines()[:9]] == [f"ok   ({number})" for number in range(1, 10)]
    assert "verified: policy 3 of 1970-01-01 00:00 UTC, 1 policies" in output
    assert "MB/s" in output


def test_json_is_complete_and_its_fields_are_the_documented_ones(world: World) -> None:
    report = world.verify_json()
    signed = world.source.signed(3)
    assert report["policy"] == {
        "policy_version": 3,
        "manifest": signed.digest,
        "state_root": signed.manifest.state_root,
        "encodings": ["anchor"],
        "step": 2,
        "created_at_ms": 0,
        "signers": [TRAINER.key_id],
    }
    assert report["run"] == RUN.digest
    assert report["pinned"]
    assert report["policy_version"] == 3
    assert [check["number"] for check in report["checks"]] == list(range(1, 10))
    assert (report["against"], report["tensor"], report["export"]) == (None, None, None)
    help_text = typer.testing.CliRunner().invoke(main.app, ["verify", "--help"]).output
    assert all(name in help_text for name in report)


def test_an_earlier_policy_is_verified_and_tied_to_the_head(world: World) -> None:
    report = world.verify_json("--policy", "2")
    assert report["policy"]["policy_version"] == 2
    assert report["policy"]["state_root"] == root_of(weights_of(2))
    assert report["policy_version"] == 3
    assert report["num_policies"] == 3  # the anchor, and the two deltas on it
    assert "unbroken from policy 2 to policy 3" in report["checks"][3]["detail"]


@pytest.mark.parametrize("policy", ["0", "1", "2", "3"])
@pytest.mark.parametrize("chain", [[], ["--chain"]], ids=["alone", "chain"])
def test_any_policy_can_be_asked_for(world: World, policy: str, chain: list[str]) -> None:
    report = world.verify_json("--policy", policy, *chain)
    assert report["policy"]["state_root"] == root_of(weights_of(int(policy)))


def test_a_policy_that_is_not_published_does_not_hold(world: World) -> None:
    assert "the head is 3" in world.verify("--policy", "9", code=1)


def test_a_policy_that_the_head_does_not_descend_from_is_caught(world: World, tmp_path: Path) -> None:
    other = MemorySource(RUN)
    for seed in (0, 1, 9):  # policy 2 of another history, signed by the same trainer
        other.publish(weights_of(seed))
    world.source.manifests[2] = other.manifests[2]
    world.source.blobs |= other.blobs
    world.source.save(tmp_path / "mixed")
    world.folder = tmp_path / "mixed"
    report = world.verify_json("--policy", "2", code=1)
    assert report["checks"][-1]["number"] == 4
    world.verify()


def test_a_policy_whose_bytes_are_not_kept_does_not_hold_even_with_the_chain(world: World) -> None:
    digest = world.source.signed(1).manifest.encodings[0].parts[0].digest
    (world.folder / "blobs" / digest[:2] / digest).unlink()
    world.verify("--chain")
    world.verify("--chain", "--policy", "1", code=1)
    world.verify("--policy", "1", code=1)


def test_the_weights_of_a_policy_are_recognised(world: World, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "mine.safetensors", weights_of(2))
    output = world.verify("--policy", "2", "--against", tmp_path / "mine.safetensors")
    assert "equal: " in output
    assert "2 tensors, bit for bit" in output


def test_weights_of_another_policy_differ_with_place_and_amount(world: World, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "mine.safetensors", weights_of(2))
    output = world.verify("--against", tmp_path / "mine.safetensors", code=1)
    assert "NOT equal: 2 tensors" in output
    assert "large: 1,200 of 600,000 elements differ" in output
    fields = world.verify_json("--against", tmp_path / "mine.safetensors", code=1)["against"]
    assert not fields["equal"]
    assert [item["tensor"] for item in fields["differences"]] == ["large", "table"]
    assert fields["differences"][0]["fault"] == "values"
    assert fields["differences"][0]["largest"] > 0


def test_nothing_is_exported_where_the_comparison_fails(world: World, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "mine.safetensors", weights_of(0))
    output = world.verify("--against", tmp_path / "mine.safetensors", "--export", tmp_path / "out", code=1)
    assert "exported: nothing" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("policy", [0, 2, 3])
@pytest.mark.parametrize("name", ["large", "table"])
def test_one_tensor_is_proven_with_no_more_than_its_own_bytes(world: World, policy: int, name: str) -> None:
    report = world.verify_json("--tensor", name, "--policy", str(policy))
    tensor = report["tensor"]
    assert tensor["digest"] == weights_of(policy)[name].digest
    assert (tensor["dtype"], tensor["shape"]) == ("bf16", list(weights_of(policy)[name].shape))
    assert tensor["index"] == list(weights_of(policy)).index(name)
    assert tensor["manifest"] == world.source.signed(policy).digest
    assert [check["number"] for check in report["checks"]] == [1, 2, 3, 4, 6, 7, 9]
    path = [world.source.signed(version).manifest for version in (range(policy % 3 + 1) if policy < 3 else [3])]
    update_paths = [(manifest, manifest.encodings[0]) for manifest in path]
    tables = [open_index(world.source.blobs[way.index.digest], way, manifest.tensors) for manifest, way in update_paths]
    chunks = [table[number] for table in tables for number in range(len(table))]
    own = sum(chunk.size for chunk in chunks if chunk.tensor == tensor["index"])
    indices = sum(way.index.size for _, way in update_paths)
    assert tensor["num_bytes"] == own + indices < sum(way.sent_bytes for _, way in update_paths)
    assert tensor["num_policies"] == len(path)


def test_a_tensor_is_proven_although_another_ones_bytes_are_spoilt(world: World) -> None:
    part = world.source.signed(3).manifest.encodings[0].parts[0]
    world.flip(part.digest, at=100)
    world.verify(code=1)
    assert "verified: table" in world.verify("--tensor", "table")
    report = world.verify_json("--tensor", "large", code=1)
    assert report["tensor"] is None
    assert report["checks"][-1]["number"] == 6
    assert not report["checks"][-1]["passed"]


def test_a_tensor_that_decodes_to_another_one_is_caught(tmp_path: Path) -> None:
    source, other = MemorySource(RUN), weights_of(5)
    source.publish(weights_of(0), tensors=tensor_table(other), state_root=root_of(other))
    source.save(tmp_path / "public")
    report = World(tmp_path / "public", source).verify_json("--tensor", "table", code=1)
    assert report["checks"][-1]["number"] == 7


def test_a_tensor_that_the_policy_lacks_is_wrong_usage(world: World) -> None:
    assert "no tensor 'nothing'" in world.verify("--tensor", "nothing", code=2).replace("\n", " ")


def test_an_export_is_verified_against_its_run(world: World, tmp_path: Path) -> None:
    report = world.verify_json("--policy", "1", "--export", tmp_path / "out")
    assert report["export"]["path"] == str(tmp_path / "out")
    assert "model.safetensors" in report["export"]["files"]
    assert root_of(read_weights(tmp_path / "out")) == root_of(weights_of(1))
    world.verify("--policy", "1", "--against", tmp_path / "out")
    world.verify("--policy", "2", "--against", tmp_path / "out", code=1)


def test_an_export_is_signed_with_a_key_file(world: World, tmp_path: Path) -> None:
    signer = create_key(tmp_path / "mine.key")
    world.verify("--export", tmp_path / "out", "--sign", tmp_path / "mine.key")
    envelope = json.loads((tmp_path / "out" / "PROVENANCE.dsse.json").read_bytes())
    assert [item["keyid"] for item in envelope["signatures"]] == [signer.key_id]


def test_nothing_is_exported_from_a_publication_that_does_not_hold(world: World, tmp_path: Path) -> None:
    world.flip(world.source.signed(3).manifest.encodings[0].parts[0].digest, at=100)
    report = world.verify_json("--export", tmp_path / "out", code=1)
    assert report["checks"][-1]["number"] == 5
    assert report["policy"] is None
    assert not (tmp_path / "out").exists()


def test_a_swapped_tokenizer_is_never_exported(world: World, tmp_path: Path) -> None:
    world.flip(digest_of(b"{}"), at=0)
    report = world.verify_json("--export", tmp_path / "out", code=1)
    assert report["checks"][-1]["number"] == 8
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tensor", "table", "--chain"],
        ["--tensor", "table", "--export", "out"],
        ["--tensor", "table", "--against", "out"],
        ["--sign", "mine.key"],
        ["--policy", "-1"],
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(world: World, arguments: list[str]) -> None:
    world.verify(*arguments, code=2)


@pytest.mark.parametrize(
    "arguments", [["--against", "nothing"], ["--export", "."], ["--export", "out", "--sign", "no"]]
)
def test_this_machines_faults_have_their_own_code(
    world: World, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world.folder)
    monkeypatch.setattr(sys, "argv", ["prime-node", "verify", str(world.folder), *arguments])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    assert stopped.value.code == 3
    assert "ok " not in capsys.readouterr().out  # printed before anything was verified


def test_the_help_documents_every_exit_code() -> None:
    output = typer.testing.CliRunner().invoke(main.app, ["verify", "--help"]).output
    assert "Exit codes:" in output
    for code in ("0 ", "1 ", "2 ", "3 ", "130 "):
        assert f"\n   {code}" in output or f"\n    {code}" in output


class Seeder(BaseHTTPRequestHandler):
    """Server of the published folder `folder` under a coordinator's addresses, byte ranges included."""

    folder: Path

    def do_GET(self) -> None:
        match self.path.partition("?")[0].split("/")[1:]:
            case ["v1", "run"]:
                data = (self.folder / "run.json").read_bytes()
            case ["v1", "head"]:
                data = (self.folder / "head.json").read_bytes()
            case ["v1", "manifests", version]:
                data = (self.folder / f"manifests/{int(version):08d}.json").read_bytes()
            case ["v1", "blobs", digest]:
                data = (self.folder / "blobs" / digest[:2] / digest).read_bytes()
            case ["v1", "timestamp"] if (self.folder / "timestamp.json").exists():
                data = (self.folder / "timestamp.json").read_bytes()
            case ["v1", "keys", _] | ["v1", "timestamp"]:
                self.send_error(404)
                return
            case _:
                raise AssertionError(self.path)
        first, _, last = self.headers.get("Range", "bytes=-").removeprefix("bytes=").partition("-")
        piece = data[int(first) : int(last) + 1] if last else data
        self.send_response(206 if last else 200)
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        self.wfile.write(piece)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the base class has it
        pass


@pytest.mark.parametrize(
    "arguments", [[], ["--chain"], ["--policy", "1"], ["--tensor", "large", "--policy", "2"]], ids=" ".join
)
def test_a_join_link_is_verified_over_the_network(world: World, arguments: list[str]) -> None:
    stale, _ = over_the_network(world, arguments)
    assert (stale["ok"], stale["checks"][-1]["number"]) == (False, 9)
    fresh = world.source.timestamp_of(world.source.shown_head)
    (world.folder / "timestamp.json").write_bytes(fresh.to_bytes())
    result, other = over_the_network(world, arguments)
    assert result["ok"], result
    assert result["pinned"]
    assert result["timestamp"]["policy_version"] == 3
    assert other["checks"][-1]["number"] == 1


def over_the_network(world: World, arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the output of --json under the run's link, and under another run's."""
    handler = type("Handler", (Seeder,), {"folder": world.folder})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            link = f"http://127.0.0.1:{server.server_port}/#{RUN.digest}"
            result = typer.testing.CliRunner().invoke(main.app, ["verify", link, "--json", *arguments])
            other = typer.testing.CliRunner().invoke(main.app, ["verify", link[:-4] + "0000", "--json", *arguments])
        finally:
            server.shutdown()
            serving.join()
    for one in (result, other):
        assert one.exit_code == (0 if json.loads(one.output)["ok"] else 1), one.output
    return json.loads(result.output), json.loads(other.output)


WITHOUT_TORCH = """
import sys
from prime_node.cli.main import main
sys.argv = ["prime-node", "verify", *sys.argv[1:]]
try:
    main()
finally:
    heavy = [name for name in ("torch", "transformers", "vllm", "aiohttp.web", "asyncpg") if name in sys.modules]
    print("imported:", heavy)
"""


def test_verify_compare_and_export_run_without_torch(world: World, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "mine.safetensors", weights_of(3))
    arguments = ["--chain", "--against", tmp_path / "mine.safetensors", "--export", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, world.folder, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "imported: []" in done.stdout


def test_two_manifests_of_one_policy_are_kept_as_evidence(world: World, tmp_path: Path) -> None:
    other = world.source.publish(weights_of(9), previous=world.source.signed(2))
    for blob in other.manifest.blobs:
        path = world.folder / "blobs" / blob.digest[:2] / blob.digest
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(world.source.blobs[blob.digest])
    (world.folder / "head.json").write_bytes(other.envelope.to_bytes())
    output = world.verify("--evidence", tmp_path / "kept", code=1)
    assert "FAIL (4) chain: two signed manifests for policy 3" in output
    kept = [open_envelope(path.read_bytes()) for path in (tmp_path / "kept").iterdir()]
    assert len({envelope.digest for envelope in kept}) == 2
    for envelope in kept:
        assert open_manifest(envelope, RUN).manifest.policy_version == 3
