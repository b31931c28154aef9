"""Rewards that the trainer itself found for a batch, kept for the steps that it computes again after a kill.

Greedy completions and grades may be others the second time: an engine on another machine, a judge, a grader that failed. With
them the policy would be another one than the published one. So the values of the first time are durable before a step uses
them, and a step that is computed again uses them. A file that is not as it was written is not used, and its values are found
again.

    rewards/00000012-1-greedy-0.json     step 12, batch 1 of the step, greedy completions of its first mini-batch
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_node.files import disk_fault, disk_faults, write_durably
from prime_node.inside import place
from prime_protocol.digest import digest_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardsKey:
    """What some rewards are of. Example: RewardsKey(12, 1, digest, "greedy-0", (96, 97))."""

    step: int
    part: int
    batch: str
    """Digest of the signed batch."""
    what: str
    slots: tuple[int, ...]
    """Slots of the groups, in the order of their rewards."""

    @property
    def file_name(self) -> str:
        """Return the name of their file."""
        return f"{self.step:08d}-{self.part}-{self.what}.json"


class KeptRewards:
    """Files in a folder. Several threads may use it, for different keys."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob("*.partial"):
            unfinished.unlink()
        self._folder = folder

    def read(self, key: RewardsKey) -> Any:
        """Return rewards as they were kept; None if there are none of these groups. Raises LocalError."""
        path = place(self._folder, key.file_name)
        try:
            digest, _, data = path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise disk_fault(error) from None
        if digest_of(data) != digest.decode("ascii", "replace"):
            log.warning("%s is damaged: its rewards are found again", path)
            return None
        found = json.loads(data)
        return found["rewards"] if (found["batch"], found["slots"]) == (key.batch, [*key.slots]) else None

    def keep(self, key: RewardsKey, rewards: Any) -> None:
        """Keep rewards durably, as JSON has them. Raises LocalError: a step whose rewards are lost might not be repeatable."""
        document = {"batch": key.batch, "slots": key.slots, "rewards": rewards}
        data = json.dumps(document, allow_nan=False).encode()
        path = place(self._folder, key.file_name)
        with disk_faults(path):
            write_durably(path, digest_of(data).encode() + b"\n" + data)

    def forget(self, durable_step: int) -> None:
        """Delete the rewards of the steps before `durable_step`. Idempotent."""
        for path in self._folder.glob("*.json"):
            if int(path.name.partition("-")[0]) < durable_step:
                path.unlink(missing_ok=True)
