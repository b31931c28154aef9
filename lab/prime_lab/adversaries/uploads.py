"""Cheats between the worker and the coordinator: other bundles, other times, other leases.

A cheat is a subclass that overrides what it does differently. It has the worker's key: everything it sends is signed
properly.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import zstandard

from prime_lab.adversaries.engine import Means
from prime_node.ports.transport import WorkerPort
from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.identity import SigningKey
from prime_protocol.limits import Limits
from prime_protocol.parcel import open_parcel, pack_parcel
from prime_protocol.proof import num_proofs
from prime_protocol.replies import NotYet, UploadReply
from prime_protocol.requests import LeaseRequest, ReturnLeaseRequest
from prime_protocol.rollout import RolloutHeader, Rollouts, pack_body, parse_body
from prime_protocol.tensor_file import pack_tensors


class DishonestPort:
    """Implementation of ports.transport.WorkerPort around a real one: calls that are not overridden pass unchanged."""

    def __init__(self, port: WorkerPort, key: SigningKey, means: Means) -> None:
        self.port = port
        self.key = key
        self.means = means
        self.leases: dict[str, Lease] = {}
        self.session = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)

    async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
        """Request a lease and remember it."""
        self.session = request.session
        answer = await self.port.lease(request)
        if isinstance(answer, Envelope):
            lease = parse_json(answer.payload, Lease)
            self.leases[lease.lease_id] = lease
        return answer

    async def upload(self, parcel: bytes) -> UploadReply:
        """Upload a bundle unchanged."""
        return await self.port.upload(parcel)


def opened_upload(parcel: bytes) -> tuple[RolloutHeader, Rollouts]:
    """Return the content of one of the worker's own bundles."""
    found = open_parcel(parcel, body_bytes_max=2**31)
    header = parse_json(found.envelope.payload, RolloutHeader)
    return header, parse_body(header, found.check_body(header), Limits())


def packed(header: RolloutHeader, rollouts: Rollouts, key: SigningKey, **changes: object) -> bytes:
    """Return the bundle packed and signed again."""
    body, size = pack_body(rollouts)
    return _signed(header, body, size, key, **changes)


def _signed(header: RolloutHeader, body: bytes, size: int, key: SigningKey, **changes: object) -> bytes:
    fields = {"body_digest": digest_of(body), "body_bytes": len(body), "decompressed_bytes": size, **changes}
    return pack_parcel(header.model_copy(update=fields), body, PayloadType.ROLLOUT, key)


def pretended(parcel: bytes) -> UploadReply:
    """Return the coordinator's likely reply to a bundle that it never got."""
    return UploadReply(bundle=digest_of(parcel))


class EasyProblems(DishonestPort):
    """A cheat that claims that every completion answers the lease's shortest prompt, and answers only that one."""

    async def upload(self, parcel: bytes) -> UploadReply:
        """Upload the bundle with all slots set to the easiest problem's."""
        header, rollouts = opened_upload(parcel)
        easiest = min(self.leases[header.lease_id].groups, key=lambda group: len(group.prompt_token_ids))
        slots_N = np.full_like(rollouts.slots_N, easiest.slot)
        return await self.port.upload(packed(header, replace(rollouts, slots_N=slots_N), self.key))


class ClaimedRewards(DishonestPort):
    """A cheat that adds perfect rewards."""

    async def upload(self, parcel: bytes) -> UploadReply:
        """Upload the bundle with an extra tensor of rewards."""
        header, rollouts = opened_upload(parcel)
        tensors = {name.rpartition("_")[0]: getattr(rollouts, name) for name in rollouts.__slots__}
        tensors["rewards"] = np.ones(len(rollouts), np.float32)
        raw = pack_tensors({name: tensor for name, tensor in tensors.items() if tensor is not None})
        return await self.port.upload(_signed(header, zstandard.ZstdCompressor().compress(raw), len(raw), self.key))


class ReplayedOwn(DishonestPort):
    """A cheat that works once, and sends its first bundle again for each later lease.

    The copy gets that lease's slots and seeds.
    """

    first: tuple[RolloutHeader, Rollouts] | None = None

    async def upload(self, parcel: bytes) -> UploadReply:
        """Upload the first bundle again, repacked for this lease."""
        header, rollouts = opened_upload(parcel)
        if self.first is None:
            self.first = header, rollouts
            return await self.port.upload(parcel)
        return await self.port.upload(packed(header, dressed_as(self.first[1], rollouts), self.key))


class LeakingUploads(DishonestPort):
    """An honest worker that gives its bundles to an accomplice before they are verified."""

    async def upload(self, parcel: bytes) -> UploadReply:
        """Upload a bundle and share it with the accomplice."""
        self.means.overheard.append(parcel)
        return await self.port.upload(parcel)


