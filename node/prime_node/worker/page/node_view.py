"""What the worker's page shows, as JSON values. No key material is among them; text from outside is bounded."""

from __future__ import annotations

from typing import Any

from prime_node.worker.control import Wanted
from prime_node.worker.reporting import status_of
from prime_node.worker.sentences import doing, reason_in_words, speed_now
from prime_node.worker.worker import Worker
from prime_protocol.visible import printable

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
