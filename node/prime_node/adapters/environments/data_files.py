"""Finds the file that a RunSpec's `options.path` means, outside the environment process.

The path is untrusted. Two safeguards. The path must lead into the data folder in this machine's own settings, after following
symbolic links, or to a file of the hub. And the caller compares the digest in the RunSpec, so environments can read only files
whose content the run's author already knows.

Files on the Hugging Face hub are named by paths in the format of its own file system. They are fetched without this user's
token, and only up to a size limit. Files that the user has already fetched come from the cache.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from pathlib import Path

PREFIX = "hf://datasets/"
_NAME = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_PATH = re.compile(
    rf"hf://datasets/(?P<repo>{_NAME}/{_NAME})(@(?P<revision>{_NAME}))?/(?P<name>{_NAME}(/{_NAME})*)", re.ASCII
)


def cache_folder() -> Path:
    """Return the folder of files fetched from the hub. Tokens are next to it, not in it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def hub_file(path: str, *, bytes_max: int) -> Path:
    """Return a file such as "hf://datasets/openai/gsm8k@main/main/test-00000-of-00001.parquet", from the cache or else the hub.

    Raises OSError, and ValueError, also if it is not cached and has more than `bytes_max` bytes.
    """
    found = _PATH.fullmatch(path)
    if found is None:
        raise ValueError(
            f"{path!r}: write a dataset file as hf://datasets/OWNER/NAME[@REVISION]/FILE, without leading dots in names"
        )
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    repo, name, revision = found["repo"], found["name"], found["revision"] or "main"
    try:
        return Path(hf_hub_download(repo, name, repo_type="dataset", revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        pass
    try:
        url = hf_hub_url(repo, name, repo_type="dataset", revision=revision)
        size = get_hf_file_metadata(url, token=False).size
        if size is None or size > bytes_max:
            raise ValueError(
                f"{path} has {size} bytes, more than {bytes_max}: raise environments.hub_file_bytes_max, or fetch it "
                f"yourself: hf download --repo-type dataset {repo} {name}"
            )
        return Path(hf_hub_download(repo, name, repo_type="dataset", revision=revision, token=False))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise OSError(
            f"{path}: cannot download it: {why}; fetch it yourself: hf download --repo-type dataset {repo} {name}"
        ) from error


def find_file(path: str, folder: Path | None, *, hidden: Sequence[Path] = (), hub_bytes_max: int = 0) -> Path:
    """Return the absolute path of a dataset's file in `folder`, this machine's data folder, but in no folder of `hidden`.

    Raises ValueError and OSError.
    """
    if path.startswith(PREFIX):
        return hub_file(path, bytes_max=hub_bytes_max)
    if folder is None:
        raise ValueError(
            f"options.path = {path!r} is relative to the folder of this machine's datasets; set environments.data_folder"
        )
    root = folder.resolve()
    try:
        found = (root / path).resolve(strict=True)
    except RuntimeError:
        raise ValueError(f"options.path = {path!r}: symbolic links that lead to each other") from None
    if not found.is_relative_to(root):
        raise ValueError(
            f"options.path = {path!r} leads out of {folder}; put the file there, or set environments.data_folder"
        )
    if any(found.is_relative_to(kept.resolve()) for kept in hidden):
        raise ValueError(f"options.path = {path!r} leads into a folder that holds keys; choose another data folder")
    if not stat.S_ISREG(found.stat().st_mode):
        raise ValueError(f"options.path = {path!r} is not a regular file")
    return found
