"""The calibration of a new run: a shipped or given one that covers it, else one that is measured now or was measured before."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from prime_node.cli.lifetime import INTERRUPTED
from prime_node.cli.say import say
from prime_node.cli.shipped import SHIPPED, calibration_file, read_calibration
from prime_node.cli.wire_classes import class_of_kind, worker_kind
from prime_protocol.errors import LocalError

if TYPE_CHECKING:
    from prime_node.cli.options import Options
    from prime_node.coordinator.new_run import RunConfig
    from prime_protocol.calibration import Calibration

ADVICE = (
    "run.calibration=auto measures one here, `prime-node calibrate FILE --config CONFIG` on another machine; "
    "--set run.calibration=none makes a run for workers that you trust"
)


def calibration_for(
    options: Options, settings: RunConfig, config_json: bytes, *, config_file: Path | None
) -> Calibration | None:
    """Return the calibration of a run whose model has this configuration; None if it wants none.

    If no calibration is known for the engines that [worker] and [validator] name, measure one on this machine; that takes
    minutes and prints its progress. Raises LocalError if a given calibration does not cover the run.
    """
    from prime_node.coordinator.new_run import covers
    from prime_node.validator.config import ValidatorConfig
    from prime_node.worker.config import WorkerConfig

    choice = settings.calibration
    if choice == "none":
        say("no calibration: cheats by precision or weights are not banned in this run, so take workers that you trust")
        return None
    file = calibration_file("shipped" if choice == "auto" else choice)
    found = read_calibration(file)
    if choice != "auto":
        require_covers(f"calibration {choice}", found, config_json, settings.temperature, advice=ADVICE)
    worker, validator = options.load(WorkerConfig), options.load(ValidatorConfig)
    pair = class_of_kind(worker_kind(worker)), class_of_kind(validator.kind)
    if covers(found, config_json) and settings.temperature >= found.temperature_min:
        # In a given file any worker will do, unless the config names an engine: this machine may run none.
        is_any = choice != "auto" and worker.engine == "auto"
        if any(each.validator == pair[1] and (is_any or each.worker == pair[0]) for each in found.pairs):
            return found
    say(
        f"no calibration is known for {pair[0]} judged by {pair[1]}, so the run's own is measured now, except for what an "
        "earlier measurement left"
    )
    if validator.engine == "vllm":
        say("its limits fit workers of this machine's build of vLLM and kind of processor; others would be banned")
    # Pairs of the default calibration have other statistics than a new one, and each further statistic weakens the others.
    return _measured(options, config_file, extend=() if choice == "auto" else ("--extend", str(file)))


def require_covers(name: str, found: Calibration, config_json: bytes, temperature: float, *, advice: str) -> None:
    """Raise LocalError if a calibration was measured on something that errs less than the run. `name` is for its message."""
    from prime_node.coordinator.new_run import covers

    if not covers(found, config_json):
        raise LocalError(f"{name} was measured on a smaller model than the run's; {advice}")
    if temperature < found.temperature_min:
        raise LocalError(
            f"{name} was measured at temperature {found.temperature_min:g}, above the run's {temperature:g}; {advice}"
        )


def _measured(options: Options, config_file: Path | None, *, extend: Sequence[str]) -> Calibration:
    """Run `prime-node calibrate` for the config, in a process whose memory is freed afterwards. Raises LocalError.

    Ends this command, too, if it is interrupted.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / SHIPPED
        command = [sys.executable, "-P", "-m", "prime_node", "calibrate", str(file), "--no-cheats", *extend]
        command += [] if config_file is None else ["--config", str(config_file)]
        for assignment in options.assignments:
            command += ["--set", assignment]
        before = signal.signal(signal.SIGINT, lambda *_: None)  # the child gets it too, and ends in order
        try:
            with subprocess.Popen([*command, "--stop-with-parent"], stdin=subprocess.PIPE) as child:
                code = child.wait()
        finally:
            signal.signal(signal.SIGINT, before)
        if code == INTERRUPTED:
            raise typer.Exit(INTERRUPTED)
        if code:
            raise LocalError(
                "the calibration could not be measured here, for the reason above; name engines of this machine in [worker] and "
                "[validator], or a file of `prime-node calibrate` from another machine in run.calibration, or set "
                "run.calibration=none and take workers that you trust"
            )
        return read_calibration(file)
