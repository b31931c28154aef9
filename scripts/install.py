"""Install prime-node for one role from a release folder or URL, or upgrade it. Python 3.11 or newer alone is needed.

    python3 -I install.py --role worker                         # from the folder of this file
    python3 -I install.py --role worker --from https://host/release/

`-I` keeps Python from importing modules of the release's folder, which are not checked. Nothing of a release is run before
its signature and digests are checked. Each version gets an environment of its own in ~/.local/share/prime-node/versions;
`current` names the one in use, and ~/.local/bin/prime-node leads to it. A version that does not start is removed, and the one
before it stays in use. A role that is added to an installed version gets a new environment, too.
"""

import sys  # it is built in; every other module, also __future__, may come from the folder of this file

if __name__ == "__main__" and not sys.flags.isolated:
    sys.exit(
        "install: call `python3 -I install.py ...`: without -I Python runs modules next to this file, which are not signed"
    )

import argparse
import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KEY = ""
"""Public key of the releases, 64 hexadecimal digits: `scripts/release --key` writes it into the copy that it releases."""
LOCKS = {
    "verifier": ("verifier",),
    "worker": ("worker",),
    "operator": ("operator", "envs"),
    "trainer": ("worker", "envs"),
    "validator": ("worker", "envs"),
}
"""Locks of each role. Who makes a run's problems or scores answers gets the packages of environments, too."""
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CAPABILITY_MIN = (8, 0) if platform.machine() == "aarch64" else (7, 5)
"""Lowest compute capability of GPUs that the torch of the locks has kernels for, as in prime_node/adapters/old_gpus.py."""
LINES_SHOWN = 6
"""Last lines of pip that are shown if it fails: its last one alone may be "for help visit ..."."""
CUDA_PARTS = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")
NOT_COMPILED = "site-packages/(.*/tests?/|torch/testing/_internal/|transformers/models/(?!auto|llama|qwen|gemma))"
"""Python files that few processes import, a third of all: compiling takes most of an installation's processor time."""
FILE_BYTES_MAX = 64 << 20
FILE_S_MAX = 600.0
"""Seconds for one file of a release: a source that sends a byte a minute would take years."""
LINK_CHARS_MAX = 2**14
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,120}")
WHEELS = (r"prime_node-.*\.whl$", r"pip-.*\.whl$")
VERSION = re.compile(r"\d{1,6}\.\d{1,6}\.\d{1,6}")


class Stop(Exception):
    """Error: nothing was changed. The message says why."""


# Ed25519 as in RFC 8032, to verify alone: a new machine has no library for it, and nothing here is secret.
P = 2**255 - 19
Q = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, P - 2, P) % P
Point = tuple[int, int, int, int]
BASE_Y = 4 * pow(5, P - 2, P) % P


def _add(one: Point, two: Point) -> Point:
    a, b = (one[1] - one[0]) * (two[1] - two[0]) % P, (one[1] + one[0]) * (two[1] + two[0]) % P
    c, d = 2 * one[3] * two[3] * D % P, 2 * one[2] * two[2] % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return (e * f % P, g * h % P, f * g % P, e * h % P)


def _times(factor: int, point: Point) -> Point:
    total: Point = (0, 1, 1, 0)
    while factor > 0:
        if factor & 1:
            total = _add(total, point)
        point, factor = _add(point, point), factor >> 1
    return total


