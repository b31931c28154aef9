"""Error for a command that needs an extra that is not installed."""

from __future__ import annotations

from prime_protocol.errors import LocalError


def missing_extra(extra: str, purpose: str, error: ImportError) -> LocalError:
    """Return the error, with the command that installs the extra."""
    return LocalError(f"{purpose} need the extra {extra!r} ({error}): {how_to_install(extra)}")


def how_to_install(extra: str) -> str:
    """Return the advice. No package index has this project, so it names none."""
    return f'run ./scripts/up in the project\'s folder, or there: pip install ".[{extra}]"'
