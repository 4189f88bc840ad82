"""Weights of a worker: fetched while it samples, checked, and swapped when the policy allows.

A version is held only after the engine echoed the digest of its manifest; until then the worker
says it holds what it held before. A swap that fails is tried again, for services.stall_timeout_s at
most, and the worker says why until one succeeds. Snapshots that were fetched are kept for a while, because
fixed mode may want an older one again for a group that was lost elsewhere.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.core.config import RunConfig
from antiphon.core.dissemination.reports import NetworkLog
from antiphon.core.errors import ContractError, IntegrityError, UnavailableError
from antiphon.core.patience import Patience
from antiphon.core.records import SnapshotManifest
from antiphon.net.rpc.retry import MOST_PAUSE_S, retry_unavailable
from antiphon.services.rollout.engine.thread import EngineThread
from antiphon.services.rollout.swap import WeightView, leases_wait, version_to_fetch, version_to_load
from antiphon.system import failpoints
from antiphon.system.wakeup import Wakeup
from antiphon.weights.signature import check_signature

MOST_FAILING_PAUSE_S = 10.0
"""Longest pause between two attempts at a swap that fails; the first is MOST_PAUSE_S."""
Delay = Callable[[], Awaitable[None]]
"""Awaited before every lease request, submission and swap; tests inject delays with it."""
Find = Callable[[int], Awaitable[SnapshotManifest | None]]
"""Returns the manifest of a version, None where there is none that can be believed."""

_log = structlog.get_logger(__name__)


async def no_delay() -> None:
    """Return at once."""


class WeightSource(Protocol):
    """Where snapshots come from and where they are kept."""

    bytes_fetched: int
    """Bytes of chunks that arrived so far and were kept; it grows while a transfer runs."""
    network: NetworkLog
    """What was measured on the way."""

    async def fetch(self, manifest: SnapshotManifest, find: Find) -> None:
        """Bring a snapshot here, verified; continues where an earlier attempt stopped.

        Args:
            manifest: of the version.
            find: asked for earlier versions that a chain of patches may pass.

        Raises:
            UnavailableError: when the holder of the chunks does not answer.
            IntegrityError: when it sent other bytes than the manifest names.
        """

    def open(self, manifest: SnapshotManifest) -> Mapping[str, Any]:
        """Return the tensors of a fetched snapshot, checked against its digest: what an engine takes.

        Raises:
            UnavailableError: when it is not here any more.
            IntegrityError: when its bytes were altered; the next `fetch` brings them again.
        """

    def prune(self, kept: Sequence[SnapshotManifest]) -> None:
        """Forget what no manifest in `kept` needs."""


@dataclass(frozen=True, slots=True)
class Failing:
    """Swaps that fail, one after the other."""

    since_s: float
    """When the first of them did, on the event loop's clock."""
    reason: str
    """Why the last one did, as a sentence."""
    pause_s: float
    """Until the next attempt."""


