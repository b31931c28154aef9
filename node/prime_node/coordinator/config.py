"""Settings of the coordinator: the [coordinator] table. What a run is, is in its RunSpec; this is how it is served."""

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
    """Which problems are asked. With both thresholds away and no filtering, every problem is."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    easy_threshold: float | None = Field(default=None, ge=0.0, le=1.0)
    """A problem whose group's mean reward is at or above this is not asked again."""
    hard_threshold: float | None = Field(default=None, ge=0.0, le=1.0)
    """A problem whose group's mean reward is at or below this is not asked again."""
    easy_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the easy pool that is asked again from each start of the coordinator on, drawn at random."""
    hard_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the hard pool likewise."""
    online_difficulty_filtering: bool = False
    """Groups whose rewards are all 0 or all 1 do not reach the trainer; another problem takes their place."""
    oversampling_factor: float = Field(default=2.0, ge=1.0)
    """Groups generated for a step over those that it trains on, at most; beyond that, such groups reach the trainer after all."""

    @model_validator(mode="after")
    def _ordered(self) -> CurriculumConfig:
        low, high = self.hard_threshold, self.easy_threshold
        if low is not None and high is not None and low >= high:
            raise ValueError("hard_threshold must be below easy_threshold")
        return self

    @property
    def is_on(self) -> bool:
        return self.online_difficulty_filtering or self.easy_threshold is not None or self.hard_threshold is not None

    def pool_of(self, reward_mean: float) -> Pool:
        if self.easy_threshold is not None and reward_mean >= self.easy_threshold:
            return Pool.EASY
        if self.hard_threshold is not None and reward_mean <= self.hard_threshold:
            return Pool.HARD
        return Pool.NORMAL

    def filtered_as(self, reward_mean: float) -> Pool | None:
        """Why a group teaches nothing, None where it may."""
        if not self.online_difficulty_filtering or 0.0 < reward_mean < 1.0:
            return None
        return Pool.HARD if reward_mean <= 0.0 else Pool.EASY


