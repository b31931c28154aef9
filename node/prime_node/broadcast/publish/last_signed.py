"""The manifest that this trainer signed last, on its own disk before it is sent.

Two signed manifests of one policy are a fork: every follower that saw the first one refuses the second permanently. The same
policy signed a second time is one too, since the date differs. There are two ways to it:

- the trainer ends before the coordinator has answered, while peers have the manifest already. So the next start sends the
  same manifest again;
- the coordinator was restored from an older copy, and knows less than the followers do. So the trainer compares, and stops
  before anything is signed or deleted.
"""

from __future__ import annotations

from pathlib import Path

from prime_node.files import write_durably
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, open_envelope, parse_json
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.manifest import Manifest, SignedManifest


class LastSigned:
    """The file `signed.json` in the trainer's folder: the digest of an envelope, and the envelope."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "signed.json"

    def note(self, signed: SignedManifest) -> None:
        """Record a manifest, before it is sent. Durable when it returns."""
        data = signed.envelope.to_bytes()
        write_durably(self._file, digest_of(data).encode() + b"\n" + data)

    def unanswered(self, head: SignedManifest | None, *, run: str) -> Envelope | None:
        """Return the last manifest if it follows the coordinator's head, so that the coordinator does not have it; else None.

        Raises LocalError if the head is neither its predecessor, nor the same, nor a later one.
        """
        found = self._read()
        if found is None:
            return None
        envelope, last = found
        version = -1 if head is None else head.manifest.policy_version
        if last.run == run:
            if last.policy_version == version + 1 and last.previous == (None if head is None else head.digest):
                return envelope
            if version > last.policy_version or (head is not None and head.digest == envelope.digest):
                return None
        raise LocalError(
            f"the coordinator's newest policy is {version}, but this trainer has signed policy {last.policy_version} of run "
            f"{last.run[:12]} ({self._file}). Was the coordinator restored from an older copy, or is this another run's "
            f"folder? Nothing was changed. To continue would sign a second policy {version + 1}, which workers reject as a "
            "fork; docs/operating.md says what to do"
        )

    def _read(self) -> tuple[Envelope, Manifest] | None:
        try:
            digest, _, data = self._file.read_bytes().partition(b"\n")
            if digest_of(data).encode() != digest:
                raise ValueError("it is not what was written")
            envelope = open_envelope(data)
            return envelope, parse_json(envelope.payload, Manifest)
        except FileNotFoundError:
            return None
        except (ValueError, RemoteError):
            raise LocalError(
                f"{self._file} is damaged: restore it from a copy, or delete it if the coordinator was not restored and has "
                "all policies that its workers have"
            ) from None
