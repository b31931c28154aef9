"""Time from the command `prime-node join` to "joined", with a real coordinator on this machine.

    python scripts/bench/joining.py [--quick] [--json] [--joins 5]

Each worker has a new folder and a new key, and uses the transformers engine. The processor time is that of the worker's own
process. The wall time depends on what else the machine does, so the processor time has a bar too.
"""

from __future__ import annotations

import argparse
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from checks import Check, Output, at_most
from processes import processor_s

ROOT = Path(__file__).resolve().parents[2]
NODE = [sys.executable, "-m", "prime_node"]
JOINED = "joined; the engine is loading"
JOINED_S_MAX = 2.5


def joins(number: int, folder: Path) -> list[tuple[float, float]]:
    """Return seconds and processor seconds until each worker had joined."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    run = folder / "run"
    new = ["new", str(run), "--config", str(ROOT / "configs/demo.toml"), "--url", f"http://127.0.0.1:{port}"]
    subprocess.run([*NODE, *new], check=True, stdout=sys.stderr)
    link = (run / "join-link").read_text().strip()
    serve = ["coordinator", str(run), "--set", f"coordinator.port={port}"]
    coordinator = subprocess.Popen([*NODE, *serve], stderr=subprocess.PIPE, text=True)
    try:
        wait_for("serving run", coordinator)
        return [timed(link, folder / f"worker-{place}") for place in range(number)]
    finally:
        end(coordinator)


def timed(link: str, folder: Path) -> tuple[float, float]:
    """Return seconds and processor seconds until one worker had joined."""
    began_s = time.monotonic()
    join = ["join", link, "--folder", str(folder), "--engine", "transformers"]
    worker = subprocess.Popen([*NODE, *join], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(JOINED, worker)
        return time.monotonic() - began_s, processor_s(worker.pid)
    finally:
        end(worker)


def wait_for(text: str, process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return
    raise SystemExit(f"the process ended before it said {text!r}:\n{''.join(lines)}")


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three workers")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON on stdout, and nothing else")
    parser.add_argument("--joins", type=int, default=5, help="workers, one after the other")
    options = parser.parse_args()
    output = Output(as_json=options.json)
    with tempfile.TemporaryDirectory() as folder:
        # The first one may compile kernels and reads every file from the disk.
        _, *found = joins(1 + (3 if options.quick else options.joins), Path(folder))
    walls, processors = zip(*found, strict=True)
    for wall_s, busy_s in found:
        print(f"joined after {wall_s:.2f} s, {busy_s:.2f} s of processor time", file=sys.stderr)
    checks: list[Check] = [
        at_most("processor seconds from the command to joined, middle", statistics.median(processors), JOINED_S_MAX),
    ]
    if not options.quick:
        checks.append(at_most("seconds from the command to joined, middle", statistics.median(walls), JOINED_S_MAX))
    return output.finish(checks)


if __name__ == "__main__":
    sys.exit(main())
