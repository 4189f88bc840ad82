"""Modelled run: a run whose decisions are production's and whose engines, learner and network are a model.

What is opened, leased, continued, dropped and sealed is decided by `core.loop` (`plan_leases`, `plan_seal`,
`dropped`, the bound, the run-ahead), on the same fold of the same events as in a coordinator. Engines are
models, and nothing is sent. So a day of a thousand workers takes a minute, where `simulator.world` goes
message by message. What is left out: messages that are lost or late, retries, evaluations, and engines that
pause to load a version. Where the parts of a recorded run shared one machine, that is calibrated by it too.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from blake3 import blake3

from antiphon.core.config import RunConfig
from antiphon.core.coordinator.planner import RunAheadPlanner, WorkerSpeed
from antiphon.core.errors import ConfigError, InfeasibleError
from antiphon.core.lengths.order import LeaseOrder
from antiphon.core.loop import events as e
from antiphon.core.loop.admission import Ordering, plan_leases
from antiphon.core.loop.assembly import SealPlan, dropped, plan_seal
from antiphon.core.loop.events import BatchSealed
from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.places import window_of
from antiphon.core.loop.run_state import RunState, new_state
from antiphon.core.loop.staleness import is_published, oldest_allowed_version
from antiphon.core.loop.work_account import WorkAccount
from antiphon.core.seeds import generator
from antiphon.core.status import CapacityRecord
from antiphon.simulator.modelled.calibration import Calibration, SeenGroup, TimedEvent, calibrate


@dataclass(frozen=True, slots=True)
class Modelled:
    """What a modelled run came to."""

    commits_s: tuple[float, ...]
    """When each step was committed, virtual seconds since the first lease."""
    learner_s: float
    """In which the learner trained."""
    staleness: dict[int, int]
    """Staleness in versions -> trained completions."""
    account: WorkAccount
    usd: float
    tokens: int
    """Accepted."""
    losses: int
    events: int
    digest: str
    """blake3 of all events and their times; the same seed gives the same."""

    @property
    def seconds(self) -> float:
        return self.commits_s[-1]

    @property
    def idle_share(self) -> float:
        return max(0.0, 1.0 - self.learner_s / self.seconds)


def sealed_event(plan: SealPlan, filtered_before: int) -> BatchSealed:
    """Return the event of a batch; `filtered_before` groups were dropped since the one before."""
    ages = Counter[int]()
    for group in plan.used:
        ages[plan.step - group.oldest_version] += group.samples
    tokens, count = sum(sum(group.token_counts) for group in plan.used), sum(ages.values())
    filtered = tuple(group.group_id for group in plan.filtered)
    return BatchSealed(
        step=plan.step,
        group_ids=tuple(group.group_id for group in plan.used),
        filtered_ids=filtered,
        digest="",
        timings_digest="",
        trajectories=count,
        groups_filtered=len(filtered) + filtered_before,
        groups_dropped_stale=0,
        tokens=tokens,
        reward_mean=0.0,
        completion_tokens_mean=tokens / max(1, count),
        staleness=tuple(sorted(ages.items())),
    )


_SMALL = 1e-9

Ends = list[tuple[float, int]]
"""(tokens, completions that have this many)."""


@dataclass(slots=True)
class Engine:
    """One worker's engine: ``alpha + beta n`` seconds per token with n completions at once."""

    name: str
    known: Calibration
    speed: float = 1.0
    """Share of the pace that it has where cores are shared."""
    tokens: float = 0.0
    """What a completion has got that ran from the beginning on."""
    at_s: float = 0.0
    sampled: int = 0
    """Tokens of all groups that it handed in."""
    busy_s: float = 0.0
    """With work."""
    running: list[tuple[float, str, int]] = field(default_factory=list)
    """(value of `tokens` at its end, group, completions of the group that end there), a heap."""
    load: int = 0
    groups: int = 0
    planned: int = 0
    """Times that its next end was planned."""
    held: int = 0
    away: bool = False

    def move(self, now: float) -> None:
        """Sample until `now`."""
        if self.load:
            self.tokens += (now - self.at_s) * self.speed / self.known.token_s(self.load)
            self.busy_s += now - self.at_s
        self.at_s = now

    def next_s(self) -> float:
        """Return when the next completion ends."""
        left = max(0.0, self.running[0][0] - self.tokens)
        return self.at_s + left * self.known.token_s(self.load) / self.speed

    def begin(self, group_id: str, ends: Ends) -> Ends:
        """Begin a group, and return where its completions end."""
        load = sum(count for _, count in ends)
        first = self.tokens + self.known.start_s / self.known.token_s(self.load + load)
        absolute = [(first + left, count) for left, count in ends]
        for end, count in absolute:
            heapq.heappush(self.running, (end, group_id, count))
        self.load += load
        self.groups += 1
        return absolute

    def ended(self, now: float) -> Iterator[tuple[str, int]]:
        """Sample until the next end, which is now; yield each group and how many of it ended."""
        self.move(now)
        self.tokens = max(self.tokens, self.running[0][0])
        while self.running and self.running[0][0] <= self.tokens + _SMALL:
            _, group_id, count = heapq.heappop(self.running)
            self.load -= count
            yield group_id, count

    def lose(self) -> None:
        """Forget all."""
        self.running, self.load, self.groups, self.away = [], 0, 0, True
        self.planned += 1


