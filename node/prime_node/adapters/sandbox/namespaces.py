"""This process in its own file system: `enter_namespaces` makes a root that contains only the given paths.

It needs neither a program nor privileges if the kernel lets users make namespaces. It adds to Landlock: files outside cannot
even be named, so neither their modes nor their times change. No socket file of another program can be reached, and /tmp and
/dev/shm are private. The process keeps its id, its children and its network. A child tries it first, and leaves no traces.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from prime_node.adapters.sandbox.bubblewrap import View
from prime_node.adapters.sandbox.libc import checked, libc
from prime_node.adapters.sandbox.links import links_on_the_way
from prime_node.adapters.sandbox.rules import Restriction

WHAT = "own file system"
_NEWNS, _NEWUSER, _NEWIPC = 0x0002_0000, 0x1000_0000, 0x0800_0000
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 2, 4, 4096, 16384, 1 << 18
_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_MOUNT_SETATTR, _ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 442, 1, 2, 4
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_TRY_BYTES_MAX = 1_024
EMPTY = ("/tmp", "/dev/shm")
"""Folders that are new, empty and writable inside."""
OLD, NEW = "/old", "/new"
OF_THE_MACHINE = ("sys", "sysrq-trigger", "irq", "bus", "acpi", "fs")
"""Entries of /proc that set the machine's kernel and devices: only readable inside. For some, root needs no capability."""


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("spread", ctypes.c_uint64),
        ("user", ctypes.c_uint64),
    )


def enter_namespaces(view: View) -> Restriction:
    """Restrict this process to the paths of the view. The caller has one thread. `view.network` is ignored: the network stays."""
    if sys.platform != "linux":
        return Restriction(WHAT, False, f"{sys.platform} has no namespaces")
    why = _tried(view)
    if why:
        return Restriction(WHAT, False, why)
    _enter(view)
    return Restriction(WHAT, True)


def _tried(view: View) -> str:
    """Return why a child could not do this here; empty if it could."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        result = b"a child that tried it failed"
        try:
            _enter(view)
            closed = [path for path in view.write if not os.access(path, os.W_OK | os.X_OK)]
            result = f"{closed[0]} could not be written to inside".encode() if closed else b"ok"
        except PermissionError as error:
            result = f"the system does not let this user create namespaces: {error}".encode()
        except OSError as error:
            result = f"it cannot be set up: {error}".encode()
        finally:
            os.write(writer, result[:_TRY_BYTES_MAX])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read(_TRY_BYTES_MAX).decode(errors="replace")
    os.waitpid(child, 0)
    return "" if answer == "ok" else answer or "a child process died while trying it"


def _enter(view: View) -> None:
    """Enter the namespaces. Raises OSError."""
    here, uid, gid = Path.cwd(), os.geteuid(), os.getegid()
    wanted, links = _mounts(view), links_on_the_way((*view.read, *view.write, *view.devices))
    try:
        checked("unshare", libc().unshare(_NEWNS | _NEWIPC))
    except PermissionError:
        checked("unshare", libc().unshare(_NEWUSER | _NEWNS | _NEWIPC))
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV)
    Path(f"/tmp{OLD}").mkdir()
    Path(f"/tmp{NEW}").mkdir()
    _pivot("/tmp", f"/tmp{OLD}")
    os.chdir("/")
    _mount("tmpfs", NEW, "tmpfs", _NOSUID | _NODEV, "mode=0755")
    for own in ("/dev", *EMPTY):
        Path(NEW + own).mkdir()
        _mount("tmpfs", NEW + own, "tmpfs", _NOSUID | _NODEV, "mode=1777" if own in EMPTY else "mode=0755")
    Path(f"{NEW}/proc").mkdir()
    _mount(f"{OLD}/proc", f"{NEW}/proc", None, _BIND | _REC)
    for own in (f"{NEW}/proc/{name}" for name in OF_THE_MACHINE):
        if Path(own).exists():
            _mount(own, own, None, _BIND | _REC)
            _set_attributes(own, _Attributes(set=_ATTR_RDONLY), _AT_RECURSIVE)
    for link, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        Path(f"{NEW}/dev/{link}").symlink_to(target)
    for place, real in links.items():
        if not os.path.lexists(f"{NEW}{place}"):
            Path(f"{NEW}{place}").parent.mkdir(parents=True, exist_ok=True)
            Path(f"{NEW}{place}").symlink_to(real)
    for path, attributes in wanted:
        _bind(str(path), attributes)
    _set_attributes(NEW, _Attributes(set=_ATTR_RDONLY), 0)
    checked("umount2", libc().umount2(OLD.encode(), _DETACH))
    os.chdir(NEW)
    _pivot(".", ".")
    checked("umount2", libc().umount2(b".", _DETACH))
    os.chdir(here if here.is_dir() else (*view.write, Path("/"))[0])


def _mounts(view: View) -> list[tuple[Path, int]]:
    """Return real places to bind, the outer before the inner, each with the attributes that restrict it."""
    safe = _ATTR_NOSUID | _ATTR_NODEV
    kinds = ((view.read, safe | _ATTR_RDONLY), (view.write, safe), (view.devices, _ATTR_NOSUID))
    real = {path.resolve(): taken for paths, taken in kinds for path in paths}
    found: dict[Path, int] = {}
    for path in sorted(real, key=lambda path: len(path.parts)):
        outer = next((one for one in path.parents if one in found), None)
        if path.parts[:2] != ("/", "proc") and (outer is None or found[outer] != real[path]):
            found[path] = real[path]
    return list(found.items())


def _bind(place: str, attributes: int) -> None:
    """Bind a path, ignoring one that does not exist."""
    source, target = Path(OLD + place), Path(NEW + place)
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch(mode=0o600)
    else:
        return
    _mount(str(source), str(target), None, _BIND | _REC)
    wanted = _Attributes(set=attributes, clear=0 if attributes & _ATTR_RDONLY else _ATTR_RDONLY)
    _set_attributes(str(target), wanted, _AT_RECURSIVE)


def _set_attributes(target: str, wanted: _Attributes, flags: int) -> None:
    arguments = (_AT_FDCWD, target.encode(), flags, ctypes.byref(wanted), ctypes.sizeof(wanted))
    checked(f"mount_setattr {target}", libc().syscall(_MOUNT_SETATTR, *arguments))


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    result = libc().mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    checked(f"mount {target}", result)


def _pivot(new: str, old: str) -> None:
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError("the system call number of pivot_root is not known for this processor")
    checked("pivot_root", libc().syscall(number, new.encode(), old.encode()))