class ReplayedOthers(DishonestPort):
    """A cheat that sends another worker's bundles, as overheard, under its own name and for its own leases."""

    async def upload(self, parcel: bytes) -> UploadReply:
        """Upload the accomplice's latest bundle, repacked for this lease, if it is long enough."""
        header, rollouts = opened_upload(parcel)
        for theirs in [opened_upload(one)[1] for one in self.means.overheard[-1:]]:
            if len(theirs) >= len(rollouts):
                parcel = packed(header, dressed_as(theirs, rollouts), self.key)
        return await self.port.upload(parcel)


class Equivocating(DishonestPort):
    """A cheat that signs two bundles for each lease, and sends the second one too."""

    async def upload(self, parcel: bytes) -> UploadReply:
        """Upload a bundle and a second one with other logprobs."""
        header, rollouts = opened_upload(parcel)
        reply = await self.port.upload(parcel)
        other = replace(rollouts, logprobs_T=np.minimum(rollouts.logprobs_T * np.float32(1.01), 0))
        await self.port.upload(packed(header, other, self.key))
        return reply


class TimeShifted(DishonestPort):
    """A cheat that keeps finished bundles until their step is trained, and backdates them."""

    def __init__(self, port: WorkerPort, key: SigningKey, means: Means) -> None:
        super().__init__(port, key, means)
        self.kept: list[tuple[int, bytes]] = []

    async def upload(self, parcel: bytes) -> UploadReply:
        """Upload only the kept bundles of older steps."""
        header, rollouts = opened_upload(parcel)
        self.kept.append((header.step, packed(header, rollouts, self.key, created_at_ms=0)))
        newest = max(step for step, _ in self.kept)
        for one in [one for one in self.kept if one[0] < newest]:
            self.kept.remove(one)
            await self.port.upload(one[1])
        return pretended(parcel)


class Hoarding(DishonestPort):
    """A cheat that takes every lease it can get, claims to work on all of them, and never sends anything."""

    async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
        """Request a lease while claiming to hold all earlier ones."""
        held = tuple({*(request.holding or ()), *self.leases})
        return await super().lease(request.model_copy(update={"holding": held[-1_024:]}))

    async def upload(self, parcel: bytes) -> UploadReply:
        """Drop the bundle."""
        return pretended(parcel)


class Framing(DishonestPort):
    """A cheat that makes an honest worker look like a copyist.

    It holds a lease back until the completions of its seeds are filed under another lease. Then it returns the lease to
    an honest worker, whose completions must be the same. The engine answers by tokens.refiled.
    """

    held: str | None = None

    async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
        """Request a lease while claiming to hold the framed one."""
        if self.held is not None and request.holding is not None:
            request = request.model_copy(update={"holding": (*request.holding, self.held)})
        return await super().lease(request)

    async def upload(self, parcel: bytes) -> UploadReply:
        """Keep the first bundle's completions; hand its lease back once they are filed under another one."""
        header, rollouts = opened_upload(parcel)
        if self.held is None:
            self.held = header.lease_id
            self.means.mailbox[:] = rollouts.completions()
            return pretended(parcel)
        reply = await self.port.upload(parcel)
        if not self.means.mailbox:  # it is filed
            await self.port.return_lease(ReturnLeaseRequest(lease_id=self.held, session=self.session))
            self.held = None
        return reply


class Picking(DishonestPort):
    """A cheat that hands back leases with long prompts.

    It returns every lease with longer prompts than its average so far, and asks again for quicker work.
    """

    def __init__(self, port: WorkerPort, key: SigningKey, means: Means) -> None:
        super().__init__(port, key, means)
        self.lengths: list[float] = []

    async def lease(self, request: LeaseRequest) -> Envelope | NotYet:
        """Request a lease; hand it back if its prompts are long."""
        answer = await super().lease(request)
        if isinstance(answer, NotYet):
            return answer
        lease = parse_json(answer.payload, Lease)
        length = statistics.fmean(len(group.prompt_token_ids) for group in lease.groups)
        self.lengths.append(length)
        if length < statistics.fmean(self.lengths):
            return answer
        await self.port.return_lease(ReturnLeaseRequest(lease_id=lease.lease_id, session=self.session))
        return NotYet(reason="too long for my taste", retry_after_s=0.0)


def dressed_as(old: Rollouts, new: Rollouts) -> Rollouts:
    """Return old completions under a new lease's slots, seeds and policy; as many as the new one has."""
    num = len(new)
    tokens, proofs = int(old.lengths_N[:num].sum()), num_proofs(old.lengths_N[:num].tolist())
    spans_S3 = np.stack([np.arange(num), np.full(num, new.spans_S3[0, 1]), old.lengths_N[:num]], axis=1)
    return replace(
        old,
        token_ids_T=old.token_ids_T[:tokens],
        logprobs_T=old.logprobs_T[:tokens],
        lengths_N=old.lengths_N[:num],
        finish_N=old.finish_N[:num],
        slots_N=new.slots_N,
        seeds_N=new.seeds_N,
        spans_S3=spans_S3.astype(np.int32),
        proofs_CB=None if old.proofs_CB is None else old.proofs_CB[:proofs],
    )
