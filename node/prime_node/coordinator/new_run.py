"""Creation of a run: the [run] table of a config, some keys and the model's files become a signed RunSpec.

The RunSpec is fixed for the life of the run; another RunSpec is another run. Settings that may change during a run are in the
roles' own tables instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from prime_node.config import Settings, SettingsConfigDict
from prime_node.coordinator.assignments import chain_of, secret_of
from prime_protocol import limits
from prime_protocol.adapters import AdapterSpec
from prime_protocol.assignment import Sampling
from prime_protocol.calibration import Calibration
from prime_protocol.check_policy import AuditPolicy, CheckPolicy
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import LocalError
from prime_protocol.identity import KeyId, SigningKey
from prime_protocol.key_ring import RoleKeys
from prime_protocol.limits import TEMPERATURE_MIN, Limits
from prime_protocol.replay import BundleAccess, ReplayPolicy
from prime_protocol.run_spec import CONFIG_FILE, EnvironmentSpec, ModelFile, PinnedRun, RunSpec
from prime_protocol.schedule import Schedule
from prime_protocol.seed_chain import committed
from prime_protocol.verify import LIKELIHOOD_RATIOS

ROLES = ("root", "coordinator", "trainer", "validator")
"""Roles of the keys that are made for a new run, one each."""
POSITIONS_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names of a model's number of positions in config.json: the usual one, GPT-2's and MPT's."""
REFERENCE_SHARE = 0.25
"""Reference share of a new run that takes unseeded engines."""


class TinyModel(BaseModel):
    """A small Qwen3-architecture model with a byte-level tokenizer, generated locally."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["tiny"] = "tiny"
    """Kind of the model: generated here."""
    hidden_size: int = Field(default=128, ge=16)
    """Width."""
    num_layers: int = Field(default=2, ge=1)
    """Number of decoder layers."""
    num_heads: int = Field(default=4, ge=1)
    """Number of attention heads, and of key and value heads."""
    intermediate_size: int = Field(default=384, ge=16)
    """Width of the MLP."""


class PretrainedModel(BaseModel):
    """A model folder in Hugging Face format, or a model from a hub."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["pretrained"]
    """Kind of the model: with weights of its own."""
    name_or_path: str
    """Folder with config.json, tokenizer files and safetensors, or a hub's model name such as `Qwen/Qwen3-0.6B`."""


class AdapterConfig(BaseModel):
    """Low-rank adapters of a pretrained model, published without the base: megabytes per policy instead of gigabytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(ge=1)
    """Rank of the factors."""
    alpha: int = Field(default=32, ge=1)
    """Scale of the adapters' product, which is alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of linear layers, such as "q_proj"; empty: all but the head."""


class ReplayConfig(BaseModel):
    """Re-execution of training steps by strangers. The table `[run.replay]`, even an empty one, turns it on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state_every: int = Field(default=10, ge=1)
    """Policies between two published training states, 12 bytes a parameter each. A re-execution begins at one of them."""
    state_days: float = Field(default=7.0, gt=0.0, le=limits.REPLAY_DAYS_MAX)
    """Days for which they are kept."""
    bundle_days: float = Field(default=7.0, gt=0.0, le=limits.REPLAY_DAYS_MAX)
    """Days for which the bundles of a batch are kept for their readers."""
    bundles: BundleAccess = BundleAccess.PUBLIC
    """Readers of the bundles: public, everyone; or auditors, those named here or later in a key ring. Strangers can check but the
    batches' signatures, the learning rates and the bound on each weight's movement then."""
    auditors: tuple[KeyId, ...] = Field(default=(), max_length=limits.SIGNATURES_MAX)
    """Ids of the auditors' public keys, from `prime-node keys make`, for bundles = "auditors"."""
    gib_max: float = Field(default=0.0, ge=0.0, le=2.0**20)
    """GiB of these states and bundles above which those of the oldest policies are deleted before their days are over; 0: no
    such bound. It is part of the promise, so strangers know of it."""

    @model_validator(mode="after")
    def _auditors_have_something_to_read(self) -> Self:
        if self.auditors and self.bundles is not BundleAccess.AUDITORS:
            raise ValueError('auditors are named, but everyone may read the bundles: set bundles = "auditors"')
        return self

    def policy(self, *, recipe: str) -> ReplayPolicy:
        """Return the RunSpec's promise."""
        promised = self.model_dump(exclude={"gib_max", "auditors"})
        return ReplayPolicy(recipe=recipe, bytes_max=round(self.gib_max * 2**30), **promised)