class WeightSync:
    """The versions a worker knows of, has here, and samples with."""

    def __init__(
        self,
        coordinator: Coordinator,
        source: WeightSource,
        engine: EngineThread,
        config: RunConfig,
        run_id: str,
        groups_in_flight: Callable[[], tuple[int, int]],
        change: Wakeup,
        swapped: Wakeup,
        delay: Delay,
        learner_key: bytes = b"",
    ) -> None:
        """Start with nothing held.

        `groups_in_flight` returns how many groups' leases name the held version, and how many others
        there are. `change` is notified when a version was announced, fetched or loaded, `swapped` when
        one was loaded. `delay` is awaited before each swap. `learner_key` is the public key that
        manifests must be signed with, empty where none are.
        """
        self._coordinator = coordinator
        self.source = source
        self._engine = engine
        self._mode = config.loop.mode
        self._kept = config.broadcast.snapshots_kept
        self._stall_timeout_s = config.services.stall_timeout_s
        self._away_s = config.services.orphan_s + config.services.stall_timeout_s
        self._pause_s = config.coordinator.heartbeat_s
        self._run_id = run_id
        self._groups_in_flight = groups_in_flight
        self._change = change
        self._swapped = swapped
        self._delay = delay
        self._learner_key = learner_key
        self._complete: dict[int, SnapshotManifest] = {}
        self._arriving: SnapshotManifest | None = None
        self.failing: Failing | None = None
        """What the last swap failed of; None once one has succeeded."""
        self._newest: int | None = None
        self._wanted: int | None = None
        self._held: SnapshotManifest | None = None
        self._swapping: int | None = None
        """Version that is being put together or loaded; it is not pruned meanwhile."""
        self.loading = False
        """The engine has been told to take other weights; what it is given now is sampled by those."""
        self._lock = asyncio.Lock()
        """Fixed mode: held while weights are swapped and while a lease is asked for, because a lease
        that names a version must find it still loaded. Few leases of elastic mode do: those that miss it are
        given back."""

    @property
    def held_version(self) -> int | None:
        """Version that samples now; its digest was checked."""
        return None if self._held is None else self._held.version

    @property
    def weights_digest(self) -> str | None:
        """Digest of the weights that sample now."""
        return None if self._held is None else self._held.weights_digest

    def note_newest(self, newest: int | None) -> None:
        if newest is not None and (self._newest is None or newest > self._newest):
            self._newest = newest
            self._change.notify()

    def note_wanted(self, version: int | None) -> None:
        if version != self._wanted:
            self._wanted = version
            self._change.notify()

    def note_evaluated(self, version: int | None) -> None:
        """Note which version a heartbeat's reply wants; it knows of evaluations alone."""
        if self._mode == "elastic":
            self.note_wanted(version)

    def pauses_leases(self) -> bool:
        """Return whether a swap is coming that another lease would put off."""
        return leases_wait(self._view(), self._mode)

    @asynccontextmanager
    async def held_still(self) -> AsyncIterator[None]:
        """Keep the weights as they are while a lease is asked for, where leases name a version."""
        if self._mode == "elastic":
            yield
        else:
            async with self._lock:
                yield

    async def fetch_forever(self) -> None:
        """Fetch what is wanted and what is newest, while sampling continues.

        Raises:
            UnavailableError: when no byte of a snapshot comes for services.stall_timeout_s.
            IntegrityError: when its chunks stay wrong for as long.
        """
        while True:
            version = version_to_fetch(self._view())
            if version is None:
                await self._change.wait(self._pause_s)
            else:
                await self._fetch(version)

    async def swap_forever(self) -> None:
        """Load what is due, one swap at a time."""
        while True:
            version = version_to_load(self._view(), self._mode)
            if version is None:
                await self._change.wait(self._pause_s)
            else:
                await self._swap(version)

    async def _fetch(self, version: int) -> None:
        loop = asyncio.get_running_loop()
        patience, pause_s = Patience(loop.time()), 0.1
        told: Failing | None = None
        patience.still_s(self.source.bytes_fetched, loop.time())
        while version == version_to_fetch(self._view()):
            self._arriving = None
            try:
                asked_s = loop.time()
                try:
                    manifest = self._arriving = await self._manifest(version)
                finally:
                    patience.excuse(loop.time() - asked_s)  # the worker's heartbeats mind who is away
                await self.source.fetch(manifest, self._find)
            except (UnavailableError, IntegrityError) as error:
                # A holder that restarts, moves or sends a damaged chunk is asked again; its
                # manifest too, because the origin may have another address by now.
                _log.warning("snapshot.unfetched", version=version, error=str(error))
                if isinstance(error, IntegrityError) and self.failing is told:
                    since_s = loop.time() if told is None else told.since_s
                    told = Failing(since_s, f"version {version} was not fetched: {error}", pause_s)
                    self.failing = told
                still_s = patience.still_s(self.source.bytes_fetched, loop.time())
                if still_s > self._stall_timeout_s:
                    raise
                if not still_s:
                    pause_s = 0.1  # something arrived: a slow link, not one that is away
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
            else:
                self._complete[version] = manifest
                self._arriving = None
                if self.failing is told:
                    self.failing = None
                _log.info("snapshot.fetched", version=version, bytes=manifest.full_bytes)
                self._prune()
                self._change.notify()

    async def _manifest(self, version: int) -> SnapshotManifest:
        manifest = await retry_unavailable(
            "coordinator.latest_manifest",
            lambda: self._coordinator.latest_manifest(version),
            self._away_s,
        )
        if manifest is None:
            raise UnavailableError(f"the coordinator has no manifest of version {version} yet")
        self._check(manifest, version)
        return manifest

    async def _find(self, version: int) -> SnapshotManifest | None:
        """Return the manifest of an earlier version, None where there is none that can be believed."""
        try:
            manifest = await self._coordinator.latest_manifest(version)
            if manifest is not None:
                self._check(manifest, version)
        except (UnavailableError, IntegrityError) as error:
            _log.warning("manifest.unusable", version=version, error=str(error))
            return None
        return manifest

    def _check(self, manifest: SnapshotManifest, version: int) -> None:
        if manifest.run_id != self._run_id or manifest.version != version:
            raise ContractError(
                f"asked for version {version} of run {self._run_id}, got a manifest of version "
                f"{manifest.version} of run {manifest.run_id}; start the worker against its own run"
            )
        check_signature(manifest, self._learner_key)

    async def _swap(self, version: int) -> None:
        await self._delay()
        manifest = self._complete.get(version)
        if manifest is None:
            return  # a newer one came meanwhile
        self._swapping = version
        try:
            await self._load(version, manifest)
        finally:
            self._swapping = None

    async def _load(self, version: int, manifest: SnapshotManifest) -> None:
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        try:
            tensors = await asyncio.to_thread(self.source.open, manifest)
        except (UnavailableError, IntegrityError) as error:
            _log.warning("snapshot.damaged", version=version, error=str(error))
            self._complete.pop(version, None)  # so that it is fetched again
            await self._fail(version, str(error))
            return
        verified_s = clock()
        async with self.held_still():
            # A lease that names the held version, or another wish, may have come in meanwhile.
            if version_to_load(replace(self._view(), complete={version}), self._mode) is None:
                return
            failpoints.reach("worker.apply")
            self.loading = True
            try:
                report = await self._engine.load(
                    version, tensors, manifest.weights_digest, self._stall_timeout_s
                )
            finally:
                self.loading = False
            if not report.problem:
                self._held = manifest
            elif report.serving is None:
                self._held = None
        if report.problem:
            _log.error("weights.refused", version=version, serving=report.serving, reason=report.problem)
            await self._fail(version, report.problem)
            return
        self.failing = None
        self.source.network.loaded(version, verified_s - begun_s, clock() - verified_s)
        _log.info("weights.loaded", version=version, digest=manifest.weights_digest)
        self._prune()
        self._swapped.notify()
        self._change.notify()

    async def _fail(self, version: int, reason: str) -> None:
        """Say why a swap failed, and wait until it is tried again or another version is due.

        Raises:
            IntegrityError: when swaps have failed for services.stall_timeout_s.
        """
        clock = asyncio.get_running_loop().time
        before, now = self.failing, clock()
        since_s = now if before is None else before.since_s
        pause_s = MOST_PAUSE_S if before is None else min(2 * before.pause_s, MOST_FAILING_PAUSE_S)
        reason = f"version {version} was not loaded: {reason}"
        self.failing = Failing(since_s, reason, pause_s)
        if now - since_s > self._stall_timeout_s:
            raise IntegrityError(reason)
        self._swapped.notify()  # the next heartbeat says it
        self._change.notify()
        while (left_s := now + pause_s - clock()) > 0:
            await self._change.wait(left_s)
            if version_to_load(self._view(), self._mode) not in (None, version):
                return

    def _prune(self) -> None:
        kept = set(sorted(self._complete)[-self._kept :]) | {self._wanted, self.held_version, self._swapping}
        for version in [v for v in self._complete if v not in kept]:
            del self._complete[version]
        arriving = [] if self._arriving is None else [self._arriving]
        self.source.prune([*self._complete.values(), *arriving])

    def _view(self) -> WeightView:
        pinned, free = self._groups_in_flight()
        return WeightView(
            held=self.held_version,
            complete=self._complete.keys(),
            newest=self._newest,
            wanted=self._wanted,
            pinned_groups=pinned,
            free_groups=free,
        )
