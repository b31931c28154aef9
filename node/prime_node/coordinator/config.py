"""Settings of the coordinator: the [coordinator] table. The RunSpec defines the run; these settings define how it is served."""

from __future__ import annotations

import ipaddress
from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from prime_node.config import Settings, SettingsConfigDict
from prime_node.coordinator.state.curriculum import Pool
from prime_protocol.identity import KeyId
from prime_protocol.limits import TIMESTAMP_LIFETIME_S_MAX


class CurriculumConfig(BaseModel):
    """Selection of problems. Without thresholds and filtering, all problems are used."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    easy_threshold: float | None = Field(default=None, ge=0.0, le=1.0)
    """Mean reward of a group at or above which its problem is not asked again."""
    hard_threshold: float | None = Field(default=None, ge=0.0, le=1.0)
    """Mean reward of a group at or below which its problem is not asked again."""
    easy_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the easy pool, drawn at random, that returns to use at each start of the coordinator."""
    hard_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """The same share of the hard pool."""
    online_difficulty_filtering: bool = False
    """Whether to drop groups whose rewards are all 0 or all 1, and to sample another problem instead."""
    oversampling_factor: float = Field(default=2.0, ge=1.0)
    """Maximum of the groups generated for a step, as a multiple of those that it trains on. Beyond it, no group is dropped."""

    @model_validator(mode="after")
    def _ordered(self) -> CurriculumConfig:
        low, high = self.hard_threshold, self.easy_threshold
        if low is not None and high is not None and low >= high:
            raise ValueError("hard_threshold must be below easy_threshold")
        return self

    @property
    def is_on(self) -> bool:
        """Whether any selection of problems is on."""
        return self.online_difficulty_filtering or self.easy_threshold is not None or self.hard_threshold is not None

    def pool_of(self, reward_mean: float) -> Pool:
        """Return the pool of a problem by its group's mean reward."""
        if self.easy_threshold is not None and reward_mean >= self.easy_threshold:
            return Pool.EASY
        if self.hard_threshold is not None and reward_mean <= self.hard_threshold:
            return Pool.HARD
        return Pool.NORMAL

    def filtered_as(self, reward_mean: float) -> Pool | None:
        """Return the pool for which a group is dropped; None if it is kept."""
        if not self.online_difficulty_filtering or 0.0 < reward_mean < 1.0:
            return None
        return Pool.HARD if reward_mean <= 0.0 else Pool.EASY


class EvaluationConfig(BaseModel):
    """Evaluations by the workers. They cost the run's own inference; their results are labelled untrusted."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    every: int = Field(default=0, ge=0)
    """Number of steps between evaluated policies, the first one included; 0: none is evaluated."""
    at: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Additional policies to evaluate."""
    problems: int = Field(default=64, ge=1, le=4_096)
    """Held-out problems of each environment; each gets rollouts_per_group completions."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Values of k for pass@k, at most rollouts_per_group."""

    def is_due(self, policy_version: int) -> bool:
        """Return whether a policy is to be evaluated."""
        return policy_version in self.at or (self.every > 0 and policy_version % self.every == 0)