class EvaluationConfig(BaseModel):
    """Evaluations by the workers. They cost the run's own inference; their figures are marked as not trusted."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    every: int = Field(default=0, ge=0)
    """A policy is evaluated after so many steps, the first one included; 0: none is."""
    at: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Policies that are evaluated besides."""
    problems: int = Field(default=64, ge=1, le=4_096)
    """Held-out problems of each environment; each is answered rollouts_per_group times."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """The k of pass@k, at most rollouts_per_group."""

    def is_due(self, policy_version: int) -> bool:
        return policy_version in self.at or (self.every > 0 and policy_version % self.every == 0)


class CoordinatorConfig(Settings):
    model_config = SettingsConfigDict(env_prefix="PRIME_COORDINATOR_")
    section: ClassVar[str] = "coordinator"

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 lets other machines join."""
    port: int | None = Field(default=None, ge=0, le=65_535)
    """Port to listen on; 0 takes any free one. None takes the join link's, and 8400 where that names none, as behind a proxy."""
    tick_seconds: float = Field(default=0.5, gt=0.0)
    """How often expired leases, silent workers and overdue checks are looked for."""
    check_seconds: float = Field(default=30.0, gt=0.0)
    """How long a validator has for one bundle before another one gets it; four times as long where rewards are compared."""
    check_attempts_max: int = Field(default=3, ge=1)
    """A bundle that this many validators left unanswered is refused as unverifiable; its groups are leased again."""
    second_look_share: float = Field(default=0.05, ge=0.0, le=1.0)
    """Where several validators are at work: this share of the audited bundles that are accepted is judged by a second one too."""
    watchdog_seconds: float = Field(default=120.0, gt=0.0)
    """When nothing has moved for so long, the log says who everything waits for."""
    snapshot_events: int = Field(default=2_000, ge=1)
    """A snapshot of the state is written after this many events; a restart replays at most these."""
    checkpoints_kept: int | None = Field(default=None, ge=1)
    """Newest policies whose every encoding is kept, beside the anchor of policy 0 and the cheapest way from nothing to each of
    them. A worker that was away longer begins from there. None keeps all, so that the whole chain can be verified."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Which problems are asked."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Which policies the workers evaluate on held-out problems."""
    trusted_networks: tuple[str, ...] = (
        "127.0.0.0/8",
        "::1/128",
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "fc00::/7",
    )
    """Networks whose newcomers are not limited together: by default this machine and private addresses. Behind a reverse proxy
    or a container's bridge every worker seems to come from there: name the proxy in `proxies`, or leave its address out here."""
    proxies: tuple[str, ...] = ()
    """Addresses or networks of reverse proxies of your own, for example ["127.0.0.1"]. What they write at the end of
    X-Forwarded-For is the caller's address; nobody else's header is read."""
    hosts: tuple[str, ...] = ()
    """Names under which it is asked for besides the join link's, for example ["rl.example.org"]. A caller at a private address
    that names another one is refused: a web page can lead the browser on this machine here under a name of its own."""
    connects_per_second: float = Field(default=50.0, gt=0.0)
    """New connections from one network, sustained; a burst of five times as many is taken. Others are reset."""
    public_requests_per_second: float = Field(default=500.0, gt=0.0)
    """Requests from one network on connections where nobody has shown a member's signature; others wait. All of them together get
    a fifth of the coordinator's time. What members sign is bounded by `requests_per_second`."""
    workers_per_network_max: int = Field(default=64, ge=1)
    """Workers from one network (/24 of IPv4, /48 of IPv6) at one time, but for trusted ones."""
    allowed_workers: tuple[KeyId, ...] = ()
    """Keys that may join; empty: any may."""
    invites_needed: bool = False
    """New keys need an invitation; `prime-node operate invite` makes one."""
    seeders: tuple[KeyId, ...] = ()
    """Keys of seeders (`prime-node seed`) that do not join and count as members of the swarm. A run that takes invited or listed
    workers alone names its peers to no other key that has not joined."""
    software_min: str = Field(default="", pattern=r"^(\d{1,6}(\.\d{1,6}){0,3})?$")
    """Workers with an older prime-node are told to upgrade; empty: none is."""
    requests_per_second: float = Field(default=50.0, gt=0.0)
    """Signed requests of one worker, sustained; a burst of ten times as many is allowed."""
    faults_per_second: float = Field(default=5.0, gt=0.0)
    """Faulty requests and new keys from one network address, sustained; a burst of fifty times as many is allowed.
    Beyond that, keys that neither take part nor belong to the run are turned away there."""
    nonces_max: int = Field(default=1_000_000, ge=1_000)
    """Nonces remembered against replays, about 200 bytes each: half of them members', a quarter the run's own keys', a quarter
    strangers'. When a part is used up, requests of its kind are refused for a while."""
    timestamp_seconds: float = Field(default=30.0, gt=0.0)
    """How often the statement of which policy and keys are newest is signed anew."""
    timestamp_lifetime_seconds: float = Field(default=600.0, ge=1.0, le=TIMESTAMP_LIFETIME_S_MAX)
    """How long one holds. A worker that has seen none for longer takes no new work: it may be shown a frozen run."""
    tensorboard: bool = False
    """Write the numbers of each step for TensorBoard too, beside metrics.jsonl."""
    wandb_project: str | None = None
    """Send them to this project of Weights & Biases too, which keeps its own settings in WANDB_* variables."""
    timeline_bytes_max: int = Field(default=2**26, ge=2**16)
    """Of timeline.jsonl, which `prime-node trace` draws from; a full one is kept beside the one that follows it."""
    serve_chunks: bool = True
    """Give the bytes of checkpoints over HTTP. Without it the coordinator gives words and model files alone, and policies come
    from peers, the trainer's seeder and mirrors: for a thin uplink, or where a CDN gives the bytes."""
    p2p_listen: tuple[str, ...] = ()
    """Multiaddrs of a libp2p host of the coordinator's own, for example ["/ip4/0.0.0.0/tcp/8401"]: workers meet there, and it
    relays for those behind NATs. Empty: no such host, and peers talk over HTTP alone. Needs the extra p2p."""
    p2p_announce: tuple[str, ...] = ()
    """Multiaddrs at which workers reach that host, for example ["/ip4/203.0.113.7/tcp/8401"]: needed where it listens on
    0.0.0.0."""
    grace_seconds: float = Field(default=5.0, ge=0.0)
    """How long requests under way may take to finish when the coordinator stops."""

    @field_validator("trusted_networks", "proxies")
    @classmethod
    def _networks_are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ipaddress.ip_network(network)  # raises ValueError with what is wrong
        return networks

    @cached_property
    def trusted(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """trusted_networks, parsed."""
        return tuple(ipaddress.ip_network(network) for network in self.trusted_networks)

    @cached_property
    def behind(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        """proxies, parsed."""
        return tuple(ipaddress.ip_network(network) for network in self.proxies)

    @property
    def unlimited(self) -> tuple[str, ...]:
        """Networks of others' machines whose newcomers have no limits, where it listens for others at all."""
        if self.proxies or self.host in ("127.0.0.1", "::1", "localhost"):
            return ()
        return tuple(str(network) for network in self.trusted if not network.is_loopback)