def _x_of(y: int, sign: int) -> int | None:
    if y >= P:
        return None
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P != 0:
        x = x * pow(2, (P - 1) // 4, P) % P
    if (x * x - square) % P != 0 or (x == 0 and sign):
        return None
    return P - x if x & 1 != sign else x


def _point(data: bytes) -> Point | None:
    number = int.from_bytes(data, "little")
    y = number & ((1 << 255) - 1)
    x = _x_of(y, number >> 255)
    return None if x is None else (x, y, 1, x * y % P)


def is_signed(message: bytes, signature: bytes, key: bytes) -> bool:
    """Return whether an Ed25519 signature of a message verifies under a public key."""
    if len(signature) != 64 or len(key) != 32:
        return False
    a, r, s = _point(key), _point(signature[:32]), int.from_bytes(signature[32:], "little")
    if a is None or r is None or s >= Q:
        return False
    number = int.from_bytes(hashlib.sha512(signature[:32] + key + message).digest(), "little") % Q
    base_x = _x_of(BASE_Y, 0)
    assert base_x is not None
    left, right = _times(s, (base_x, BASE_Y, 1, base_x * BASE_Y % P)), _add(r, _times(number, a))
    return (left[0] * right[2] - right[0] * left[2]) % P == 0 and (left[1] * right[2] - right[1] * left[2]) % P == 0


def downloaded(url: str) -> bytes:
    """Return what an address sends, up to one byte too many. Raises OSError, ValueError and HTTPException."""
    found: list[bytes | Exception] = []

    def read() -> None:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                found.append(answer.read(FILE_BYTES_MAX + 1))
        except (OSError, ValueError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # it is the answer, too
            found.append(error)

    reading = threading.Thread(target=read, daemon=True)  # the timeout above is for each packet, also of the header
    reading.start()
    reading.join(FILE_S_MAX)
    if not found:
        raise TimeoutError(f"it took more than {FILE_S_MAX:.0f} s")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def read_file(source: str, name: str) -> bytes:
    """Return a file of a release. Raises Stop if it is missing, too large, too slow or no file."""
    try:
        if source.startswith(("https://", "http://")):
            data = downloaded(f"{source.rstrip('/')}/{name}")
        else:
            if not (path := Path(source) / name).is_file():
                raise Stop(f"{source}: {name} is missing, or not a file")
            with path.open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Stop(f"{source}: {name} cannot be read ({error})") from None
    if len(data) > FILE_BYTES_MAX:
        raise Stop(f"{source}: {name} is larger than {FILE_BYTES_MAX >> 20} MiB")
    return data


def read_release(source: str, key: str) -> dict[str, Any]:
    """Return the signed description of a release. Raises Stop if its signature does not verify or it is no description."""
    if not re.fullmatch(r"[0-9a-f]{64}", key):
        raise Stop("no key: give the public key of the releases with --key (64 hexadecimal digits)")
    text = read_file(source, "release.json")
    if not is_signed(text, read_file(source, "release.json.sig"), bytes.fromhex(key)):
        raise Stop(f"{source}: release.json is not signed by the key {key[:12]}...")
    release: dict[str, Any] = json.loads(text)
    if not VERSION.fullmatch(release["version"]) or not all(NAME.fullmatch(name) for name in release["files"]):
        raise Stop(f"{source}: release.json has a version or a file name of an unknown form")
    return release


def checked(source: str, release: dict[str, Any], name: str) -> bytes:
    """Return a file of a release whose digest is the signed one. Raises Stop otherwise."""
    data = read_file(source, name)
    if hashlib.sha256(data).hexdigest() != release["files"].get(name):
        raise Stop(f"{source}: {name} has another digest than release.json")
    return data


def number_of(version: str) -> tuple[int, ...]:
    """Return a version in a form to compare."""
    return tuple(map(int, version.split(".")))


def joined(locks: list[str]) -> list[str]:
    """Return the entries of several locks, each once: they are made together, so equal packages have equal entries."""
    entries = [entry.strip() for lock in locks for entry in re.split(r"^(?=[\w.-]+==)", lock, flags=re.MULTILINE)]
    return list(dict.fromkeys(entry for entry in entries if "==" in entry))


def pip_of(folder: Path, pip: Path) -> tuple[list[str], list[str]]:
    """Return the command that installs into an environment in a folder, and the one that makes that environment.

    A release brings the wheel of its pip: the Python of a new Debian or Ubuntu has none, nor a way to make one. -I: neither
    imports modules from the folder in which this program was called. The locks name every package, and each of them has a
    wheel: pip looks for no other package (--no-deps), and builds none.
    """
    install = [str(folder / "bin" / "python"), "-I", str(pip / "pip"), "install", "--quiet"]
    install += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--no-compile"]
    return install, [sys.executable, "-I", "-m", "venv", "--without-pip", str(folder)]


def _run_step(step: list[str], version: str) -> None:
    """Run a step of an installation. Raises Stop with its last lines if it fails."""
    ran = subprocess.run(step, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        said = (ran.stderr.strip() or ran.stdout.strip() or "no message").splitlines()
        said = [line.strip() for line in said if not line.startswith("WARNING: Retrying")]
        raise Stop(f"{version} could not be installed: {' | '.join(said[-LINES_SHOWN:])}")


def why_no_gpu() -> str:
    """Return why no NVIDIA GPU of this machine is of use; empty if one may be, or if an old driver does not tell."""
    if (program := shutil.which("nvidia-smi")) is None:
        return "no NVIDIA GPU"
    ask = [program, "--query-gpu=compute_cap,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True)
        rows = [line.split(",", 1) for line in answer.stdout.splitlines()]
        newest, name = max((number_of(number), name.strip()) for number, name in rows)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    if newest >= CAPABILITY_MIN:
        return ""
    has, needed = (".".join(map(str, one)) for one in (newest, CAPABILITY_MIN))
    return f"{name} has compute capability {has}, and torch needs {needed} or higher"


def add_torch_for_cpus(install: list[str], entries: list[str], version: str) -> list[str]:
    """Install the CPU build of the torch of a lock, and return the entries that are still to be installed.

    All of them if the lock has no torch, or if that build cannot be had: the lock's own build runs without a GPU, too.
    """
    torch = next((entry.split()[0] for entry in entries if entry.startswith("torch==")), "")
    if torch == "" or sys.platform != "linux" or not (reason := why_no_gpu()):
        return entries
    print(f"{shown(reason)}: the CPU build of {torch} comes from {CPU_INDEX}, without a digest", flush=True)
    try:
        _run_step([*install, "--extra-index-url", CPU_INDEX, f"{torch}+cpu"], version)
    except Stop as error:
        print(
            f"{shown(str(error))}\nit is replaced by the CUDA build of the lock, which is 2.7 GB to download",
            flush=True,
        )
        return entries
    return [entry for entry in entries if not CUDA_PARTS.match(entry)]


def make_environment(folder: Path, source: str, release: dict[str, Any], roles: list[str]) -> str:
    """Make the environment of a version for some roles. Return the wheel's name. Raises Stop, having removed it, if pip fails."""
    wheel, pip = (next((file for file in release["files"] if re.match(form, file)), "") for form in WHEELS)
    if "" in (wheel, pip):
        raise Stop(f"{source}: release.json names no wheel of prime-node, or none of pip")
    locks = sorted({lock for role in roles for lock in LOCKS[role]})
    entries = joined([checked(source, release, f"{name}.txt").decode() for name in locks])
    print(f"installing {len(entries)} packages for {', '.join(roles)}: a minute, or ten on a busy machine", flush=True)
    try:
        with tempfile.TemporaryDirectory() as name:
            place = Path(name)
            for file in (wheel, pip):
                (place / file).write_bytes(checked(source, release, file))
            install, make = pip_of(folder, place / pip)
            _run_step(make, release["version"])
            entries = add_torch_for_cpus(install, entries, release["version"])
            (place / "lock.txt").write_text("\n".join([*entries, ""]))
            if entries:
                print(f"{len(entries)} packages with their digests", flush=True)
                _run_step([*install, "--require-hashes", "-r", str(place / "lock.txt")], release["version"])
            _run_step([*install, str(place / pip), str(place / wheel)], release["version"])
            compiles = ["-m", "compileall", "-q", "-j", "0"]  # pip would use one processor
            compiles += ["-x", NOT_COMPILED, str(folder / "lib")]
            subprocess.run([install[0], "-I", *compiles], capture_output=True, check=False)
    except Stop:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return wheel


def starts(folder: Path, version: str, link: str) -> str:
    """Return why a version does not start or cannot work for a run; empty if it does."""
    program = str(folder / "bin" / "prime-node")
    for command in ([program, "--version"], *([[program, "doctor", "-", "--no-measure"]] if link else [])):
        ran = subprocess.run(command, input=link, capture_output=True, text=True, check=False)  # arguments are seen
        if ran.returncode != 0:
            last = (ran.stderr.strip() or ran.stdout.strip() or "no message").splitlines()[-1]
            return f"`{' '.join(['prime-node', *command[1:]])}` ended with {ran.returncode}: {last}"
        if command[1] == "--version" and ran.stdout.strip() != version:
            return f"it says that it is {ran.stdout.strip()}"
    return ""


def point_to(link: Path, target: Path) -> None:
    """Make a symbolic link lead to a target, at once."""
    link.parent.mkdir(parents=True, exist_ok=True)
    draft = link.with_name(f".{link.name}.new")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(link)


def require_own(link: Path, target: Path) -> None:
    """Raise Stop if there is something else than a link to a target: it belongs to another program or installation."""
    if os.path.lexists(link) and not (link.is_symlink() and link.readlink() == target):
        raise Stop(f"{link} is not a link of this installation: move it away, or give another folder with --bin")


@contextlib.contextmanager
def alone(to: Path) -> Iterator[None]:
    """Hold the lock of a folder of versions. Raises Stop if another installation does: each removes what is unfinished."""
    to.mkdir(parents=True, exist_ok=True)
    with (to / "install.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Stop(f"another installation works in {to}: wait for its end") from None
        yield


def recorded_roles(to: Path) -> list[str]:
    """Return the roles of the last installation in a folder; none if there is no readable record."""
    try:
        return list(json.loads((to / "install.json").read_bytes())["roles"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def install(arguments: argparse.Namespace) -> str:
    """Install what the arguments say. Return the last line for the user. Raises Stop."""
    source = arguments.source if "://" in arguments.source else str(Path(arguments.source).absolute())
    release = read_release(source, arguments.key)
    low, high = release["python"]
    if not number_of(low) <= sys.version_info[:2] < number_of(high):
        raise Stop(
            f"Python {sys.version_info[0]}.{sys.version_info[1]} is not from {low} to below {high}: call this with another"
        )
    with alone(arguments.to.absolute()):
        return install_release(arguments, source, release)


def install_release(arguments: argparse.Namespace, source: str, release: dict[str, Any]) -> str:
    """Install a release whose signature was checked. Return the last line for the user. Raises Stop."""
    to, version = arguments.to.absolute(), release["version"]
    current, command = to / "current", arguments.bin.absolute() / "prime-node"
    target = current / "bin" / "prime-node"
    require_own(command, target)
    used = current.readlink().name if current.is_symlink() else ""
    before, had = used.partition("-")[0], recorded_roles(to) if used else []
    roles = sorted({*had, *arguments.role})
    if before and number_of(version) < number_of(before):
        raise Stop(f"{version} is older than {before}, which is installed")
    if version == before and roles == had:
        point_to(command, target)
        return f"prime-node {version} is installed already"
    name = f"{version}-{'-'.join(roles)}" if version == before else version
    folder = to / "versions" / name
    shutil.rmtree(folder, ignore_errors=True)  # an earlier attempt that was interrupted
    folder.parent.mkdir(parents=True, exist_ok=True)
    wheel = make_environment(folder, source, release, roles)
    if (why := starts(folder, version, arguments.link)) != "":
        shutil.rmtree(folder)
        raise Stop(
            f"{version} does not work here: {why}. " + (f"{used} stays in use" if used else "Nothing is installed")
        )
    record = {"source": source, "key": arguments.key, "roles": roles, "bin": str(command.parent)}
    record |= {"wheel": wheel, "sha256": release["files"][wheel]}
    (to / "install.json").write_text(json.dumps(record, indent=2) + "\n")
    point_to(current, Path("versions") / name)
    point_to(command, target)
    kept = f" ({used} is kept)" if used else ""
    if str(command.parent) not in os.environ.get("PATH", "").split(os.pathsep):
        kept += f"\n{command.parent} is not in PATH. Here, and in the file that your shell reads at its start:"
        kept += f'\n  export PATH="{command.parent}:$PATH"'
    return f"prime-node {version} is installed for {', '.join(roles)}: {command}{kept}"


def shown(text: str) -> str:
    """Return a text of which nothing controls the terminal: a source chooses the words of its errors."""
    return "".join(each if each.isprintable() else "?" for each in text[:2_000])


def main() -> None:
    """Install, and print what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--role", choices=sorted(LOCKS), action="append", required=True, help="may be repeated; roles add up"
    )
    parser.add_argument(
        "--from", dest="source", default=str(Path(__file__).parent), help="folder or URL of the release"
    )
    parser.add_argument("--key", default=KEY, help="public key of the releases")
    parser.add_argument(
        "--link",
        default="",
        help="join link (-: from standard input): the new version must be able to work for this run",
    )
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    parser.add_argument(
        "--to", type=Path, default=Path(data).expanduser() / "prime-node", help="folder of the versions"
    )
    parser.add_argument("--bin", type=Path, default=Path("~/.local/bin").expanduser(), help="folder of the command")
    arguments = parser.parse_args()
    if arguments.link == "-":
        arguments.link = sys.stdin.readline(LINK_CHARS_MAX).strip()
    try:
        print(install(arguments))
    except (Stop, KeyError, OSError, ValueError) as error:
        sys.exit(f"install: {shown(str(error))}")
    except KeyboardInterrupt:
        sys.exit("install: interrupted: nothing that was in use is changed, and another call begins again")


if __name__ == "__main__":
    main()
