"""hatchling's metadata hook: the README of a package has no relative links, which lead nowhere outside a checkout.

With PRIME_NODE_HOME (the project's address, https://host/owner/name) links and pictures become absolute, at the tag of the
version. Without it links become plain text and pictures are left out. CONTRIBUTING.md says how to build a release.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"!\[([^\]]*)\]\(((?!https?:)[^)]+)\)\n?")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?!https?:|#)[^)]+)\)")


def packaged_readme(text: str, home: str, version: str) -> str:
    """Return the README with absolute links, or without links if `home` is empty."""
    if not home:
        return LINK.sub(r"\1", PICTURE.sub("", text))
    text = PICTURE.sub(rf"![\1]({home}/raw/v{version}/\2)\n", text)
    return LINK.sub(rf"[\1]({home}/blob/v{version}/\2)", text)


class ReadmeHook(MetadataHookInterface):
    """The hook: pyproject.toml names this file."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        root = Path(self.root)
        (version,) = re.findall(
            r'^__version__ = "(.*)"$', (root / "node/prime_node/__init__.py").read_text(), re.MULTILINE
        )
        text = (root / "README.md").read_text(encoding="utf-8")
        home = os.environ.get("PRIME_NODE_HOME", "").rstrip("/")
        metadata["readme"] = {"content-type": "text/markdown", "text": packaged_readme(text, home, version)}
