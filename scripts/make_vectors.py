"""Write golden vectors: inputs as they are on the wire, and the result that every implementation must give.

    python scripts/make_vectors.py tests/vectors/v1.1

`tests/vectors/v1` is frozen: a test compares its digest. The first addition to protocol version 1 adds a folder `v1.1`, the
next one `v1.2`. Keep in it only the lists that differ from those of the folders before, and the files that they name. All
keys and times are fixed, so two runs of one version of this script differ at most in how zstd compresses.

A folder holds one JSON list per kind, and binary inputs. A case has a `name`, an `input` (a file in the folder, or
`hex`, or `text`), the kind's own parameters, and either `expect` or the `error` code. tests/protocol/vector_kinds.py shows
in one short function per kind how to read them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vectors.adapters import adapters
from vectors.answers import answers
from vectors.basics import envelopes, json_texts, keys, noise
from vectors.bundles import bundles
from vectors.calibrations import calibrations
from vectors.checkpoints import checkpoints
from vectors.claims import body_claims
from vectors.delegations import delegations, standings
from vectors.folder import Folder
from vectors.invites import invites
from vectors.judged import judged_logprobs
from vectors.ledger import ledger
from vectors.messages import messages
from vectors.peers import peers
from vectors.proofs import choices, compared_choices, proofs
from vectors.replay import replay
from vectors.runs import lease_of, runs
from vectors.seeds import seeds
from vectors.trust import trust
from vectors.turns import turns
from vectors.uncalibrated import close_flips, compared, excess_flips, ranks, shaded


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Folder(Path(sys.argv[1]))
    keys(folder)
    json_texts(folder)
    envelopes(folder)
    noise(folder)
    choices(folder)
    compared_choices(folder)
    proofs(folder)
    run = runs(folder)
    trust(folder, run)
    calibrations(folder, run)
    peers(folder, run)
    lease = lease_of(run, checkpoints(folder, run))
    messages(folder, run, lease, bundles(folder, run, lease))
    ledger(folder, run)
    turns(folder, lease)
    invites(folder, run)
    delegations(folder, run)
    standings(folder)
    adapters(folder)
    ranks(folder)
    compared(folder)
    excess_flips(folder)
    close_flips(folder)
    shaded(folder)
    judged_logprobs(folder, run)
    body_claims(folder, run)
    seeds(folder)
    answers(folder)
    replay(folder)


if __name__ == "__main__":
    main()
