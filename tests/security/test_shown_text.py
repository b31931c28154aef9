"""Strangers' texts are bounded on arrival, and never reach a terminal, a log, a label or a page unescaped."""

from __future__ import annotations

import importlib
import io
import json
import logging
import pkgutil
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console
from tests.cases_world import check_each
from tests.security.hostile_text_world import CHARACTERS, HOSTILE, hostile_status, is_clean

import prime_protocol
from prime_node.adapters.prometheus_metrics import PrometheusMetrics
from prime_node.cli import outcome, screen, status_view
from prime_node.cli.plot import Curve, save_curves_png
from prime_node.cli.run_status import RunStatus
from prime_node.cli.say import say
from prime_node.observe import setup_logging
from prime_node.ports.metrics import Metric, MetricKind
from prime_node.worker.status import Status
from prime_protocol.envelope import WireModel
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.identity import KeyId
from prime_protocol.requests import JoinRequest, WorkerState
from prime_protocol.visible import INVISIBLE, VISIBLE, printable

NOT_SHOWN = {
    "EnvelopeText": "a signed envelope, opened before anything of it is used",
    "authorization": "the same, in base64",
    "invite": "the same",
    "delegation": "the same",
    "receipts": "the same",
    "peers": "the same",
    "ticket": "the same",
    "progress": "is parsed as the trainer's state; an error quotes it as Python does, with escapes",
    "path": "is matched with the routes",
    "preset": "is one of the names that the code knows",
    "options": "are data of environments; where an error quotes them, RemoteError makes them printable",
    "detail": "of an error answer becomes a RemoteError, which makes it printable; a verdict's and a receipt's are texts",
}
"""Text fields without a pattern, and why none of them is displayed unescaped."""


