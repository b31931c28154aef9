"""Every bound on what a peer may send, with its unit in its name.

There are two kinds. `Limits` belongs to a run: it is part of the RunSpec, so the root key signs it and all sides use the
same numbers. The constants below apply before a RunSpec is known, or limit what no run may change. SPEC.md, section 16,
lists both with these docstrings.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

ENVELOPE_BYTES_MAX = 4 * 2**20
"""A signed JSON envelope. The largest one is a manifest: 250 bytes per tensor and 140 per part, so 20,000 parts or 300 GB."""
WORK_BYTES_MAX = 2**26
"""A lease, a check or a batch on the wire. It holds the prompts: 9 bytes per token, so 4,000 prompts of 1,700 tokens."""
ENVELOPE_MARKS_MAX = 4_096
"""Brackets, braces and commas in an envelope. The longest list of signatures has 51."""
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
"""Window that a zstd frame may ask its reader to keep."""
ERROR_BODY_BYTES_MAX = 16 * 2**10
"""Part of an error answer that a client reads."""
WAIT_S_MAX = 30.0
"""Time for which a client may ask the server to hold a request open."""
RETRY_AFTER_S_MAX = 3_600.0
"""Longest pause that a server may ask for."""
DETAIL_CHARS_MAX = 2_000
"""Explanation in an error answer."""
NAME_CHARS_MAX = 200
"""Names of tensors, files, environments, workers."""
TEXT_CHARS_MAX = 500
"""Text for a person: a notice, a reason, the detail of a verdict."""
OPTION_CHARS_MAX = 4_096
"""String among the options of an environment."""
COORDINATORS_MAX = 8
"""Further addresses of coordinators in a RunSpec."""
UPLOAD_URL_CHARS_MAX = 2_200
"""URL for one direct upload."""
UPLOAD_URL_S_MAX = 900
"""Time for which that URL is valid."""
ENVIRONMENT_LINE_BYTES_MAX = 16 * 2**20
"""One line from an environment process; the longest is a prompt of a million token ids. A longer one ends the process."""
ENVIRONMENT_ASKS_MAX = 4_096
"""Requests to the model by one episode, including those beyond its turns; more end the process."""
ENVIRONMENT_STRAY_ASKS_MAX = 4_096
"""Requests to the model by finished episodes, in the lifetime of one process; more end the process."""
ENVIRONMENT_LOG_LINE_BYTES_MAX = 2_000
"""One line that environment code prints, as written to the host's log; the rest of the line is cut."""
ENVIRONMENT_LOG_BYTES_MAX = 64 * 2**10
"""Output of environment code in one minute, as written to the host's log; the rest is dropped."""
ENVIRONMENT_TEXT_CHARS_MAX = 4 * 2**20
"""A problem's text or its reference answer."""
REWARD_MAX = 1e6
"""Magnitude of a reward from an environment."""
RECEIPTS_MAX = 1_024
"""Receipts in one answer; a cursor leads to the next page."""
RECEIPT_CHARS_MAX = 256 * 2**10
"""One receipt's envelope as text; the largest one lists 4,096 non-consecutive slots, and compared rewards."""
LAMBDAS_MAX = 12
"""Rates in the mixture of one statistic's evidence."""
STATISTICS_MAX = 16
"""Statistics of one bundle that contribute to evidence."""
COMPARED_REWARDS_MAX = 1_024
"""Rewards that a receipt lists for one bundle's comparison, the worker's and the validator's together."""
CALIBRATION_PAIRS_MAX = 64
"""Pairs of engines in one calibration, including those that amendments add."""
CALIBRATIONS_MAX = CALIBRATION_PAIRS_MAX - 1
"""Amendments of one run's calibration over its lifetime. Each adds at least one pair."""
CALIBRATION_BYTES_MAX = 256 * 2**10
"""An amendment's payload, as large as a RunSpec, which may contain as many pairs."""
INVITE_CHARS_MAX = 4 * 2**10
"""An invitation as text."""
PERSON_MACHINES_MAX = 256
"""Machines of one person in one run."""
STANDING_BYTES_MAX = 256 * 2**10
"""A contributor's standing, with its machines."""
DELEGATION_CHARS_MAX = 2 * 2**10
"""A delegation as text."""
DELEGATION_LIFETIME_S_MAX = 34_560_000.0
"""Validity of a delegation: 400 days."""
ESCROW_BUNDLES_MAX = 1_024
"""Bundles of one worker whose tokens are not credited yet."""
LEDGER_LINE_BYTES_MAX = 160 * 2**10
"""One line of the ledger: a receipt's payload with its place."""
LEDGER_LINES_MAX = 512
"""Lines of the ledger in one answer; the next request continues after them."""
LEDGER_PAGE_BYTES_MAX = 4 * 2**20
"""Total size of those lines."""
SEED_CHAIN_LENGTH_MAX = 2**16
"""Secrets in the chain that determines a run's assigned randomness. A verifier computes all of them."""
LEASE_DRAWS_MAX = 1_024
"""Draws that a slot may take. A verifier tries this many for a lease's problem, because a lease does not state its draw."""
FINGERPRINTS_MAX = 4_096
"""Fingerprints of one bundle."""
TENSOR_RANK_MAX = 8
"""Number of dimensions of one tensor."""
REQUEST_BYTES_MAX = 512 * 2**10
"""A signed request on the wire. The largest one is a validator's verdict with its rewards."""
REQUEST_AGE_S_MAX = 120.0
"""Validity of a signed request before and after its time stamp. Its nonce is remembered at least twice as long."""
LEDGER_HEAD_S_MAX = 60.0
"""Age in seconds above which a running coordinator signs a new head of its ledger for a request."""
BLOB_S_PER_MIB_MAX = 64.0
"""Extra validity of a blob's time stamp per MiB, in seconds: the server reads the body after the header."""
CLOCK_BACK_S_MAX = 1.0
"""A server begins a new epoch if its wall clock falls behind its monotonic clock by more than this, in seconds."""
UNPINNED_DOSSIER_BYTES_MAX = 256 * 2**20
"""A dossier, its bundle (also decompressed) or a ledger, of a run that the reader did not name."""
REPLAY_DAYS_MAX = 36_500.0
"""Days for which a RunSpec may promise bundles and training states."""
PROGRESS_CHARS_MAX = 4_096
"""The trainer's counters and coefficients in a training state."""
KEY_RINGS_MAX = 1_024
"""Key rings of one run over its lifetime."""
KEY_RING_BYTES_MAX = 64 * 2**10
"""A key ring's payload; the largest one names 16 keys for each role."""
TIMESTAMP_BYTES_MAX = 4 * 2**10
"""A timestamp's payload."""
TIMESTAMP_LIFETIME_S_MAX = 604_800.0
"""Validity of a timestamp, which names the newest policy: one week."""
LEASE_ROLLOUTS_MAX = 4096
"""Rollouts that one lease may ask for."""
STEP_GROUPS_MAX = 2**20
"""Groups that one step may train on."""
TOKENS_MAX = 2**20
"""Tokens of one prompt or of one completion, regardless of the run's own limits."""
TEMPERATURE_MIN = 0.01
"""Smallest temperature above 0. Logits divided by far smaller ones have no finite logprobs in float32."""
TURNS_MAX = 1_024
"""Requests to the model in one rollout."""
SCORINGS_MAX = 32
"""Number of times that one rollout is scored."""
PEERS_MAX = 64
"""Peers in one list."""
PEER_LIST_BYTES_MAX = 128 * 2**10
"""A signed list of peers."""
PEER_TEXT_CHARS_MAX = 192 * 2**10
"""The envelope of a list or a ticket as JSON text."""
PEER_TICKET_BYTES_MAX = 4 * 2**10
"""The envelope of a ticket, a token or an answer to a challenge."""
PEER_UPDATE_BYTES_MAX = 256 * 2**10
"""One notification line, in which a peer lists what it has."""
PEER_UPDATE_ENCODINGS_MAX = 64
"""Encodings in one notification line; a peer announces no more."""
PEER_UPDATE_RUNS_MAX = 8_192
"""Runs of consecutive pieces in one notification line, of all encodings together."""
CHUNKS_MAX = 2**20
"""Tensors of one manifest, parts or chunks of one encoding."""
ENCODINGS_MAX = 16
"""Update paths to one policy: its anchor and its deltas."""
MODEL_FILE_BYTES_MAX = 4 * 2**20
"""One configuration file of a model."""
TOKENIZER_BYTES_MAX = 64 * 2**20
"""A model's tokenizer.json, and the vocabulary and merges files of older formats."""
VOCABULARY_MAX = 2**24
"""Tokens of a vocabulary; token ids are below it."""
TOKENIZER_WORD_CHARS_MAX = 1_024
"""One token of a vocabulary. An eighth: one of Unigram, for unknown words or around tokens, and the longest word of WordPiece."""
TOKENIZER_TEXT_BYTES_MAX = 2**23
"""A text that a tokenizer gets, times the factor by which it may lengthen texts: the library takes 200 bytes for each."""
TOKENIZER_ENTRIES_MAX = 2**21
"""Tokens in a tokenizer.json, and merges in it; the largest published one has 514,906 merges."""
TOKENIZER_STEPS_MAX = 64
"""Normalizers, splitters, processors, decoders and other typed components of a tokenizer."""
TOKENIZER_GROWTH_MAX = 256
"""Factor by which a tokenizer's replacements may lengthen a text."""
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
"""Unbounded repeats in one alternative of a regular expression. After two of them nothing may be required."""
TOKENIZER_REGEX_WAYS_MAX = 128
"""Ways in which a regular expression can match at one place, without unbounded repeats; published ones have up to 40."""
MODEL_LAYERS_MAX = 1_024
"""Layers and heads of a model. Each layer costs memory and time even if only its parameters are counted."""
MODEL_EXPERTS_MAX = 4_096
"""Experts of one layer."""
MODEL_EXPERTS_TOTAL_MAX = 2**16
"""Experts of all layers together."""
MODEL_SIZE_MAX = 2**20
"""Any size in a config.json that has no limit of its own, in elements."""
MODEL_POSITIONS_MAX = 2**24
"""Positions of a model's context."""
MODEL_CONFIG_ITEMS_MAX = 8_192
"""Items of one list in a config.json."""
MODEL_CONFIG_CHARS_MAX = 4_096
"""One text in a config.json."""
CHAT_TEMPLATE_CHARS_MAX = 128 * 2**10
"""The source of a chat template."""
CHAT_TEMPLATE_COST_MAX = 2**21
"""Loop steps, characters and elements that one rendering of a chat template processes, together."""
STEP_MAX = 2**31 - 1
"""Largest step and policy version: they are also sent as int32."""
PEER_REQUESTS_MAX = 32
"""Concurrent requests of one peer at another."""
PEER_FRAME_BYTES_MAX = 64 * 2**20
"""One request or reply between peers, regardless of what the two agreed on; a longer one ends the stream."""
PEER_STREAMS_MAX = 64
"""Streams that one side of a link may hold open, for all protocols together; further ones are reset."""
PEER_STALL_S_MAX = 20.0
"""Time for which a request or reply that has begun may make no progress before its stream is reset."""
PEER_CONNECTIONS_MAX = 512
"""Links of one peer, in both directions; a relay's or a coordinator's configuration may allow more."""
PEER_CONNECTIONS_INBOUND_MAX = 448
"""Those of them that others may dial. Then a link of the network with most ends for one of a network with fewer."""
PEER_CONNECTIONS_NETWORK_MAX = 128
"""Inbound links of one peer from one network."""
PEER_LINKS_MAX = 4
"""Links between the same two peers: each may dial the other, through a relay and directly."""
PEER_ADDRESSES_MAX = 8
"""Addresses of one peer that are dialled or remembered."""
PEER_PROTOCOLS_MAX = 64
"""Protocols of one peer's Identify message that are remembered."""
PEER_ADDRESS_CHARS_MAX = 256
"""One multiaddr as text."""
BOOTSTRAP_PEERS_MAX = 8
"""Peers to which a peer always keeps a link."""
RELAY_CIRCUITS_MAX = 256
"""Concurrent circuits of a relay, and peers for which it holds a reservation."""
RELAY_NETWORK_MAX = 64
"""Reservations at a relay, concurrent `meet` requests at it, and circuits, of one network."""
RELAY_TARGET_MAX = 32
"""Concurrent circuits of a relay to one peer."""
RELAY_TARGET_NETWORK_MAX = 8
"""Those of one network."""
RELAY_CIRCUIT_BYTES_MAX = 2**20
"""Data through one relay circuit: enough for hole punching, too little for checkpoints."""
RELAY_CIRCUIT_S_MAX = 120
"""Lifetime of one relay circuit."""
KNOWN_PEERS_MAX = 2_048
"""Addresses of peers that one peer remembers; the oldest are dropped first."""
PEER_RECORDS_MAX = 1_024
"""Peers from the coordinator's lists that one peer remembers; the oldest are dropped first."""
PEER_HINTS_MAX = 16
"""Peers that are tried because a hint (a hash table, the local network) names them; no coordinator vouches for them."""
LAN_BYTES_MAX = 8 * 2**20
"""Records of multicast DNS in memory; beyond it a machine stops looking for peers on its local network."""
PEER_HINT_ADDRESSES_MAX = 2
"""Addresses of one such peer that are dialled."""
PEER_HINTS_S_MAX = 300.0
"""Period in which at most PEER_HINTS_MAX new ones are tried."""
PEER_QUESTION_BYTES_MAX = 3 * PEER_TICKET_BYTES_MAX
"""One request to a peer over libp2p: a path, a range and a ticket."""
PEER_RANGE_BYTES_MAX = 16 * 2**20
"""Part of a blob in one answer over libp2p, held in memory. Over HTTP the answer is streamed, and only the blob limits it."""
PEER_LISTENERS_MAX = 256
"""Peers subscribed to one peer's notifications at a time."""
PEER_LISTENERS_NETWORK_MAX = 64
"""Such peers of one network: a /24 of IPv4, a /48 of IPv6, or one IPv4 address outside the public internet."""
PEER_LISTENERS_EACH_MAX = 2
"""Subscriptions of one such peer at a time: an old link may take a while to close."""
PEER_STRANGERS_LISTENING_MAX = 16
"""Subscriptions of all peers without a ticket, together."""
PEER_TOKENS_MAX = 4_096
"""Verified tickets that are remembered."""
PEER_REQUESTS_WAITING_MAX = 512
"""Requests for pieces in one peer's queue."""
PEER_REQUESTS_WAITING_NETWORK_MAX = 128
"""The same for all members of one network."""
PEER_REQUESTS_WAITING_EACH_MAX = 32
"""The same for one peer; all peers without a ticket count as one."""
PEER_TURN_S_MAX = 3.0
"""Time in the queue after which a request is refused; its sender then tries another peer."""
PEER_ANSWER_S_MAX = 30.0
"""Time for one piece; after it, the piece is requested from another peer."""
PEER_SILENCE_S_MAX = 45.0
"""Silence after which a peer counts as disconnected. Peers send a notification line every 15 seconds, as a keep-alive."""
PEER_HTTP_CONNECTIONS_MAX = 20
"""HTTP connections of one peer to another: the requests that the piece picker keeps open, and the notifications."""
HTTP_CONNECTIONS_MAX = 20_000
"""Connections to one HTTP server, a coordinator's or a peer's."""
HTTP_STRANGERS_MAX = 10_000
"""Connections among them that have not yet carried a signed request of a member."""
HTTP_STRANGERS_EACH_MAX = 512
"""Such connections from one network: a /24 of IPv4, a /48 of IPv6."""
HTTP_MEMBERS_MAX = 9_000
"""Connections among them of members. The rest, for neither strangers nor members, is reserved for the run's own keys."""
HTTP_MEMBERS_NETWORK_MAX = 2_048
"""Such connections from one network (/24, /48) that the operator does not trust. Further ones count as strangers'."""
HTTP_MEMBERS_EACH_MAX = 32
"""Such connections of one key. Further ones count as strangers'."""
HTTP_HEADER_BYTES_MAX = 16 * 2**10
"""The header of one HTTP request: its request line and all its fields."""
HTTP_HEADER_LINES_MAX = 64
"""Fields of one HTTP header."""
HTTP_HEADER_S_MAX = 10.0
"""Time from the first byte of a header to its last."""
HTTP_READINGS_MAX = 64
"""Socket reads that one HTTP request may take, in addition to one for every 256 bytes."""
HEADER_ENVELOPE_BYTES_MAX = 6 * 2**10
"""An envelope in a field of an HTTP header: proxies commonly accept 8 KiB per field."""
STRANGER_BODY_BYTES_MAX = 2**17
"""A body without a signed header of a member."""
STRANGERS_BODY_BYTES_MAX = 64 * 2**20
"""Such bodies in transfer to one server, together."""
STRANGERS_BODY_BYTES_EACH_MAX = 8 * 2**20
"""The same from one network."""
STRANGERS_ANSWER_BYTES_MAX = 256 * 2**20
"""Large answers in transfer to strangers' connections, together."""
STRANGERS_ANSWER_BYTES_EACH_MAX = 64 * 2**20
"""The same to one network."""
MEMBERS_ANSWER_BYTES_MAX = 2**30
"""Large answers in transfer to members' connections, together."""
MEMBERS_ANSWER_BYTES_EACH_MAX = 256 * 2**20
"""The same to one key."""
MEMBERS_BODY_BYTES_MAX = 2**30
"""Bodies of members in transfer to one coordinator, together."""
ROLES_BODY_BYTES_MAX = 2**30
"""The same for the keys that the run trusts: trainer, validators, coordinator and root. One key has half of it."""
BODIES_EACH_MAX = 64
"""Bodies of one key, or of one network of strangers, in transfer to one coordinator at a time."""
PEER_HANDSHAKES_MAX = 64
"""Inbound links of one peer in their handshake. A newer one ends the oldest of the network with most of them."""
PEER_HANDSHAKES_NETWORK_MAX = 32
"""Those of one network."""
PEER_DIAL_BACKS_MAX = 4
"""Concurrent dial-backs of one peer, each to test whether another peer can be reached."""
PEER_DIAL_BACKS_PER_MINUTE_MAX = 120
"""Dial-backs per minute that a coordinator makes for one network (/24, /48), and that a peer makes to one IP address."""
PEER_OFFERS_PER_NETWORK_MAX = 256
"""Peers of one network (/24, /48) that a coordinator remembers for its lists; trusted keys do not count."""
PEER_GUESTS_MAX = 64
"""Non-members that a coordinator of an open run remembers for its lists, apart from its members."""
PEER_GUESTS_LISTED_MAX = 16
"""Such non-members in one list."""
DIAL_BACKS_MAX = 64
"""Concurrent dial-backs of a coordinator."""
DIAL_BACK_S_MAX = 5.0
"""Duration of one dial-back."""
CLAIMED_CORES_MAX = 65_536
"""Processor cores that a worker may claim."""
CLAIMED_MEMORY_BYTES_MAX = 2**50
"""Memory that a worker may claim: one PiB."""
CLAIMED_MS_MAX = 31_536_000_000
"""Duration that a worker may claim: one year."""
CLAIMED_TOKENS_PER_S_MAX = 10**9
"""Generation speed that a worker may claim."""
CLAIMED_BYTES_PER_S_MAX = 10**12
"""Download speed that a worker may claim."""
CLAIMED_BYTES_MAX = 2**50
"""Traffic that a worker may claim."""
CLAIMED_LINKS_MAX = 256
"""Links to peers that a worker may claim."""
BUNDLES_SPOOLED_MAX = 10**6
"""Bundles that a worker may claim to hold on its disk."""
COUNT_MAX = 2**53
"""Largest count, size and time stamp: every JSON reader represents it exactly."""


