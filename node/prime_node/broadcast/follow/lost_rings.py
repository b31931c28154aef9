"""Key rings that this machine knew and has lost: a file that rotted or went missing must not put former keys back in force.

Two traces of a lost ring remain in the folder: the name of its file, and a timestamp whose signer no known ring names. Both were
written after the ring was verified.
"""

from __future__ import annotations

from pathlib import Path

from prime_node.files import read_or_begin
from prime_protocol import limits
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json
from prime_protocol.errors import RemoteError
from prime_protocol.key_ring import KeyRing, Role
from prime_protocol.run_spec import PinnedRun
from prime_protocol.timestamp import Timestamp


def newest_ring_kept(folder: Path, run: PinnedRun) -> int:
    """Return the highest version of which the folder has a file, also a damaged one; 0 if there is none.

    Whole key rings of another run, which used the folder before, do not count. Raises OSError.
    """
    kept = {path: int(path.name[:4]) for path in folder.glob("[0-9][0-9][0-9][0-9].json*")}  # one may be NAME.damaged
    known = (path for path, version in kept.items() if version <= limits.KEY_RINGS_MAX)
    return max((kept[path] for path in known if not _is_of_other_run(read_or_begin(path), run)), default=0)


def _is_of_other_run(data: bytes, run: PinnedRun) -> bool:
    try:
        return parse_json(open_envelope(data).payload, KeyRing).run != run.digest
    except RemoteError:
        return False


def is_by_unknown_key(envelope: Envelope, run: PinnedRun) -> bool:
    """Return whether an undamaged timestamp of the run is signed by a key that no known ring names as a coordinator's."""
    try:
        signer = envelope.sole_signer()
        stamp = parse_json(envelope.verify(PayloadType.TIMESTAMP, trusted=(signer,)), Timestamp)
    except RemoteError:
        return False
    return stamp.run == run.digest and signer not in run.keys.ever(Role.COORDINATOR)
