"""The RunSpec: the definition of a run, signed by its root keys and pinned by its digest in the join link.

A worker never learns its trust root from the network. The join link `http://host:port/#<digest>` holds the digest of
the RunSpec's payload. A worker detects a server with other bytes before it parses any of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from prime_protocol import limits
from prime_protocol.adapters import AdapterSpec
from prime_protocol.amendment import CalibrationChain
from prime_protocol.assignment import Count, Name, Sampling, Seed, Text
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.digest import Digest, is_digest
from prime_protocol.envelope import Envelope, PayloadType, WireModel, load_json, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.key_ring import KeyChain, RoleKeys
from prime_protocol.limits import Limits
from prime_protocol.names import ModelFileName
from prime_protocol.replay import ReplayPolicy
from prime_protocol.schedule import Schedule, Selection, StalePolicy
from prime_protocol.seed_chain import SeedChain
from prime_protocol.step import Admission

PROTOCOL_VERSION = 1
"""Wire version, raised with every change that an older peer cannot read."""
CONFIG_FILE = "config.json"
"""Model file that defines the weights' architecture; manifests name its digest."""


class ModelFile(WireModel):
    """File next to the weights: config.json, tokenizer.json, ... Its bytes are a blob with that digest.

    Only file types that hold data are allowed: a run must not bring code or pickles to the machines that join it.
    """

    name: ModelFileName
    digest: Digest
    size: Count


Option = (
    Annotated[str, Field(max_length=limits.OPTION_CHARS_MAX)]
    | Annotated[int, Field(ge=-limits.COUNT_MAX, le=limits.COUNT_MAX)]
    | Annotated[float, Field(gt=-limits.COUNT_MAX, lt=limits.COUNT_MAX)]  # a larger integer is parsed as a float
    | bool
)


CoordinatorUrl = Annotated[
    str, Field(max_length=200, pattern=r"^https?://(?:[0-9a-zA-Z.-]{1,150}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?$")
]
"""Address of a coordinator: scheme, host, perhaps a port. It has no path, because a run could name any device's."""
CoordinatorUrls = Annotated[tuple[CoordinatorUrl, ...], Field(max_length=limits.COORDINATORS_MAX)]


class EnvironmentSpec(WireModel):
    """One environment of the run.

    Example: EnvironmentSpec(name="spell", id="reasoning_gym", options={"task": "spell_backward"}).
    """

    name: Name
    """Name of this environment in rewards and reports."""
    id: Name
    """Name of the implementation."""
    weight: float = Field(default=1.0, gt=0.0, le=1e6)
    """Share of the problems, relative to the other environments."""
    seed: Seed = 0
    """Seed of the problem generator."""
    options: dict[Name, Option] = Field(default_factory=dict, max_length=64)
    """Options of the implementation."""
    turns_max: int = Field(default=1, ge=1, le=limits.TURNS_MAX, exclude_if=lambda value: value == 1)
    """Requests to the model in one rollout. Above 1 the environment answers, and workers run its code too."""
    context_tokens_max: int = Field(default=0, ge=0, le=limits.TOKENS_MAX, exclude_if=lambda value: value == 0)
    """Limit on prompt plus answer of one turn; 0 allows one prompt and one completion of the run's limits."""
    is_deterministic: bool = Field(default=True, exclude_if=lambda value: value)
    """Whether equal answers always get equal texts and rewards. If not, the environment's texts are the worker's claim."""
    scorings: int = Field(default=1, ge=1, le=limits.SCORINGS_MAX, exclude_if=lambda value: value == 1)
    """Number of times a rollout is scored; the reward is the median. For judges whose scores vary."""


