"""Files of datasets on the Hugging Face hub, by paths as its own file system writes them."""

from __future__ import annotations

import re
from pathlib import Path

PREFIX = "hf://datasets/"
_PATH = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<name>.+)")


def cache_folder() -> Path:
    """Where files of the hub lie once they are fetched. Tokens lie beside it, not in it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def find_file(path: str) -> Path:
    """A local path as it is; "hf://datasets/openai/gsm8k@main/main/test-00000-of-00001.parquet" from the cache or the hub.

    Raises ValueError and OSError.
    """
    if not path.startswith(PREFIX):
        return Path(path).expanduser()
    found = _PATH.fullmatch(path)
    if found is None:
        raise ValueError(f"{path}: a dataset's file is hf://datasets/OWNER/NAME[@REVISION]/FILE")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            hf_hub_download(found["repo"], found["name"], repo_type="dataset", revision=found["revision"] or "main")
        )
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise OSError(f"{path}: the hub does not give it: {str(error).splitlines()[0]}") from error
