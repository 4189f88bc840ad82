"""World: one run in virtual time, decided by the production code of `core.loop`, without services.

What is modelled: workers whose completions get slower the more of them run at once, a learner whose steps
take a constant time, rewarding and a broadcast with constant delays, and (for tests) workers that die.
What is not: anything else that fails; `antiphon simulate` has that.
"""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from antiphon.core.config import RunConfig, build_config
from antiphon.core.loop import admission, assembly
from antiphon.core.loop import events as e
from antiphon.core.loop.loop_measures import LoopMeasures
from antiphon.core.loop.run_ahead import RunAhead, first_plan, is_due, plan_anew
from antiphon.core.loop.run_state import RunState

TOKENS = 100
"""Completion tokens that stand for length 1."""
WORKERS = 4
RUN_ID = "tails"


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long completions are: log-normal between prompts and within, cut at a cap."""

    sigma_prompt: float
    sigma_sample: float
    cap: float
    """In units of the median length."""
    seed: int = 0

    def draw(self, number: int, block: int, samples: int) -> npt.NDArray[np.int64]:
        """Return the completion tokens of the `number`-th group, shape [samples].

        Every `block` prompts in a row have one from each `block`-th part of the distribution, in random
        order: the mean of any batch that was chosen blindly is then close to the population's.
        """
        order = np.random.default_rng((self.seed, 1, number // block)).permutation(block)
        random = np.random.default_rng((self.seed, 2, number))
        quantile = (order[number % block] + random.random()) / block
        median = math.exp(self.sigma_prompt * _normal_quantile(quantile))
        lengths = median * np.exp(self.sigma_sample * random.standard_normal(samples))
        tokens = np.rint(np.minimum(self.cap, lengths) * TOKENS).astype(np.int64)
        at_least_one: npt.NDArray[np.int64] = np.maximum(tokens, 1)
        return at_least_one


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: its bound, how much is sampled at once, and how fast everything is."""

    max_staleness: int
    prompts_per_step: int
    group_size: int
    steps: int
    places: int
    """Groups that all workers together can sample at once."""
    learner_s: float
    reward_s: float
    broadcast_s: float
    alpha: float
    """Seconds per token of a completion that runs alone."""
    beta: float
    """Seconds per token that each further completion at the same worker adds."""
    filter: str = "none"
    varied_share: float = 1.0
    """Share of the groups whose rewards differ."""
    deaths: tuple[float, ...] = ()
    """Seconds at which a worker, in turns, loses what it samples."""

    def config(self, seed: int) -> RunConfig:
        """Return the run's configuration."""
        return build_config(
            {
                "run": {"steps": self.steps, "seed": seed},
                "environment": {"train_size": 4 * self.prompts_per_step * (self.steps + 1)},
                "loop": {
                    "max_staleness": self.max_staleness,
                    "prompts_per_step": self.prompts_per_step,
                    "group_size": self.group_size,
                    "filter": self.filter,
                },
                "broadcast": {"snapshots_kept": self.max_staleness + 8},
                "evaluation": {"prompts": 1},
            }
        )


@dataclass(slots=True)
class Walked:
    """What a run came to."""

    seconds_per_step: float
    staleness_mean: float
    staleness_worst: int
    wasted_share: float
    """Tokens that were sampled and not trained on, of all; without those that the filter left out."""
    restarts_worst: int
    """Most times that one group was begun anew."""
    opened_mean: float
    trained_mean: float
    """Mean completion tokens; also of what the filter left out, which used up its place."""
    first_batches_mean: float
    """Of the first three batches."""
    lengths_by_staleness: dict[int, float]
    trained: list[int]
    """Numbers of the groups in the order in which they trained."""
    plan: RunAhead | None


@dataclass(slots=True)
class _Worker:
    """One worker: completions share its pace, ``alpha + beta * running`` seconds per token."""

    places: int
    tokens: float = 0.0
    """What a completion has got that ran since the beginning."""
    at_s: float = 0.0
    running: list[tuple[float, int, str]] = field(default_factory=list)
    """(value of `tokens` at its end, tie, lease id) of each running completion."""
    left: dict[str, int] = field(default_factory=dict)
    """Lease id -> completions that still run."""
    alarm: int = 0


