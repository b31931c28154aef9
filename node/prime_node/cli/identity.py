"""`prime-node identity`: this machine's key, several machines of one person, and backups.

A person's key authorises the keys of machines and signs nothing else. Keep it off the machines that work, or at least back it up:
it can revoke a machine that is lost. SPEC.md, section 24.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from prime_node.broadcast.audit.audit_report import date_of
from prime_node.cli.options import command_group
from prime_node.cli.outcome import MAY_PASS, REFUSED
from prime_node.cli.place import HOME, parse_link, worker_folders
from prime_node.cli.say import say
from prime_node.folder_lock import is_in_use
from prime_node.keyfile import create_key, id_file, load_key, load_or_create
from prime_protocol.delegation import Delegation
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.requests import RevokeRequest
from prime_protocol.run_spec import JoinLink

identity = command_group("Keep, back up and move this machine's key; let several machines count as one person's.")

PASSPHRASE_CHARS_MIN = 12
Own = Annotated[Path, typer.Option("--identity", help="Key file of this machine.")]
PersonKey = Annotated[Path, typer.Option("--person", help="Key file of the person.")]
KeyFile = Annotated[Path, typer.Option("--key", help="Key file.")]
PassphraseFile = Annotated[
    Path | None, typer.Option("--passphrase-file", help="File with the passphrase, instead of a question.")
]
OWN, PERSON = HOME / "identity.key", HOME / "person.key"


@identity.command("show")
def show_identity(own: Own = OWN, person: PersonKey = PERSON) -> None:
    """Print this machine's key and its person."""
    from prime_node.cli.wire_identity import now_ms, stored_delegation

    say(f"machine  {load_key(own).key_id if own.exists() else f'no key yet: the first `prime-node join` makes {own}'}")
    stored = stored_delegation(own)
    if stored is not None:
        ended = " (expired)" if stored[0].expires_at_ms < now_ms() else ""
        say(f"works for person {stored[0].person}")
        say(f"         {_reach(stored[0])}{ended}")
    if person.exists():
        say(f"person   {load_key(person).key_id}")


@identity.command("new")
def new_person(file: Annotated[Path, typer.Argument(help="New key file of the person.")] = PERSON) -> None:
    """Make a person's key, which authorises machines."""
    say(f"person {create_key(file).key_id} in {file}")
    say("next: `prime-node identity authorise` for this machine, `prime-node identity authorise KEY` for another one,")
    say(f"and `prime-node identity backup FILE --key {file}`: a lost key cannot revoke a lost machine")


@identity.command("authorise")
def authorise_machine(
    machine: Annotated[
        str | None, typer.Argument(help="Key id of another machine, as its `prime-node identity show` prints it.")
    ] = None,
    days: Annotated[float, typer.Option("--days", min=0.01, help="Validity in days, at most 400.")] = 90.0,
    run: Annotated[
        str | None, typer.Option("--run", help="Join link of the only run in which it holds [all runs].")
    ] = None,
    own: Own = OWN,
    person: PersonKey = PERSON,
) -> None:
    """Let a machine work for the person. Without KEY it is this machine. Another one gets the printed text."""
    from prime_node.cli import wire_identity

    digest = None if run is None else parse_link(run).run
    here = load_or_create(own).key_id if machine is None else machine
    text = wire_identity.delegation_text(load_key(person), here, days=days, run=digest)
    if machine is None:
        delegation = wire_identity.keep_delegation(own, text)
        say(f"this machine works for person {delegation.person}, {_reach(delegation)}, from its next start on")
        return
    say(f"on that machine: prime-node identity accept {text}")


@identity.command("accept")
def accept_delegation(
    delegation: Annotated[str, typer.Argument(help="Text that `prime-node identity authorise` has printed.")],
    own: Own = OWN,
) -> None:
    """Let this machine work for the person who authorised it. It does so from its next start on."""
    from prime_node.cli.wire_identity import keep_delegation

    kept = keep_delegation(own, delegation)
    say(f"this machine works for person {kept.person}, {_reach(kept)}, from its next start on")