class RunSpec(WireModel):
    """Definition of one training run. Immutable: another RunSpec is another run."""

    protocol_version: int = Field(default=PROTOCOL_VERSION, ge=1, le=limits.COUNT_MAX)
    name: Name
    created_at_ms: Count
    keys: RoleKeys
    """Keys of version 0; key rings may replace them."""
    model_files: tuple[ModelFile, ...] = Field(min_length=1, max_length=64)
    """Configuration and tokenizer, fixed for the run. Manifests deliver the weights."""
    vocab_size: int = Field(ge=1, le=2**24)
    """Size of the vocabulary; token ids are below it."""
    environments: tuple[EnvironmentSpec, ...] = Field(min_length=1, max_length=256)
    sampling: Sampling
    async_level: int = Field(default=2, ge=0, le=64)
    """k: a rollout tagged n comes from a policy v with 0 <= n - v <= k."""
    max_steps: int = Field(ge=1, le=limits.STEP_MAX)
    """Number of training steps. The run ends when policy `max_steps` is published."""
    groups_per_step: int = Field(ge=1, le=limits.STEP_GROUPS_MAX)
    """R: groups that one step trains on."""
    rollouts_per_group: int = Field(ge=1, le=limits.LEASE_ROLLOUTS_MAX)
    """G: completions of one prompt."""
    lease_seconds: float = Field(default=600.0, gt=0.0, le=1e6)
    """Time that a worker has for one lease."""
    heartbeat_seconds: float = Field(default=5.0, ge=0.1, le=3_600.0)
    """Interval of a worker's heartbeats; after four missed ones its leases go to other workers."""
    limits: Limits = Field(default_factory=Limits)
    checks: CheckPolicy = Field(default_factory=CheckPolicy)
    schedule: Schedule = Field(default_factory=Schedule, exclude_if=lambda schedule: schedule.is_default)
    """Asynchronous mode. Omitted if it is the default."""
    adapters: AdapterSpec | None = Field(default=None, exclude_if=lambda adapters: adapters is None)
    """Base model and shape of adapters, if policies are adapters only. Omitted if policies are whole models."""
    seed_chain: SeedChain | None = Field(default=None, exclude_if=lambda chain: chain is None)
    """Commitment to the secrets behind problems and seeds. Omitted if they stay secret."""
    replay: ReplayPolicy | None = Field(default=None, exclude_if=lambda replay: replay is None)
    """Promise that training steps can be re-executed. Omitted if there is none."""
    title: Text = Field(default="", exclude_if=lambda title: not title)
    """Name of the run for people. Omitted if empty."""
    description: Text = Field(default="", exclude_if=lambda description: not description)
    """What is trained and why, for people. Omitted if empty."""
    coordinators: CoordinatorUrls = Field(default=(), exclude_if=lambda urls: not urls)
    """Addresses at which a coordinator of the run may answer, in addition to the join link's. Omitted if there are none."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        for what, names in (
            ("model file", [file.name.casefold() for file in self.model_files]),  # some file systems ignore case
            ("environment", [environment.name for environment in self.environments]),
        ):
            if len(set(names)) != len(names):
                raise ValueError(f"two {what}s have the same name")
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.model_config_digest is None:
            raise ValueError(f"the model files lack {CONFIG_FILE}")
        if max(file.size for file in self.model_files) > self.limits.blob_bytes_max:
            raise ValueError("a model file is larger than limits.blob_bytes_max")
        if self.sampling.completion_tokens_max > self.limits.completion_tokens_max:
            raise ValueError("sampling.completion_tokens_max is above limits.completion_tokens_max")
        longest = self.limits.prompt_tokens_max + self.sampling.completion_tokens_max
        if any(0 < environment.context_tokens_max < longest for environment in self.environments):
            raise ValueError(
                f"an environment's context_tokens_max is below {longest}: a prompt and a completion must fit"
            )
        if any(token >= self.vocab_size for token in self.sampling.stop_token_ids):
            raise ValueError("a stop token is not in the vocabulary")
        if self.seed_chain is not None and self.seed_chain.length > self.max_steps:
            raise ValueError("seed_chain has more secrets than the run has steps")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        schedule, eta = self.schedule, self.schedule.staleness_threshold
        level = schedule.async_level(self.groups_per_step, otherwise=self.async_level)
        if self.async_level != level:
            cause = (
                f"staleness_threshold is {eta:g}" if eta is not None else f"max_run_ahead is {schedule.max_run_ahead}"
            )
            raise ValueError(f"async_level must be {level}, for schedule.{cause}")
        num_batches = schedule.trigger_parameter_sync_step * schedule.require_batches
        if self.groups_per_step % num_batches:
            raise ValueError(
                f"groups_per_step = {self.groups_per_step} cannot be divided into {num_batches} mini-batches "
                "(trigger_parameter_sync_step * require_batches)"
            )
        if (schedule.group_rollouts_min or 0) > self.rollouts_per_group:
            raise ValueError("schedule.group_rollouts_min is above rollouts_per_group")
        return self

    @property
    def admission(self) -> Admission:
        """Rule that decides which policy may serve which slot."""
        schedule = self.schedule
        return Admission(
            groups_per_step=self.groups_per_step,
            slots_ahead=schedule.slots_ahead(self.groups_per_step, async_level=self.async_level),
            is_in_order=schedule.selection is Selection.IN_ORDER,
            lag_max=schedule.max_off_policy_steps if schedule.stale is StalePolicy.DROP else None,
        )

    def context_tokens_max(self, environment: EnvironmentSpec) -> int:
        """Return the limit on prompt plus answer of one turn."""
        return environment.context_tokens_max or self.limits.prompt_tokens_max + self.sampling.completion_tokens_max

    @property
    def commits_to_prompts(self) -> bool:
        """Whether each receipt that accepts a bundle has a digest of its lease's prompts."""
        return self.seed_chain is not None and self.seed_chain.prompts

    @property
    def turns_max(self) -> int:
        """Largest turns_max of all environments."""
        return max(environment.turns_max for environment in self.environments)

    @property
    def model_config_digest(self) -> str | None:
        """Digest of config.json."""
        return next((file.digest for file in self.model_files if file.name == CONFIG_FILE), None)

    def step_of(self, slot: int) -> int:
        """Return the step that trains a slot."""
        return slot // self.groups_per_step


