"""Rollout worker: leases groups, samples them, hands each in exactly as it was sampled.

It dials out. Sampling never waits for the network: leases, submissions, heartbeats and snapshots each
have a loop of their own beside the engine's thread. The coordinator may vanish and return at any time; a
finished group is kept until it was answered. Several are handed in at a time: an answer comes after the
coordinator's transaction, so one group after the other would make its time the pace of the whole worker.
A group that the coordinator refuses is logged and let go: only a refusal of the worker itself ends it.
A lease that names a version is sampled with that version or not at all. What is unfinished goes along
with the heartbeats, so that another worker continues it if this one is lost; asked to stop, a worker
finishes what it surely can, hands the rest over, and leaves.

Asked to stop, a worker reports at once what it has, so that a kill costs nothing from then on. It waits only
a short time for a coordinator that does not answer: that one is most likely being stopped too.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.api.engine import Engine
from antiphon.core.config import RunConfig, parse_config
from antiphon.core.errors import BlockedError, RefusedError, UnavailableError
from antiphon.core.loop.leases import finishes_in_time
from antiphon.core.records import PROTOCOL_VERSION, LeaseProgress, PartialTrajectory
from antiphon.core.requests import (
    HeartbeatReply,
    LeaseRequest,
    TurnReply,
    TurnRequest,
    WorkerHeartbeat,
    WorkerHello,
    WorkerWelcome,
)
from antiphon.core.spans import rest_of
from antiphon.net.rpc.retry import retry_unavailable
from antiphon.services.rollout.engine.thread import DriveEngine, EngineThread
from antiphon.services.rollout.weights import Delay, WeightSource, WeightSync, no_delay
from antiphon.services.rollout.work import GroupInFlight, WorkInFlight, gather, piece_of
from antiphon.system import failpoints
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
REGISTER_TIMEOUT_S = 300.0
"""How long a worker tries to register for the first time."""
LEASE_WAIT_S = 5.0
"""How long one lease request is held open; the coordinator answers earlier when there is news."""
FIRST_PAUSE_S = 0.02
"""Pause after a lease request that brought nothing; it doubles up to `MOST_PAUSE_S`."""
MOST_PAUSE_S = 0.5
MOST_AT_ONCE = 32
"""Groups that may wait for the answers to their submissions at the same time."""
MOST_TURNS_AT_ONCE = 192
"""Turns that may wait for their answers at the same time; one stream carries these and all else."""
MOST_REASON = 1000
"""Characters of a heartbeat's reason for a swap that failed."""
GRACE_S = 20.0
"""What `stop` leaves a worker that does not know the run's rollout.grace_s yet."""

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)