@identity.command("revoke")
def revoke_machine(
    machine: Annotated[str, typer.Argument(help="Key id of the machine.")],
    links: Annotated[list[str], typer.Argument(help="Join links of the runs in which it takes part.")],
    person: PersonKey = PERSON,
) -> None:
    """End the work of a machine in runs.

    For example of one that was stolen. No delegation brings its key back there. No run keeps that from the others.

    \b
    Exit codes: 4 a run refused it; 6 a run does not answer.
    """
    from prime_node.cli import wire
    from prime_node.ports.transport import Unreachable

    key, parsed = load_key(person), [parse_link(link) for link in links]
    try:
        request = RevokeRequest(machine=machine)
    except ValueError:
        raise typer.BadParameter("not a key id", param_hint="MACHINE") from None

    async def send(link: JoinLink) -> int:
        """Revoke it in one run, and return the exit code."""
        try:
            async with wire.client(link, key) as client:
                await client.revoke(request)
        except RemoteError as error:
            say(f"NOT revoked in run {link.run[:12]}: refused: {error}")
            return REFUSED
        except Unreachable as error:
            say(f"NOT revoked in run {link.run[:12]}, which does not answer: {error}")
            return MAY_PASS
        say(f"revoked in run {link.run[:12]}")
        return 0

    async def send_all() -> list[int]:
        return await asyncio.gather(*map(send, parsed))

    if code := max(asyncio.run(send_all())):
        raise typer.Exit(code)


@identity.command("backup")
def backup_key(
    file: Annotated[Path, typer.Argument(help="New file of the backup.")],
    key: KeyFile = OWN,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Write a key to a file that a passphrase encrypts. The file holds neither rollouts nor receipts."""
    from prime_node.cli.wire_identity import write_backup

    saved = write_backup(key, file, _passphrase(passphrase_file, is_new=True))
    say(f"{file} holds key {saved.key_id}, encrypted; `prime-node identity restore {file}` brings it back")


@identity.command("restore")
def bring_back(
    file: Annotated[Path, typer.Argument(help="File of the backup.")],
    key: KeyFile = OWN,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Bring a key back from its backup. It never overwrites another key."""
    from prime_node.cli.wire_identity import restore_key

    say(f"key {restore_key(file, key, _passphrase(passphrase_file, is_new=False)).key_id} is in {key}")


@identity.command("move")
def move_key(
    file: Annotated[Path, typer.Argument(help="New file of the backup, for the other machine.")],
    key: KeyFile = OWN,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Back a key up, and remove it here. Another machine can then continue with it: two machines cannot use one key."""
    from prime_node.cli.wire_identity import write_backup

    _require_no_worker()
    saved = write_backup(key, file, _passphrase(passphrase_file, is_new=True))
    for path in (id_file(key), key):
        path.unlink(missing_ok=True)
    say(f"{file} holds key {saved.key_id}, and this machine has it no more")
    say(f"on the other machine: prime-node identity restore {file.name}")
    say(f"take {HOME / 'runs'} along too: it holds receipts, and bundles that are not uploaded")


def _reach(delegation: Delegation) -> str:
    where = "in all runs" if delegation.run is None else f"in run {delegation.run[:12]}"
    return f"{where} until {date_of(delegation.expires_at_ms)}"


def _passphrase(file: Path | None, *, is_new: bool) -> str:
    """Return the passphrase from a file or a person. Raises LocalError."""
    if file is not None:
        try:
            passphrase = file.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise LocalError(f"{file}: {error}") from None
    else:
        passphrase = typer.prompt("passphrase", hide_input=True, confirmation_prompt=is_new, err=True)
    if is_new and len(passphrase) < PASSPHRASE_CHARS_MIN:
        raise LocalError(
            f"a passphrase needs {PASSPHRASE_CHARS_MIN} characters: anyone with the file can guess forever"
        )
    return passphrase


def _require_no_worker() -> None:
    for folder in worker_folders():
        if is_in_use(folder):
            raise LocalError(f"a worker runs in {folder}: `prime-node finish {folder}` first")
