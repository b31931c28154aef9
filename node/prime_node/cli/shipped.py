"""The paths of the shipped configurations and calibration: in a checkout's configs/, or inside an installed wheel."""

from __future__ import annotations

from pathlib import Path

from prime_node.config import SHIPPED_FOLDERS
from prime_protocol.calibration import Calibration
from prime_protocol.envelope import parse_json
from prime_protocol.errors import LocalError, RemoteError

SHIPPED = "calibration.json"
"""Name of the default calibration."""


def config_path(name: str) -> Path:
    """Return the path of a shipped config. Raises LocalError with the known names."""
    for folder in SHIPPED_FOLDERS:
        if (folder / name).is_file():
            return folder / name
    known = sorted({path.name for folder in SHIPPED_FOLDERS if folder.is_dir() for path in folder.glob("*.toml")})
    raise LocalError(f"no shipped config {name}; known are {', '.join(known) or 'none'}")


def read_calibration(path: Path) -> Calibration:
    """Read a file made by `prime-node calibrate`. Raises LocalError."""
    try:
        return parse_json(path.read_bytes(), Calibration)
    except OSError as error:
        raise LocalError(f"calibration {path}: {error.strerror}; `prime-node calibrate {path}` makes one") from None
    except RemoteError as error:
        raise LocalError(f"calibration {path}: {error.detail}") from None


def shipped_calibration() -> Calibration:
    """Return the default calibration; its note says how it was measured."""
    return read_calibration(config_path(SHIPPED))


def calibration_file(choice: str) -> Path:
    """Return the file that a setting names: `shipped`, a path, or the name of a shipped file. The file may be missing."""
    if choice == "shipped":
        return config_path(SHIPPED)
    path = Path(choice).expanduser()
    is_shipped = (
        path.name == choice and not path.exists() and any((folder / choice).is_file() for folder in SHIPPED_FOLDERS)
    )
    return config_path(choice) if is_shipped else path