class RunConfig(Settings):
    """The [run] table. It is read once, when the run directory is created."""

    model_config = SettingsConfigDict(env_prefix="PRIME_RUN_")
    section: ClassVar[str] = "run"

    name: str = "run"
    """Name that contributors see."""
    title: str = ""
    """Name of the run for people, on its page. Empty: `name`."""
    description: str = ""
    """What is trained and why, in one or two sentences for the page."""
    coordinators: tuple[str, ...] = ()
    """Addresses of further coordinators of the run, for example ["http://b.example.org:8400"]: hot standbys, or names that move.
    Clients ask the next one where one does not answer. If the join link has TLS (https), all need it."""
    async_level: int = Field(default=2, ge=0, le=64)
    """Number of policies that inference may be behind the trainer, k. 2 hides the broadcast."""
    max_steps: int = Field(default=1_000, ge=1)
    """Number of the run's last policy."""
    groups_per_step: int = Field(default=64, ge=1)
    """Prompts of one step."""
    rollouts_per_group: int = Field(default=8, ge=1)
    """Completions of one prompt."""
    temperature: float = Field(default=1.0, ge=TEMPERATURE_MIN, le=10.0)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the probability: sample among the most probable tokens that have it together. 1: among all."""
    top_k: int = Field(default=0, ge=0)
    """Number of the most probable tokens to sample among. 0: all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Minimum probability of a token to sample, as a share of the most probable one's. 0: sample among all tokens."""
    completion_tokens_max: int = Field(default=1_024, ge=1)
    """Length limit of a completion, including the stop token."""
    lease_seconds: float = Field(default=600.0, gt=0.0)
    """Time that a worker has for one lease."""
    heartbeat_seconds: float = Field(default=5.0, ge=0.1)
    """Time between a worker's heartbeats."""
    model: Annotated[TinyModel | PretrainedModel, Field(discriminator="kind")] = TinyModel()
    """Model to train."""
    adapters: AdapterConfig | None = None
    """Adapters of that model to train and publish; workers then need the base model once. None: train and publish the whole
    model."""
    environments: tuple[EnvironmentSpec, ...] = Field(min_length=1)
    """Sources of problems, with their weights."""
    limits: Limits = Limits()
    """Limits on everything that a peer may send."""
    checks: CheckPolicy = CheckPolicy(
        proofs=True,
        audits=AuditPolicy(),
        flips_explained=True,
        close_flips_seen=True,
        shading_seen=True,
        logprobs_judged=True,
    )
    """Checks by validators. By default, new runs require hidden-state proofs and audit a share of the bundles."""
    calibration: str = "auto"
    """Calibration of honest tokens, which lets evidence against a worker add up. auto: the shipped one if it covers the model and
    the engines of [worker] and [validator], else one that is measured on this machine and cached. Otherwise `shipped`, the name
    of another shipped file, or a file from `prime-node calibrate`, which must cover the model; or `none`, for a run of trusted
    workers."""
    calibration_tokens: int = Field(default=50_000, ge=2_000)
    """Honest tokens to measure for a calibration. Fewer give wider limits, so that cheats are banned later."""
    calibration_minutes: float = Field(default=10.0, gt=0.0)
    """Minutes after which the measurement ends with fewer tokens, but at least 2,000. The start of the engines and the end of the
    lease in progress come on top."""
    replay: ReplayConfig | None = None
    """Re-execution of training steps by strangers. None: they can verify who signed the weights, not how they were computed."""
    schedule: Schedule = Schedule()
    """Asynchronous mode: a preset, or settings by the names of prime-rl, verl or NeMo-RL. See docs/scheduler.md. A
    staleness_threshold replaces async_level."""

    @field_validator("checks", mode="before")
    @classmethod
    def _checks_of_new_runs(cls, checks: Any) -> Any:
        """Fill in the checks of new runs. In a RunSpec, an absent check is off and all bundles are audited."""
        if not isinstance(checks, dict):
            return checks
        compared = {"reference_share": REFERENCE_SHARE, "references_public": True} if checks.get("unseeded") else {}
        seen = dict.fromkeys(("flips_explained", "close_flips_seen", "shading_seen", "logprobs_judged"), True)
        return {"proofs": True, "audits": {}, **seen, **compared, **checks}