class World:
    """Walks a run to its end."""

    def __init__(
        self, setting: Setting, lengths: Lengths, plan: RunAhead | None, measured: bool, seed: int = 0
    ) -> None:
        """Prepare a run; `plan` is kept to its end (None: only the gate decides) unless it is `measured`."""
        self.setting, self.lengths = setting, lengths
        self.config = setting.config(seed)
        self.state = RunState(group_size=setting.group_size, payload_retention_steps=2)
        self.measures = LoopMeasures()
        self.plan = first_plan(self.config, setting.places) if measured else plan
        self.measured = measured
        self.now, self._planned = 0.0, 0
        self._tick = itertools.count()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        share, rest = divmod(setting.places, WORKERS)
        self._workers = [_Worker(share + (i < rest)) for i in range(WORKERS) if share + (i < rest)]
        self._held, self._training = 0, False
        self._lengths: dict[str, npt.NDArray[np.int64]] = {}
        self._begun: dict[str, tuple[_Worker, str, float]] = {}
        self._opened: list[npt.NDArray[np.int64]] = []
        self._batches: list[list[str]] = []
        self._by_age: dict[int, list[float]] = {}
        self._restarts: Counter[str] = Counter()
        self._wasted = self._kept = 0.0

    def run(self) -> Walked:
        """Walk the run and return what it came to.

        Raises:
            RuntimeError: when nothing can happen any more before the last step.
        """
        setting = self.setting
        self._record(e.RunOpened(RUN_ID, {}), e.SnapshotAnnounced(0, "0", "o"))
        for index in range(len(self._workers)):
            self._record(e.WorkerRegistered(f"w{index}-1", f"w{index}", 1, 0.0))
        for index, at_s in enumerate(setting.deaths):
            self._at(at_s, partial(self._die, self._workers[index % len(self._workers)]))
        self._open_steps()
        self._follow_up()
        while len(self.state.commits) < setting.steps:
            if not self._heap:
                raise RuntimeError(f"nothing moves after {len(self.state.commits)} of {setting.steps} steps")
            self.now, _, act = heapq.heappop(self._heap)
            act()
            self._follow_up()
        return self._walked()

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at_s, next(self._tick), act))

    def _record(self, *events: e.JournalEvent) -> None:
        for event in events:
            self.measures.observe(event, self.state, self.now)
            self.state.apply(event)

    # What the coordinator does.

    def _follow_up(self) -> None:
        while True:
            self._record(*assembly.dropped(self.state, self.config))
            plan = assembly.plan_seal(self.state, self.config)
            if plan is None:
                break
            self._seal(plan)
        self._replan()
        self._lease()
        step = len(self.state.commits)
        if not self._training and step < self.state.next_seal:
            self._training = True
            self._at(self.now + self.setting.learner_s, lambda: self._commit(step))

    def _seal(self, plan: assembly.SealPlan) -> None:
        batch = (*plan.used, *plan.filtered)
        ages = Counter(plan.step - group.oldest_version for group in batch)
        for group in batch:
            lengths = self._lengths[group.group_id]
            self._kept += float(lengths.sum())
            self._by_age.setdefault(plan.step - group.oldest_version, []).append(float(lengths.mean()))
        self._batches.append([group.group_id for group in sorted(batch, key=lambda group: group.number)])
        used, filtered = (tuple(g.group_id for g in part) for part in (plan.used, plan.filtered))
        gone = len(filtered) + len(self.state.since_seal.filtered)
        stale = self.state.since_seal.groups_stale
        self._record(
            e.BatchSealed(
                plan.step, used, filtered, "d", "t", 0, gone, stale, 0, 0.0, 0.0, tuple(ages.items())
            )
        )

    def _replan(self) -> None:
        batches = self.measures.batches
        if not self.measured or not is_due(batches, self._planned):
            return
        if (pace := self.measures.pace(self.now)) is not None:
            self._planned = batches
            self.plan = plan_anew(pace, batches, self.config, self.setting.places)

    def _lease(self) -> None:
        places, plan = self.setting.prompts_per_step, self.plan
        while True:
            worker = max(self._workers, key=self._room)
            free = self._room(worker)
            openings = None
            if plan is not None:
                issued = self.state.next_seal * places + self.state.training_groups
                unused = plan.unused(worker.places, len(worker.left))
                openings = max(0, int(min(unused, plan.room(issued, self._held, places))))
            found = admission.plan_leases(self.state, self.config, self._held, min(1, free), (), openings)
            if not found.group_ids:
                return
            for opening in found.openings:
                self._record(opening)
                drawn = self.lengths.draw(opening.number, places, self.setting.group_size)
                self._lengths[opening.group_id] = drawn
                self._opened.append(drawn)
            for group_id in found.group_ids:
                self._begin(worker, group_id)

    def _room(self, worker: _Worker) -> int:
        """Return how many groups a worker asks for: those whose completions it has room for."""
        return (worker.places * self.setting.group_size - len(worker.running)) // self.setting.group_size

    def _begin(self, worker: _Worker, group_id: str) -> None:
        attempt = self.state.groups[group_id].attempt + 1
        lease_id = admission.lease_id_of(bytes(32), group_id, attempt)
        name = f"w{self._workers.index(worker)}-1"
        self._record(e.LeaseGranted(group_id, lease_id, name, attempt, self._held, self.now))
        self._advance(worker)
        lengths = self._lengths[group_id]
        for length in lengths.tolist():
            heapq.heappush(worker.running, (worker.tokens + length, next(self._tick), lease_id))
        worker.left[lease_id] = len(lengths)
        self._begun[lease_id] = (worker, group_id, worker.tokens)
        self._set_alarm(worker)

    # What the workers, the reward service, the learner and the broadcast do.

    def _pace(self, worker: _Worker) -> float:
        return self.setting.alpha + self.setting.beta * len(worker.running)

    def _advance(self, worker: _Worker) -> None:
        if worker.running:
            worker.tokens += (self.now - worker.at_s) / self._pace(worker)
        worker.at_s = self.now

    def _set_alarm(self, worker: _Worker) -> None:
        worker.alarm += 1
        if worker.running:
            left = max(0.0, worker.running[0][0] - worker.tokens)
            number = worker.alarm
            self._at(self.now + left * self._pace(worker), lambda: self._ring(worker, number))

    def _ring(self, worker: _Worker, number: int) -> None:
        if number != worker.alarm:
            return
        self._advance(worker)
        while worker.running and worker.running[0][0] <= worker.tokens + 1e-6:
            lease_id = heapq.heappop(worker.running)[2]
            worker.left[lease_id] -= 1
            if not worker.left[lease_id]:
                del worker.left[lease_id]
                self._submit(lease_id)
        self._set_alarm(worker)

    def _submit(self, lease_id: str) -> None:
        _, group_id, _ = self._begun.pop(lease_id)
        group = self.state.groups[group_id]
        counts = tuple(self._lengths[group_id].tolist())
        self._record(
            e.GroupSubmitted(
                group_id,
                lease_id,
                group.worker_id,
                group.attempt,
                "d",
                group.held_version,
                counts,
                1.0,
                self.now,
            )
        )
        random = np.random.default_rng((self.lengths.seed, 3, group.number))
        varied = random.random() < self.setting.varied_share
        rewards = (0.0,) * (len(counts) - 1) + (float(varied),)
        self._at(
            self.now + self.setting.reward_s,
            lambda: self._record(e.GroupRewarded(group_id, rewards, "r", self.now)),
        )

    def _commit(self, step: int) -> None:
        self._training = False
        self._record(e.StepCommitted(step, step + 1, "w", "d", {}, True))
        self._at(self.now + self.setting.broadcast_s, lambda: self._load(step + 1))

    def _load(self, version: int) -> None:
        self._record(e.SnapshotAnnounced(version, str(version), "o"), e.WorkerLoaded("w0-1", version))
        self._held = version
        self._open_steps()

    def _open_steps(self) -> None:
        ahead = min(self._held + self.setting.max_staleness, self.setting.steps - 1)
        self._record(*admission.open_step(self.state, self.config, ahead))

    def _die(self, worker: _Worker) -> None:
        self._advance(worker)
        for lease_id in list(worker.left):
            _, group_id, begun = self._begun.pop(lease_id)
            sampled = np.minimum(self._lengths[group_id], worker.tokens - begun).sum()
            self._wasted += float(sampled)
            self._restarts[group_id] += 1
            self._record(e.LeaseExpired(group_id, lease_id, self.state.groups[group_id].worker_id, "it died"))
        worker.left.clear()
        worker.running.clear()
        self._set_alarm(worker)

    def _walked(self) -> Walked:
        trained = [self._lengths[group_id] for batch in self._batches for group_id in batch]
        first = [self._lengths[group_id] for batch in self._batches[:3] for group_id in batch]
        histogram = self.state.staleness_histogram
        return Walked(
            seconds_per_step=self.now / self.setting.steps,
            staleness_mean=sum(age * n for age, n in histogram.items()) / max(1, sum(histogram.values())),
            staleness_worst=max(histogram, default=0),
            wasted_share=self._wasted / max(1.0, self._wasted + self._kept),
            restarts_worst=max(self._restarts.values(), default=0),
            opened_mean=float(np.mean(self._opened)),
            trained_mean=float(np.mean(trained)),
            first_batches_mean=float(np.mean(first)),
            lengths_by_staleness={age: float(np.mean(found)) for age, found in sorted(self._by_age.items())},
            trained=[int(group_id[1:]) for batch in self._batches for group_id in batch],
            plan=self.plan,
        )


def _normal_quantile(share: float) -> float:
    """Return the quantile of the standard normal distribution (share in 0..1, both excluded)."""
    return NormalDist().inv_cdf(min(1.0 - 1e-9, max(1e-9, share)))