def texts(annotation: Any, found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the constraints of each string inside a type."""
    if annotation == KeyId:
        yield {"max_length": 52, "pattern": "key"}
        return
    while typing.get_origin(annotation) is Annotated:
        for item in annotation.__metadata__:
            found = found | constraints(item)
        annotation = annotation.__origin__
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from texts(part, found)
    elif annotation is str:
        yield found
    elif typing.get_origin(annotation) is not typing.Literal:
        for part in typing.get_args(annotation):
            if part is not Ellipsis:
                yield from texts(part, {})


def constraints(item: Any) -> dict[str, Any]:
    if isinstance(item, FieldInfo):
        return {kind: bound for one in item.metadata for kind, bound in constraints(one).items()}
    return {kind: getattr(item, kind) for kind in ("pattern", "max_length") if getattr(item, kind, None) is not None}


def models(base: type[BaseModel] = WireModel) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        if model.__module__.startswith("prime_"):
            yield model
        yield from models(model)


def fields() -> list[Any]:
    for module in pkgutil.walk_packages(prime_protocol.__path__, "prime_protocol."):
        importlib.import_module(module.name)
    return [
        (f"{model.__name__}.{name}", (name, found))
        for model in sorted(set(models()), key=lambda model: model.__name__)
        for name, field in model.model_fields.items()
        for found in texts(
            typing.get_type_hints(model, include_extras=True)[name],
            {kind: bound for item in field.metadata for kind, bound in constraints(item).items()},
        )
    ]


def test_every_text_on_the_wire_has_a_bound_and_a_pattern_or_a_reason() -> None:
    check_each(fields(), lambda case: bounded(*case))


def bounded(name: str, found: dict[str, Any]) -> None:
    pattern = found.get("pattern", "")
    assert "max_length" in found or re.fullmatch(r"\^\[[0-9a-f-]+\]\{\d+\}\$", pattern), "has no bound"
    if not pattern:
        assert name in NOT_SHOWN
    elif pattern != "key":
        for character in CHARACTERS:
            assert not _takes(pattern, f"a{character}b")
            assert not _takes(pattern, character)


def _takes(pattern: str, text: str) -> bool:
    """Return whether the engine that applies it accepts a text."""
    from pydantic import Field

    try:
        _ADAPTERS.setdefault(pattern, TypeAdapter(Annotated[str, Field(pattern=pattern)])).validate_python(text)
    except ValidationError:
        return False
    return True


_ADAPTERS: dict[str, Any] = {}


def test_many_texts_are_found() -> None:
    assert len(fields()) > 80


def test_python_and_the_wire_agree_on_every_code_point() -> None:
    """A name may contain what `printable` keeps, except code points that some version of Unicode lacks."""
    taken, surrogates = re.compile(VISIBLE), range(0xD800, 0xE000)
    listed = {code for first, last in INVISIBLE for code in range(first, last + 1)}.difference(surrogates)
    refused = {code for code in range(0x110000) if code not in surrogates and not taken.fullmatch(chr(code))}
    assert refused == listed
    assert {printable(chr(code)) for code in listed} == {"?"}
    for character in CHARACTERS:
        assert not _takes(VISIBLE, character), hex(ord(character))


def test_whatever_is_made_printable_is_clean_and_short() -> None:
    every = "".join(map(chr, range(0x110000)))
    shown = printable(every, len(every))
    assert shown.isprintable()
    assert "\ud800" not in shown
    assert shown.encode()
    assert len(printable("x" * 10**6)) == 2_000
    assert printable("größe Ωμέγα 漢字 🙂") == "größe Ωμέγα 漢字 🙂"


def test_a_name_with_any_of_them_is_refused_when_a_worker_joins() -> None:
    engine = {"name": "x", "version": "1", "dtype": "fp32", "device": "cpu"}
    for character in CHARACTERS:
        for place in ("name", "software"):
            claimed = {"name": "x", "software": "x", "engine": engine, "rollouts_max": 1, place: f"a{character}b"}
            with pytest.raises(ValidationError):
                JoinRequest.model_validate_json(json.dumps(claimed))
        with pytest.raises(ValidationError):
            JoinRequest.model_validate_json(
                json.dumps({"name": "x", "software": "x", "rollouts_max": 1, "engine": engine | {"device": character}})
            )


# Screens


def drawn(*shown: Any, width: int = 4_000) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=width)
    for one in shown:
        console.print(one)
    return out.getvalue()


def test_the_screen_of_a_run_shows_nothing_of_it() -> None:
    shown = drawn(status_view.of_run(RunStatus.model_validate(hostile_status())))
    assert "owned" in shown
    assert "[bold red]" in shown
    assert is_clean(shown)


@pytest.mark.parametrize("field", ["bytes_published", "peers", "num_workers", "step"])
def test_numbers_too_large_to_be_shown_are_refused(field: str) -> None:
    status = json.loads(json.dumps(hostile_status())) | {field: 10**4000}
    with pytest.raises(ValidationError, match=field):
        RunStatus.model_validate(status)


def test_markup_in_a_reason_is_shown_as_text() -> None:
    """It was parsed: a link, hidden text, and a traceback for a closing tag without an opening one."""
    refused = {"[/x]": 1, "[link=https://evil.example]here[/link]": 2, "[conceal]hidden[/conceal]": 3}
    status = hostile_status() | {"rollouts": {"accepted": 1, "refused": refused}}
    shown = drawn(status_view.of_run(RunStatus.model_validate(status)))
    assert all(reason in shown for reason in refused)
    assert is_clean(shown)


def test_the_screen_of_a_worker_shows_nothing_of_it() -> None:
    status = Status(
        at_ms=0, worker=HOSTILE, state=WorkerState.IDLE, policy_version=1, head=1, step=1, tokens_per_s=1.0,
        rollouts_generated=1, rollouts_accepted=1, rollouts_pending=1, tokens_accepted=1, refused={HOSTILE: 1},
        swarm=HOSTILE, notice=HOSTILE, waiting_for=HOSTILE,
    )  # fmt: skip
    assert is_clean(drawn(status_view.of_workers([(Path(f"/tmp/{HOSTILE}"), status)], now_ms=0)))


def test_the_screen_of_up_shows_nothing_of_it() -> None:
    row = screen.Row(HOSTILE, HOSTILE, HOSTILE, policy=HOSTILE, note=HOSTILE)
    progress = screen.RunProgress(
        HOSTILE, 1, 2, 3.0, evaluation=HOSTILE, broadcast=HOSTILE, rows=[row], waiting_for=HOSTILE, refused={HOSTILE: 2}
    )
    assert is_clean(drawn(screen.render(progress)))
    assert is_clean(screen.one_line(progress))
    assert "\n" not in screen.one_line(progress)


def test_errors_and_lines_show_nothing_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE, HOSTILE)
    say(HOSTILE, console=Console(width=200))
    for error in (LocalError(HOSTILE), RemoteError(ErrorCode.MALFORMED, HOSTILE)):
        outcome.tell(error)
    output = capsys.readouterr()
    assert is_clean(output.out)
    assert is_clean(output.err)
    assert output.out.count("\n") == 3
    assert all(line.startswith(("prime-node: ", "  ")) for line in output.err.splitlines())
    assert "[bold red]x[/]" in output.out


def test_the_title_of_a_plot_is_no_formula(tmp_path: Path) -> None:
    curve = Curve(steps=[1, 2], rewards=[0.1, 0.2], evaluation_steps=[1], greedy=[0.1], sampled=[0.1], ban_step=None)
    save_curves_png(curve, tmp_path / "curve.png", title=f"$\\frac {HOSTILE} $\\input{{/etc/passwd}}$")
    assert (tmp_path / "curve.png").is_file()


# Logs and metrics


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    setup_logging("worker", file=tmp_path / "worker.log")
    handler = logging.getLogger().handlers[0]
    yield tmp_path / "worker.log"
    handler.close()


def test_a_log_holds_nothing_of_it_and_no_line_that_a_stranger_has_forged(log_file: Path) -> None:
    log = logging.getLogger("test")
    log.warning("worker %s says %r and %s", HOSTILE, HOSTILE, "\ud800")
    log.warning("%s", "x" * 10**6)
    try:
        raise ValueError(f"first\n{HOSTILE}\n2026-11-22 00:00:00,000 ERROR coordinator x: forged")
    except ValueError:
        log.exception("a bug about %s", HOSTILE)
    log.info("and a stack", stack_info=True)
    text = log_file.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert is_clean(text)
    assert len(text) < 60_000
    ours = [line for line in lines if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \w+ +worker test: ", line)]
    assert len(ours) == 4
    assert all(line.startswith("    ") for line in lines if line not in ours)


def test_a_traceback_that_another_handler_has_formatted_before_is_made_clean_too(log_file: Path) -> None:
    root = logging.getLogger()
    root.handlers.insert(0, logging.StreamHandler(io.StringIO()))  # it keeps its text in the record
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("test").exception("a bug")
    assert is_clean(log_file.read_text(encoding="utf-8"))


def test_labels_of_metrics_hold_nothing_of_it() -> None:
    metrics = PrometheusMetrics()
    for kind, name in ((MetricKind.COUNTER, "c_total"), (MetricKind.GAUGE, "g"), (MetricKind.HISTOGRAM, "h")):
        metrics.declare(Metric(kind, name, "help", ("label",)))
    metrics.add("c_total", label=HOSTILE)
    metrics.set("g", 1.0, label=HOSTILE + "x" * 10_000)
    metrics.observe("h", 1.0, label=HOSTILE)
    text = metrics.exposition()[0].decode()
    assert is_clean(text)
    assert max(map(len, text.splitlines())) < 400
