"""Hostile worker: a party of a simulated run that wants to do harm, by what a worker's token allows.

It takes leases and never finishes a group: it reports beginnings that break the rules of tokens, so that
others would continue them, beats, releases, reports and hands in under leases that it stole from others,
names versions that do not exist, holds on to groups without sampling, and loads nothing. It speaks in the
name of others, calls what only the run's own services may, and sends more than it may. Once it is shut
out it comes back under another name, with a token of its own. What must hold nevertheless is the witness' to
say: no honest worker is struck or ends, and no lease ends but by its holder or its deadline.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.core.records import (
    PROTOCOL_VERSION,
    FinishReason,
    GroupSubmission,
    Lease,
    LeaseProgress,
    PartialTrajectory,
    Trajectory,
    VersionSpan,
)
from antiphon.core.requests import LeaseRequest, WorkerHeartbeat, WorkerHello
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.net.security.guard import DEFAULT_LIMITS
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.simulator.standins.arithmetic import END_TOKEN
from antiphon.simulator.virtual.random_streams import RandomStream

NAME = "hostile"
"""Its names begin with this."""
EDITOR = f"{NAME}-editor"
"""A worker like all others, but for an engine whose owner changes tokens (`engines.EditingEngine`)."""
EDITED = 0.4
"""Share of its completions."""
NAMES = 3
"""How often it comes back."""
FLOOD = 400
"""Calls at once: more than a worker has to its credit."""
STOLEN = 4
"""Most leases of others that one call names."""


@dataclass(slots=True)
class HostileWorker:
    """One such party; each act is drawn."""

    connect: Callable[[str], CoordinatorClient]
    """Returns the client of a worker of that name."""
    run_id: str
    running: Callable[[], Sequence[tuple[str, str]]]
    """Returns (lease id, group id) of the leases that run, which it has stolen."""
    others: Callable[[], Sequence[str]]
    """Returns the ids of the workers that take part."""
    report: Callable[[str], None]
    """Told what was answered that had to be refused."""
    random: RandomStream
    """Decides what it does."""
    _client: CoordinatorClient = field(init=False)
    _flooded: bool = False
    _worker_id: str = ""
    _version: int | None = None
    _leases: dict[str, Lease] = field(default_factory=dict)

    async def run(self, until: Callable[[], bool]) -> None:
        """Do harm until `until` says so or every name is shut out, then fall silent."""
        acts = (
            self._take,
            self._false_beginning,
            self._use_stolen,
            self._false_group,
            self._hoard,
            self._speak_for_another,
            self._give_orders,
            self._flood,
        )
        for number in range(NAMES):
            self._leases = {}
            self._client = self.connect(f"{NAME}-{number}")
            barred = not await self._register(f"{NAME}-{number}")
            while not barred and not until():
                await asyncio.sleep(self.random.between(0.2, 2.0))
                try:
                    await self.random.choose(acts)()
                except UnavailableError:
                    await asyncio.sleep(1.0)
                except AntiphonError as refused:
                    barred = "excluded" in str(refused) or "quarantine" in str(refused)
                if self.random.happens(0.02):
                    barred = not await self._register(f"{NAME}-{number}")
        await asyncio.Event().wait()

    async def _register(self, name: str) -> bool:
        while True:
            try:
                hello = WorkerHello(name, PROTOCOL_VERSION, self.run_id, 4)
                self._worker_id = (await self._client.register(hello)).worker_id
            except UnavailableError:
                await asyncio.sleep(1.0)
            except AntiphonError:
                return False
            else:
                return True

    async def _take(self) -> None:
        """Ask for groups as one that has loaded the newest version, which it never does."""
        reply = await self._client.lease_group(LeaseRequest(self._worker_id, self._version, 2, 0.5))
        self._version = reply.newest_version if reply.wanted_version is None else reply.wanted_version
        self._leases |= {lease.lease_id: lease for lease in reply.leases}

    async def _false_beginning(self) -> None:
        """Report a beginning that goes on after its end, or one of a version that does not exist."""
        told = tuple(LeaseProgress(i, (self._piece(),)) for i in list(self._leases)[:1])
        await self._beat(tuple(self._leases), told)

    async def _use_stolen(self) -> None:
        """Extend, release, write into or hand in what others hold."""
        stolen = [lease for lease in self.running() if lease[0] not in self._leases]
        if not stolen:
            return
        taken = [self.random.choose(stolen) for _ in range(STOLEN)]
        ids = tuple(dict.fromkeys(lease_id for lease_id, _ in taken))
        match self.random.index(4):
            case 0:
                await self._beat(ids)
            case 1:
                await self._beat((), released=ids)
            case 2:
                await self._beat((), tuple(LeaseProgress(lease_id, (self._piece(),)) for lease_id in ids))
            case _:
                lease_id, group_id = taken[0]
                await self._client.submit_group(self._group(lease_id, group_id, (1, 2)))

    async def _false_group(self) -> None:
        """Hand in a group that no lease allows."""
        for lease in list(self._leases.values())[:1]:
            del self._leases[lease.lease_id]
            await self._client.submit_group(self._group(lease.lease_id, lease.group_id, lease.seeds))

    async def _hoard(self) -> None:
        """Keep what it has, without a token."""
        await self._beat(tuple(self._leases))

    async def _speak_for_another(self) -> None:
        """Ask in the name of a worker that takes part."""
        if others := self._of_other_names():
            told = self.random.choose(others)
            await self._must_be_refused(
                f"a request in the name of {told}",
                self._client.lease_group(LeaseRequest(told, self._version, 1, 0.5)),
            )

    def _of_other_names(self) -> list[str]:
        own = name_of_worker(self._worker_id)
        return [worker_id for worker_id in self.others() if name_of_worker(worker_id) != own]

    async def _give_orders(self) -> None:
        """Call what only the run's own services may: shut a worker out that takes part."""
        if others := self._of_other_names():
            told = name_of_worker(self.random.choose(others))
            await self._must_be_refused(
                f"a worker's order to exclude {told}", self._client.revoke(told, "it is in the way")
            )

    async def _must_be_refused(self, what: str, call: Awaitable[object]) -> None:
        try:
            await call
        except UnavailableError:
            raise
        except AntiphonError:
            return
        self.report(f"{what} was answered")

    async def _flood(self) -> None:
        """Send more than one worker may, at once; only once, since it takes the simulator's time."""
        if self._flooded:
            return
        self._flooded = True
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        calls = (self._client.latest_manifest(None) for _ in range(FLOOD))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [str(answer) for answer in answers if isinstance(answer, BaseException)]
        rate = DEFAULT_LIMITS.requests
        allowed = rate.burst + rate.per_s * (loop.time() - begun_s)
        # A coordinator that was started again meanwhile has forgotten what it answered before.
        if FLOOD - len(refused) > allowed and all("asks too much" in sentence for sentence in refused):
            self.report(f"{FLOOD - len(refused)} of {FLOOD} calls of one worker at once were answered")

    async def _beat(
        self,
        lease_ids: tuple[str, ...],
        progress: tuple[LeaseProgress, ...] = (),
        released: tuple[str, ...] = (),
    ) -> None:
        beat = WorkerHeartbeat(
            self._worker_id,
            self._version,
            None,
            lease_ids,
            0,
            0.0,
            1.0,
            progress=progress,
            released_leases=released,
        )
        reply = await self._client.heartbeat(beat)
        for lease_id in reply.cancelled_leases:
            self._leases.pop(lease_id, None)

    def _piece(self) -> PartialTrajectory:
        tokens, version = [3, END_TOKEN, 5], self._version or 0
        if self.random.happens(0.3):
            tokens, version = [3, 4, 5], version + 1000
        return PartialTrajectory(
            np.array(tokens, dtype=np.int32),
            np.full(len(tokens), -1.0, dtype=np.float32),
            (VersionSpan(version, 0, len(tokens)),),
            sample_index=0,
        )

    def _group(self, lease_id: str, group_id: str, seeds: Sequence[int]) -> GroupSubmission:
        version = self._version or 0
        spans: tuple[VersionSpan, ...] = (VersionSpan(version + 1000, 0, 2),)
        if self.random.happens(0.5):
            spans = (VersionSpan(version, 0, 1), VersionSpan(version - 1, 1, 2))
        trajectories = tuple(
            Trajectory(
                np.array([3, 4], dtype=np.int32),
                np.full(2, -1.0, dtype=np.float32),
                spans,
                FinishReason.STOP,
                sample_index=index,
                seed=seed,
            )
            for index, seed in enumerate(seeds)
        )
        return GroupSubmission(lease_id, group_id, self._worker_id, trajectories, 0.1)
