"""Settings of the coordinator: the [coordinator] table. The RunSpec defines the run; these settings define how it is served."""

from __future__ import annotations

import ipaddress
import math
from functools import cached_property
from typing import Annotated, ClassVar, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from prime_node.config import Settings, SettingsConfigDict
from prime_node.coordinator.curriculum_config import CurriculumConfig
from prime_protocol.identity import KeyId
from prime_protocol.limits import PERSON_MACHINES_MAX, TIMESTAMP_LIFETIME_S_MAX


def host_and_port(address: str) -> tuple[str, int]:
    """Return the two parts of an address, for example of "10.0.0.5:8402" or "[fd00::5]:8402". Raises ValueError."""
    url = urlsplit(f"//{address}")
    if not url.hostname or url.port is None or url.path or url.query or url.username is not None:
        raise ValueError('expected host and port, for example "10.0.0.5:8402"')
    try:
        url.hostname.encode("idna")
    except UnicodeError:  # a resolver would raise it
        raise ValueError(f"{url.hostname[:100]!r} is no name of a host") from None
    return url.hostname, url.port


class EvaluationConfig(BaseModel):
    """Evaluations by the workers. They cost the run's own inference; their results are labelled untrusted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    gateways_listen: str = ""
    """Address at which the run's gateways (`prime-node gateway`) reach this coordinator, for example "10.0.0.5:8402": of a
    network of your own, not of the internet. Gateways prove that they have keys/gateway.key; nothing is encrypted there.
    Empty: none."""
    store: str = "sqlite"
    """Store of the state, the receipts and the ledger: "sqlite" is a file in the run's folder. A PostgreSQL database, one for
    each run, is named by a URL, for example "postgresql://prime@db.example.org/mine"; it needs the extra postgres. The password
    comes from PGPASSWORD, ~/.pgpass or a service file."""
    blobs: str = "folder"
    """Place of bundles and checkpoints: "folder" is the run's folder. A bucket of S3, or of a service with its API, is named by
    a URL, for example "s3://my-bucket/prime"; it needs the extra s3. Endpoint, region and credentials come from
    AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""
    uploads: Literal["coordinator", "direct"] = "coordinator"
    """How the bodies of bundles reach `blobs`: "coordinator" takes them itself. With "direct", and `blobs` in S3, workers put
    large ones into the bucket by URLs that the coordinator signs with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, where they
    reach AWS_ENDPOINT_URL; then it reads and checks them. Other workers send them to the coordinator."""
    standby: bool = False
    """Whether to stand by while another coordinator of the run leads, and to take over when it ends, instead of ending with an
    error. Needs `store` in PostgreSQL and `blobs` in S3, which all coordinators of the run share."""
    term_seconds: float = Field(default=2.0, ge=0.5, le=60.0)
    """Time without a sign of life after which a leader on PostgreSQL is replaced. It answers nothing after nine tenths of it."""
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
    journal_days: float = Field(default=30.0, ge=0.0)
    """Days for which the journal's events stay in the archive that `prime-node coordinator replay` folds again; 0 keeps none."""
    journal_gib_max: float = Field(default=1.0, ge=0.0)
    """GiB of that archive above which the oldest events are deleted; 0 keeps none."""
    checkpoints_kept: int | None = Field(default=None, ge=1)
    """Number of newest policies whose every encoding is kept, with the anchor of policy 0 and the cheapest update paths to
    them. A worker that was away longer starts from there. None sets no such limit: all encodings stay, and the whole chain can
    be verified, until they have more bytes than public_gib_max."""
    public_gib_max: float = Field(default=256.0, ge=0.0)
    """GiB of checkpoints above which the oldest are forgotten, as by checkpoints_kept; 0: no limit. The newest policies, and the
    update paths to them, stay in any case."""
    scrub_hours: float = Field(default=24.0, ge=0.0)
    """Hours between two readings of all public blobs of the folder, which find and delete damaged ones; 0 reads none. A bucket's
    service does that itself."""
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
    lag_ms_max: float = Field(default=10.0, ge=0.0)
    """Lateness of the event loop in milliseconds beyond which requests are refused (503 with Retry-After): those of strangers
    first, then heartbeats, then requests for work, then uploads. 0 refuses none for load."""
    workers_per_network_max: int = Field(default=64, ge=1)
    """Workers from one network (/24 of IPv4, /48 of IPv6) at one time, except for trusted networks."""
    machines_per_person_max: int = Field(default=64, ge=1, le=PERSON_MACHINES_MAX)
    """Machines of one person (`prime-node identity`) that the run knows. Each also counts for its network's limit."""
    allowed_workers: tuple[KeyId, ...] = ()
    """Keys that may join, of workers or of persons, whose machines may join then; empty: any key."""
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
    """Nonces remembered against replays, about 100 bytes each: half of them for members, a quarter for the run's own keys, a
    quarter for strangers. Each active worker adds room for 512. When a part is used up, requests of its kind are refused for a
    while."""
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

    @field_validator("store")
    @classmethod
    def _store_is_known(cls, store: str) -> str:
        url = urlsplit(store)
        is_url = url.scheme in ("postgresql", "postgres") and url.path[:1] in ("", "/") and "@" not in url.path
        if store != "sqlite" and not is_url:  # a path with an @ may hold a password, and messages show it
            raise ValueError('expected "sqlite" or "postgresql://user@host/database"')
        if url.password is not None or "passw" in " ".join(parse_qs(url.query)).lower():  # sslpassword, too
            raise ValueError("must hold no password: set PGPASSWORD, or write ~/.pgpass or a service file")
        return store

    @field_validator("blobs")
    @classmethod
    def _blobs_are_known(cls, blobs: str) -> str:
        url = urlsplit(blobs)
        if "@" in url.netloc or url.query:
            raise ValueError("must hold no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        if blobs != "folder" and (url.scheme != "s3" or not url.netloc):
            raise ValueError('expected "folder" or "s3://bucket/prefix"')
        return blobs

    @model_validator(mode="after")
    def _standbys_share(self) -> CoordinatorConfig:
        if self.uploads == "direct" and self.blobs == "folder":
            raise ValueError('uploads = "direct" needs a bucket: set blobs = "s3://..."')
        if self.standby and (self.store == "sqlite" or self.blobs == "folder"):
            raise ValueError(
                'standby needs what all coordinators of the run share: set store = "postgresql://..." and blobs = "s3://..."'
            )
        return self

    @field_validator("gateways_listen")
    @classmethod
    def _gateways_reach_it(cls, address: str) -> str:
        if address:
            host_and_port(address)
        return address

    @property
    def gateways_address(self) -> tuple[str, int] | None:
        """Host and port at which gateways are heard, if any are."""
        return host_and_port(self.gateways_listen) if self.gateways_listen else None

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
    def public_bytes_max(self) -> float:
        """Bytes of checkpoints above which the oldest are forgotten."""
        return self.public_gib_max * 2**30 or math.inf

    @property
    def unlimited(self) -> tuple[str, ...]:
        """Networks of other machines whose newcomers have no limits; empty if the coordinator listens only for this machine."""
        if self.proxies or self.host in ("127.0.0.1", "::1", "localhost"):
            return ()
        return tuple(str(network) for network in self.trusted if not network.is_loopback)
