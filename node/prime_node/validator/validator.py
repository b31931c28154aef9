"""The state of a validator's loop (loop.py)."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from prime_node.ports.clock import Clock
from prime_node.ports.engine import SamplingScorer
from prime_node.ports.environment import Tokenizer
from prime_node.ports.traces import OpenSpan
from prime_node.ports.transport import ValidatorPort
from prime_node.validator.config import ValidatorConfig
from prime_node.validator.held import HeldScorer
from prime_node.validator.references import Comparisons
from prime_node.validator.scoring_workers import ScoringWorkers
from prime_protocol.run_spec import PinnedRun
from prime_protocol.weights import Weights


@dataclass
class Validator:
    """State of the loop. `policy` returns the verified weights of a version, waiting for them if necessary."""

    run: PinnedRun
    config: ValidatorConfig
    coordinator: ValidatorPort
    scorer: SamplingScorer
    scoring_workers: ScoringWorkers
    tokenizer: Tokenizer
    policy: Callable[[int], Awaitable[Weights]]
    policy_versions: Callable[[], tuple[int, ...]]
    clock: Clock
    verdicts: Counter[str] = field(default_factory=Counter)
    """Number of bundles accepted, and rejected by reason."""
    comparisons: Comparisons = field(default_factory=Comparisons)
    """Comparisons of unseeded bundles' rewards with references sampled here."""
    deadlines_ms: dict[str, int] = field(default_factory=dict)
    """Bundles in progress, from the task to the answer -> the deadline, by our own clock."""
    lost: set[str] = field(default_factory=set)
    """Those of them that another validator has, or that have a verdict."""
    checking: dict[str, OpenSpan] = field(default_factory=dict)
    """Their spans, for traces."""
    said_s: float = -math.inf
    """Time of the last log line."""
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    """Random id of this process."""

    def __post_init__(self) -> None:
        self.held = HeldScorer(self.scorer)

    def drop(self, bundle: str) -> None:
        """Record that a bundle is no longer here."""
        self.deadlines_ms.pop(bundle, None)
        if (checking := self.checking.pop(bundle, None)) is not None:
            checking.end()
        self.lost.discard(bundle)