class CoordinatorConfig(Settings):
    """The [coordinator] table."""

    model_config = SettingsConfigDict(env_prefix="PRIME_COORDINATOR_")
    section: ClassVar[str] = "coordinator"

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 lets other machines join."""
    port: int | None = Field(default=None, ge=0, le=65_535)
    """Port to listen on; 0 takes any free one. None takes the join link's port, or 8400 if the link has none, as behind a
    proxy."""
    tick_seconds: float = Field(default=0.5, gt=0.0)
    """Interval of the checks for expired leases, silent workers and overdue verdicts."""
    check_seconds: float = Field(default=30.0, gt=0.0)
    """Time that a validator has for one bundle before another one gets it, besides the time for the most tokens that its lease
    allows, at the validator's measured speed; four times as long if rewards are compared."""
    check_attempts_max: int = Field(default=3, ge=1)
    """Validators that may leave a bundle unanswered before it is rejected as unverifiable; its groups are then leased again."""
    second_look_share: float = Field(default=0.05, ge=0.0, le=1.0)
    """Share of the accepted audited bundles that a second validator judges too, if several validators are active."""
    watchdog_seconds: float = Field(default=120.0, gt=0.0)
    """Time without progress after which the log names what the run waits for."""
    snapshot_events: int = Field(default=2_000, ge=1)
    """Events between two snapshots of the state; a restart replays at most these."""
    checkpoints_kept: int | None = Field(default=None, ge=1)
    """Number of newest policies whose every encoding is kept, with the anchor of policy 0 and the cheapest update paths to
    them. A worker that was away longer starts from there. None keeps all encodings, so that the whole chain can be verified."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Selection of problems."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation of policies by the workers, on held-out problems."""
    trusted_networks: tuple[str, ...] = (
        "127.0.0.0/8",
        "::1/128",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "fc00::/7",
    )
    """Networks without shared limits for their newcomers: by default this machine and private addresses. Behind a reverse proxy
    or a container's bridge all workers appear to come from there: name the proxy in `proxies`, or leave its address out here."""
    proxies: tuple[str, ...] = ()
    """Addresses or networks of your own reverse proxies, for example ["127.0.0.1"]. The address that they append to
    X-Forwarded-For is the caller's; the header of any other sender is ignored."""
    hosts: tuple[str, ...] = ()
    """Host names that requests may use besides the join link's, for example ["rl.example.org"]. A request with another name
    from a private address is refused, because a web page can lead the browser on this machine here under its own name."""
    connects_per_second: float = Field(default=50.0, gt=0.0)
    """New connections per second from one network, sustained; a burst of five times as many is accepted. Others are reset."""
    public_requests_per_second: float = Field(default=500.0, gt=0.0)
    """Requests per second from one network on connections without a member's signature; others wait. All of them together get a
    fifth of the coordinator's time. `requests_per_second` limits what members sign."""
    workers_per_network_max: int = Field(default=64, ge=1)
    """Workers from one network (/24 of IPv4, /48 of IPv6) at one time, except for trusted networks."""
    allowed_workers: tuple[KeyId, ...] = ()
    """Keys that may join; empty: any key."""
    invites_needed: bool = False
    """Whether new keys need an invitation; `prime-node operate invite` creates one."""
    seeders: tuple[KeyId, ...] = ()
    """Keys of seeders (`prime-node seed`) that do not join and count as members of the swarm. A run for invited or listed
    workers lists its peers to no other key that has not joined."""
    software_min: str = Field(default="", pattern=r"^(\d{1,6}(\.\d{1,6}){0,3})?$")
    """Minimum version of prime-node. Older workers get an error that asks for an upgrade. Empty: any version."""
    requests_per_second: float = Field(default=50.0, gt=0.0)
    """Signed requests per second of one worker, sustained; a burst of ten times as many is accepted."""
    faults_per_second: float = Field(default=5.0, gt=0.0)
    """Faulty requests and new keys per second from one network address, sustained; a burst of fifty times as many is accepted.
    Beyond that, keys at this address that neither take part nor belong to the run are refused."""
    nonces_max: int = Field(default=1_000_000, ge=1_000)
    """Nonces remembered against replays, about 200 bytes each: half of them for members, a quarter for the run's own keys, a
    quarter for strangers. When a part is used up, requests of its kind are refused for a while."""
    timestamp_seconds: float = Field(default=30.0, gt=0.0)
    """Interval at which the statement of the newest policy and keys, and the head of the ledger, are signed again."""
    timestamp_lifetime_seconds: float = Field(default=600.0, ge=1.0, le=TIMESTAMP_LIFETIME_S_MAX)
    """Lifetime of that statement. A worker without a fresh one accepts no new work: it may be shown a frozen run."""
    tensorboard: bool = False
    """Whether to write the numbers of each step for TensorBoard too, in addition to metrics.jsonl."""
    wandb_project: str | None = None
    """Project of Weights & Biases that gets the numbers too. WANDB_* variables contain its own settings."""
    timeline_bytes_max: int = Field(default=2**26, ge=2**16)
    """Maximum size of timeline.jsonl, which `prime-node trace` reads. A full file is kept with the next one."""
    serve_chunks: bool = True
    """Whether to serve the bytes of checkpoints over HTTP. Without it the coordinator serves only documents and model files;
    policies come from peers, the trainer's seeder and mirrors. Useful for a slow uplink, or if a CDN serves the bytes."""
    p2p_listen: tuple[str, ...] = ()
    """Multiaddrs of the coordinator's own libp2p host, for example ["/ip4/0.0.0.0/tcp/8401"]: a bootstrap peer for workers, and
    a relay for those behind NATs. Empty: no such host, and peers use HTTP alone. Needs the extra p2p."""
    p2p_announce: tuple[str, ...] = ()
    """Multiaddrs at which workers reach that host, for example ["/ip4/203.0.113.7/tcp/8401"]. Required if it listens on
    0.0.0.0."""
    grace_seconds: float = Field(default=5.0, ge=0.0)
    """Time that requests in progress get to finish when the coordinator stops."""

    @field_validator("trusted_networks", "proxies")
    @classmethod
    def _networks_are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ipaddress.ip_network(network)  # raises ValueError with the reason
        return networks

    @cached_property
    def trusted(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """The parsed `trusted_networks`."""
        return tuple(ipaddress.ip_network(network) for network in self.trusted_networks)

    @cached_property
    def behind(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """The parsed `proxies`."""
        return tuple(ipaddress.ip_network(network) for network in self.proxies)

    @property
    def unlimited(self) -> tuple[str, ...]:
        """Networks of other machines whose newcomers have no limits; empty if the coordinator listens only for this machine."""
        if self.proxies or self.host in ("127.0.0.1", "::1", "localhost"):
            return ()
        return tuple(str(network) for network in self.trusted if not network.is_loopback)
