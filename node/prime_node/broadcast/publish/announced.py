"""The policy that this trainer announced last, on its own disk.

A coordinator that was restored from an older copy knows less than the workers do. A trainer that followed it would sign a
second policy under a used number: a fork, which every worker that saw the first refuses, and evidence against the trainer's
own key. So the trainer compares, and stops before anything is signed or deleted.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from prime_node.files import write_durably
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.manifest import SignedManifest


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    policy_version: int
    manifest: str
    """Digest of the manifest."""
    digest: str | None = None
    """Digest of these fields; None in a record of an earlier release."""

    def digest_of_fields(self) -> str:
        """Return the digest that an undamaged record has."""
        return digest_of(f"{self.run} {self.policy_version} {self.manifest}".encode())


class Announced:
    """A one-line file, `announced.json`, in the trainer's folder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "announced.json"

    def note(self, signed: SignedManifest) -> None:
        """Record a manifest that the coordinator has accepted. Durable when it returns."""
        manifest = signed.manifest
        record = _Record(run=manifest.run, policy_version=manifest.policy_version, manifest=signed.digest)
        whole = record.model_copy(update={"digest": record.digest_of_fields()})
        write_durably(self._file, whole.model_dump_json().encode())

    def check(self, head: SignedManifest | None) -> None:
        """Compare the coordinator's head with the last announced one.

        Raises LocalError if the head is not that one, or a later one.
        """
        try:
            record = _Record.model_validate_json(self._file.read_bytes())
            if record.digest not in (None, record.digest_of_fields()):
                raise ValueError("a flipped bit")
        except FileNotFoundError:
            return
        except ValueError:  # ValidationError is one
            raise LocalError(
                f"{self._file} is damaged: restore it from a copy, or delete it if the coordinator was not restored"
            ) from None
        version = -1 if head is None else head.manifest.policy_version
        is_known = head is not None and (version > record.policy_version or head.digest == record.manifest)
        if is_known and head is not None and head.manifest.run == record.run:
            return
        raise LocalError(
            f"the coordinator's newest policy is {version}, but this trainer has announced policy "
            f"{record.policy_version} of run {record.run[:12]} ({self._file}). Was the coordinator restored from an "
            "older copy, or is this another run's folder? Nothing was changed. To continue would sign a second policy "
            f"{version + 1}, which workers reject as a fork; docs/operating.md says what to do"
        )