def covers(calibration: Calibration, config_json: bytes) -> bool:
    """Return whether a model is at most as large as the measured one: errors grow with width and depth."""
    config = json.loads(config_json)
    hidden_size, num_layers = config.get("hidden_size"), config.get("num_hidden_layers")
    if not isinstance(hidden_size, int) or not isinstance(num_layers, int):
        return False
    return hidden_size <= calibration.hidden_size_max and num_layers <= calibration.num_layers_max


def fit_positions(config: RunConfig, config_json: bytes) -> Limits:
    """Return the run's limits, with prompts short enough that a completion fits into the model's positions after them.

    A longer sequence would end the trainer. Raises LocalError where the settings ask for one.
    """
    model = json.loads(config_json)
    model = model.get("text_config", model)
    field = next((name for name in POSITIONS_FIELDS if isinstance(model.get(name), int)), None)
    if field is None:
        return config.limits
    positions = model[field]
    room = positions - config.completion_tokens_max
    asked = {f"environment {one.name}: context_tokens_max": one.context_tokens_max or 0 for one in config.environments}
    asked["completion_tokens_max"] = config.completion_tokens_max + 1
    if "prompt_tokens_max" in config.limits.model_fields_set:
        asked["limits.prompt_tokens_max"] = config.limits.prompt_tokens_max + config.completion_tokens_max
    for name, tokens in asked.items():
        if tokens > positions:
            raise LocalError(
                f"[run] {name}: sequences of {tokens:,} tokens do not fit into the model's {positions:,} positions "
                f"({field} in config.json); lower it"
            )
    return config.limits.model_copy(update={"prompt_tokens_max": min(config.limits.prompt_tokens_max, room)})


def build_run_spec(
    config: RunConfig,
    *,
    keys: Mapping[str, SigningKey],
    model_files: Mapping[str, bytes],
    vocab_size: int,
    stop_token_ids: tuple[int, ...],
    now_ms: int,
    adapters: AdapterSpec | None = None,
    calibration: Calibration | None = None,
    recipe: bytes = b"",
) -> PinnedRun:
    """Sign the RunSpec with the root key. Raise LocalError if the settings do not fit together.

    `calibration` becomes part of the checks, unless they contain one already. `recipe`: the trainer's, if the run can be
    re-executed.
    """
    checks = config.checks
    if calibration is not None and checks.calibration is None:
        known = calibration if checks.unseeded else calibration.without(LIKELIHOOD_RATIOS)
        checks = checks.model_copy(update={"calibration": known})
    limits_of_run = fit_positions(config, model_files[CONFIG_FILE]) if CONFIG_FILE in model_files else config.limits
    try:
        spec = RunSpec(
            name=config.name,
            title=config.title,
            description=config.description,
            coordinators=tuple(url.rstrip("/") for url in config.coordinators),
            created_at_ms=now_ms,
            keys=RoleKeys(
                root=(keys["root"].key_id,),
                coordinator=(keys["coordinator"].key_id,),
                trainer=(keys["trainer"].key_id,),
                validator=(keys["validator"].key_id,),
                auditor=() if config.replay is None else config.replay.auditors,
            ),
            model_files=tuple(
                ModelFile(name=name, digest=digest_of(data), size=len(data))
                for name, data in sorted(model_files.items())
            ),
            vocab_size=vocab_size,
            environments=config.environments,
            sampling=Sampling(
                temperature=config.temperature,
                top_p=config.top_p,
                top_k=config.top_k,
                min_p=config.min_p,
                completion_tokens_max=config.completion_tokens_max,
                stop_token_ids=stop_token_ids,
            ),
            async_level=config.schedule.async_level(config.groups_per_step, otherwise=config.async_level),
            max_steps=config.max_steps,
            groups_per_step=config.groups_per_step,
            rollouts_per_group=config.rollouts_per_group,
            lease_seconds=config.lease_seconds,
            heartbeat_seconds=config.heartbeat_seconds,
            limits=limits_of_run,
            checks=checks,
            schedule=config.schedule,
            adapters=adapters,
            replay=None if config.replay is None else config.replay.policy(recipe=digest_of(recipe)),
            seed_chain=committed(
                chain_of(secret_of(keys["coordinator"]), min(config.max_steps, limits.SEED_CHAIN_LENGTH_MAX)),
                prompts=True,
            ),
        )
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise LocalError(f"[run] {place}: {fault['msg']}") from None
    envelope = seal(spec, PayloadType.RUN_SPEC, keys["root"])
    return PinnedRun(envelope.digest, spec, envelope)
