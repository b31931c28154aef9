"""The worker's page and its API on loopback, and what it shows. No key material is among it; text from outside is bounded.

Buttons write the same file as `prime-node pause` (control.py).

`GET /v1/node` shows everything, `POST /v1/control` orders, `POST /v1/session` begins a session. pages/loopback.py checks
who asks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from prime_node.pages.loopback import LoopbackGate, json_answer, order_route, page_routes, parsed_form
from prime_node.ports.web import Request, Response, Route
from prime_node.worker.control import Control, Wanted, WorkLimits, read_control, write_control
from prime_node.worker.reporting import status_of
from prime_node.worker.status import doing, reason_in_words, speed_now
from prime_node.worker.worker import Worker
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.visible import printable

FILES_IN = "prime_node.worker.page"
"""Package whose folder `assets` has the page's files."""
_MINUTE = re.compile(r"[0-9]{1,12}", re.ASCII)


class Order(BaseModel):
    """Body of an order. What is left out stays as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    wanted: Wanted | None = None
    limits: WorkLimits | None = None


class NodePages:
    """Answers of the worker's page."""

    def __init__(self, worker: Worker, gate: LoopbackGate, link: str) -> None:
        """Answer for `worker`. `link` is the run's join link without an invitation."""
        self._worker, self._gate, self._link = worker, gate, link

    def routes(self) -> Sequence[Route]:
        """Return the routes, each behind the gate."""
        gate = self._gate
        return (
            *page_routes(gate, FILES_IN),
            Route("GET", "/v1/node", gate.private(self._node)),
            order_route(gate, "/v1/control", self._control),
        )

    async def _node(self, request: Request) -> Response:
        since = request.query.get("since", "0")
        if _MINUTE.fullmatch(since) is None:
            raise RemoteError(ErrorCode.MALFORMED, "`since` is a number of minutes")
        return json_answer(node_document(self._worker, self._link, since_minute=int(since)))

    async def _control(self, request: Request) -> Response:
        order, worker = parsed_form(request.body, Order), self._worker
        try:
            control = read_control(worker.folder)
        except LocalError:  # damaged: the order writes it again
            control = Control()
        changes = {name: getattr(order, name) for name in order.model_fields_set if getattr(order, name) is not None}
        at_ms = max(worker.clock.now_ms(), control.at_ms + 1)
        write_control(worker.folder, control.model_copy(update=changes | {"at_ms": at_ms}))
        return json_answer({"at_ms": at_ms})


TEXT_CHARS_MAX = 400


def node_document(worker: Worker, link: str, *, since_minute: int) -> dict[str, Any]:
    """Return the document of the page, with the minutes from `since_minute` on."""
    status, spec, engine = status_of(worker), worker.run.spec, worker.engine_info
    headline, sentence = doing(status)
    limits = worker.activity.limits or worker.config.limits
    return {
        "run": {
            "title": _text(spec.title or spec.name),
            "description": _text(spec.description),
            "digest": worker.run.digest,
            "link": link,
            "max_steps": spec.max_steps,
        },
        "worker": {
            "name": _text(worker.config.name),
            "key": worker.key.key_id,
            "folder": _text(str(worker.folder)),
            "engine": _text(f"{engine.name} {engine.version}, {engine.dtype}, on {engine.device}"),
        },
        "doing": {
            "headline": headline,
            "sentence": _text(sentence),
            "is_paused": bool(status.paused),
            "is_on_request": worker.activity.wanted is Wanted.PAUSE,
            "is_finishing": worker.finishing or worker.quit.is_set(),
            "notice": _text(status.notice) if status.notice not in ("", status.waiting_for) else "",
        },
        "policy": status.policy_version,
        "head": status.head,
        "step": status.step,
        "tokens_per_s": speed_now(status),
        "last_tokens_per_s": status.tokens_per_s,
        "accepted": status.rollouts_accepted,
        "pending": status.rollouts_pending,
        "tokens_credited": status.tokens_accepted,
        "rejected": [
            {"reason": reason, "words": reason_in_words(reason), "count": count}
            for reason, count in sorted(status.refused.items(), key=lambda one: -one[1])
        ],
        "bundles": {
            "escrow": status.bundles_in_escrow,
            "spooled": status.bundles_spooled,
            "uploaded": status.bundles_uploaded,
        },
        "standing": _standing(worker),
        "leases_dropped": status.leases_dropped,
        "peers": status.peers,
        "swarm": _text(status.swarm),
        "down_bytes": status.down_bytes,
        "up_bytes": status.up_bytes,
        "limits": limits.model_dump(mode="json"),
        "defaults": _defaults(worker),
        "notes": _notes(worker),
        "recent": worker.recent.since(since_minute),
        "at_ms": status.at_ms,
    }


def _standing(worker: Worker) -> dict[str, Any] | None:
    """Return the contributor's place and the machines of its person; None if it is not known yet."""
    found = worker.standing
    if found is None:
        return None
    return {
        "person": "" if found.contributor == worker.key.key_id else found.contributor,
        "rank": found.rank,
        "contributors": found.contributors,
        "tokens": found.tokens,
        "all_tokens": found.all_tokens,
        "machines": [
            {
                "key": one.worker,
                "name": _text(one.name),
                "state": _text(one.state),
                "accepted": one.accepted,
                "rejected": one.refused,
                "tokens": one.tokens,
            }
            for one in found.machines
        ],
    }


def _defaults(worker: Worker) -> dict[str, Any]:
    """Return what an empty limit means."""
    config = worker.config
    return {
        "upload_mbit_per_s": config.swarm.upload_mbit_per_s,
        "download_mbit_per_s": config.swarm.download_mbit_per_s,
        "threads": config.threads,
        "gpu_memory_share": config.gpu_memory_share or 0.9,
    }


def _notes(worker: Worker) -> dict[str, str]:
    """Return when a limit takes effect that does not do so at once."""
    found = {"gpu_memory_share": "from the next start on, with vLLM"}
    if worker.engine_info.name != "transformers":
        found["threads"] = "from the next start on"
    return found


def _text(text: str) -> str:
    return printable(text, TEXT_CHARS_MAX)