@dataclass(frozen=True, slots=True)
class PinnedRun:
    """RunSpec whose digest matches the pinned one and whose root signatures were verified."""

    digest: str
    spec: RunSpec
    envelope: Envelope
    keys: KeyChain = field(init=False, compare=False)
    """Current and past keys: the RunSpec's, and those of the key rings that this process has verified since."""
    calibrations: CalibrationChain = field(init=False, compare=False)
    """Versions of the calibration: the RunSpec's, and the amendments that this process has verified since."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", KeyChain(self.digest, self.spec.keys))
        object.__setattr__(self, "calibrations", CalibrationChain(self.keys, self.spec.checks.calibration))

    @property
    def checks(self) -> CheckPolicy:
        """The RunSpec's checks, with the newest known version of the calibration."""
        return self.checks_at(self.calibrations.version)

    def checks_at(self, calibration: int) -> CheckPolicy:
        """Return the RunSpec's checks with a version of the calibration. Raises RemoteError for an unknown version."""
        known = self.calibrations.at(calibration)
        return self.spec.checks.model_copy(update={"calibration": known}) if calibration else self.spec.checks


@dataclass(frozen=True, slots=True)
class JoinLink:
    """Address and digest of a run, and perhaps an invitation. Example: `http://203.0.113.5:8400/#af13...`."""

    url: str
    run: str
    invite: str = ""
    """Text of an invitation (invite.py) for a run that admits only invited keys."""

    @classmethod
    def parse(cls, text: str) -> JoinLink:
        """Parse a link that a user entered. Raises ValueError that says what is wrong with it."""
        text = text.strip(" \t\r\n<>\"'")
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"the join link {text[:120]!r} has no valid address: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username is not None:
            raise ValueError(f"a join link looks like http://host:port/#<64 hex digits>, got {text[:120]!r}")
        if port == 0:
            raise ValueError("the join link's port is 0")
        run, dot, invite = parts.fragment.partition(".")
        if not is_digest(run):
            raise ValueError(
                f"the join link needs the 64 digits (0-9, a-f) of its run after '#', and has {len(run)} characters there. "
                "Ask the operator for the whole link"
            )
        if dot and not (re.fullmatch(r"[0-9A-Za-z_=-]+", invite) and len(invite) <= limits.INVITE_CHARS_MAX):
            raise ValueError("the invitation at the join link's end is damaged. Ask the operator for the whole link")
        return cls(f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", run, invite)

    def __str__(self) -> str:
        return f"{self.url}/#{self.run}{'.' if self.invite else ''}{self.invite}"


def open_run_spec(envelope: Envelope, *, pinned: str) -> PinnedRun:
    """Check a RunSpec against the digest of the join link. Raises RemoteError.

    (1) size; (2) digest of the raw payload equals the pinned one; (3) protocol version; (4) schema and bounds; (5)
    every root key that it names has signed it.
    """
    if len(envelope.payload) > limits.RUN_SPEC_BYTES_MAX:  # (1)
        raise LimitExceeded("RUN_SPEC_BYTES_MAX", len(envelope.payload), limits.RUN_SPEC_BYTES_MAX)
    if envelope.digest != pinned:  # (2)
        raise RemoteError(ErrorCode.WRONG_RUN, f"the server's run is {envelope.digest}, the join link names {pinned}")
    fields = load_json(envelope.payload)
    version = fields.get("protocol_version") if isinstance(fields, dict) else None
    if version != PROTOCOL_VERSION:  # (3)
        is_newer = isinstance(version, int) and version > PROTOCOL_VERSION
        advice = "upgrade this software" if is_newer else "install the release that the run's operator names"
        raise RemoteError(
            ErrorCode.VERSION_UNSUPPORTED,
            f"the run speaks protocol {version!r:.20}, this software {PROTOCOL_VERSION}: {advice}, and start again",
        )
    spec = parse_json(envelope.payload, RunSpec)  # (4)
    roots = spec.keys.root
    envelope.verify(PayloadType.RUN_SPEC, trusted=roots, threshold=len(set(roots)))  # (5)
    return PinnedRun(pinned, spec, envelope)
