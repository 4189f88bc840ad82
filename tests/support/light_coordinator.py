"""LightCoordinator: the part of the contract that workers and judges see, in memory.

It keeps no steps and no gate. A test queues leases and looks at what came back; it can make
the coordinator vanish, forget its workers, cancel leases and count every call.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from antiphon.core.config import RunConfig, dump_config
from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.records import (
    PROTOCOL_VERSION,
    GroupRewards,
    GroupSubmission,
    Lease,
    SampleReward,
    SamplingParameters,
    SnapshotManifest,
    SubmitVerdict,
)
from antiphon.core.requests import (
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    PullReply,
    WorkerHeartbeat,
    WorkerHello,
    WorkerWelcome,
)
from antiphon.core.seeds import request_seeds
from antiphon.core.status import RunStatus


def light_lease(
    number: int,
    *,
    samples: int = 2,
    version: int | None = None,
    max_tokens: int = 12,
    attempt: int = 1,
) -> Lease:
    """Return a lease whose tokens depend on `number` and the weights alone."""
    return Lease(
        lease_id=f"{number:030x}{attempt:02x}",
        group_id=f"g{number}",
        prompt_key=f"train-0-{number}",
        prompt_token_ids=(1 + number % 7, 3),
        epoch=0,
        seeds=request_seeds(0, f"train-0-{number}", 0, samples),
        sampling=SamplingParameters(max_tokens=max_tokens),
        version=version,
        duration_s=60.0,
        attempt=attempt,
    )


class LightCoordinator:
    """Only what workers and judges call."""

    def __init__(self, config: RunConfig, run_id: str = "run-1", heartbeat_s: float = 0.01) -> None:
        self.config = config
        self.run_id = run_id
        self.heartbeat_s = heartbeat_s
        self.next_s = 0.0
        """What a worker without a lease is told to wait until its next heartbeat."""
        self.away = False
        """Every call fails as if nobody listened."""
        self.calls: Counter[str] = Counter()
        self.queue: list[Lease] = []
        self.granted: dict[str, Lease] = {}
        self.submissions: list[GroupSubmission] = []
        self.answer = asyncio.Event()
        """Submissions and rewards are answered while this is set."""
        self.answer.set()
        self.lose_answers = 0
        """This many submissions are accepted without the worker hearing of it."""
        self.cancelled: list[str] = []
        self.beats: list[WorkerHeartbeat] = []
        self.hellos: list[WorkerHello] = []
        self.asked: list[LeaseRequest] = []
        self.known: set[str] = set()
        self.finished, self.environment_digest = False, ""
        self.wanted: int | None = None
        self.to_reward: list[tuple[str, GroupSubmission]] = []
        """Groups, each behind the key of its prompt."""
        self.rewards: dict[str, tuple[SampleReward, ...]] = {}
        self._manifests: dict[int, SnapshotManifest] = {}
        self._changed = asyncio.Condition()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 50.0) -> None:
        """Wait until `condition` holds; it is looked at after every call the coordinator gets."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)

    async def announce(self, manifest: SnapshotManifest) -> None:
        self._manifests[manifest.version] = manifest
        await self._note("announce")

    async def register(self, hello: WorkerHello) -> WorkerWelcome:
        await self._note("register")
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ContractError("another protocol version")
        if hello.run_id not in ("", self.run_id):
            raise ContractError(f"this is run {self.run_id}, not {hello.run_id}")
        self.hellos.append(hello)
        worker_id = f"{hello.worker_name}-{len(self.hellos)}"
        self.known.add(worker_id)
        return WorkerWelcome(worker_id, self.run_id, dump_config(self.config), self.heartbeat_s)

    async def heartbeat(self, beat: WorkerHeartbeat) -> HeartbeatReply:
        self.beats.append(beat)
        await self._note("heartbeat")
        return HeartbeatReply(
            known=beat.worker_id in self.known,
            cancelled_leases=tuple(i for i in beat.lease_ids if i in self.cancelled),
            newest_version=self._newest(),
            run_finished=self.finished,
            next_s=self.next_s,
            wanted_version=self.wanted,
        )

    async def lease_group(self, request: LeaseRequest) -> LeaseReply:
        self.asked.append(request)
        await self._note("lease_group")
        leases = self._grant(request)
        if not leases:
            await asyncio.sleep(min(request.wait_s, 0.01))
        return LeaseReply(
            leases=tuple(leases),
            reason="" if leases else "nothing to lease",
            newest_version=self._newest(),
            wanted_version=self.wanted,
            run_finished=self.finished,
        )

    async def submit_group(self, submission: GroupSubmission) -> SubmitVerdict:
        await self._note("submit_group")
        if submission.lease_id not in self.granted:
            raise ContractError(f"lease {submission.lease_id} was never granted")
        known = [s for s in self.submissions if s.group_id == submission.group_id]
        if not known:
            self.submissions.append(submission)
            await self._note("accepted")
        await self.answer.wait()
        if self.lose_answers:
            self.lose_answers -= 1
            raise UnavailableError("the answer was lost")
        return SubmitVerdict.ALREADY_ACCEPTED if known else SubmitVerdict.ACCEPTED

    async def latest_manifest(self, version: int | None) -> SnapshotManifest | None:
        await self._note("latest_manifest")
        newest = self._newest()
        wanted = newest if version is None else version
        return None if wanted is None else self._manifests.get(wanted)

    async def pull_for_reward(self, client_id: str, limit: int, wait_s: float) -> PullReply:
        await self._note("pull_for_reward")
        groups, self.to_reward = self.to_reward[:limit], self.to_reward[limit:]
        if not groups:
            await asyncio.sleep(min(wait_s, 0.01))
        keys, submissions = zip(*groups, strict=True) if groups else ((), ())
        return PullReply(submissions, keys)

    async def submit_rewards(self, groups: Sequence[GroupRewards]) -> Sequence[str]:
        await self._note("submit_rewards")
        new = [group for group in groups if group.group_id not in self.rewards]
        for group in new:
            self.rewards[group.group_id] = group.samples
            await self._note("rewarded")
        await self.answer.wait()
        return [group.group_id for group in new]

    async def status(self) -> RunStatus:
        await self._note("status")
        return RunStatus(
            run_id=self.run_id,
            steps_total=1,
            committed_steps=0,
            opened_steps=1,
            sealed_steps=0,
            newest_version=self._newest(),
            groups_open=len(self.queue),
            groups_leased=0,
            groups_to_reward=len(self.to_reward),
            groups_ready=0,
            groups_dropped_stale=0,
            groups_filtered=0,
            groups_requeued=0,
            finished=self.finished,
            environment_digest=self.environment_digest,
        )

    def _grant(self, request: LeaseRequest) -> list[Lease]:
        if request.held_version is None or request.worker_id not in self.known:
            return []
        fits = [lease for lease in self.queue if lease.version in (None, request.held_version)]
        leases = fits[: request.groups]
        for lease in leases:
            self.queue.remove(lease)
            self.granted[lease.lease_id] = lease
        return leases

    def _newest(self) -> int | None:
        return max(self._manifests, default=None)

    async def _note(self, call: str) -> None:
        self.calls[call] += 1
        async with self._changed:
            self._changed.notify_all()
        if self.away and call not in ("announce", "accepted", "rewarded"):
            raise UnavailableError(f"{call}: nobody listens")
