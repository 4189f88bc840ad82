"""Worker registry: who takes part in the run, what it must know, and who is shut out."""

import asyncio
import dataclasses
from collections.abc import Callable, Collection
from functools import partial

import structlog

from antiphon.core.checks import LONGEST_TEXT, MOST_PLACES, check_number, check_piece
from antiphon.core.config import dump_config, with_rule
from antiphon.core.dissemination.plan import ORIGIN
from antiphon.core.dissemination.reports import DeliveryRecord, NetworkReport, check_address, check_report
from antiphon.core.errors import ContractError
from antiphon.core.loop import acceptance
from antiphon.core.loop import events as e
from antiphon.core.loop.group_state import GroupState
from antiphon.core.loop.partials import KeptGroup, false_author
from antiphon.core.records import PROTOCOL_VERSION, KeptProgress, PartialTrajectory
from antiphon.core.requests import HeartbeatReply, WorkerHeartbeat, WorkerHello, WorkerWelcome
from antiphon.core.sampling_config import Rule, decide_rule
from antiphon.core.trust.reputation import quarantine_reason
from antiphon.core.trust.worker_names import WORKER_NAME, name_of_worker
from antiphon.services.coordinator.fleet import Member
from antiphon.services.coordinator.journal import payloads
from antiphon.services.coordinator.prompts import token_rules_of
from antiphon.services.coordinator.run_state_machine import LONGEST_REASON, RunStateMachine

NO_REASON = "no reason was given"
OTHER_SOURCES = (ORIGIN, "Lattica", "object store")
"""Sources of a delivery that are no workers."""

_log = structlog.get_logger("coordinator")


