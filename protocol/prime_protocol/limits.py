"""Every bound on what a peer may send, with its unit in its name.

Two kinds. `Limits` belongs to a run: the RunSpec carries it, so the root key signs it and every side uses the same
numbers. The constants below hold before a RunSpec is known, or bound what no run may change.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

ENVELOPE_BYTES_MAX = 4 * 2**20
"""A signed JSON envelope. The largest one is a manifest: about 250 bytes a tensor and 140 a part, so 20,000 parts or 300 GB."""
JSON_DEPTH_MAX = 16
"""Nesting of objects and arrays in any JSON payload."""
SIGNATURES_MAX = 16
"""Signatures on one envelope."""
RUN_SPEC_BYTES_MAX = 256 * 2**10
"""A RunSpec payload; it is fetched before anything is trusted."""
PARCEL_HEADER_BYTES_MAX = 16 * 2**10
"""The signed header in front of a parcel's body."""
TENSOR_HEADER_BYTES_MAX = 64 * 2**10
"""The JSON header of a tensor file."""
ZSTD_WINDOW_BYTES_MAX = 2**27
"""The window that a zstd frame may ask its reader to keep."""
ERROR_BODY_BYTES_MAX = 16 * 2**10
"""An error answer that a client reads."""
WAIT_S_MAX = 30.0
"""How long a client may ask the server to hold a request open."""
RETRY_AFTER_S_MAX = 3_600.0
"""The longest pause that a server may ask for."""
DETAIL_CHARS_MAX = 2_000
"""The explanation in an error answer."""
NAME_CHARS_MAX = 200
"""Names of tensors, files, environments, workers."""
TEXT_CHARS_MAX = 500
"""A text for a person: a notice, a reason, the detail of a verdict."""
OPTION_CHARS_MAX = 4_096
"""A string among the options of an environment."""
ENVIRONMENT_LINE_BYTES_MAX = 16 * 2**20
"""One line from a process of environments; the longest is a prompt of a million token ids. A longer one ends the process."""
ENVIRONMENT_ASKS_MAX = 4_096
"""Requests to the model by one episode, those beyond its turns included; more end the process."""
ENVIRONMENT_STRAY_ASKS_MAX = 4_096
"""The same by episodes that are over, in one life of the process."""
ENVIRONMENT_LOG_LINE_BYTES_MAX = 2_000
"""One line that environments' code prints, in the host's log; what is longer is cut."""
ENVIRONMENT_LOG_BYTES_MAX = 64 * 2**10
"""What environments' code prints in one minute, in the host's log; the rest is dropped."""
ENVIRONMENT_TEXT_CHARS_MAX = 4 * 2**20
"""A problem's text or its reference answer."""
REWARD_MAX = 1e6
"""The size of a reward that an environment may give."""
RECEIPTS_MAX = 1_024
"""Receipts in one answer; the cursor leads to the next ones."""
RECEIPT_CHARS_MAX = 256 * 2**10
"""One receipt's envelope as text; the largest one lists 4,096 slots that do not follow one another, and compared rewards."""
LAMBDAS_MAX = 12
"""Rates that one statistic's evidence is a mixture over."""
STATISTICS_MAX = 12
"""Statistics of one bundle that evidence is made of."""
COMPARED_REWARDS_MAX = 1_024
"""Rewards that a receipt tells of one bundle's comparison, the worker's and the validator's together."""
CALIBRATION_PAIRS_MAX = 64
"""Pairs of engines in one calibration."""
INVITE_CHARS_MAX = 4 * 2**10
"""An invitation as text."""
SURETY_BUNDLES_MAX = 1_024
"""Bundles of one worker whose tokens are not credited yet."""
LEDGER_LINE_BYTES_MAX = 160 * 2**10
"""One line of the ledger: a receipt's payload with its place."""
LEDGER_LINES_MAX = 512
"""Lines of the ledger in one answer; the next request goes on behind them."""
LEDGER_PAGE_BYTES_MAX = 4 * 2**20
"""Their bytes together."""
SEED_CHAIN_LENGTH_MAX = 2**16
"""Secrets in the chain that a run's assigned randomness comes from; whoever checks works all of them out."""
LEASE_DRAWS_MAX = 1_024
"""Draws that a slot may take, and that are tried for the problem of a lease, which does not say its draw."""
FINGERPRINTS_MAX = 4_096
"""Fingerprints of one bundle."""
TENSOR_RANK_MAX = 8
"""Dimensions of one tensor."""
REQUEST_BYTES_MAX = 512 * 2**10
"""A signed request as it is on the wire. The largest one is a validator's verdict with its rewards."""
REQUEST_AGE_S_MAX = 120.0
"""A signed request is valid this long before and after its time stamp; its nonce is remembered at least twice as long."""
BLOB_S_PER_MIB_MAX = 64.0
"""A blob's time stamp counts longer by this for each MiB, in seconds: its body is read behind its header."""
CLOCK_BACK_S_MAX = 1.0
"""A server whose wall clock falls behind its monotonic one by more than this, in seconds, begins a new epoch."""
KEY_RINGS_MAX = 1_024
"""Key rings of one run, one after another."""
KEY_RING_BYTES_MAX = 64 * 2**10
"""A key ring's payload; the largest one names 16 keys for each role."""
TIMESTAMP_BYTES_MAX = 4 * 2**10
"""A timestamp's payload."""
TIMESTAMP_LIFETIME_S_MAX = 604_800.0
"""How long a statement of the newest policy may hold: a week."""
LEASE_ROLLOUTS_MAX = 4096
"""Rollouts that one lease may ask for."""
STEP_GROUPS_MAX = 2**20
"""Groups that one step may train on."""
TOKENS_MAX = 2**20
"""Tokens of one prompt or of one completion, whatever a run allows."""
TURNS_MAX = 1_024
"""Requests to the model in one rollout."""
SCORINGS_MAX = 32
"""How often one rollout is scored."""
PEERS_MAX = 64
"""Peers in one list."""
PEER_LIST_BYTES_MAX = 128 * 2**10
"""A signed list of peers."""
PEER_TEXT_CHARS_MAX = 192 * 2**10
"""The envelope of a list or a ticket as JSON text."""
PEER_TICKET_BYTES_MAX = 4 * 2**10
"""The envelope of a ticket, a token or an answer to a challenge."""
PEER_NEWS_BYTES_MAX = 256 * 2**10
"""One line of what a peer has."""
PEER_NEWS_ENCODINGS_MAX = 64
"""Encodings in one line; a peer announces no more."""
PEER_NEWS_RUNS_MAX = 8_192
"""Runs of pieces of one encoding in one line."""
CHUNKS_MAX = 2**20
"""Tensors of one manifest, parts or chunks of one encoding."""
ENCODINGS_MAX = 16
"""Ways to one policy: its anchor and its deltas."""
MODEL_FILE_BYTES_MAX = 4 * 2**20
"""One of a model's configuration files."""
TOKENIZER_BYTES_MAX = 64 * 2**20
"""A model's tokenizer.json, and the vocabulary and merges of an older form."""
VOCABULARY_MAX = 2**24
"""Tokens of a vocabulary, and a token's id."""
TOKENIZER_ENTRIES_MAX = 2**21
"""Tokens, and merges, that a tokenizer.json lists; the largest published one has 514,906 merges."""
TOKENIZER_STEPS_MAX = 64
"""Normalizers, splitters, processors and decoders of a tokenizer, and what else of it has a type."""
TOKENIZER_GROWTH_MAX = 256
"""How many times as long a tokenizer's replacements may make a text."""
TOKENIZER_REGEX_CHARS_MAX = 4_096
"""One regular expression of a tokenizer."""
TOKENIZER_REGEXES_MAX = 32
"""Regular expressions of a tokenizer; published ones have up to 6."""
TOKENIZER_STEP_CHARS_MAX = 16_384
"""Texts of all steps of a tokenizer together, expressions included, tables of characters not."""
TOKENIZER_ADDED_MAX = 2**16
"""Added tokens of a tokenizer; published ones have up to 6,500."""
TOKENIZER_ADDED_CHARS_MAX = 2**20
"""Their texts together: the library takes seconds and 100 MiB for each MiB of them."""
TOKENIZER_REGEX_REPEATS_MAX = 3
"""Unbounded repeats in one alternative of it: the time grows with the length of a text to this power."""
MODEL_LAYERS_MAX = 1_024
"""Layers and heads of a model. Each layer costs memory and time even where its parameters are only counted."""
MODEL_EXPERTS_MAX = 4_096
"""Experts of a layer."""
MODEL_EXPERTS_TOTAL_MAX = 2**16
"""Experts of all layers."""
MODEL_SIZE_MAX = 2**20
"""Any size in a config.json that has no bound of its own, in elements."""
MODEL_POSITIONS_MAX = 2**24
"""Positions of a model's context."""
MODEL_CONFIG_ITEMS_MAX = 8_192
"""Items of one list in a config.json."""
MODEL_CONFIG_CHARS_MAX = 4_096
"""One text in a config.json."""
CHAT_TEMPLATE_CHARS_MAX = 128 * 2**10
"""The source of a chat template."""
CHAT_TEMPLATE_COST_MAX = 2**21
"""Steps of loops, characters and elements that one rendering of a chat template works on, together."""
STEP_MAX = 2**31 - 1
"""The largest step and policy version: they travel as int32 too."""
ANNOUNCEMENT_BYTES_MAX = 256 * 2**10
"""What peers pass on to all others: a signed manifest, or its digest where that is longer."""
ANNOUNCEMENT_JUDGE_S_MAX = 4.0
"""A peer judges an announcement within this time or drops it, blaming nobody."""
ANNOUNCEMENTS_JUDGED_MAX = 16
"""Announcements that a peer judges at one time; others wait."""
ANNOUNCEMENTS_REJECTED_MAX = 8
"""Announcements of one peer that do not verify, before its links are closed for good."""
PEER_REQUESTS_MAX = 32
"""Requests of one peer that another works on at a time."""
PEER_FRAME_BYTES_MAX = 64 * 2**20
"""One request or reply between peers, whatever the two agreed on; a longer one ends the stream."""
PEER_STREAMS_MAX = 64
"""Streams that one peer may hold open at another."""
PEER_STALL_S_MAX = 20.0
"""A request or reply that has begun may stand still this long before its stream is reset."""
PEER_CONNECTIONS_MAX = 512
"""Links of one peer, in both directions; a relay or a coordinator may be set to more."""
PEER_LINKS_MAX = 4
"""Links between the same two peers: each may dial the other, over a relay and directly."""
PEER_ADDRESSES_MAX = 8
"""Addresses of one peer that are dialled or remembered."""
PEER_ADDRESS_CHARS_MAX = 256
"""One multiaddr as text."""
BOOTSTRAP_PEERS_MAX = 8
"""Peers that another stays linked to, come what may."""
RELAY_CIRCUITS_MAX = 256
"""Circuits that a relay carries at a time, and peers that it holds a place for."""
RELAY_CIRCUIT_BYTES_MAX = 2**20
"""One circuit carries no more: words to punch a hole with, no checkpoints."""
RELAY_CIRCUIT_S_MAX = 120
"""One circuit lasts no longer."""
KNOWN_PEERS_MAX = 2_048
"""Addresses of peers that one peer remembers; the oldest go first."""
PEER_RECORDS_MAX = 1_024
"""Peers of the coordinator's lists that one peer remembers; the oldest go first."""
PEER_HINTS_MAX = 16
"""Peers that hints name (a table, the local network) and that are tried; no coordinator vouches for them."""
LAN_NAMES_MAX = 4_096
"""Names that multicast DNS may bring; beyond them a machine no longer looks for peers on its local network."""
PEER_HINT_ADDRESSES_MAX = 2
"""Addresses of one such peer that are dialled."""
PEER_HINTS_S_MAX = 300.0
"""PEER_HINTS_MAX new ones are tried in this time, and no more."""
PEER_QUESTION_BYTES_MAX = 3 * PEER_TICKET_BYTES_MAX
"""One question to a peer over libp2p: a path, a range and a ticket."""
PEER_RANGE_BYTES_MAX = 16 * 2**20
"""What one answer over libp2p holds of a blob: it is held whole. Over HTTP it is streamed, and only the blob bounds it."""
PEER_LISTENERS_MAX = 256
"""Peers that hear one peer's news at a time."""
PEER_LISTENERS_NETWORK_MAX = 64
"""Of these, peers of one network: a /24 of IPv4, a /48 of IPv6, or one IPv4 address that is not of the public internet."""
PEER_LISTENERS_EACH_MAX = 2
"""News that one of them hears at a time: an old link may take a while to end."""
PEER_STRANGERS_LISTENING_MAX = 16
"""News that all who show no ticket hear at a time, together."""
PEER_TOKENS_MAX = 4_096
"""Tickets that were checked and are remembered."""
PEER_REQUESTS_WAITING_MAX = 512
"""Requests for pieces that wait for a turn at one peer."""
PEER_REQUESTS_WAITING_NETWORK_MAX = 128
"""The same of all members of one network."""
PEER_REQUESTS_WAITING_EACH_MAX = 32
"""The same of one asker; strangers count as one."""
PEER_TURN_S_MAX = 3.0
"""A request that got no turn within this time is turned away; the asker tries another peer."""
PEER_ANSWER_S_MAX = 30.0
"""A piece that takes longer is asked of another peer."""
PEER_SILENCE_S_MAX = 45.0
"""A peer from whom no news came for so long is gone: he sends a line every 15 seconds, if only to show that he is there."""
PEER_HTTP_CONNECTIONS_MAX = 20
"""Connections of one peer to another over HTTP: the requests that the picker keeps open there, and the news."""
HTTP_CONNECTIONS_MAX = 20_000
"""Connections to one HTTP server, a coordinator's or a peer's."""
HTTP_STRANGERS_MAX = 10_000
"""Of these, connections on which no member of the run has shown itself yet."""
HTTP_STRANGERS_EACH_MAX = 512
"""Such connections from one network: a /24 of IPv4, a /48 of IPv6."""
HTTP_MEMBERS_MAX = 9_000
"""Of these, connections of members; what neither they nor strangers may use is left to the run's own keys."""
HTTP_MEMBERS_NETWORK_MAX = 2_048
"""Such connections from one network (/24, /48) that the operator does not trust. Those beyond count as strangers'."""
HTTP_MEMBERS_EACH_MAX = 32
"""Such connections of one key. Those beyond count as strangers'."""
HTTP_HEADER_BYTES_MAX = 16 * 2**10
"""The header of one HTTP request: its request line and all its fields."""
HTTP_HEADER_LINES_MAX = 64
"""Fields in it."""
HTTP_HEADER_S_MAX = 10.0
"""From the first byte of such a header to its last."""
HTTP_READINGS_MAX = 64
"""Readings that one HTTP request may take, beside one for each 256 bytes of it."""
HEADER_ENVELOPE_BYTES_MAX = 6 * 2**10
"""An envelope in a field of an HTTP header: proxies commonly take 8 KiB a field."""
STRANGER_BODY_BYTES_MAX = 2**17
"""A body that no member of the run has announced in a signed header."""
STRANGERS_BODY_BYTES_MAX = 64 * 2**20
"""Such bodies that are on their way into one server, altogether."""
STRANGERS_BODY_BYTES_EACH_MAX = 8 * 2**20
"""The same from one network."""
STRANGERS_ANSWER_BYTES_MAX = 256 * 2**20
"""Large answers on their way to connections of strangers, altogether."""
STRANGERS_ANSWER_BYTES_EACH_MAX = 64 * 2**20
"""The same to one network."""
MEMBERS_ANSWER_BYTES_MAX = 2**30
"""Large answers on their way to connections of members, altogether."""
MEMBERS_ANSWER_BYTES_EACH_MAX = 256 * 2**20
"""The same to one key."""
MEMBERS_BODY_BYTES_MAX = 2**30
"""Bodies of members on their way into one coordinator, altogether."""
ROLES_BODY_BYTES_MAX = 2**30
"""The same of the keys that the run trusts: trainer, validators, coordinator and root."""
BODIES_EACH_MAX = 64
"""Bodies of one key, or of one network of strangers, that are on their way into one coordinator at a time."""
PEER_HANDSHAKES_MAX = 64
"""Links of one peer that are being made, in each direction."""
PEER_DIAL_BACKS_MAX = 4
"""Peers for whom one peer tries at a time whether they can be reached."""
PEER_DIAL_BACKS_PER_MINUTE_MAX = 120
"""Dial-backs that a coordinator makes for one network (/24, /48), and that a peer makes to one IP address, in a minute."""
PEER_OFFERS_PER_NETWORK_MAX = 256
"""Peers of one network (/24, /48) that a coordinator remembers to list; those of trusted keys do not count."""
PEER_GUESTS_MAX = 64
"""Peers that do not take part and that a coordinator of an open run remembers to list, apart from its members."""
PEER_GUESTS_LISTED_MAX = 16
"""Of these, in one list."""
DIAL_BACKS_MAX = 64
"""The same at the coordinator."""
DIAL_BACK_S_MAX = 5.0
"""One such attempt takes no longer."""
CLAIMED_CORES_MAX = 65_536
"""Processor cores that a worker may claim."""
CLAIMED_MEMORY_BYTES_MAX = 2**50
"""Memory that a worker may claim: a PiB."""
CLAIMED_MS_MAX = 31_536_000_000
"""A time that a worker says that something took it: a year."""
CLAIMED_TOKENS_PER_S_MAX = 10**9
"""A speed that a worker may claim."""
CLAIMED_BYTES_PER_S_MAX = 10**12
"""The same of a download."""
BUNDLES_SPOOLED_MAX = 10**6
"""Bundles that a worker may say to have on its disk."""
COUNT_MAX = 2**53
"""The largest count, size and time stamp: every JSON reader keeps it exactly."""


