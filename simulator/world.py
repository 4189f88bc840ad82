"""World: one simulated run from its first process to its last, with everything that goes wrong.

Names of processes last (`worker-1`), the processes do not. A supervisor starts each again
after its death, as the main job does; faults come from the schedule. Once the schedule is over the
network is good and every process runs, and from then on the run must move within two lease periods.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from blake3 import blake3

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError, ContractError, UnavailableError
from antiphon.core.loop import events as e
from antiphon.core.loop.events import load_event
from antiphon.core.loop.run_state import fold, new_state
from antiphon.core.records import GroupRewards, GroupSubmission, StepCommit, SubmitVerdict
from antiphon.core.requests import HeartbeatReply, LeaseReply, LeaseRequest, WorkerHeartbeat
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.coordinator.journal.journal import StoredEvent
from antiphon.services.coordinator.run_state_machine import RunStateMachine
from antiphon.simulator import processes
from antiphon.simulator.checks.invariants import Witness
from antiphon.simulator.faults import Fault, FaultKind, draw_faults
from antiphon.simulator.hostile_worker import EDITED, EDITOR, NAME, HostileWorker
from antiphon.simulator.hosts import HARMFUL, MISCHIEF, SLOWEST_TURN_S, TIMEOUT_S, Host, Manner
from antiphon.simulator.injector import FaultInjector
from antiphon.simulator.processes import RESTART_S, ProcessEntry, SharedRun
from antiphon.simulator.report import Outcome
from antiphon.simulator.scenario import Scenario
from antiphon.simulator.standins import engines, training
from antiphon.simulator.virtual.disk import RUN_ID, JournalDisk, MemoryStore, logs_beside
from antiphon.simulator.virtual.loop import Process, VirtualLoop
from antiphon.simulator.virtual.network import Network
from antiphon.simulator.virtual.random_streams import RandomStream

LATEST_S = 6.0
"""The operator comes at most this many seconds after a batch was sealed."""
REPEATED = 0.3
"""Chance that a command is given once more."""


class Operator:
    """Someone at the command line of a simulated run."""

    def __init__(self, skips: Sequence[int], fixed: bool, witness: Witness, random: RandomStream) -> None:
        """Skip each step of `skips`; `random` says when."""
        self._left = set(skips)
        self._fixed, self._witness, self._random = fixed, witness, random
        self._processes: list[Process] = []

    def train(self, step: int, payload: bytes) -> int:
        """Be what the learner trains with: the witness, unless the batch cannot be trained.

        Raises:
            UnavailableError: where `step` is still to be skipped.
        """
        if self._fixed and step in self._left:
            raise UnavailableError(f"the batch of step {step} cannot be trained")
        return self._witness.trained(step, payload)

    def look(self, rows: Sequence[StoredEvent], shared: SharedRun) -> bool:
        """See what reached the disk; return whether a step was skipped."""
        found = [e.load_event(row.kind, row.body) for row in rows if row.kind.startswith("batch.")]
        for event in found:
            if isinstance(event, e.BatchVoided):
                self._left.discard(event.step)
            elif isinstance(event, e.BatchSealed) and event.step in self._left:
                process = Process(shared.loop, "operator")
                self._processes.append(process)
                delay_s = self._random.between(0.0, LATEST_S)
                process.spawn(self._skip(shared, event.step, delay_s))
        return any(isinstance(event, e.BatchVoided) for event in found)

    def leave(self) -> None:
        """Give no more commands."""
        for process in self._processes:
            process.kill()

    async def _skip(self, shared: SharedRun, step: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        client = shared.coordinator()
        again = self._random.happens(REPEATED)
        while True:
            try:
                await client.skip_step(step, "it cannot be trained", "operator")
            except UnavailableError:
                await asyncio.sleep(1.0)
            except ContractError as error:
                if self._fixed:
                    self._witness.report(f"step {step} could not be skipped: {error}")
                self._left.discard(step)  # it is committed
                return
            else:
                if not again:
                    return
                again = False


CALL_S = 10.0
"""Deadline of a call, as in production."""


class Witnessed(CoordinatorClient):
    """A client that reports to the witness what its process claims and receives."""

    def __init__(
        self, shared: processes.SharedRun, witness: Witness, entry: ProcessEntry, worker: str = ""
    ) -> None:
        """Call as the worker of that name, or as one of the run's own services."""
        channel = shared.channel(processes.COORDINATOR, worker)
        super().__init__(processes.COORDINATOR, CALL_S, channel=channel)
        self._witness = witness
        self._entry = entry
        self._shared = shared

    async def heartbeat(self, beat: WorkerHeartbeat) -> HeartbeatReply:
        self._witness.held(self._entry.name, self._entry.held, beat.held_version)
        self._entry.held = beat.held_version
        self._witness.holders.told(beat.lease_ids, beat.released_leases)
        sent_s = self._witness.now()
        reply = await super().heartbeat(beat)
        if reply.known:  # else it must register, which may come too late for its leases
            self._witness.holders.heard(beat.lease_ids, sent_s, self._witness.now())
        return reply

    async def lease_group(self, request: LeaseRequest) -> LeaseReply:
        reply = await super().lease_group(request)
        for lease in reply.leases:
            self._witness.leased(lease)
        return reply

    async def submit_group(self, submission: GroupSubmission) -> SubmitVerdict:
        if seconds := self._shared.upload_s(self._entry.name):
            await asyncio.sleep(seconds)
        verdict = await super().submit_group(submission)
        self._witness.answered(submission, verdict)
        return verdict

    async def submit_rewards(self, groups: list[GroupRewards]) -> Sequence[str]:  # type: ignore[override]
        taken = await super().submit_rewards(groups)
        for group_id in taken:
            self._witness.rewarded(group_id)
        return taken

    async def commit_step(self, commit: StepCommit) -> None:
        await super().commit_step(commit)
        self._witness.committed(commit)


