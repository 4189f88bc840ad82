"""Rollout worker: leases groups, samples them, hands each in exactly as it was sampled.

It dials out. Sampling never waits for the network: leases, submissions, heartbeats and snapshots each
have a loop of their own beside the engine's thread. The coordinator may vanish and return at any time; a
finished group is kept until it was answered.
A group that the coordinator refuses is logged and let go: only a refusal of the worker itself ends it.
A lease that names a version is sampled with that version or not at all. What is unfinished goes along
with the heartbeats, so that another worker continues it if this one is lost; asked to stop, a worker
finishes what it surely can, hands the rest over, and leaves.

Asked to stop, a worker reports at once what it has, so that a kill costs nothing from then on. It waits only
a short time for a coordinator that does not answer: that one is most likely being stopped too.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal, Protocol, TypeVar

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.api.engine import Engine
from antiphon.core.config import RunConfig, parse_config
from antiphon.core.errors import UnavailableError
from antiphon.core.loop.leases import finishes_in_time
from antiphon.core.records import PROTOCOL_VERSION, LeaseProgress
from antiphon.core.requests import (
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    WorkerHeartbeat,
    WorkerHello,
    WorkerWelcome,
)
from antiphon.net.rpc.retry import retry_unavailable
from antiphon.services.rollout.engine.driver import DriveEngine, EngineDriver
from antiphon.services.rollout.engine.thread import EngineThread
from antiphon.services.rollout.group import GroupInFlight
from antiphon.services.rollout.progress import gather, tokens_left
from antiphon.services.rollout.weights import Delay, WeightSource, WeightSync, no_delay
from antiphon.services.rollout.work import Submitter, WorkInFlight, first_leaf, samples_with
from antiphon.system.wakeup import Wakeup

Prepare = Callable[[RunConfig, WorkerWelcome, Callable[[int], None]], Awaitable[RunConfig]]
"""Brings what the engine is built from to this machine, and returns the configuration that says where it is;
called with the run's, the welcome, and what takes the bytes that arrive."""


async def nothing_to_prepare(
    config: RunConfig, welcome: WorkerWelcome, arrived: Callable[[int], None]
) -> RunConfig:
    """Return the configuration as it is."""
    return config


FINISHING_SHARE = 0.5
"""Part of the grace time in which a group must surely be finished, or it is handed over at once."""
HAND_OVER_S = 3.0
"""Of the grace time, kept for handing over what was not finished after all; and how long a coordinator
is waited for that does not answer."""

_log = structlog.get_logger(__name__)


class SendHeartbeat(Protocol):
    """Sends a heartbeat at once, apart from the regular ones."""

    async def __call__(
        self, progress: tuple[LeaseProgress, ...], *, released: tuple[str, ...] = (), leaving: bool = False
    ) -> None:
        """Report progress, leases that are given back, and leaving."""