class WorkerRegistry:
    """Admits workers, takes their heartbeats and shuts them out."""

    def __init__(self, state_machine: RunStateMachine, learner_key: bytes) -> None:
        self._state_machine = state_machine
        self._config, self._state = state_machine.config, state_machine.state
        self._fleet, self._leases = state_machine.fleet, state_machine.leases
        self._learner_key = learner_key
        self._begun_s = state_machine.clock()

    async def register(self, hello: WorkerHello) -> WorkerWelcome:
        """Admit a worker; one of the same name that is not lost is replaced.

        Raises:
            ContractError: another protocol version, another run, or a name that is invalid.
        """
        state_machine, name = self._state_machine, hello.worker_name
        state_machine.check_open()
        if hello.protocol_version != PROTOCOL_VERSION:
            raise ContractError(
                f"worker {name!r} speaks protocol version {hello.protocol_version}, but this "
                f"coordinator speaks {PROTOCOL_VERSION}; install the same version of Antiphon on both"
            )
        if hello.run_id and hello.run_id != state_machine.run_id:
            raise ContractError(
                f"worker {name!r} means to serve run {hello.run_id!r}, but this coordinator "
                f"serves {state_machine.run_id!r}; give the address of the right coordinator"
            )
        if not WORKER_NAME.fullmatch(name):
            raise ContractError(
                f"worker name {name[:80]!r} cannot be used; take up to 64 letters, digits, "
                "dots, dashes and underscores"
            )
        check_number(f"concurrent_groups of worker {name}", hello.concurrent_groups, MOST_PLACES)
        if hello.relay_address:
            check_address(hello.relay_address)
        if barred := self._state.barred(name):
            raise ContractError(f"worker {name} was excluded from this run: {barred}")
        state_machine.lose_named(name, "another worker of this name registered")
        worker_id = f"{name}-{self._state.registrations.get(name, 0) + 1}"
        now = state_machine.clock()
        places = hello.concurrent_groups or self._config.rollout.concurrent_groups
        of_class, usd = self._config.price_of(name, state_machine.journal.wall_clock())
        self._fleet.add(worker_id, name, places, now, hello.relay_address, usd)
        rule = self._rule(hello)
        await state_machine.record(e.WorkerRegistered(worker_id, name, places, now, rule, usd, of_class))
        _log.info("worker.registered", worker=worker_id, sampling_rule=rule)
        return WorkerWelcome(
            worker_id=worker_id,
            run_id=state_machine.run_id,
            config_yaml=dump_config(with_rule(self._config, rule)),
            heartbeat_s=self._config.coordinator.heartbeat_s,
            learner_key=self._learner_key,
        )

    def _rule(self, hello: WorkerHello) -> Rule:
        """Return the run's rule, which the first worker's device decides where the configuration does not."""
        if self._state.registrations:  # journals from before there was a choice name none
            return "gumbel" if self._state.sampling_rule == "gumbel" else "inverse_cdf"
        return decide_rule(self._config.sampling.rule, hello.device)

    async def heartbeat(self, heartbeat: WorkerHeartbeat) -> HeartbeatReply:
        """Extend the worker's leases, keep what they made so far, and say what to give up.

        The lease of another worker is left as it is, and a group with progress that no completion can have
        begins again; both are a strike, and so are numbers that cannot be.

        Raises:
            ContractError: when a number cannot be, or the weights that sample were never announced.
        """
        state_machine, state = self._state_machine, self._state
        state_machine.check()
        member, now = self._fleet.get(heartbeat.worker_id), state_machine.clock()
        if member is None:
            if now - self._begun_s < self._config.coordinator.lease_s:
                # A coordinator that was just started knows its leases, and it lives. Later it must register.
                self._leases.extend(heartbeat.lease_ids, heartbeat.worker_id, now)
            return HeartbeatReply(False, (), state.newest_version, state.finished)
        try:
            check_claims(heartbeat, self._config.loop.group_size)
        except ContractError as error:
            await strike(state_machine, member.name, "", "refused", str(error))
            raise
        self._check_weights(heartbeat)
        self._reprice(member, now)
        gone = self._leases.extend(heartbeat.lease_ids, heartbeat.worker_id, now)
        foreign = self._leases.foreign(_named(heartbeat), heartbeat.worker_id)
        heartbeat = _without(heartbeat, foreign) if foreign else heartbeat
        kept, gained, refused = self._take_progress(heartbeat)
        if self._fleet.take_heartbeat(member, heartbeat, now):
            state_machine.loaded(member)
        if heartbeat.network is not None:
            self._take_network(member, heartbeat.network)
        wanted = state_machine.tell(member)
        gone += self._end_hung(member, heartbeat, gained, now) + tuple(refused)
        for lease_id in heartbeat.released_leases:
            held = self._leases.get(lease_id)
            if held is not None:
                state_machine.take_back(held, "handed over by its worker")
        if heartbeat.leaving:
            state_machine.lose(member, "it left in order")
        for held in foreign.values():
            told = f"it used the lease of group {held.group_id}, which {name_of_worker(held.worker_id)} holds"
            strike(state_machine, member.name, held.group_id, "refused", told)
        for group_id, worker_id, told in refused.values():
            strike(state_machine, name_of_worker(worker_id), group_id, "refused", told)
        if heartbeat.released_leases or heartbeat.leaving or foreign or refused:
            await state_machine.record()  # the worker ends with the answer: it must be true after a crash
        return HeartbeatReply(
            known=True,
            cancelled_leases=gone,
            newest_version=state.newest_version,
            run_finished=state.finished,
            kept=kept,
            next_s=member.pause_s,
            leave=member.draining,
            wanted_version=wanted,
        )

    def _reprice(self, member: Member, now: float) -> None:
        """Record the price of a worker where it changed since its last heartbeat."""
        _, usd = self._config.price_of(member.name, self._state_machine.journal.wall_clock())
        if usd != member.usd_per_hour:
            member.usd_per_hour = usd
            self._state_machine.record(e.WorkerPriced(member.worker_id, usd, now))
            _log.info("worker.priced", worker=member.worker_id, usd_per_hour=usd)

    def _take_network(self, member: Member, report: NetworkReport) -> None:
        transfers = self._fleet.transfers
        before = transfers.excluded()
        announced = tuple(
            self._known_sources(told) for told in report.deliveries if told.version in self._state.snapshots
        )
        for delivery in transfers.take(member.worker_id, dataclasses.replace(report, deliveries=announced)):
            self._state_machine.record(e.SnapshotDelivered(**dataclasses.asdict(delivery)))
        for name, what in transfers.excluded().items():
            if name not in before:
                _log.warning("relay.excluded", worker=name, reason=what)

    def _known_sources(self, told: DeliveryRecord) -> DeliveryRecord:
        """Leave out sources that never were: the journal keeps what is told for ever."""

        def known(source: str) -> bool:
            name, _, number = source.rpartition("-")
            last = self._state.registrations.get(name, 0)
            if source in OTHER_SOURCES:
                return True
            return number.isdecimal() and number == str(int(number)) and 0 < int(number) <= last

        return dataclasses.replace(
            told,
            bytes_from={one: count for one, count in told.bytes_from.items() if known(one)},
            best_bytes_per_s={one: rate for one, rate in told.best_bytes_per_s.items() if known(one)},
            culprits={one: what for one, what in told.culprits.items() if known(one)},
        )

    def _check_weights(self, heartbeat: WorkerHeartbeat) -> None:
        acceptance.check_held_version(self._state, heartbeat.worker_id, heartbeat.held_version)
        if heartbeat.held_version is None or heartbeat.weights_digest is None:
            return
        announced = self._state.snapshots.get(heartbeat.held_version)
        if announced != heartbeat.weights_digest:
            raise ContractError(
                f"worker {heartbeat.worker_id} holds version {heartbeat.held_version} with weights "
                f"{heartbeat.weights_digest[:12]}, but {(announced or 'nothing')[:12]} was announced for it; "
                "load the announced snapshot again"
            )

    def _end_hung(
        self, member: Member, heartbeat: WorkerHeartbeat, gained: bool, now: float
    ) -> tuple[str, ...]:
        """Take back the leases of a worker whose engine stands still, and return their ids."""
        state_machine, engines = self._state_machine, self._leases.engines
        if state_machine.blocked_reason:
            return ()  # what was finished cannot be handed in, and nothing else be leased
        before = engines.most_leases(member.worker_id)
        hung = self._leases.engine_hangs(heartbeat, gained, now)
        if hung:
            seconds = engines.stands_still_s(member.worker_id)
            _log.warning("engine.stands_still", worker=member.worker_id, seconds=round(seconds, 1))
            for held in hung:
                state_machine.take_back(held, f"its engine brought no token for {seconds:.1f} s", hung=True)
        elif before is not None and engines.most_leases(member.worker_id) != before:
            state_machine.work.notify()
        return tuple(held.lease_id for held in hung)

    def _take_progress(
        self, heartbeat: WorkerHeartbeat
    ) -> tuple[tuple[KeptProgress, ...], bool, dict[str, tuple[str, str, str]]]:
        """Keep the pieces of running leases; those of ended ones are of no use, and not an error.

        Returns:
            What is kept now; whether there was something new; and by id the leases that were taken back for
            a piece that cannot be, each with (group id, worker that sampled it, why).
        """
        kept, gained, refused = [], False, {}
        for progress in heartbeat.progress:
            held = self._leases.get(progress.lease_id)
            group = None if held is None else self._state.groups.get(held.group_id)
            if held is None or group is None:
                continue
            before = sum(self._leases.partial_groups.kept(progress.lease_id))
            try:
                for piece in progress.pieces:
                    self._check(group)(piece)
            except ContractError as error:
                known = self._leases.partial_groups.snapshot(progress.lease_id)
                false = self.begin_again(group, progress.lease_id, known)
                refused[progress.lease_id] = (group.group_id, *(false or (heartbeat.worker_id, str(error))))
                continue
            gained |= self._leases.take_progress(heartbeat.worker_id, progress)
            after = self._leases.partial_groups.kept(progress.lease_id)
            self._fleet.work_done += max(0, sum(after) - before)
            kept.append(KeptProgress(progress.lease_id, after))
        return tuple(kept), gained, refused

    def begin_again(
        self, group: GroupState, lease_id: str, known: KeptGroup | None
    ) -> tuple[str, str] | None:
        """End a lease whose tokens were refused, and forget what is kept of its group.

        `known` is what was kept of the group before. Where that cannot be either, those who also continue
        from it begin again too, and the result is (worker id, reason) of who sampled it; else None.
        """
        state_machine, leases, check = self._state_machine, self._leases, self._check(group)
        partials, false = leases.partial_groups, false_author(known, check)
        for running in (group.lease_id, group.twin_lease_id):
            held = leases.get(running)
            if held is None:
                continue
            if running == lease_id or false_author(partials.snapshot(running), check) is not None:
                state_machine.take_back(held, "what was sampled under it was refused", discard=True)
        if false_author(partials.waiting(group.group_id), check) is not None:
            partials.forget(group.group_id)
            state_machine.record(forget=[payloads.prefix_name(group.group_id)])
        return false

    def _check(self, group: GroupState) -> Callable[[PartialTrajectory], None]:
        """Return what raises for a piece that no completion of a group can have."""
        return partial(
            check_piece,
            group_id=group.group_id,
            samples=group.samples,
            max_tokens=self._config.sampling.max_tokens,
            version=group.version,
            newest_version=acceptance.newest_possible_version(self._state),
            rules=token_rules_of(self._state_machine.prompts),
            published=self._state.snapshots,
            keeps_cache=self._config.rollout.swap_cache == "keep",
        )

    def drain(self, name: str) -> None:
        """Let the workers of a name leave."""
        for member in self._fleet.named(name):
            if not member.draining:
                member.draining = True
                _log.info("worker.draining", worker=member.worker_id)

    async def revoke(self, name: str, reason: str) -> None:
        """Exclude a token or a worker, which loses its leases at once."""
        state_machine = self._state_machine
        state_machine.check()
        if not WORKER_NAME.fullmatch(name):
            raise ContractError(
                f"{name[:80]!r} is neither a token's id nor a worker's name; see `antiphon status`"
            )
        if name in self._state.revoked:
            return
        reason = reason[:LONGEST_REASON] or NO_REASON
        written = state_machine.record(e.AccessRevoked(name, reason))
        state_machine.lose_named(name, f"excluded: {reason}")
        _log.warning("access.revoked", name=name, reason=reason)
        await written

    async def pardon(self, name: str, reason: str) -> None:
        self._state_machine.check()
        if self._state.barred(name):
            await self._state_machine.record(e.WorkerPardoned(name, reason[:LONGEST_REASON] or NO_REASON))