class Lengths:
    """Completions to come, as they were recorded."""

    def __init__(self, known: Calibration, seed: int, exact: bool) -> None:
        """Prepare for a run; `exact` ends each completion apart, otherwise all but the longest together."""
        self._groups, self._seed, self._exact = known.groups, seed, exact
        self._seen = defaultdict[int, list[SeenGroup]](list)
        for group in known.groups:
            self._seen[group.prompt].append(group)

    def draw(self, prompt: int, epoch: int, number: int) -> SeenGroup:
        """Return a recorded group of the prompt, each in its turn; of any prompt where there is none."""
        if known := self._seen.get(prompt):
            return known[(epoch + prompt + self._seed) % len(known)]
        return self._groups[(number + self._seed) % len(self._groups)]

    def ends(self, seen: SeenGroup) -> Ends:
        """Return where the completions of a group end."""
        if self._exact:
            return [(float(tokens), seen.tokens.count(tokens)) for tokens in set(seen.tokens)]
        longest, others = max(seen.tokens), len(seen.tokens) - 1
        mean = (sum(seen.tokens) - longest) / max(1, others)
        return [(float(longest), 1), (mean, others)] if others else [(float(longest), 1)]


EXACT_WORKERS = 32
"""Fleets of up to this many workers are walked completion by completion. In larger ones a group has its
longest completion, and the others are as long as their mean."""
HOUR_S = 3600.0
SKIPPED = 4
"""Steps at the beginning that do not count: the loop fills."""
_HALVINGS = 10
_LEAST_CORES = 0.25
_WORKER, _ROOM, _REWARDED, _TRAINED, _HELD, _LOST, _BACK = range(7)


