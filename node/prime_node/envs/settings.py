"""Settings of environments' processes: the [environments] table, which every role reads on its own machine.

Invariant: these settings alone decide what an environment's code may read, use or reach. A RunSpec names environments
and their options; nothing in it widens a grant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from prime_node.config import Settings, SettingsConfigDict


def _absolute(path: Path) -> Path:
    found = path.expanduser()
    if not found.is_absolute():
        raise ValueError(f'{path} is relative; write an absolute path, or one that begins with "~/"')
    return found


Folder = Annotated[Path, AfterValidator(_absolute)]


class EnvironmentSettings(Settings):
    """Limits and grants for environments' processes on this machine."""

    model_config = SettingsConfigDict(env_prefix="PRIME_ENVIRONMENTS_")
    section: ClassVar[str] = "environments"

    data_folder: Folder | None = None
    """Folder of this machine's datasets. A run's `options.path` is relative to it, and no other local file is opened.
    None refuses runs that name a local file."""
    code_folder: Folder | None = None
    """Folder of a run's own Python code (`options.reward`, `options.environment`), which environments' code may read. None
    refuses runs that name such code."""
    readable: tuple[Folder, ...] = ()
    """Further files and folders that environments' code may read, for example a dataset in the hub's cache."""
    unsafe_network: tuple[str, ...] = ()
    """Environments whose code may use the network, and gets the PRIME_ENVIRONMENT_ variables, each as NAME@DIGEST. All others
    have no network. The digest is of the environment's `id` and `options`, because a run may give any environment a name that is
    listed here; the name alone is refused, with what to write."""
    unsafe_answers_as_code: tuple[str, ...] = ()
    """Environments whose scorers may run a worker's answer as code, each as NAME@DIGEST. Others with such a scorer are
    refused."""
    unsafe_grade_together: bool = False
    """Whether answers are graded in the environments' own process. It saves milliseconds for each, and lets an answer that
    gains control of its scorer decide the rewards of others."""
    hub_file_bytes_max: int = Field(default=4 * 2**30, ge=0)
    """Maximum bytes of one dataset file that is fetched from the hub because a run names it. 0 fetches none."""
    memory_bytes_max: int = Field(default=8 * 2**30, ge=2**28)
    """Bytes of private memory of each process of environments."""
    processes_max: int = Field(default=2_048, ge=16)
    """Processes and threads of a run's environments together."""
    tmp_bytes_max: int = Field(default=2**30, ge=2**20)
    """Bytes that environments' code may keep in its own /tmp, and in its own /dev/shm. Both are memory."""
    file_bytes_max: int = Field(default=2**30, ge=2**20)
    """Bytes of one file that environments' code writes."""
    open_files_max: int = Field(default=1_024, ge=64)
    """Open files and sockets of each process of environments."""
