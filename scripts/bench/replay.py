"""Re-execution of the demo by a stranger: is every step exact from a mirror, is each fault found, what does it cost?

    .venv/bin/python scripts/bench/replay.py --quick           12 steps of a small demo; 8 steps re-executed
    .venv/bin/python scripts/bench/replay.py                   all 400 steps of the demo, each re-executed
    .venv/bin/python scripts/bench/replay.py --run DIR         a run of the demo that has ended already

The mirror is a copy of the published folder, without keys and without the trainer's folder. For each fault the mirror is changed
as an operator could who has all keys: the changed batch or manifest is signed again. The ledger is read from the run's folder,
in order and with two lines exchanged. Commitments: their seconds relative to all seconds of the trainer's steps, in the run; and
for SmolLM2-135M (`scripts/models.py smollm2`, built on first use) in this process, in processor seconds, relative to the
trainer's own work on a batch of configs/smollm2.toml. `--costs` measures costs alone. On a busy machine rewards take most of
the time: the environments are another process (`--rewards-of`).
`--json` prints the checks alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from checks import Check, Output, at_least, at_most

from prime_node.cli.ledger import open_ledger
from prime_node.cli.replay_target import ReplayOptions, replay_target
from prime_node.cli.run_dir import RunDir
from prime_node.envs.settings import EnvironmentSettings
from prime_node.keyfile import load_key
from prime_node.observe import read_json_lines
from prime_node.replay.checks import audited_receipts
from prime_node.replay.finding import ReplayReport
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, seal

SMALL = ("run.max_steps=12", "run.groups_per_step=12", "run.replay.state_every=4", "trainer.sft.steps_max=120")
BOTH = ("up.port=0", "up.replay_steps=0", "up.num_workers=2", "up.unsafe_cheaters={}", "trainer.evaluate_every=0")
REAL_EVERY = 10
REAL_GROUPS, REAL_ROLLOUTS, REAL_PROMPT, REAL_COMPLETION = 16, 8, 50, 12
"""A batch of configs/smollm2.toml, with the most tokens."""
COMMITMENT_SHARE_MAX = 0.01
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true")
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--run", type=Path)
    arguments.add_argument("--costs", action="store_true")
    arguments.add_argument("--rewards-of", type=int, metavar="N", help="compute only N drawn steps' rewards again")
    given = arguments.parse_args()
    output = Output(as_json=given.json)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        run = given.run or trained(Path(folder) / "run", quick=given.quick)
        if given.costs:
            shutil.copytree(RunDir(run).public, Path(folder) / "mirror")
            return output.finish(costs(run, Path(folder)))
        return output.finish(asyncio.run(checks(run, Path(folder), quick=given.quick, rewards_of=given.rewards_of)))


def trained(folder: Path, *, quick: bool) -> Path:
    """Train the demo to its end."""
    command = [sys.executable, "-m", "prime_node", "up", str(folder)]
    for assignment in (*BOTH, *(SMALL if quick else ())):
        command += ["--set", assignment]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


async def checks(run: Path, folder: Path, *, quick: bool, rewards_of: int | None) -> list[Check]:
    mirror, digest = folder / "mirror", RunDir(run).join_link().run
    shutil.copytree(RunDir(run).public, mirror)
    head = json.loads(open_envelope((mirror / "head.json").read_bytes()).payload)["policy_version"]
    steps = tuple(range(min(head, 8) if quick else head))
    began_s = time.perf_counter()
    report = await replayed(mirror, digest, steps=steps, genesis=True, rewards=rewards_of is None)
    exact = sum(one.outcome == "exact" for one in report.steps)
    print(f"{exact} of {len(report.steps)} exact, {(time.perf_counter() - began_s) / len(report.steps):.2f} s each")
    found = [at_least("steps exact from a mirror, policy 0 included, share", exact / (len(steps) + 1), 1.0)]
    if rewards_of is not None:
        drawn = await replayed(mirror, digest, sample=rewards_of, batches_only=True)
        share = sum(one.outcome == "exact" for one in drawn.steps) / rewards_of
        found.append(at_least("drawn steps whose rewards follow, share", share, 1.0))
    cheats = Cheats(run, mirror, digest, step=next(step for step in steps if cheatable(mirror, step)))
    for name, change, expected in (
        ("changed reward", cheats.change_reward, 9),
        ("dropped group", cheats.drop_group, 10),
        ("learning rate + 0.1 %", cheats.raise_rate, 11),
        ("foreign state", cheats.exchange_state, 12),
        ("withheld bundle", cheats.withhold_bundle, 8),
    ):
        code = await cheats.code_after(change)
        print(f"{name}: exit code {code}, expected {expected}")
        found.append(at_least(f"{name}: found, with exit code {expected}", float(code == expected), 1.0))
    found.append(at_least("reordered ledger: found, and none in the true order", await reordered(run, digest), 1.0))
    return [*found, *await asyncio.to_thread(costs, run, folder)]


def costs(run: Path, folder: Path) -> list[Check]:
    mirror = folder / "mirror"
    rows = [row for row in read_json_lines(run / "trainer" / "metrics.jsonl") if "commit_seconds" in row]
    share = sum(row["commit_seconds"] for row in rows) / sum(row["step_seconds"] for row in rows)
    commit_s, step_s = real_seconds(folder / "state")
    return [
        at_most("commitments, share of the demo's steps", share, COMMITMENT_SHARE_MAX),
        at_most(
            f"commitments every {REAL_EVERY} steps, share of SmolLM2-135M's training alone",
            commit_s / (REAL_EVERY * step_s + commit_s),
            COMMITMENT_SHARE_MAX,
        ),
        at_most("bytes of a training state, a parameter", state_bytes(mirror) / parameters(mirror), 12.01),
    ]


async def replayed(target: Path, run: str, **options: Any) -> ReplayReport:
    return await replay_target(str(target), ReplayOptions(run=run, ledger=False, **options), EnvironmentSettings())


def cheatable(mirror: Path, step: int) -> bool:
    """Return whether a step has a group whose rewards differ, so that its batch moves the weights."""
    return step > 0 and any(len(set(group["rewards"])) > 1 for group in _payload(_batch(mirror, step))["groups"])


class Cheats:
    """Changes of one step in a mirror, by an operator with all keys. The mirror is put back after each."""

    def __init__(self, run: Path, mirror: Path, digest: str, *, step: int) -> None:
        self._mirror, self._digest, self._step = mirror, digest, step
        self._coordinator, self._trainer = (load_key(RunDir(run).key(role)) for role in ("coordinator", "trainer"))
        self._batch, self._manifest = _batch(mirror, step), mirror / "manifests" / f"{step + 1:08d}.json"

    async def code_after(self, change: Callable[[], None]) -> int:
        """Return the exit code for the changed step."""
        kept = self._mirror.with_name("kept")
        shutil.copytree(self._mirror, kept)
        try:
            change()
            report = await replayed(self._mirror, self._digest, steps=(self._step,))
            return report.exit_code
        finally:
            shutil.rmtree(self._mirror)
            kept.rename(self._mirror)

    def change_reward(self) -> None:
        """Exchange two rewards of a group, which its advantages show."""
        payload = _payload(self._batch)
        rewards = next(group["rewards"] for group in payload["groups"] if len(set(group["rewards"])) > 1)
        low, high = rewards.index(min(rewards)), rewards.index(max(rewards))
        rewards[low], rewards[high] = rewards[high], rewards[low]
        self._sign_batch(payload)

    def drop_group(self) -> None:
        """Leave out a group that moves the weights."""
        payload = _payload(self._batch)
        payload["groups"].remove(next(group for group in payload["groups"] if len(set(group["rewards"])) > 1))
        self._sign_batch(payload)

    def raise_rate(self) -> None:
        """State another learning rate than the one that was used."""
        manifest = _payload(self._manifest)
        manifest["produced_by"]["lr"] *= 1.001
        self._sign_manifest(self._manifest, manifest)

    def exchange_state(self) -> None:
        """Commit, before the step, to a state whose first master is another one."""
        path, manifest = self._state_before()
        index = json.loads(self._blob(manifest["produced_by"]["training_state"]).read_bytes())
        first = bytearray(self._blob(index["parts"][0]["digest"]).read_bytes())
        first[3] ^= 0x40
        index["parts"][0]["digest"] = self._store(bytes(first))
        manifest["produced_by"]["training_state"] = self._store(json.dumps(index).encode())
        self._sign_manifest(path, manifest)
        for later in range(manifest["policy_version"] + 1, self._step + 2):  # each names the one before it
            path, previous = self._mirror / "manifests" / f"{later:08d}.json", open_envelope(path.read_bytes())
            self._sign_manifest(path, _payload(path) | {"previous": previous.digest})

    def withhold_bundle(self) -> None:
        """Delete a bundle."""
        self._blob(_payload(self._batch)["groups"][0]["bundle"]).unlink()

    def _state_before(self) -> tuple[Path, dict[str, Any]]:
        for version in range(self._step, -1, -1):
            path = self._mirror / "manifests" / f"{version:08d}.json"
            if (manifest := _payload(path))["produced_by"].get("training_state"):
                return path, manifest
        raise AssertionError("policy 0 has a training state")

    def _sign_batch(self, payload: dict[str, Any]) -> None:
        signed = seal(json.dumps(payload).encode(), PayloadType.BATCH, self._coordinator)
        self._batch.write_bytes(signed.to_bytes())
        manifest = _payload(self._manifest)
        manifest["produced_by"]["batch"] = signed.digest
        self._sign_manifest(self._manifest, manifest)

    def _sign_manifest(self, path: Path, manifest: dict[str, Any]) -> None:
        path.write_bytes(seal(json.dumps(manifest).encode(), PayloadType.MANIFEST, self._trainer).to_bytes())

    def _store(self, data: bytes) -> str:
        path = self._blob(digest_of(data))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return path.name

    def _blob(self, digest: str) -> Path:
        return self._mirror / "blobs" / digest[:2] / digest


async def reordered(run: Path, digest: str) -> float:
    """Return 1 if a ledger with two exchanged lines has faults, and the true one has none."""

    class Exchanged:
        """A ledger whose second and third line change places, if there are faults to be found."""

        def __init__(self, lines: list[bytes], head: Envelope) -> None:
            self._lines, self._head = lines, head

        async def ledger_head(self) -> Envelope:
            return self._head

        async def ledger(self, start: int) -> list[bytes]:
            return self._lines[start:]

    async with open_ledger(str(run), digest) as opened:
        head, lines = await opened.source.ledger_head(), list[bytes]()
        while page := await opened.source.ledger(len(lines)):
            lines += page
    pinned = RunDir(run).load_run()
    _, none = await audited_receipts(Exchanged(lines, head), pinned)
    _, faults = await audited_receipts(Exchanged([lines[0], lines[2], lines[1], *lines[3:]], head), pinned)
    return float(bool(faults) and not none)


def real_seconds(path: Path) -> tuple[float, float]:
    """Return the processor seconds of one commitment to SmolLM2-135M and of one training step, each the least of some."""
    from prime_node.adapters.models.pretrained_model import pretrained_weights
    from prime_node.adapters.training.torch_backend import TorchBackend
    from prime_node.algo.losses import find_loss
    from prime_node.ports.train_samples import TrainSample

    built = subprocess.run(
        [sys.executable, ROOT / "scripts" / "models.py", "smollm2"], stdout=subprocess.PIPE, text=True
    )
    model = Path(built.stdout.strip())
    backend = TorchBackend(model, pretrained_weights(str(model)), threads=1, row_tokens=160, micro_batch_tokens=640)
    samples = [
        TrainSample(
            tuple(range(100 + group, 100 + group + REAL_PROMPT)),
            tuple(range(1_000 * (rollout + 1), 1_000 * (rollout + 1) + REAL_COMPLETION)),
            (-5.0,) * REAL_COMPLETION,
            1.0 if rollout % 2 else -1.0,
        )
        for group in range(REAL_GROUPS)
        for rollout in range(REAL_ROLLOUTS)
    ]

    def least_s(times: int, call: Callable[[], object]) -> float:
        seconds = []
        for _ in range(times):
            began_s = time.process_time()
            call()
            seconds.append(time.process_time() - began_s)
        return min(seconds)

    step_s = least_s(2, lambda: backend.train_step(samples, find_loss("aipo"), lr=1e-6))
    commit_s = least_s(3, lambda: backend.commit(path))
    print(
        f"SmolLM2: a step takes {step_s:.1f} s, a commitment of {path.stat().st_size / 2**20:.0f} MiB {commit_s:.2f} s"
    )
    path.unlink()
    return commit_s, step_s


def state_bytes(mirror: Path) -> int:
    """Return the size of the newest training state."""
    for path in sorted((mirror / "manifests").iterdir(), reverse=True):
        if digest := _payload(path)["produced_by"].get("training_state"):
            index = json.loads((mirror / "blobs" / digest[:2] / digest).read_bytes())
            return sum(part["size"] for part in index["parts"])
    raise AssertionError("policy 0 has a training state")


def parameters(mirror: Path) -> int:
    """Return the number of a policy's weights."""
    sizes = []
    for tensor in _payload(mirror / "head.json")["tensors"]:
        count = 1
        for length in tensor["shape"]:
            count *= length
        sizes.append(count)
    return sum(sizes)


def _batch(mirror: Path, step: int) -> Path:
    return mirror / "batches" / f"{step:08d}-0000.json"


def _payload(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(open_envelope(path.read_bytes()).payload)
    return found


if __name__ == "__main__":
    sys.exit(main())