LEAVE_S = 60.0
"""How long workers and reward services have to leave a finished run."""
HOSTILE_S = 20.0
"""How long a hostile worker acts in a run without faults; else until the last of them."""
SLOW_ANSWERS = 0.02
"""Share of an environment's answers that take longer than a reward service has."""
DEAD_ANSWERS = 0.05
"""Share of them that never come, since the conversation's process dies."""
SETTLE_S = 1.0
"""How long the coordinator has to write what it was told before a run is stopped as it stands."""
COLLECT_AFTER = 50_000
"""New objects between two looks of the garbage collector."""
TURN_S = 2.0
"""Longest time between the end of a group and the lease of one that is opened in its place."""
LEASE_PERIODS = 2
"""Once faults stop, the next step commits within this many lease periods."""


class World:
    """One run."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int,
        faults: list[Fault] | None = None,
        journal: JournalDisk | None = None,
        wall_error_s: Callable[[float], float] | None = None,
    ) -> None:
        """Prepare a run.

        `seed` decides every delay, and the faults unless a schedule is given. `wall_error_s` says by how many
        seconds the coordinator's time of day is wrong at a virtual second.
        """
        self._wall_error_s = wall_error_s
        self.scenario = scenario
        self.seed = seed
        self.config: RunConfig = scenario.run_config()
        self._work = RandomStream("simulate-work", seed)
        self._speed = RandomStream("simulate-speed", seed)
        self._answers = RandomStream("simulate-answers", seed)
        self._lies = RandomStream("simulate-lies", seed)
        # It has no sockets, signals and subprocesses: code that asks for them meets an error.
        self.loop = VirtualLoop(self._work_s, scenario.limit_s)  # type: ignore[abstract]
        self.network = Network(self.loop, RandomStream("simulate-network", seed))
        self.witness = Witness(
            self.config, scenario.reward_rarity, scenario.failure_rarity, self.loop.time, scenario.limits
        )
        self._operator = Operator(
            scenario.skips,
            self.config.loop.mode == "fixed",
            self.witness,
            RandomStream("simulate-skips", seed),
        )
        self._workers = [f"worker-{index}" for index in range(scenario.workers)]
        self._reward_services = [f"reward-{index}" for index in range(scenario.reward_services)]
        self._hosts = {f"host-{manner}": manner for manner in scenario.hosts}
        hostile = (*((NAME,) if scenario.hostile else ()), *((EDITOR,) if scenario.editor else ()))
        self._processes = {
            name: ProcessEntry(name)
            for name in (
                "coordinator",
                "learner",
                *self._workers,
                *self._reward_services,
                "flow",
                *hostile,
                *self._hosts,
            )
        }
        self.faults = (
            draw_faults(
                scenario.faults,
                [*self._workers, *([EDITOR] if scenario.editor else [])],
                self._reward_services,
                RandomStream("simulate-faults", seed),
                list(self._hosts),
            )
            if faults is None
            else faults
        )
        self._injector = FaultInjector(
            self.loop, self.network, self._processes, self._start, scenario.slow_chunk_s
        )
        self._restarts = 0
        self._withheld: Counter[str] = Counter()
        """Episodes that a host played and did not report."""
        self._event_s = self._silence_s = 0.0
        """When something reached the disk last, and the longest time in which nothing did without a fault."""
        self._longest_answer_s = 0.0
        """The environment's, so far."""
        self._over = asyncio.Event()
        # A straggler now and then makes work late and stale.
        fastest, slowest = scenario.worker_slowness
        self._pace = {
            name: fastest * (slowest / fastest) ** self._speed.number() ** 2 for name in self._workers
        }
        self._pace[EDITOR] = fastest
        self.shared = self._make_shared(journal or JournalDisk())

    def _make_shared(self, disk: JournalDisk) -> processes.SharedRun:
        scenario, speed = self.scenario, self._speed
        disk.on_commit = self._on_disk
        disk.full = lambda: self._injector.left_s(FaultKind.FULL_DISK) > 0.0
        return processes.SharedRun(
            loop=self.loop,
            network=self.network,
            config=self.config,
            journal=disk,
            store=MemoryStore(disk.full),
            learner_disk=training.LearnerDisk(),
            reward_rarity=scenario.reward_rarity,
            failure_rarity=scenario.failure_rarity,
            limits=scenario.limits,
            answer_s=self._answer_s,
            conversation_dies=lambda: self._answers.happens(DEAD_ANSWERS),
            engine_step_s=self._engine_step_s,
            chunk_s=self._injector.chunk_s,
            upload_s=self._injector.upload_s,
            alters_chunk=self._alters_chunk,
            learner_step_s=lambda: speed.between(*scenario.learner_step_s),
            trained=self._operator.train,
            state_machines=[],
            wall_clock=self._wall_clock,
            audit_secret=self.seed.to_bytes(32, "big"),
        )

    def _engine_step_s(self, name: str) -> float:
        usual_s: float = self._pace[name] * self._speed.between(*self.scenario.engine_step_s)
        return usual_s + self._injector.left_s(FaultKind.HANG, name)

    def _answer_s(self) -> float:
        """Return how long an environment takes; now and then so long that the turn is asked for again."""
        slow = self._answers.happens(SLOW_ANSWERS)
        seconds = self._answers.between(10.0, 40.0) if slow else self._answers.between(0.02, 1.0)
        self._longest_answer_s = max(self._longest_answer_s, seconds)
        return seconds

    def _alters_chunk(self, name: str) -> bool:
        return self._injector.left_s(FaultKind.CORRUPT_CHUNKS, name) > 0.0 and self._lies.happens(0.5)

    def _wall_clock(self) -> float:
        now = self.loop.time()
        return now if self._wall_error_s is None else now + self._wall_error_s(now)

    def run(self) -> Outcome:
        """Simulate the run and return what it came to."""
        thresholds = gc.get_threshold()
        # Tasks and messages die by themselves; looking for circles in between only takes time.
        gc.set_threshold(COLLECT_AFTER, *thresholds[1:])
        try:
            with logs_beside(self.shared.journal):
                self.loop.run(self._main())
        except UnavailableError as stuck:
            self.witness.report(str(stuck))
            self._kill_all()
            self.loop.unwind()
        finally:
            gc.set_threshold(*thresholds)
        self.witness.violations.extend(self.network.broken)
        return self._outcome()

    # The supervisor.

    async def _main(self) -> None:
        for name in self._processes:
            self._start(name)
        for fault in self.faults:
            self.loop.call_at(fault.at_s, self._begin, fault)
        if self.scenario.span_s is not None:
            self.loop.call_at(self.scenario.span_s, self._over.set)
        await self._over.wait()
        self._injector.end_all()
        self._operator.leave()
        if self.scenario.span_s is None:
            await self._wait_for_leaving((*self._workers, *self._reward_services))
        await self._stop_the_others()
        self._final_checks()
        self._kill_all()

    async def _wait_for_leaving(self, names: Sequence[str]) -> None:
        until = self.loop.time() + LEAVE_S
        while any(self._alive(name) for name in names) and self.loop.time() < until:
            await asyncio.sleep(1.0)
        for name in names:
            if self._alive(name):
                self.witness.report(f"{name} did not leave the finished run within {LEAVE_S:g} s")

    def _kill_all(self) -> None:
        for entry in self._processes.values():
            if entry.process is not None:
                entry.process.kill()

    async def _stop_the_others(self) -> None:
        """Kill all but the coordinator, and give it time to write what it was told.

        Its state is ahead of its journal until then: a hostile worker may have come in the last moment.
        """
        for name, entry in self._processes.items():
            if name != "coordinator" and entry.process is not None and entry.process.alive:
                entry.process.kill()
                self.network.killed(entry.process)
        await asyncio.sleep(SETTLE_S)

    def _alive(self, name: str) -> bool:
        process = self._processes[name].process
        return process is not None and process.alive

    def _start(self, name: str) -> None:
        entry = self._processes[name]
        if self._alive(name) or (self._over.is_set() and name != "coordinator"):
            return
        entry.starts += 1
        self._restarts += entry.starts > 1
        process = entry.process = Process(self.loop, name)
        entry.held = None
        task = process.spawn(self._routine(entry, process))
        task.add_done_callback(lambda done: self._ended(entry, process, done))

    def _routine(self, entry: ProcessEntry, process: Process) -> Coroutine[Any, Any, None]:
        shared, name = self.shared, entry.name
        if name == "coordinator":
            return processes.serve_coordinator(shared, process, self._speed.between(-1e5, 1e5))
        if name == "learner":
            return processes.serve_learner(shared, process, self._told(entry), f"origin-{entry.starts}")
        if name == "flow":
            return processes.drive_run(shared)
        if name in self._hosts:
            random = RandomStream("simulate-host", self.seed, name, entry.starts)
            report = self.witness.report
            return Host(name, self._hosts[name], lambda: shared.gateway, random, report, self._withheld).run()
        if name in self._reward_services and self._hosts:
            return processes.serve_gateway(shared, process, self._told(entry), f"{name}-{entry.starts}")
        if name in self._reward_services:
            return processes.make_reward_service(shared, self._told(entry), f"{name}-{entry.starts}").run(
                lambda: None
            )
        if name == NAME:
            random = RandomStream("simulate-hostile", self.seed)
            return HostileWorker(
                shared.coordinator, RUN_ID, self._stolen, self._taking_part, self.witness.report, random
            ).run(self._faults_over)
        known_as = entry.alias or name
        edits = partial(engines.EditingEngine, lambda: self._lies.happens(EDITED))
        engine = edits if name == EDITOR else engines.ArithmeticEngine
        told = self._told(entry, known_as)
        worker = processes.make_worker(shared, process, told, known_as, entry.payloads, engine)
        entry.worker = worker
        return worker.run(lambda: None)

    def _faults_over(self) -> bool:
        last_s = max((fault.at_s for fault in self.faults), default=HOSTILE_S)
        return self.loop.time() >= last_s

    def _stolen(self) -> list[tuple[str, str]]:
        groups = self.shared.state_machines[-1].state.groups.values()
        return [(group.lease_id, group.group_id) for group in groups if group.lease_id]

    def _taking_part(self) -> list[str]:
        return [member.worker_id for member in self.shared.state_machines[-1].loop.fleet.living()]

    def _told(self, entry: ProcessEntry, worker: str = "") -> CoordinatorClient:
        return Witnessed(self.shared, self.witness, entry, worker)

    def _ended(self, entry: ProcessEntry, process: Process, task: asyncio.Task[None]) -> None:
        if not process.alive:
            return
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        process.kill()
        self.network.killed(process)
        if entry.name == "flow" and error is None:
            self._over.set()
            return
        if error is not None and entry.name == EDITOR:
            return  # it was found out
        if error is not None and not isinstance(error, UnavailableError):
            kind = "failed" if isinstance(error, AntiphonError) else "broke"
            self.witness.report(f"{entry.name} {kind}: {type(error).__name__}: {error}")
            if entry.starts > 20:
                self._over.set()
                return
        if error is None and self.witness.counts["run.finished"]:
            return
        self.loop.call_later(entry.away_s, self._start, entry.name)
        entry.away_s = RESTART_S

    # Faults.

    def _work_s(self) -> tuple[float, float]:
        low, high = (0.01, 0.8) if self._injector.slow_disk else (0.0001, 0.004)
        return self._work.between(low, high), self._work.between(low, high)

    def _begin(self, fault: Fault) -> None:
        if not self._over.is_set():
            self._injector.begin(fault)

    def _on_disk(self, rows: Any) -> None:
        since_s = max(self._event_s, self._injector.calm_s)
        self._event_s = self.loop.time()
        self._silence_s = max(self._silence_s, self._event_s - since_s)
        self.witness.on_disk(rows)
        if self._operator.look(rows, self.shared):
            self._injector.trouble(0.0)
        self._injector.written()

    # The end.

    def _final_checks(self) -> None:
        witness, config = self.witness, self.config
        witness.close(bool(witness.counts["run.finished"]))
        state_machine = self.shared.state_machines[-1]
        self._balance_work(state_machine)
        for name, withheld in self._withheld.items():
            counts = self.shared.host_counts[name]
            if counts.taken - counts.reported < withheld:
                witness.report(f"{name} withheld {withheld} episodes, but {counts} shows fewer")
        state = fold(new_state(config), self._events())
        if self._alive("coordinator") and state_machine.failure is None:
            if state_machine.state != state:
                witness.report("the coordinator's state is not the fold of its journal")
            witness.balance(
                state_machine.state.groups_requeued,
                state_machine.state.groups_dropped_stale,
                state_machine.state.groups_filtered,
                state_machine.state.newest_version,
            )
        if witness.counts["run.finished"] and len(state_machine.loop.leases) and self._alive("coordinator"):
            held = [group.group_id for group in state_machine.state.groups.values()]
            if not held:
                witness.report(f"{len(state_machine.loop.leases)} leases are held of a run without groups")
        recovery_s = self._recovery_s()
        limit_s = LEASE_PERIODS * config.coordinator.lease_s + self._own_work_s()
        if recovery_s is not None and recovery_s > limit_s:
            witness.report(
                f"the next step was committed {recovery_s:.1f} s after the last fault; "
                f"{LEASE_PERIODS} lease periods and the step's own work are {limit_s:.1f} s"
            )
        if self._silence_s > limit_s:
            witness.report(f"nothing happened for {self._silence_s:.1f} s, more than {limit_s:.1f} s")

    def _balance_work(self, state_machine: RunStateMachine) -> None:
        """Compare the work account's total with the seconds that workers were connected."""
        if not self._alive("coordinator"):
            return
        account = state_machine.state.work_accounts.account(state_machine.clock())
        expected = self.witness.hours.total_s(state_machine.clock())
        for what, values in (("seconds", account.seconds), ("tokens", account.tokens)):
            negative = {use: value for use, value in values.items() if value < -1e-6}
            if negative:
                self.witness.report(f"the work account has negative {what}: {negative}")
        if abs(account.total_s - expected) > 1e-3:
            self.witness.report(
                f"the work account has {account.total_s:.3f} worker seconds, but there were {expected:.3f}"
            )

    def _recovery_s(self) -> float | None:
        after = [at_s for at_s, _ in self.witness.commits if at_s >= self._injector.calm_s]
        return after[0] - self._injector.calm_s if after and self.faults else None

    def _own_work_s(self) -> float:
        """Return what a step may take of itself: sampling its groups in turns, and training."""
        scenario, loop = self.scenario, self.config.loop
        places = loop.prompts_per_step
        turns = 1 + places / (len(self._workers) * self.config.rollout.concurrent_groups)
        group_s = self.config.sampling.max_tokens * scenario.engine_step_s[1] * max(self._pace.values())
        if loop.filter == "refill":
            # The next group is opened once the last was rewarded, and each may be the only one missing.
            turns, group_s = 1 + places * (1 + loop.refill_limit), group_s + TURN_S
        harm_s = MISCHIEF * TIMEOUT_S * sum(manner in HARMFUL for manner in self._hosts.values())
        if self._hosts:  # they may wait for groups that no worker has room for before others give up theirs
            harm_s += self.config.services.stall_timeout_s
        slow_s = SLOWEST_TURN_S if Manner.SLOW in self._hosts.values() else 0.0
        group_s = scenario.turns * (group_s + max(slow_s, self._longest_answer_s))
        # A learner that was killed may have to repeat what it trained.
        repeated = self.config.run.steps if any(f.target == "learner" for f in self.faults) else 0
        return float(turns * group_s + harm_s + (1 + repeated) * scenario.learner_step_s[1])

    def _events(self) -> Any:
        return (load_event(row.kind, row.body) for row in self.shared.journal.written())

    def _outcome(self) -> Outcome:
        hasher = blake3()
        for row in self.shared.journal.written():
            hasher.update(f"{row.seq} {row.at!r} {row.kind} {row.body}\n".encode())
        witness = self.witness
        kinds = {name.split("-")[0] if name != EDITOR else EDITOR for name in self._processes}
        return Outcome(
            seed=self.seed,
            violations=tuple(witness.violations),
            digest=hasher.hexdigest(),
            weights=tuple(commit.weights_digest for _, commit in witness.commits),
            batches=tuple(batch.digest for batch in witness.sealed),
            events=witness.events,
            steps=self.loop.callbacks,
            messages=self.network.messages,
            virtual_s=self.loop.time(),
            faults=tuple(self.faults),
            restarts=self._restarts,
            recovery_s=self._recovery_s(),
            parties=tuple(sorted(kinds | ({"operator"} if self.scenario.skips else set()))),
            shut_out=tuple(sorted(witness.authorship.shut_out)),
            edited=len(witness.authorship.edited),
        )