class Limits(BaseModel):
    """The limits of one run, part of its signed RunSpec. Example: Limits(rollout_bytes_max=1 << 20)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt_tokens_max: int = Field(default=8_192, ge=1, le=TOKENS_MAX)
    """Tokens of one prompt."""
    completion_tokens_max: int = Field(default=32_768, ge=1, le=TOKENS_MAX)
    """Tokens of one completion, the stop token included."""
    rollout_bytes_max: int = Field(default=64 * 2**20, ge=1_024, le=2**31)
    """Compressed body of one uploaded bundle."""
    rollout_decompressed_bytes_max: int = Field(default=256 * 2**20, ge=1_024, le=2**33)
    """The same after decompression."""
    blob_bytes_max: int = Field(default=64 * 2**20, ge=1_024, le=2**31)
    """One blob: a checkpoint chunk or a model file."""
    checkpoint_bytes_max: int = Field(default=2**40, ge=1_024, le=2**45)
    """All tensors of one policy, raw."""
    checkpoint_tensors_max: int = Field(default=100_000, ge=1, le=1_000_000)
    """Tensors of one policy."""
    workers_max: int = Field(default=10_000, ge=1, le=1_000_000)
    """Workers joined at one time."""
    leases_per_worker_max: int = Field(default=4, ge=1, le=1_024)
    """Open leases of one worker."""
    bundles_pending_per_worker_max: int = Field(default=8, ge=1, le=1_024)
    """Bundles of one worker that wait for a verdict."""