class Limits(BaseModel):
    """Limits that a run sets, as part of its RunSpec."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompt_tokens_max: int = Field(default=8_192, ge=1, le=TOKENS_MAX)
    """Tokens of one prompt."""
    completion_tokens_max: int = Field(default=32_768, ge=1, le=TOKENS_MAX)
    """Tokens of one completion, the stop token included."""
    rollout_bytes_max: int = Field(default=64 * 2**20, ge=1_024, le=2**31)
    """Compressed body of one uploaded bundle."""
    rollout_decompressed_bytes_max: int = Field(default=256 * 2**20, ge=1_024, le=2**33)
    """The same body after decompression."""
    blob_bytes_max: int = Field(default=64 * 2**20, ge=1_024, le=2**31)
    """One blob: a checkpoint chunk or a model file."""
    checkpoint_bytes_max: int = Field(default=2**40, ge=1_024, le=2**45)
    """All tensors of one policy, raw."""
    checkpoint_tensors_max: int = Field(default=100_000, ge=1, le=1_000_000)
    """Tensors of one policy."""
    workers_max: int = Field(default=10_000, ge=1, le=1_000_000)
    """Workers that take part at one time."""
    leases_per_worker_max: int = Field(default=4, ge=1, le=1_024)
    """Open leases of one worker."""
    bundles_pending_per_worker_max: int = Field(default=8, ge=1, le=1_024)
    """Bundles of one worker without a verdict."""