class _OrphanedError(UnavailableError):
    """The coordinator that a worker had registered with is gone."""


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
        self._prepared_bytes = 0
        self._orphan_s = REGISTER_TIMEOUT_S
        self._instance = secrets.token_hex(8)
        self._change = Wakeup()
        self._swapped = Wakeup()
        self._engine: EngineThread
        self._weights: WeightSync
        self._work = WorkInFlight(self._change)
        self._step_timeout_s = 1.0
        self._reports_progress = True
        self._grace_s = GRACE_S
        self._leave_at = 0.0
        self._ready_at: float | None = None
        self._stopping, self._done = asyncio.Event(), asyncio.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        """Serve until the run is finished, `stop` was called, or the coordinator that it had registered with
        was away for services.orphan_s; `ready` is called once the engine is up.

        Raises:
            ContractError: when the coordinator refuses the worker itself.
            UnavailableError: when the coordinator never answered, or another peer was away for longer than
                services.stall_timeout_s.
            IntegrityError: when weights do not match their digest.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = tasks.create_task(self._serve(ready))
                tasks.create_task(self._cancel_when_done(serving))
        except BaseExceptionGroup as group:
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if not isinstance(first, _OrphanedError):
                raise first from group
            _log.warning("worker.orphaned", worker=self._name, reason=str(first))
        finally:
            _log.info("worker.left", worker=self._name, tokens_generated=self._work.tokens_generated)
            if waits := sorted(self._work.turn_waits_s):
                median, late = (waits[int(share * (len(waits) - 1))] for share in (0.5, 0.99))
                _log.info("turns.waited", worker=self._name, turns=len(waits), p50_s=median, p99_s=late)

    def stop(self, grace_s: float | None = None) -> None:
        """Take nothing new, then leave within `grace_s` seconds; a second call leaves at once.

        What was sampled so far is reported to the coordinator immediately. Groups that are surely
        finished in half of the time are finished; the others are handed over for another worker to
        continue. By default `grace_s` is the run's rollout.grace_s.
        """
        loop, groups = asyncio.get_running_loop(), len(self._work.groups)
        if self._stopping.is_set():
            _log.warning("worker.stopped", worker=self._name, abandoned=groups)
            self._done.set()
            return
        if not self._work.worker_id:  # it is not registered, so there is nothing to hand over
            self._done.set()
        grace_s = self._grace_s if grace_s is None else grace_s
        _log.info("worker.stopping", worker=self._name, groups=groups, grace_s=grace_s)
        self._leave_at = loop.time() + grace_s
        self._stopping.set()
        loop.call_later(grace_s, self._done.set)
        self._change.notify()

    @property
    def worker_id(self) -> str:
        """The id that the coordinator gave it last; "" before it did."""
        return self._work.worker_id

    async def _insist(self, call: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Make a call to the coordinator until it answers.

        Raises:
            _OrphanedError: when it was away for `services.orphan_s`.
        """
        try:
            return await retry_unavailable(f"coordinator.{call}", attempt, self._orphan_s, self._name)
        except BlockedError:
            raise
        except UnavailableError as error:
            raise _OrphanedError(str(error)) from error

    async def abandon(self) -> None:
        """Give all leases back and say that the worker leaves, without asking the engine for anything."""
        await self._send_heartbeat((), released=tuple(self._work.groups), leaving=True)

    async def _cancel_when_done(self, serving: asyncio.Task[None]) -> None:
        await self._done.wait()
        serving.cancel()

    async def _serve(self, ready: Callable[[], None]) -> None:
        welcome = await self._register()
        config = parse_config(welcome.config_yaml)
        self._orphan_s = config.services.orphan_s
        self._grace_s = config.rollout.grace_s
        self._step_timeout_s = welcome.heartbeat_s
        self._reports_progress = config.coordinator.partials_mib > 0
        engine = self._engine = self._drive(lambda: self._make_engine(prepared), self._work.collect)
        weights = self._weights = WeightSync(
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
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeats(welcome.heartbeat_s))
            tasks.create_task(self._leave_when_asked())
            tasks.create_task(weights.fetch_forever())
            prepared = await self._prepare(config, welcome, self._note_prepared)
            tasks.create_task(engine.run())
            await engine.started(config.services.start_timeout_s)
            self._ready_at = asyncio.get_running_loop().time()
            ready()
            _log.info("worker.ready", worker=self._name, run=self._run_id)
            groups = self._concurrent_groups or config.rollout.concurrent_groups
            tasks.create_task(weights.swap_forever())
            tasks.create_task(self._leases(groups * config.loop.group_size, config.loop.group_size))
            for _ in range(MOST_AT_ONCE):
                tasks.create_task(self._hand_in())
            tasks.create_task(self._ask_about_turns(tasks))

    def _note_prepared(self, length: int) -> None:
        self._prepared_bytes += length

    async def _register(self) -> WorkerWelcome:
        places = self._concurrent_groups or 0
        hello = WorkerHello(
            self._name,
            PROTOCOL_VERSION,
            self._run_id,
            places,
            self._device,
            self._relay_address,
            self._instance,
        )
        registering = partial(self._coordinator.register, hello)
        if self._work.worker_id:
            welcome = await self._insist("register", registering)
        else:
            welcome = await retry_unavailable(
                "coordinator.register", registering, REGISTER_TIMEOUT_S, self._name
            )
        self._work.worker_id, self._run_id = welcome.worker_id, welcome.run_id
        _log.info("worker.registered", worker=self._name, worker_id=welcome.worker_id, run=welcome.run_id)
        return welcome

    async def _register_again(self) -> None:
        """Register with a coordinator that forgot the worker; work in flight continues under the new name."""
        await self._register()
        self._weights.source.network.forgotten()

    async def _leave_when_asked(self) -> None:
        """Wait for `stop`; then finish what is finished soon, hand over the rest, and leave."""
        await self._stopping.wait()
        clock, work = asyncio.get_running_loop().time, self._work
        try:
            groups = list(work.groups.values())
            progress = await gather(groups, self._engine, self._step_timeout_s)
            await self._send_heartbeat(progress)
            finish_s = FINISHING_SHARE * (self._leave_at - clock())
            per_token = work.seconds_per_token
            late = [g for g in groups if not finishes_in_time(g.tokens_left(progress), per_token, finish_s)]
            await self._hand_over(late)
            while not work.idle and (left_s := self._leave_at - HAND_OVER_S - clock()) > 0:
                await self._change.wait(left_s)
            await self._hand_over(list(work.groups.values()))
            await self._send_heartbeat((), leaving=True)
        except UnavailableError as error:
            _log.warning("worker.no_answer", worker=self._name, groups=len(work.groups), reason=str(error))
        self._done.set()

    async def _hand_over(self, groups: Sequence[GroupInFlight]) -> None:
        """Stop sampling groups and give their leases back, everything sampled included.

        Raises:
            UnavailableError: when the coordinator does not answer within `HAND_OVER_S`.
        """
        sampled = self._work.groups
        running = [group for group in groups if group.lease.lease_id in sampled]
        if not running:
            return
        progress = await gather(running, self._engine, self._step_timeout_s, stop=True)
        # What was finished meanwhile is on its way as a submission.
        released = [g.lease.lease_id for g in running if sampled.pop(g.lease.lease_id, None) is not None]
        _log.info("worker.handed_over", worker=self._name, groups=len(released))
        await self._send_heartbeat(progress, released=tuple(released))

    async def _send_heartbeat(
        self, progress: tuple[LeaseProgress, ...], *, released: tuple[str, ...] = (), leaving: bool = False
    ) -> None:
        """Send a heartbeat at once, apart from the regular ones."""

        async def heartbeat() -> HeartbeatReply:
            return await self._coordinator.heartbeat(self._heartbeat(progress, released, leaving))

        reply = await retry_unavailable("coordinator.heartbeat", heartbeat, HAND_OVER_S, self._name)
        if not reply.known and not leaving:
            await self._register_again()
            await retry_unavailable("coordinator.heartbeat", heartbeat, HAND_OVER_S, self._name)

    async def _heartbeats(self, pause_s: float) -> None:
        work, network = self._work, self._weights.source.network

        async def heartbeat() -> HeartbeatReply:
            # Made again for each attempt: what is sampled and what is held keeps changing.
            groups = list(work.groups.values()) if self._reports_progress else []
            progress = await gather(groups, self._engine, self._step_timeout_s)
            sent = self._heartbeat(progress, released=tuple(work.unusable))
            reply = await self._coordinator.heartbeat(sent)
            if reply.known:
                work.unusable.difference_update(sent.released_leases)
                network.confirmed(sent.network)
            return reply

        while True:
            await self._give_back_unserved()
            reply = await self._insist("heartbeat", heartbeat)
            if reply.known:
                self._apply_reply(reply)
                # Other weights are reported at once: the coordinator's gate counts with them.
                await self._rest(pause_s, reply.next_s)
            else:
                await self._register_again()
                for group in work.groups.values():
                    group.note_kept(())  # a coordinator that forgot the worker forgot its progress too
                self._change.notify()

    async def _give_back_unserved(self) -> None:
        """Hand running groups over while no weights are held any more: nothing can go on with them here."""
        if self._weights.held_version is not None or self._weights.failing is None:
            return
        try:
            await self._hand_over(list(self._work.groups.values()))
        except UnavailableError as error:  # the leases expire, or the coordinator learns of it later
            _log.warning("worker.no_answer", worker=self._name, reason=str(error))

    async def _rest(self, pause_s: float, idle_pause_s: float) -> None:
        """Wait for the next heartbeat: the longer pause holds while there is nothing to report."""
        clock = asyncio.get_running_loop().time
        until = clock() + idle_pause_s
        while not await self._swapped.wait(pause_s):
            if not self._work.idle or self._stopping.is_set() or clock() >= until:
                return

    def _heartbeat(
        self, progress: tuple[LeaseProgress, ...], released: tuple[str, ...] = (), leaving: bool = False
    ) -> WorkerHeartbeat:
        engine, weights, now = self._engine, self._weights, asyncio.get_running_loop().time()
        failing = weights.failing
        return WorkerHeartbeat(
            worker_id=self._work.worker_id,
            held_version=weights.held_version,
            weights_digest=weights.weights_digest,
            lease_ids=(*self._work.groups, *self._work.finished),
            tokens_generated=self._work.tokens_generated,
            busy_s=engine.busy_s,
            uptime_s=0.0 if self._ready_at is None else now - self._ready_at,
            sampling=any(g.unfinished for g in self._work.groups.values()) and not engine.loading,
            progress=progress,
            released_leases=released,
            leaving=leaving,
            bytes_fetched=self._prepared_bytes + weights.source.bytes_fetched,
            numerics=engine.numerics,
            swap_error="" if failing is None else failing.reason[:MOST_REASON],
            swap_failing_s=0.0 if failing is None else now - failing.since_s,
            network=weights.source.network.report(),
            missing_abilities=engine.missing_abilities,
        )

    def _apply_reply(self, reply: HeartbeatReply) -> None:
        for lease_id in reply.cancelled_leases:
            group = self._work.groups.pop(lease_id, None)
            if group is not None:
                self._engine.abort(list(group.known()))
                _log.info("lease.cancelled", lease=lease_id, group=group.lease.group_id)
        for kept in reply.kept:
            running = self._work.groups.get(kept.lease_id)
            if running is not None:
                running.note_kept(kept.tokens)
        self._weights.note_evaluated(reply.wanted_version)
        self._weights.note_newest(reply.newest_version)
        if reply.run_finished:
            self._finish_run()
        elif reply.leave and not self._stopping.is_set():
            self.stop()
        if reply.cancelled_leases:
            self._change.notify()

    async def _leases(self, samples: int, group_size: int) -> None:
        """Keep up to `samples` requests in flight, or one group of an evaluation that has more; training
        groups have `group_size`.
        """
        weights, work, pause_s = self._weights, self._work, FIRST_PAUSE_S
        while not self._stopping.is_set():
            room = (samples - work.samples) // group_size
            if room < 1 or weights.pauses_leases():
                await self._change.wait(self._lease_wait_s)
                continue
            await self._delay()
            held_version = weights.held_version
            async with weights.held_still():
                reply = await self._insist(
                    "lease_group",
                    # Made again for each attempt: the worker may have got another id in between.
                    lambda: self._coordinator.lease_group(
                        LeaseRequest(
                            worker_id=work.worker_id,
                            held_version=weights.held_version,
                            groups=room,  # noqa: B023 - awaited here
                            wait_s=self._lease_wait_s,
                            wants_history=self._engine.drafts,
                        )
                    ),
                )
                for lease in () if self._stopping.is_set() else reply.leases:
                    held = weights.held_version
                    if held is None or lease.version not in (None, None if weights.loading else held):
                        _log.warning("lease.unusable", lease=lease.lease_id, wants=lease.version, held=held)
                        work.unusable.add(lease.lease_id)
                        self._swapped.notify()  # the next heartbeat gives it back, and is due now
                        continue
                    work.take(lease, self._engine)
                    _log.debug(
                        "lease.taken", lease=lease.lease_id, group=lease.group_id, attempt=lease.attempt
                    )
                weights.note_wanted(reply.wanted_version)
                weights.note_newest(reply.newest_version)
                if reply.run_finished:
                    self._finish_run()
            if reply.leases or weights.held_version != held_version:
                pause_s = FIRST_PAUSE_S
            else:
                await self._change.wait(pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)

    async def _hand_in(self) -> None:
        """Hand in one finished group after the other; as many of these run as may wait at the same time."""
        work = self._work
        while True:
            submission = await work.to_hand_in.get()
            await self._delay()
            failpoints.reach("worker.upload.before")
            handing_in = partial(self._coordinator.submit_group, submission)
            try:
                verdict = await self._insist("submit_group", handing_in)
                _log.debug("group.submitted", group=submission.group_id, verdict=verdict.value)
            except RefusedError as error:  # it may have continued what another worker made up
                _log.warning("group.refused", group=submission.group_id, reason=str(error))
            failpoints.reach("worker.upload.after")
            del work.finished[submission.lease_id]
            self._change.notify()

    async def _ask_about_turns(self, tasks: asyncio.TaskGroup) -> None:
        """Ask for the environment's answer to each turn that has ended."""
        room = asyncio.Semaphore(MOST_TURNS_AT_ONCE)
        while True:
            lease_id, index = await self._work.turns.get()
            await room.acquire()
            asking = tasks.create_task(self._ask_until_answered(lease_id, index))
            asking.add_done_callback(lambda _: room.release())

    async def _ask_until_answered(self, lease_id: str, index: int) -> None:
        work, start = self._work, None
        while (group := work.groups.get(lease_id)) is not None and index in group.waiting:
            row = group.waiting[index]
            start = group.kept[index] if start is None else start
            piece = rest_of(piece_of(row, index), min(start, row.stop - 1))
            assert piece is not None, "a turn has ended, so it has tokens"
            asking = partial(self._ask_turn, lease_id, piece)
            try:
                reply = await self._insist("answer_turn", asking)
            except RefusedError as error:
                _log.warning("turn.refused", group=group.lease.group_id, reason=str(error))
                reply = TurnReply(answered=False, cancelled=True)
            if reply.cancelled:  # a heartbeat hears whether that is so: the coordinator may just have begun
                await self._change.wait(MOST_PAUSE_S)
            elif reply.answered:
                # Nothing can go on here before the next snapshot, unless the group is handed over.
                while self._weights.held_version is None and work.groups.get(lease_id) is group:
                    await self._change.wait(MOST_PAUSE_S)
                if work.groups.get(lease_id) is group:
                    work.answer(lease_id, index, reply, self._engine)
            elif reply.kept == piece.start and not work.turns.empty():
                work.turns.put_nowait((lease_id, index))  # a host may begin others first; these ask now
                return
            # Where the same is missing again, what was sent found no room there: then all of the row is sent.
            start = reply.kept if reply.kept < row.stop and reply.kept != start else 0

    async def _ask_turn(self, lease_id: str, piece: PartialTrajectory) -> TurnReply:
        request = TurnRequest(self._work.worker_id, lease_id, piece, self._lease_wait_s)
        return await self._coordinator.answer_turn(request)

    def _finish_run(self) -> None:
        _log.info("run.finished", worker=self._name)
        self._done.set()