class ModelledRun:
    """One run; `run` walks it."""

    def __init__(
        self,
        config: RunConfig,
        calibration: Calibration,
        workers: int,
        seed: int = 0,
        *,
        hours: float = math.inf,
        keep: bool = False,
    ) -> None:
        """Prepare a run of this many workers, all of them alike.

        Args:
            config: of the run, elastic; its own `rollout.concurrent_groups` does not count.
            calibration: how fast everything is.
            workers: that join at second 0.
            seed: of lengths, rewards and losses.
            hours: of virtual time after which it is left as it stands.
            keep: keep the events in `events`.

        Raises:
            ConfigError: for fixed mode, or no workers.
        """
        if config.loop.mode != "elastic" or workers < 1:
            raise ConfigError("a modelled run has loop.mode=elastic and at least one worker; change this")
        if any(len(group.tokens) != config.loop.group_size for group in calibration.groups):
            raise ConfigError(
                f"loop.group_size={config.loop.group_size} is not that of the calibration, whose groups have "
                f"{len(calibration.groups[0].tokens)} completions; calibrate by a run with such groups"
            )
        self._config, self._known, self._seed, self._end_s = config, calibration, seed, hours * HOUR_S
        self._size = config.loop.prompts_per_step
        self._state: RunState = new_state(config)
        self._engines = [Engine(f"worker-{number:04d}", calibration) for number in range(workers)]
        self._places = calibration.concurrent_groups * config.loop.group_size
        self._there: list[WorkerSpeed] = []
        self._now = 0.0
        self._planner = RunAheadPlanner(
            config,
            lambda: self._there,
            lambda: self._state.lengths,
            self._supply,
            lambda: sum(groups for _, _, groups in self._there),
        )
        self._lengths = Lengths(calibration, seed, workers <= EXACT_WORKERS)
        self._random = generator("modelled", seed)
        self._queue: list[tuple[float, int, int, int]] = []
        self._asking: dict[int, None] = {}
        self._set_aside: dict[int, None] = {}
        """Those that ask and sample as many groups as the run-ahead lets them."""
        self._dry = False
        """No worker gets a group before something else happens."""
        self._waits_for = ""
        """A group of the next batch that is not rewarded; nothing is sealed before it is."""
        self._sampling: dict[str, tuple[SeenGroup, int, Ends]] = {}
        """Group -> what it will be, completions left, and where they end."""
        self._kept: dict[str, tuple[int, Ends]] = {}
        """Group of a lost worker -> its oldest version, and what is left of it."""
        self._rewarding: list[tuple[str, bool]] = []
        """Group that was handed in, and whether its rewards will differ."""
        self._newest_held = self._trainings = self._losses = self._count = 0
        self._training_left = self._learner_s = self._training_at = self._trained_to = 0.0
        self._broadcast_s = 0.0
        self._commits_s, self._training = list[float](), False
        self._speed, self._hash = 1.0, blake3()
        self.events: list[TimedEvent] | None = [] if keep else None
        self.plans: list[CapacityRecord | None] = []
        """What the capacity model expected after each step."""

    def run(self) -> Modelled:
        """Walk to the last step, or to the end of the hours."""
        self._emit(e.RunOpened("modelled", {}, 0.0), "")
        for number, engine in enumerate(self._engines):
            self._join(engine, number)
        self._emit(e.SnapshotAnnounced(0, "", ""), "")
        self._open_steps()
        self._wake()
        self._grant()
        while self._queue and len(self._state.commits) < self._config.run.steps:
            second, kind, number, stamp = heapq.heappop(self._queue)
            if second > self._end_s:
                break
            if (kind == _WORKER and stamp != self._engines[number].planned) or (
                kind == _TRAINED and stamp != self._trainings
            ):
                continue
            self._now = second
            self._happen(kind, number)
            self._grant()
            self._share_cores()
        return self._outcome()

    def _happen(self, kind: int, number: int) -> None:
        if kind == _WORKER:
            self._ended(self._engines[number], number)
        elif kind == _ROOM:
            self._ask(self._engines[number], number)
        elif kind == _REWARDED:
            self._rewarded(*self._rewarding[number])
        elif kind == _TRAINED:
            self._committed()
        elif kind == _HELD:
            self._held(number)
        elif kind == _LOST:
            self._lost(self._engines[number], number)
        else:
            self._join(self._engines[number], number)
            self._wake()

    def _join(self, engine: Engine, number: int) -> None:
        engine.away = False
        places, losses = self._known.concurrent_groups, self._known.losses_per_hour
        self._emit(e.WorkerRegistered(engine.name, engine.name, places, self._now), engine.name)
        self._asking[number] = None
        if losses:
            self._push(self._now + self._random.exponential(HOUR_S / losses), _LOST, number)

    # Sampling.

    def _plan(self, engine: Engine, number: int) -> None:
        engine.planned += 1
        if engine.running:
            self._push(engine.next_s(), _WORKER, number, engine.planned)

    def _ended(self, engine: Engine, number: int) -> None:
        for group_id, count in engine.ended(self._now):
            seen, left, ends = self._sampling[group_id]
            self._sampling[group_id] = (seen, left - count, ends)
            if left == count:
                engine.groups -= 1
                self._submitted(group_id, seen, engine)
        if self._known.between_s:
            self._push(self._now + self._known.between_s, _ROOM, number)
        else:
            self._ask(engine, number)
        self._plan(engine, number)

    def _ask(self, engine: Engine, number: int) -> None:
        """Let a worker ask for groups where it has room for one."""
        if not engine.away and self._places - engine.load >= self._config.loop.group_size:
            self._set_aside.pop(number, None)
            self._asking.setdefault(number)

    def _submitted(self, group_id: str, seen: SeenGroup, engine: Engine) -> None:
        group = self._state.groups[group_id]
        del self._sampling[group_id]
        engine.sampled += sum(seen.tokens)
        self._emit(
            e.GroupSubmitted(
                group_id, group.lease_id, engine.name, group.attempt, "", group.held_version, seen.tokens,
                self._now - group.leased_at_s, self._now,
            ),
            group_id,
        )  # fmt: skip
        self._rewarding.append((group_id, seen.varied))
        self._push(self._now + seen.reward_s, _REWARDED, len(self._rewarding) - 1)

    def _rewarded(self, group_id: str, varied: bool) -> None:
        rewards = (float(varied),) + (0.0,) * (self._config.loop.group_size - 1)
        self._emit(e.GroupRewarded(group_id, rewards, "reward", self._now), group_id)
        if self._config.loop.filter == "refill":
            for event in dropped(self._state, self._config):
                self._emit(event, event.group_id)
                self._waits_for = ""
                self._wake()
        if self._waits_for in ("", group_id):
            self._seal()

    # Leases.

    def _grant(self) -> None:
        """Answer those that ask, the one first that asked longest ago."""
        if self._dry or not self._asking:
            return
        plan, order = self._plan_ahead, self._order
        state, size, group_size = self._state, self._size, self._config.loop.group_size
        for number in list(self._asking):
            engine = self._engines[number]
            most = (self._places - engine.load) // group_size
            # As `core.coordinator.leases` limits openings.
            room = unused = math.inf
            if plan is not None:
                room = plan.room(state.batches * size + state.training_groups, self._newest_held, size)
                unused = max(0, plan.unused(self._known.concurrent_groups, engine.groups))
            if not unused and not state.open_groups:
                del self._asking[number]
                self._set_aside[number] = None
                continue
            openings, ordering = (None if plan is None else int(min(unused, room))), None
            if order is not LeaseOrder.ARRIVAL:
                openings = None if plan is None else int(room)
                take = partial(self._planner.order.take, order, engine.name)
                ordering = Ordering(take, unused)
            found = plan_leases(state, self._config, engine.held, most, (), openings, ordering)
            for opened in found.openings:
                self._emit(opened, opened.group_id)
            if not found.group_ids:
                if unused and engine.held == self._newest_held:
                    self._dry = True
                    return
                continue
            engine.move(self._now)
            for group_id in found.group_ids:
                self._begin(state.groups[group_id], engine)
            self._plan(engine, number)
            if self._places - engine.load < group_size:
                del self._asking[number]

    def _supply(self) -> float:
        return sum(one.sampled / one.busy_s for one in self._engines if one.busy_s and not one.away)

    def _wake(self) -> None:
        """Let all that ask try again."""
        self._dry = False
        self._asking |= self._set_aside
        self._set_aside = {}
        places = self._known.concurrent_groups
        self._there = [(one.name, 0.0, places) for one in self._engines if not one.away]
        self._plan_ahead, self._order = self._planner.plan, self._planner.order.order

    def _begin(self, group: GroupState, engine: Engine) -> None:
        oldest, ends = self._kept.pop(group.group_id, (engine.held, []))
        seen = self._lengths.draw(group.prompt_index, group.epoch, group.number)
        if ends and not window_of(self._state, self._config.loop, group).admits(oldest):
            ends = []
        held = min(oldest, engine.held) if ends else engine.held
        if ends:
            continued = sum(seen.tokens) - round(sum(left * count for left, count in ends))
        else:
            ends, continued = self._lengths.ends(seen), 0
        attempt = group.attempt + 1
        self._emit(
            e.LeaseGranted(
                group.group_id, f"{group.group_id}/{attempt}", engine.name, attempt, held, self._now,
                max(0, continued),
            ),
            engine.name,
        )  # fmt: skip
        load = sum(count for _, count in ends)
        self._sampling[group.group_id] = (seen, load, engine.begin(group.group_id, ends))

    def _lost(self, engine: Engine, number: int) -> None:
        """End a worker; another continues what it had handed over with its beats."""
        self._losses += 1
        engine.move(self._now)
        for group_id in dict.fromkeys(group_id for _, group_id, _ in engine.running):
            group = self._state.groups[group_id]
            seen, _, ends = self._sampling.pop(group_id)
            left = [(end - engine.tokens, count) for end, count in ends if end > engine.tokens]
            sampled = max(0, sum(seen.tokens) - round(sum(end * count for end, count in left)))
            kept = sampled if self._config.coordinator.partials_mib else 0
            self._emit(
                e.LeaseExpired(group_id, group.lease_id, engine.name, "lost", self._now, sampled, kept),
                group_id,
            )
            if kept:
                self._kept[group_id] = (group.held_version, left)
        self._emit(e.WorkerLost(engine.name, "lost", self._now), engine.name)
        engine.lose()
        self._asking.pop(number, None)
        self._set_aside.pop(number, None)
        self._wake()
        self._push(self._now + self._known.replaced_s, _BACK, number)

    # The learner.

    def _seal(self) -> None:
        while (plan := plan_seal(self._state, self._config)) is not None:
            self._emit(sealed_event(plan, len(self._state.since_seal.filtered)), str(plan.step))
        line = list(self._state.training())[: self._size]
        waiting = [group.group_id for group in line if group.phase is not GroupPhase.REWARDED]
        # With filter=refill a batch may have fewer groups.
        known = len(line) == self._size and self._config.loop.filter != "refill"
        self._waits_for = waiting[-1] if waiting and known else ""
        self._train()

    def _train(self) -> None:
        step = len(self._state.commits)
        if self._training or not self._state.is_sealed(step):
            return
        self._training, self._training_at = True, self._now
        self._training_left = self._known.training_s(self._state.sealed[step].tokens)
        self._plan_training()

    def _plan_training(self) -> None:
        self._trainings += 1
        self._trained_to = self._now
        self._push(self._now + self._training_left / self._speed, _TRAINED, 0, self._trainings)

    def _committed(self) -> None:
        self._learner_s += self._now - self._training_at
        self._training = False
        self._commits_s.append(self._now)
        step = len(self._state.commits)
        published = is_published(step + 1, self._config.loop.publish_interval, self._config.run.steps)
        self._emit(e.StepCommitted(step, step + 1, "", "", {}, published, self._now), str(step))
        if published:
            self._emit(e.SnapshotAnnounced(step + 1, "", ""), str(step + 1))
            # One broadcast after the other, as in the schedule.
            self._broadcast_s = max(self._now, self._broadcast_s) + self._known.broadcast_s
            self._push(self._broadcast_s, _HELD, step + 1)
        if (make := self._planner.due(self._now)) is not None:
            self._planner.take(make())
        self.plans.append(self._planner.capacity)
        self._wake()
        self._train()

    def _held(self, version: int) -> None:
        self._newest_held = version
        for engine in self._engines:
            engine.held = version
        self._emit(e.WorkerLoaded(self._engines[0].name, version), str(version))
        self._open_steps()
        self._wake()

    def _open_steps(self) -> None:
        """Open what the schedule opens once the newest version is held."""
        loop, state = self._config.loop, self._state
        while (
            state.opened_steps < self._config.run.steps
            and oldest_allowed_version(state.opened_steps, loop.max_staleness, loop.publish_interval)
            <= self._newest_held
        ):
            self._emit(e.StepOpened(state.opened_steps), "")

    # Beneath.

    def _share_cores(self) -> None:
        """Slow down what is busy on one machine, where it has fewer cores than that."""
        cores = self._known.shared_cores
        if cores is None:
            return
        busy = sum(1 for engine in self._engines if engine.load) + self._training
        speed = min(1.0, cores / max(1, busy))
        if speed == self._speed:
            return
        for engine in self._engines:
            engine.move(self._now)
            engine.speed = speed
        if self._training:
            self._training_left -= (self._now - self._trained_to) * self._speed
        self._speed = speed
        for number, engine in enumerate(self._engines):
            self._plan(engine, number)
        if self._training:
            self._training_left = max(0.0, self._training_left)
            self._plan_training()

    def _push(self, second: float, kind: int, number: int, stamp: int = 0) -> None:
        heapq.heappush(self._queue, (float(second), kind, number, stamp))

    def _emit(self, event: e.JournalEvent, about: str) -> None:
        self._planner.observe(event, self._state, self._now)
        self._state.apply(event)
        self._count += 1
        self._hash.update(f"{self._now!r} {event.kind} {about}\n".encode())
        if self.events is not None:
            self.events.append((self._now, event))

    def _outcome(self) -> Modelled:
        state, known = self._state, self._known
        account = state.work_accounts.account(self._now)
        usd = account.total_s * known.worker_usd_per_hour + self._now * known.learner_usd_per_hour
        return Modelled(
            commits_s=tuple(self._commits_s),
            learner_s=self._learner_s,
            staleness=dict(sorted(state.staleness_histogram.items())),
            account=account,
            usd=usd / HOUR_S,
            tokens=sum(batch.tokens for batch in state.sealed[: len(state.commits)]),
            losses=self._losses,
            events=self._count,
            digest=self._hash.hexdigest(),
        )