class Shutdown:
    """The end of one worker, from the moment it is asked to stop."""

    def __init__(self, worker_name: str, work: WorkInFlight, send: SendHeartbeat, change: Wakeup) -> None:
        """What is handed over leaves `work`; `change` is notified when a group was finished or handed in."""
        self._name = worker_name
        self._work, self._send, self._change = work, send, change
        self._asked = asyncio.Event()
        self._deadline = 0.0

    @property
    def asked(self) -> bool:
        """Whether the worker was asked to stop."""
        return self._asked.is_set()

    def ask(self, grace_s: float) -> None:
        """Begin; the worker is gone within `grace_s` seconds."""
        self._deadline = asyncio.get_running_loop().time() + grace_s
        self._asked.set()

    async def run(self, engine: EngineDriver, step_timeout_s: float) -> None:
        """Wait until it is asked for; then finish, hand over, and leave."""
        await self._asked.wait()
        try:
            await self._leave(engine, step_timeout_s)
        except UnavailableError as error:
            _log.warning(
                "worker.no_answer", worker=self._name, groups=len(self._work.groups), reason=str(error)
            )

    async def _leave(self, engine: EngineDriver, step_timeout_s: float) -> None:
        clock = asyncio.get_running_loop().time
        groups = list(self._work.groups.values())
        progress = await gather(groups, engine, step_timeout_s)
        await self._send(progress)
        finish_s = FINISHING_SHARE * (self._deadline - clock())
        per_token = self._work.token_rate.seconds_per_token
        late = [g for g in groups if not finishes_in_time(tokens_left(g, progress), per_token, finish_s)]
        await self.hand_over(engine, late, step_timeout_s)
        while not self._work.idle and (left_s := self._deadline - HAND_OVER_S - clock()) > 0:
            await self._change.wait(left_s)
        await self.hand_over(engine, list(self._work.groups.values()), step_timeout_s)
        await self._send((), leaving=True)

    async def hand_over(
        self, engine: EngineDriver, groups: Sequence[GroupInFlight], step_timeout_s: float
    ) -> None:
        """Stop sampling groups and give their leases back, everything sampled included.

        Raises:
            UnavailableError: when the coordinator does not answer within `HAND_OVER_S`.
        """
        sampled = self._work.groups
        running = [group for group in groups if group.lease.lease_id in sampled]
        if not running:
            return
        progress = await gather(running, engine, step_timeout_s, stop=True)
        # What was finished meanwhile is on its way as a submission.
        released = [g.lease.lease_id for g in running if sampled.pop(g.lease.lease_id, None) is not None]
        _log.info("worker.handed_over", worker=self._name, groups=len(released))
        await self._send(progress, released=tuple(released))


REGISTER_TIMEOUT_S = 300.0
"""How long a worker tries to register, before it knows the run's own services.stall_timeout_s."""
LEASE_WAIT_S = 5.0
"""How long one lease request is held open; the coordinator answers earlier when there is news."""
FIRST_PAUSE_S = 0.02
"""Pause after a lease request that brought nothing; it doubles up to `MOST_PAUSE_S`."""
MOST_PAUSE_S = 0.5
MOST_REASON = 1000
"""Characters of a heartbeat's reason for a swap that failed."""
GRACE_S = 20.0
"""What `stop` leaves a worker that does not know the run's rollout.grace_s yet."""
_T = TypeVar("_T")