def strike(
    state_machine: RunStateMachine,
    name: str,
    group_id: str,
    check: str,
    found: str,
    certain: bool = False,
    gross: int = 0,
) -> "asyncio.Future[None]":
    """Count something against a worker, which it may lose its place for; await the result for the disk.

    `certain`: what was found is proof by itself; `gross`: tokens far beyond rounding among it.
    """
    found = found[:LONGEST_REASON]
    written = state_machine.record(e.WorkerStruck(name, group_id, check, found, gross))
    _log.warning("worker.struck", worker=name, group=group_id, check=check, reason=found)
    reason = quarantine_reason(state_machine.state.standings[name], certain, found)
    if reason is not None:
        written = state_machine.record(e.WorkerQuarantined(name, reason))
        _log.warning("worker.quarantined", worker=name, reason=reason)
        state_machine.lose_named(name, f"in quarantine: {reason}")
        state_machine.settle()  # what it sampled and no batch has yet does not train
    return written


def check_claims(heartbeat: WorkerHeartbeat, group_size: int) -> None:
    """Refuse what no worker can have measured: much is decided and told by these numbers.

    A place for a group of `group_size` samples takes as many held-out prompts, each with a lease of its own.

    Raises:
        ContractError: naming the number.
    """
    for name in ("tokens_generated", "bytes_fetched", "busy_s", "uptime_s", "swap_failing_s"):
        check_number(f"{name} of a heartbeat", getattr(heartbeat, name))
    most = MOST_PLACES * group_size
    for name in ("lease_ids", "released_leases", "progress"):
        check_number(f"the length of {name} of a heartbeat", len(getattr(heartbeat, name)), most)
    check_number("the length of numerics of a heartbeat", len(heartbeat.numerics), LONGEST_TEXT)
    if heartbeat.network is not None:
        check_report(heartbeat.network)


def _named(heartbeat: WorkerHeartbeat) -> tuple[str, ...]:
    """Return the leases that a heartbeat speaks of."""
    told = (progress.lease_id for progress in heartbeat.progress)
    return (*heartbeat.lease_ids, *heartbeat.released_leases, *told)


def _without(heartbeat: WorkerHeartbeat, lease_ids: Collection[str]) -> WorkerHeartbeat:
    """Return a heartbeat that says nothing of some leases."""
    return dataclasses.replace(
        heartbeat,
        lease_ids=tuple(i for i in heartbeat.lease_ids if i not in lease_ids),
        released_leases=tuple(i for i in heartbeat.released_leases if i not in lease_ids),
        progress=tuple(told for told in heartbeat.progress if told.lease_id not in lease_ids),
    )