def seconds_per_step(commits_s: Sequence[float]) -> float:
    """Return the mean of the seconds between successive commits; NaN of a run too short for one."""
    counted = commits_s[min(SKIPPED, max(0, len(commits_s) - 2)) :]
    return (counted[-1] - counted[0]) / (len(counted) - 1) if len(counted) > 1 else math.nan


def figure_lines(done: Modelled) -> list[str]:
    """Say what a modelled run came to, for a terminal."""
    step_s, shares = seconds_per_step(done.commits_s), staleness_shares(done.staleness)
    ages = ", ".join(f"{age}: {share:.1%}" for age, share in shares.items())
    per_million = f", ${done.usd / done.tokens * 1e6:,.3f} per million accepted tokens" if done.usd else ""
    return [
        f"a step           {step_s:,.2f} s; the learner waits {done.idle_share:.1%} of it",
        f"the run          {len(done.commits_s)} steps in {done.seconds / HOUR_S:,.2f} h for ${done.usd:,.2f}"
        f"{per_million}",
        f"staleness        {ages}",
        f"digest           {done.digest}",
    ]


def staleness_shares(histogram: dict[int, int]) -> dict[int, float]:
    """Return which share of the trained completions has which staleness."""
    total = sum(histogram.values())
    return {age: count / total for age, count in sorted(histogram.items()) if count}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run whose parts shared the cores of one machine."""

    config: RunConfig
    events: Sequence[TimedEvent]
    """Of its journal."""
    workers: int


def calibrate_machine(sparse: Recorded, crowded: Recorded, source: str = "") -> Calibration:
    """Return the calibration of two runs on one machine whose cores workers and learner share.

    Paces are those of the sparse run, in which hardly anything is busy at once: best one worker and S=0,
    where sampling and training alternate. Two things are in no lease and no step, and are found by the
    seconds per step of a whole run, since the model takes longer the more there is of the first and the less
    of the second: how long a place is empty between two groups, by the sparse run; and by the crowded one how
    many cores workers and learner have, beside all else that works there and with the caches that they share.

    Args:
        sparse: the run with fewer workers.
        crowded: the one in which workers and learner are busy at once: with more workers and run-ahead.
        source: what reports call them.

    Raises:
        InfeasibleError: when one of them trained fewer than two steps.
    """
    found = calibrate(sparse.config, sparse.events, source)
    between_s = _matching(sparse, found, "between_s", 0.0, _lease_s(sparse.events))
    found = found.model_copy(update={"between_s": between_s})
    cores = _matching(crowded, found, "shared_cores", crowded.workers + 1.0, _LEAST_CORES)
    return found.model_copy(update={"shared_cores": cores})


def _matching(of: Recorded, known: Calibration, field: str, fast: float, slow: float) -> float:
    """Return the value between two, of a field, with which the modelled run takes the seconds per step of
    the recorded one; the nearer one where none does."""
    wanted_s = seconds_per_step([at for at, event in of.events if isinstance(event, e.StepCommitted)])
    if math.isnan(wanted_s):
        raise InfeasibleError(
            "a run that calibrates a machine has two steps at least, to say how long one takes; let it train"
        )
    for _ in range(_HALVINGS):
        value = (fast + slow) / 2.0
        run = ModelledRun(of.config, known.model_copy(update={field: value}), of.workers)
        if seconds_per_step(run.run().commits_s) > wanted_s:
            slow = value
        else:
            fast = value
    return (fast + slow) / 2.0


def _lease_s(events: Sequence[TimedEvent]) -> float:
    """Return the mean seconds from a lease to its submission."""
    begun: dict[str, float] = {}
    spans = []
    for at, event in events:
        if isinstance(event, e.LeaseGranted):
            begun[event.group_id] = at
        elif isinstance(event, e.GroupSubmitted) and event.group_id in begun and len(event.token_counts) > 1:
            spans.append(at - begun.pop(event.group_id))
    return fmean(spans)
