"""The folder of a run: which role stores what, and where.

config.toml        the settings that the run was made with
overrides          the --set assignments for it, one per line
run.json           the signed RunSpec
join-link          the link that contributors need (the digest in it is the trust root)
keys/ROLE.key      private keys, mode 0600; ROLE-N.key one for key ring N, ROLE-until-N.key one from before it
key-ring-N.json    a request for key ring N
model/             configuration and tokenizer
coordinator/       state, bundles, and public/ (what anyone may download)
trainer/ validator/ worker-N/
logs/ROLE.log
operate.sock       the operator's page, while it is served on a socket
curve.png summary.json
"""

from __future__ import annotations

from pathlib import Path

from prime_node.inside import read_regular
from prime_node.ports.documents import RUN_NAME
from prime_protocol import limits
from prime_protocol.envelope import open_envelope
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.run_spec import JoinLink, PinnedRun, open_run_spec

SECRET = "assignment.secret"
"""File name of the assignment secret in the coordinator's folder."""
ARCHIVED = "archived"
"""Folder in the coordinator's for the bundles that only auditors may read."""
STATE = "state.sqlite"
"""File name of the coordinator's state in its folder."""


class RunDir:
    """Paths of one run. Example: RunDir(Path("runs/demo"))."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        """Settings that the run was made with."""
        self.overrides_file = path / "overrides"
        """File of the `--set` assignments that the run was made with."""
        self.run_spec = path / RUN_NAME
        """File of the signed RunSpec."""
        self.join_link_file = path / "join-link"
        """File of the join link for contributors."""
        self.operate_socket = path / "operate.sock"
        """Socket of the operator's page, while `prime-node operate open --socket` serves it."""
        self.model = path / "model"
        """Folder of the model's configuration and tokenizer."""
        self.coordinator = path / "coordinator"
        """Folder of the coordinator's state and bundles."""
        self.assignment_secret = self.coordinator / SECRET
        """Secret from which problems and seeds are derived. It outlives the coordinator's keys."""
        self.public = self.coordinator / "public"
        """Folder that the coordinator publishes, in the layout that `prime-node verify DIR` reads."""
        self.archived = self.coordinator / ARCHIVED
        """Folder of the bundles that the coordinator keeps for auditors."""
        self.trainer = path / "trainer"
        self.trainer_metrics = self.trainer / "metrics.jsonl"
        """File of the trainer's metrics: one JSON row per step and per policy."""
        self.validator = path / "validator"

    def overrides(self) -> list[str]:
        """Return the `--set` assignments that the run was made with."""
        return (
            _read(self.overrides_file).decode("utf-8", "replace").splitlines() if self.overrides_file.exists() else []
        )

    def worker(self, number: int) -> Path:
        """Return the folder of worker `number` on this machine."""
        return self.path / f"worker-{number}"

    def log(self, role: str) -> Path:
        """Return the log file of a role."""
        return self.path / "logs" / f"{role}.log"

    def key(self, role: str) -> Path:
        """Return the private key file of a role."""
        return self.path / "keys" / f"{role}.key"

    def next_key(self, role: str, ring: int) -> Path:
        """Return the path of a key made for a key ring that is not in force yet."""
        return self.path / "keys" / f"{role}-{ring}.key"

    @property
    def exists(self) -> bool:
        """Whether the run has been made; the RunSpec is written last."""
        try:
            return self.run_spec.exists()
        except OSError:  # the name is too long for a path
            return False

    def join_link(self) -> JoinLink:
        """Read the join link. Raises LocalError if it is not written yet, or damaged."""
        if not self.join_link_file.exists():
            raise LocalError(
                f"{self.path} has no join link yet; `prime-node coordinator {self.path}` or `up` writes it"
            )
        try:
            return JoinLink.parse(_read(self.join_link_file).decode("utf-8", "replace"))
        except ValueError as error:
            raise LocalError(f"{self.join_link_file} is damaged ({error}): put back a copy of it") from None

    def load_run(self) -> PinnedRun:
        """Read this folder's RunSpec, which is its own trust root. Raises LocalError if there is none, or a damaged one."""
        if not self.exists:
            raise LocalError(f"{self.path} holds no run: no run.json. `prime-node new {self.path}` makes one")
        try:
            envelope = open_envelope(_read(self.run_spec))
            return open_run_spec(envelope, pinned=envelope.digest)
        except RemoteError as error:
            raise LocalError(f"{self.run_spec} is damaged ({error}): put back a copy of it") from None


def _read(path: Path) -> bytes:
    """Return the content of a file in a folder that may come from others. Raises LocalError for a device, a pipe or too much."""
    try:
        return read_regular(path.resolve(), bytes_max=limits.ENVELOPE_BYTES_MAX)
    except OSError as error:
        raise LocalError(f"{path} cannot be read: {error.strerror}; put back a copy of it") from None
