"""Worker registry: who takes part in the run, what it must know, and who is shut out."""

import structlog

from antiphon.core.config import dump_config, with_rule
from antiphon.core.errors import ContractError
from antiphon.core.loop import acceptance
from antiphon.core.loop import events as e
from antiphon.core.loop.checks import check_piece
from antiphon.core.records import PROTOCOL_VERSION, KeptProgress
from antiphon.core.sampling_config import Rule, decide_rule
from antiphon.core.trust.worker_names import WORKER_NAME
from antiphon.services.coordinator.api import HeartbeatReply, WorkerHeartbeat, WorkerHello, WorkerWelcome
from antiphon.services.coordinator.fleet import Member
from antiphon.services.coordinator.run_state_machine import LONGEST_REASON, RunStateMachine

NO_REASON = "no reason was given"

_log = structlog.get_logger("coordinator")


class WorkerRegistry:
    """Admits workers, takes their heartbeats and shuts them out."""

    def __init__(self, state_machine: RunStateMachine, learner_key: bytes) -> None:
        self._state_machine = state_machine
        self._config, self._state = state_machine.config, state_machine.state
        self._fleet, self._leases = state_machine.fleet, state_machine.leases
        self._learner_key = learner_key

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
        if barred := self._state.barred(name):
            raise ContractError(f"worker {name} was excluded from this run: {barred}")
        state_machine.lose_named(name, "another worker of this name registered")
        worker_id = f"{name}-{self._state.registrations.get(name, 0) + 1}"
        now = state_machine.clock()
        places = hello.concurrent_groups or self._config.rollout.concurrent_groups
        self._fleet.add(worker_id, name, places, now)
        rule = self._rule(hello)
        await state_machine.record(e.WorkerRegistered(worker_id, name, places, now, rule))
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

        Raises:
            ContractError: when the worker samples with weights that were never announced, or reports
                progress that no completion of its lease can have.
        """
        state_machine, state = self._state_machine, self._state
        state_machine.check()
        member, now = self._fleet.get(heartbeat.worker_id), state_machine.clock()
        if member is None:
            return HeartbeatReply(False, (), state.newest_version, state.finished)
        self._check_weights(heartbeat)
        gone = self._leases.extend(heartbeat.lease_ids, heartbeat.worker_id, now)
        kept, gained = self._take_progress(heartbeat)
        if self._fleet.take_heartbeat(member, heartbeat, now):
            state_machine.loaded(member)
        member.sent_newest = state.newest_version
        gone += self._end_hung(member, heartbeat, gained, now)
        for lease_id in heartbeat.released_leases:
            held = self._leases.get(lease_id)
            if held is not None:
                state_machine.take_back(held, "handed over by its worker")
        if heartbeat.leaving:
            state_machine.lose(member, "it left in order")
        if heartbeat.released_leases or heartbeat.leaving:
            await state_machine.record()  # the worker ends with the answer: it must be true after a crash
        return HeartbeatReply(
            known=True,
            cancelled_leases=gone,
            newest_version=state.newest_version,
            run_finished=state.finished,
            kept=kept,
            next_s=member.pause_s,
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

    def _take_progress(self, heartbeat: WorkerHeartbeat) -> tuple[tuple[KeptProgress, ...], bool]:
        """Keep the pieces of running leases; those of others are of no use, and not an error.

        Returns:
            What is kept now, and whether there was something new.
        """
        kept, gained = [], False
        for progress in heartbeat.progress:
            held = self._leases.get(progress.lease_id)
            group = None if held is None else self._state.groups.get(held.group_id)
            if group is None:
                continue
            before = sum(self._leases.partial_groups.kept(progress.lease_id))
            for piece in progress.pieces:
                check_piece(
                    piece,
                    group.group_id,
                    samples=group.samples,
                    max_tokens=self._config.sampling.max_tokens,
                    version=group.version if self._config.loop.mode == "fixed" else None,
                    newest_version=acceptance.newest_possible_version(self._state),
                    published=self._state.snapshots,
                )
            gained |= self._leases.take_progress(heartbeat.worker_id, progress)
            after = self._leases.partial_groups.kept(progress.lease_id)
            self._fleet.work_done += max(0, sum(after) - before)
            kept.append(KeptProgress(progress.lease_id, after))
        return tuple(kept), gained

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
