"""Build the documentation site into build/site: scripts/docs, then open build/site/index.html.

It needs no network: pip install '.[docs]' (Sphinx, furo, MyST). A warning, such as a broken link, is an error.
The documents of the repository are its pages; scripts/reference.py makes the reference from the code.
PRIME_NODE_HOME is the project's address for links to source files; without it they are plain text.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = os.environ.get("PRIME_NODE_HOME", "").rstrip("/")
PAGES: dict[str, tuple[str, ...]] = {
    "Tutorials": (
        "docs/tutorials/contributor",
        "docs/tutorials/operator",
        "docs/tutorials/reward",
        "docs/tutorials/researcher",
        "docs/tutorials/auditor",
    ),
    "Guides": (
        *("docs/installing", "docs/joining", "docs/operating", "docs/models", "docs/services", "docs/containers"),
        *(
            "docs/environments",
            "docs/algorithms",
            "docs/python",
            "docs/verifying",
            "docs/replaying",
            "docs/support",
            "configs/README",
        ),
    ),
    "Reference": (
        *("docs/reference/settings", "docs/reference/commands", "docs/reference/metrics", "docs/reference/endpoints"),
        *("docs/reference/errors", "docs/metrics", "protocol/SPEC", "docs/glossary"),
    ),
    "Explanation": (
        *(
            "docs/how-it-works",
            "docs/architecture",
            "docs/scheduler",
            "docs/detection",
            "docs/sandbox",
            "SECURITY",
            "DECISIONS",
        ),
        *("docs/comparison", "docs/several-machines", "docs/upstream/README", "scripts/bench/RESULTS"),
    ),
    "Project": ("CHANGELOG", "CONTRIBUTING"),
}
"""The site's contents. Each document of docs/ is in it."""
CONF = """
project = "prime-node"
html_title = "prime-node {version}"
copyright = "the prime-node contributors"
extensions = ["myst_parser"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
html_theme = "furo"
html_static_path = []
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {{"top_of_page_buttons": []}}
highlight_language = "none"
pygments_style = "friendly"
pygments_dark_style = "monokai"
suppress_warnings = ["myst.header"]
"""
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?!https?:|#|mailto:)[^)\s]+)\)")
MARK = re.compile(r"^( *)<!-- (run by|not run)(.*?) -->\n((?: *)```\n.*?^ *```)$", re.MULTILINE | re.DOTALL)


def write_sources(folder: Path) -> None:
    """Write what Sphinx reads: the documents at their own paths, so that links between them stay valid."""
    documents = {name for names in PAGES.values() for name in names if not name.startswith("docs/reference/")}
    for name in documents:
        text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
        _write(folder / f"{name}.md", page(text, ROOT / f"{name}.md", documents))
    for picture in (ROOT / "docs").rglob("*.png"):
        target = folder / picture.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, target)
    sys.path.insert(0, str(ROOT / "scripts"))
    import reference

    for file, text in reference.pages():
        _write(folder / "docs" / "reference" / file, text)
    readme = page((ROOT / "README.md").read_text(encoding="utf-8"), ROOT / "README.md", documents)
    trees = (
        f"```{{toctree}}\n:caption: {title}\n:hidden:\n\n" + "\n".join(names) + "\n```"
        for title, names in PAGES.items()
    )
    _write(folder / "index.md", "\n\n".join([readme.partition("\n## Documentation\n")[0], *trees]))
    version = re.search(r'__version__ = "(.*)"', (ROOT / "node" / "prime_node" / "__init__.py").read_text())
    assert version is not None
    _write(folder / "conf.py", CONF.format(version=version[1]))


def page(text: str, path: Path, documents: set[str]) -> str:
    """Return a document as a page: what is no page is linked at the project's address, and each block says what runs it."""

    def link(found: re.Match[str]) -> str:
        target, _, anchor = found[2].partition("#")
        name = os.path.relpath((path.parent / target).resolve(), ROOT)
        if name.removesuffix(".md") in documents or name.endswith(".png"):
            return found[0]
        if name == "README.md":
            return f"[{found[1]}]({os.path.relpath(ROOT / 'index.md', path.parent)})"
        return f"[{found[1]}]({HOME}/blob/main/{name}{'#' if anchor else ''}{anchor})" if HOME else found[1]

    def caption(found: re.Match[str]) -> str:
        return f"{found[4]}\n\n{found[1]}*{found[2].capitalize()}{found[3]}.*"

    return MARK.sub(caption, LINK.sub(link, text)).replace("```mermaid", "```text")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def build(site: Path) -> str:
    """Build the site into a new folder. Return its size in words. Raises CalledProcessError with Sphinx's warnings."""
    with tempfile.TemporaryDirectory() as name:
        write_sources(Path(name))
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", name, str(site)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(site / ".doctrees", ignore_errors=True)
    return f"{len(list(site.rglob('*.html')))} pages"


def main() -> None:
    """Build the site and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "site", help="folder, which is replaced")
    site: Path = parser.parse_args().to
    if find_spec("sphinx") is None or find_spec("furo") is None or find_spec("myst_parser") is None:
        sys.exit("the site needs Sphinx, furo and MyST: pip install '.[docs]'")
    shutil.rmtree(site, ignore_errors=True)
    try:
        print(f"{build(site)}: open {site / 'index.html'}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.stderr}\nthe site was not built: correct what is above")


if __name__ == "__main__":
    main()