class RolloutWorker:
    """One worker of one run, from registration to leaving."""

    def __init__(
        self,
        coordinator: Coordinator,
        worker_name: str,
        run_id: str,
        make_engine: Callable[[RunConfig], Engine],
        make_source: Callable[[RunConfig], WeightSource],
        *,
        concurrent_groups: int | None = None,
        delay: Delay = no_delay,
        lease_wait_s: float = LEASE_WAIT_S,
        drive: DriveEngine = EngineThread,
        learner_key: bytes | None = None,
        device: Literal["cpu", "gpu"] = "cpu",
        prepare: Prepare = nothing_to_prepare,
        relay_address: str = "",
    ) -> None:
        """Prepare a worker; nothing is sent before `run`.

        `worker_name` is unique in the run: letters, digits, dot, dash, underscore. `run_id` may be "" for
        whichever run the coordinator serves. `make_engine` is called in the engine's thread.
        `concurrent_groups` are sampled at the same time, by default as many as the run's configuration
        says. `delay` is awaited before each lease request, submission and swap. `learner_key` is the
        public key that manifests must be signed with; None takes the one that the coordinator names.
        `device` is what the engine samples on; the first worker's decides `sampling.rule: auto`.
        `prepare` is awaited before the engine is built. `relay_address` is where others take weights.
        """
        self._coordinator = coordinator
        self._name = worker_name
        self._run_id = run_id
        self._make_engine = make_engine
        self._make_source = make_source
        self._concurrent_groups = concurrent_groups
        self._delay = delay
        self._lease_wait_s = lease_wait_s
        self._drive = drive
        self._learner_key = learner_key
        self._device = device
        self._prepare, self._relay_address = prepare, relay_address
        self._prepared, self._prepared_bytes = asyncio.Event(), 0
        self._stall_timeout_s = REGISTER_TIMEOUT_S
        self._change = Wakeup()
        self._swapped = Wakeup()
        self._engine: EngineDriver | None = None
        self._engine_config: RunConfig | None = None
        self._weights: WeightSync | None = None
        self._work = WorkInFlight(self._change)
        self._submitter = Submitter(coordinator, self._work, self._change, self._reach, delay)
        self._shutdown = Shutdown(worker_name, self._work, self._send_heartbeat, self._change)
        self._step_timeout_s = 1.0
        self._reports_progress = True
        self._grace_s = GRACE_S
        self._ready_at: float | None = None
        self._draining = False
        self._done = asyncio.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until the run is finished or `stop` was called; `ready` is called once the engine is up.

        Raises:
            ContractError: when the coordinator refuses the worker itself.
            UnavailableError: when a peer was away for longer than services.stall_timeout_s.
            IntegrityError: when weights do not match their digest.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._serve(ready))
                tasks.create_task(self._cancel_when_done(serving))
        except BaseExceptionGroup as group:
            raise first_leaf(group) from group
        finally:
            _log.info("worker.left", worker=self._name, tokens_generated=self._work.tokens_generated)

    def stop(self, grace_s: float | None = None) -> None:
        """Take nothing new, then leave within `grace_s` seconds; a second call leaves at once.

        What was sampled so far is reported to the coordinator immediately. Groups that are surely
        finished in half of the time are finished; the others are handed over for another worker to
        continue. By default `grace_s` is the run's rollout.grace_s.
        """
        groups = len(self._work.groups)
        if self._shutdown.asked:
            _log.warning("worker.stopped", worker=self._name, abandoned=groups)
            self._done.set()
            return
        if not self._work.worker_id:  # it is not registered, so there is nothing to hand over
            self._done.set()
        grace_s = self._grace_s if grace_s is None else grace_s
        _log.info("worker.stopping", worker=self._name, groups=groups, grace_s=grace_s)
        self._draining = True
        self._shutdown.ask(grace_s)
        asyncio.get_running_loop().call_later(grace_s, self._done.set)
        self._change.notify()

    @property
    def worker_id(self) -> str:
        """The id that the coordinator gave it last; "" before it did."""
        return self._work.worker_id

    async def abandon(self) -> None:
        """Give all leases back and say that the worker leaves, without asking the engine for anything."""
        await self._send_heartbeat((), released=tuple(self._work.groups), leaving=True)

    async def _cancel_when_done(self, serving: asyncio.Task[None]) -> None:
        await self._done.wait()
        serving.cancel()

    async def _shut_down_when_asked(self, engine: EngineDriver) -> None:
        await self._shutdown.run(engine, self._step_timeout_s)
        self._done.set()

    async def _send_heartbeat(
        self, progress: tuple[LeaseProgress, ...], *, released: tuple[str, ...] = (), leaving: bool = False
    ) -> None:
        async def heartbeat() -> HeartbeatReply:
            return await self._coordinator.heartbeat(self._heartbeat(progress, released, leaving))

        reply = await retry_unavailable("coordinator.heartbeat", heartbeat, HAND_OVER_S, self._name)
        if not reply.known and not leaving:
            await self._register()
            await retry_unavailable("coordinator.heartbeat", heartbeat, HAND_OVER_S, self._name)

    async def _serve(self, ready: Callable[[], None]) -> None:
        welcome = await self._register()
        config = parse_config(welcome.config_yaml)
        self._stall_timeout_s = config.services.stall_timeout_s
        self._grace_s = config.rollout.grace_s
        self._step_timeout_s = welcome.heartbeat_s
        self._reports_progress = config.coordinator.partials_mib > 0
        engine = self._drive(lambda: self._make_engine(self._engine_config or config), self._work.collect)
        weights = WeightSync(
            self._coordinator,
            self._make_source(config),
            engine,
            config,
            welcome.run_id,
            self._work.by_pin,
            self._change,
            self._swapped,
            self._delay,
            welcome.learner_key if self._learner_key is None else self._learner_key,
        )
        self._engine, self._weights = engine, weights
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_engine(config, welcome, engine))
            tasks.create_task(self._heartbeats(engine, welcome.heartbeat_s))
            tasks.create_task(self._shut_down_when_asked(engine))
            tasks.create_task(weights.fetch_forever())
            tasks.create_task(self._sample(config, engine, weights, ready))

    async def _run_engine(self, config: RunConfig, welcome: WorkerWelcome, engine: EngineDriver) -> None:
        self._engine_config = await self._prepare(config, welcome, self._note_prepared)
        self._prepared.set()
        await engine.run()

    def _note_prepared(self, length: int) -> None:
        self._prepared_bytes += length

    async def _sample(
        self, config: RunConfig, engine: EngineDriver, weights: WeightSync, ready: Callable[[], None]
    ) -> None:
        await self._prepared.wait()  # or the worker ends: `prepare` has a patience of its own
        await engine.started(config.services.start_timeout_s)
        self._ready_at = asyncio.get_running_loop().time()
        ready()
        _log.info("worker.ready", worker=self._name, run=self._run_id)
        group_size = config.loop.group_size
        samples = (self._concurrent_groups or config.rollout.concurrent_groups) * group_size
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(weights.swap_forever())
            tasks.create_task(self._leases(engine, weights, samples, group_size))
            tasks.create_task(self._submitter.run())

    async def _register(self) -> WorkerWelcome:
        places = self._concurrent_groups or 0
        told = (self._name, PROTOCOL_VERSION, self._run_id, places, self._device, self._relay_address)
        hello = WorkerHello(*told)
        welcome = await self._reach("coordinator.register", lambda: self._coordinator.register(hello))
        self._work.worker_id, self._run_id = welcome.worker_id, welcome.run_id
        if self._weights is not None:
            self._weights.network.forgotten()
        _log.info("worker.registered", worker=self._name, worker_id=welcome.worker_id, run=welcome.run_id)
        return welcome

    async def _heartbeats(self, engine: EngineDriver, pause_s: float) -> None:
        async def heartbeat() -> HeartbeatReply:
            # Made again for each attempt: what is sampled and what is held keeps changing.
            groups = list(self._work.groups.values()) if self._reports_progress else []
            progress = await gather(groups, engine, self._step_timeout_s)
            told = self._heartbeat(progress, released=tuple(self._work.unusable))
            reply = await self._coordinator.heartbeat(told)
            self._work.unusable.difference_update(told.released_leases if reply.known else ())
            if self._weights is not None and reply.known:
                self._weights.network.confirmed(told.network)
            return reply

        while True:
            await self._give_back_unserved(engine)
            reply = await self._reach("coordinator.heartbeat", heartbeat)
            if reply.known:
                self._apply_reply(reply)
                # Other weights are reported at once: the coordinator's gate counts with them.
                await self._rest(pause_s, reply.next_s)
            else:
                # Its leases are named by their ids, so work in flight continues under the new name.
                await self._register()
                for group in self._work.groups.values():
                    group.note_kept(())  # a coordinator that forgot the worker forgot its progress too
                self._change.notify()

    async def _give_back_unserved(self, engine: EngineDriver) -> None:
        """Hand running groups over while no weights are held any more: nothing can go on with them here."""
        weights = self._weights
        if weights is None or weights.held_version is not None or weights.failing is None:
            return
        try:
            await self._shutdown.hand_over(engine, list(self._work.groups.values()), self._step_timeout_s)
        except UnavailableError as error:  # the leases expire, or the coordinator learns of it later
            _log.warning("worker.no_answer", worker=self._name, reason=str(error))

    async def _rest(self, pause_s: float, idle_pause_s: float) -> None:
        """Wait for the next heartbeat: the longer pause holds while there is nothing to report."""
        clock = asyncio.get_running_loop().time
        until = clock() + idle_pause_s
        while not await self._swapped.wait(pause_s):
            if not self._work.idle or self._draining or clock() >= until:
                return

    def _heartbeat(
        self, progress: tuple[LeaseProgress, ...], released: tuple[str, ...] = (), leaving: bool = False
    ) -> WorkerHeartbeat:
        engine, weights, now = self._engine, self._weights, asyncio.get_running_loop().time()
        uptime_s = 0.0 if self._ready_at is None else now - self._ready_at
        failing = None if weights is None else weights.failing
        return WorkerHeartbeat(
            worker_id=self._work.worker_id,
            held_version=None if weights is None else weights.held_version,
            weights_digest=None if weights is None else weights.weights_digest,
            lease_ids=(*self._work.groups, *self._work.finished),
            tokens_generated=self._work.tokens_generated,
            busy_s=0.0 if engine is None else engine.busy_s,
            uptime_s=uptime_s,
            sampling=bool(self._work.groups) and engine is not None and not engine.loading,
            progress=progress,
            released_leases=released,
            leaving=leaving,
            bytes_fetched=self._prepared_bytes + (0 if weights is None else weights.bytes_fetched),
            numerics="" if engine is None else engine.numerics,
            swap_error="" if failing is None else failing.reason[:MOST_REASON],
            swap_failing_s=0.0 if failing is None else now - failing.since_s,
            network=None if weights is None else weights.network.report(),
        )

    def _apply_reply(self, reply: HeartbeatReply) -> None:
        for lease_id in reply.cancelled_leases:
            group = self._work.groups.pop(lease_id, None)
            if group is not None and self._engine is not None:
                self._engine.abort(group.request_ids())
                _log.info("lease.cancelled", lease=lease_id, group=group.lease.group_id)
        for kept in reply.kept:
            running = self._work.groups.get(kept.lease_id)
            if running is not None:
                running.note_kept(kept.tokens)
        if self._weights is not None:
            self._weights.note_evaluated(reply.wanted_version)
            self._weights.note_newest(reply.newest_version)
        if reply.run_finished:
            self._finish_run()
        elif reply.leave and not self._draining:
            self.stop()
        if reply.cancelled_leases:
            self._change.notify()

    async def _leases(self, engine: EngineDriver, weights: WeightSync, samples: int, group_size: int) -> None:
        """Keep up to `samples` requests in flight; an evaluation's group has one, others `group_size`."""
        pause_s = FIRST_PAUSE_S
        while not self._draining:
            room = (samples - self._work.samples) // group_size
            if room < 1 or weights.pauses_leases():
                await self._change.wait(self._lease_wait_s)
                continue
            await self._delay()
            held_version = weights.held_version
            async with weights.held_still():
                asking = partial(self._ask, engine, weights, room)
                reply = await self._reach("coordinator.lease_group", asking)
                self._accept(reply, engine, weights)
            if reply.leases or weights.held_version != held_version:
                pause_s = FIRST_PAUSE_S
            else:
                await self._change.wait(pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)

    async def _ask(self, engine: EngineDriver, weights: WeightSync, room: int) -> LeaseReply:
        # Made again for each attempt: the worker may have got another id in between.
        request = LeaseRequest(
            worker_id=self._work.worker_id,
            held_version=weights.held_version,
            groups=room,
            wait_s=self._lease_wait_s,
            wants_history=engine.drafts,
        )
        return await self._coordinator.lease_group(request)

    def _accept(self, reply: LeaseReply, engine: EngineDriver, weights: WeightSync) -> None:
        for lease in () if self._draining else reply.leases:
            if not samples_with(lease, held := weights.held_version, weights.loading):
                _log.warning("lease.unusable", lease=lease.lease_id, wants=lease.version, held=held)
                self._work.unusable.add(lease.lease_id)
                self._swapped.notify()  # the next heartbeat gives it back, and is due now
                continue
            self._work.take(lease, engine)
            _log.debug("lease.taken", lease=lease.lease_id, group=lease.group_id, attempt=lease.attempt)
        weights.note_wanted(reply.wanted_version)
        weights.note_newest(reply.newest_version)
        if reply.run_finished:
            self._finish_run()

    def _finish_run(self) -> None:
        _log.info("run.finished", worker=self._name)
        self._done.set()

    async def _reach(self, what: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        return await retry_unavailable(what, attempt, self._stall_timeout_s, self._name)
