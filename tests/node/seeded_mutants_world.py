"""Faults that are put into the code of gateways and their links. A simulated run must find each of them.

python -m tests.node.seeded_mutants_world 3 --to 300          the first seed that finds each fault
python -m tests.node.seeded_mutants_world 3 --to 300 --name NAME     the same for one of them
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import logging
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.node.seeded_parts_world import replaced
from tests.node.seeded_world import has_gateways, simulate

CLIENT, SERVER = "prime_node.adapters.link.link_client", "prime_node.adapters.link.link_server"
RELAY, LIVE = "prime_node.coordinator.gateway.relay", "prime_node.coordinator.gateway.relay"
GATE, INTAKE = "prime_node.coordinator.api.requests", "prime_node.coordinator.api.intake"


@dataclass(frozen=True)
class Mutant:
    """One function with other text. Where the text is no longer in it, it is an error."""

    name: str
    module: str
    function: str
    """Name in the module. Example: "LinkClient.ask"."""
    changes: tuple[tuple[str, str], ...]
    """Each text, and the one that replaces it."""
    seed: int
    """A seed that finds it."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Change the function for a while."""
        module = importlib.import_module(self.module)
        *owners, name = self.function.split(".")
        owner = module
        for each in owners:
            owner = vars(owner)[each]
        text = textwrap.dedent(inspect.getsource(vars(owner)[name]))
        for old, new in self.changes:
            assert text.count(old) == 1, f"{self.function} has no {old!r} any more: change the mutant with it"
            text = text.replace(old, new)
        made: dict[str, object] = {}
        exec("from __future__ import annotations\n" + text, vars(module), made)
        with replaced(owner, **{name: made[name]}):
            yield


MUTANTS = (
    Mutant(
        "an answer goes to the request that waits longest",
        CLIENT,
        "LinkClient._take",
        (("self._waiting.pop(frame.call)", "self._waiting.pop(min(self._waiting))"),),
        3,
    ),
    Mutant(
        "requests that wait outlive their link, and the next link numbers its own from 1 again",
        CLIENT,
        "LinkClient._link",
        (("for answer in self._waiting.values():", "self._numbers = itertools.count(1)\n        for answer in ():"),),
        11,
    ),
    Mutant(
        "requests that wait when a link ends are never answered",
        CLIENT,
        "LinkClient._link",
        (("for answer in self._waiting.values():", "for answer in ():"),),
        11,
    ),
    Mutant(
        "refusals do not arrive",
        CLIENT,
        "LinkClient._take",
        (("answer.set_exception(fault_of(frame.head))", "pass"),),
        7,
    ),
    Mutant(
        "a streamed body loses a byte", CLIENT, "LinkClient._pieces", (("yield frame.body", "yield frame.body[1:]"),), 3
    ),
    Mutant(
        "a nonce is spent again through another gateway",
        GATE,
        "RequestGate._accept",
        (("self.nonces.require_new(signer, stamped.nonce)", "hash((stamped.nonce, now_s))"),),
        3,
    ),
    Mutant(
        "a bundle is acknowledged before the writer has its body",
        INTAKE,
        "BundleIntake.upload_held",
        (
            ("if data := await parcel.fetch():", "if not (data := b'x'):"),
            ("elif not await self.storage.bundles.has(parcel.digest)", "elif not data"),
        ),
        3,
    ),
    Mutant(
        "a gateway names another signer",
        RELAY,
        "GatewayRelay._handle",
        (
            (
                "replace(call, signer=signer, body=payload",
                "replace(call, signer=next(reversed(self.senders._senders), signer), body=payload",
            ),
        ),
        3,
    ),
    Mutant(
        "a public document is answered as it was the first time",
        RELAY,
        "GatewayRelay._answered",
        (("self._waiting.pop(key, None)", "pass"),),
        3,
    ),
)


def finding(mutant: Mutant, seed: int) -> Exception | None:
    """Return how a seed fails with a mutant; None if it does not."""
    with mutant.applied():
        try:
            simulate(seed)
        except Exception as error:  # noqa: BLE001 (each one is a finding)
            return error
    return None


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--to", type=int)
    parser.add_argument("--name", default="", help="a part of its name")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    for each in MUTANTS:
        if given.name in each.name:
            found = ((seed, finding(each, seed)) for seed in range(given.seed, given.to) if has_gateways(seed))
            first = next(((seed, error) for seed, error in found if error is not None), None)
            said = "no seed finds it" if first is None else f"{first[0]}: {type(first[1]).__name__}: {first[1]}"
            print(f"{each.name}: {' '.join(said.split())[:160]}", flush=True)
