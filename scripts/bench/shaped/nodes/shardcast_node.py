"""shardcast 0.3.2 as it is shipped: the first `relays` receivers are its middle nodes, the others its clients. Options: relays.

Every process runs its own copy of the package, because a client writes its notes into the package's folder. A client starts when
every relay lists the version: a relay that does not would make it recurse endlessly.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from marks import description, mark, wait_for_go


def own_copy() -> Any:
    found = importlib.util.find_spec("shardcast")
    assert found
    assert found.origin
    shutil.copytree(Path(found.origin).parent, "package/shardcast")
    sys.path.insert(0, str(Path("package").resolve()))
    import shardcast

    return shardcast


def prepare_folder() -> None:
    """Make the folder whose file it uses to measure bandwidth."""
    Path("data").mkdir()
    Path("data/data1.bin").write_bytes(b"x" * 1_000_000)


def serve(node: SimpleNamespace, shardcast: Any) -> None:
    prepare_folder()
    shardcast.initialize("data", node.port)
    mark("ready")
    wait_for_go(node)
    shardcast.broadcast(node.file)
    while True:
        time.sleep(1)


def relay(node: SimpleNamespace, shardcast: Any) -> None:
    prepare_folder()
    middle = shardcast.MiddleNode([f"http://{node.origin}:{node.port}"], "data", node.port, check_interval=1)
    mark("ready")
    wait_for_go(node)
    while "v1" not in middle.processed_versions:
        time.sleep(0.02)
    with Path(node.out).open("wb") as whole:
        whole.writelines(shard.read_bytes() for shard in sorted(Path("data/v1").glob("shard_*.bin")))
    finish(node)
    while True:
        time.sleep(1)


def client(node: SimpleNamespace, shardcast: Any) -> None:
    servers = node.receivers[: node.options["relays"]] or [node.origin]
    urls = [f"http://{address}:{node.port}" for address in servers]
    while True:
        try:
            reader = shardcast.ClientNode(urls, "downloads")
            break
        except Exception as error:  # noqa: BLE001 - it raises nothing narrower
            print("a relay is not up yet:", error, flush=True)
            time.sleep(0.2)
    mark("ready")
    wait_for_go(node)
    while not all(lists_version(url) for url in urls):
        time.sleep(0.1)
    path = None
    while not path:
        path = reader.download_version("v1", node.out)
    if Path(path) != Path(node.out):
        shutil.move(path, node.out)
    finish(node)


def lists_version(url: str) -> bool:
    try:
        return b"v1:" in urllib.request.urlopen(f"{url}/distribution.txt", timeout=5).read()
    except OSError:
        return False


def finish(node: SimpleNamespace) -> None:
    assert hashlib.sha256(Path(node.out).read_bytes()).hexdigest() == node.digest
    mark("done")


if __name__ == "__main__":
    node = description()
    package = own_copy()
    if node.role == "origin":
        serve(node, package)
    elif node.index <= node.options["relays"]:
        relay(node, package)
    else:
        client(node, package)
