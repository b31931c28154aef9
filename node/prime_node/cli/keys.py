"""`prime-node keys`: which keys may sign for a run, and how its root changes them.

The root's keys may be on machines without a network, so a change travels in a file. `rotate` and `revoke` write the next key
ring to it, and `sign` adds a root key's signature on the machine with that key. `submit` sends it to the coordinator, or writes
it to the folder of a coordinator that does not run. SPEC.md, section 7 defines a ring and its validity.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from prime_node.cli.key_request import (
    Known,
    changed,
    describe_key_request,
    known_of,
    read_request,
    ring_lines,
    signatures_missing,
    signed_with,
    submit_to,
    use_new_keys,
    write_request,
)
from prime_node.cli.options import command_group
from prime_node.cli.place import is_url
from prime_node.cli.run_dir import RunDir
from prime_node.cli.say import say
from prime_node.keyfile import create_key, load_key, load_or_create
from prime_protocol.errors import LocalError
from prime_protocol.key_ring import KeyRing, Role, RoleKeys

keys = command_group("Show, rotate and revoke the keys of a run, by a threshold of its root keys.")

Target = Annotated[str, typer.Argument(help="Run directory, published folder, join link or URL.")]
Request = Annotated[Path, typer.Argument(help="Request file that `rotate` or `revoke` has written.")]
Reason = Annotated[str, typer.Option("--reason", help="Reason; it is signed and public.")]
Out = Annotated[Path | None, typer.Option("--out", help="Request file [RUN/key-ring-N.json, else ./key-ring-N.json].")]


@keys.command()
def show(target: Target) -> None:
    """Print the current keys and the earlier key rings."""
    known = asyncio.run(known_of(target))
    for line in describe_key_request(known):
        say(line)


@keys.command()
def make(file: Annotated[Path, typer.Argument(help="New key file, mode 0600.")]) -> None:
    """Make a key and print its id. For a root, or for a role whose key is on another machine."""
    say(create_key(file).key_id)


@keys.command()
def rotate(
    target: Target,
    role: Annotated[Role, typer.Option("--role", help="Role that gets new keys.")],
    key: Annotated[
        list[str], typer.Option("--key", help="Id of a new key; repeatable. Default: a new key in RUN/keys.")
    ] = [],  # noqa: B006 - typer reads it, nothing changes it
    keep: Annotated[bool, typer.Option("--keep", help="Keep the present keys and add the new one.")] = False,
    threshold: Annotated[
        int | None, typer.Option("--threshold", min=1, help="New number of keys that must sign; root and trainer only.")
    ] = None,
    reason: Reason = "rotation",
    out: Out = None,
) -> None:
    """Write a request for new keys of a role. The run directory's root key signs it, if it is there.

    \b
    A planned change of the trainer's key takes two steps: `rotate --keep`, start the trainer with the new key,
    then `revoke` the old one. In an emergency, stop the trainer, `rotate` and start it again.
    """
    known = asyncio.run(known_of(target))
    new = tuple(key) or (_made_key(target, role, known),)
    held = known.run.keys.current.of(role) if keep else ()
    changes: dict[str, object] = {role.value: tuple(dict.fromkeys((*held, *new)))}
    if threshold is not None:
        if role not in (Role.ROOT, Role.TRAINER):
            raise typer.BadParameter("only root and trainer have a threshold", param_hint="--threshold")
        changes[f"{role}_threshold"] = threshold
    _propose(target, known, changed(known.run.keys.current, changes), reason=reason, out=out)


@keys.command()
def revoke(
    target: Target,
    key: Annotated[list[str], typer.Argument(help="Ids of the keys that lose every role.")],
    reason: Reason = "revoked",
    out: Out = None,
) -> None:
    """Write a request that removes keys. The run directory's root key signs it, if it is there."""
    known = asyncio.run(known_of(target))
    current = known.run.keys.current
    changes: dict[str, object] = {}
    for role in Role:
        left = tuple(held for held in current.of(role) if held not in key)
        if not left and role is not Role.AUDITOR:
            raise LocalError(
                f"no {role} key would be left: `prime-node keys rotate {target} --role {role}` puts a new one in its place"
            )
        if left != current.of(role):
            changes[role.value] = left
    if not changes:
        raise LocalError("none of these keys has a role in this run; `prime-node keys show` lists those that have")
    _propose(target, known, changed(current, changes), reason=reason, out=out)


@keys.command()
def sign(
    request: Request,
    key: Annotated[Path, typer.Option("--key", help="Key file of a root key, of the old root or of the new one.")],
) -> None:
    """Show a request, and add a root key's signature to it. Needs no network."""
    envelope, ring = read_request(request)
    for line in ring_lines(ring):
        say(line)
    write_request(request, signed_with(envelope, load_key(key)))
    say(f"signed with {load_key(key).key_id}")


@keys.command()
def submit(request: Request, target: Target) -> None:
    """Send a signed request to the run's coordinator.

    Without a running coordinator, write it to its folder. Exit code 4: refused.
    """
    envelope, ring = read_request(request)
    known = asyncio.run(known_of(target))
    missing = signatures_missing(known.run.keys, envelope, ring)
    if missing:
        raise LocalError(f"{request}: {'; '.join(missing)}. `prime-node keys sign {request} --key FILE` adds one")
    asyncio.run(submit_to(target, known, envelope))
    say(f"key ring {ring.version} is in force")
    if not is_url(target):
        for line in use_new_keys(RunDir(Path(target)), ring):
            say(line)


def _made_key(target: str, role: Role, known: Known) -> str:
    """Make a new key in the run directory. It does not replace the current key until the ring is in force."""
    if is_url(target):
        raise typer.BadParameter("a URL has no folder for a new key; make one with `keys make`", param_hint="--key")
    path = RunDir(Path(target)).next_key(role, known.run.keys.version + 1)
    made = load_or_create(path)
    say(f"new {role} key {made.key_id} in {path}")
    return made.key_id


def _propose(target: str, known: Known, wanted: RoleKeys, *, reason: str, out: Path | None) -> None:
    """Write the request, signed with the available keys, and print the next steps."""
    version = known.run.keys.version + 1
    ring = KeyRing(
        run=known.run.digest,
        version=version,
        previous=known.run.keys.digest,
        keys=wanted,
        published=known.published,
        created_at_ms=known.now_ms,
        reason=reason,
    )
    home = None if is_url(target) else RunDir(Path(target))
    file = out or (Path() if home is None else home.path) / f"key-ring-{version}.json"
    envelope = signed_with(None, *_roots_at_hand(home, version), ring=ring)
    write_request(file, envelope)
    for line in ring_lines(ring):
        say(line)
    missing = signatures_missing(known.run.keys, envelope, ring)
    for line in missing:
        say(line)
    step = f"prime-node keys sign {file} --key ROOT.key" if missing else f"prime-node keys submit {file} {target}"
    say(f"written to {file}; next: {step}")


def _roots_at_hand(home: RunDir | None, version: int) -> Sequence[Path]:
    """Return the root key files of the run directory: the current one, and one made for this ring."""
    if home is None:
        return ()
    files = (home.key(Role.ROOT), home.next_key(Role.ROOT, version))
    return [file for file in files if file.exists()]
