"""Run view: what a run's journal says about its learning, its time and its work, folded event by event.

All instants are seconds of work since the run's first lease, as `core.run_clock` counts them: start-ups
and breaks take none, so that an instant after a break follows the one before it. Of groups that are past
only numbers are kept, of those that live also their names.
"""

import json
import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from antiphon.core.dissemination.reports import DeliveryRecord
from antiphon.core.drafting.statistics import StatisticsSum
from antiphon.core.loop.run_state import range_of
from antiphon.core.messages import UNIT_RANGE
from antiphon.core.records import DraftingStatistics, StepCommit
from antiphon.core.reporting.alarms import StepAlarms
from antiphon.core.reporting.deliveries import Deliveries
from antiphon.core.reporting.shortcuts import Differences
from antiphon.core.run_clock import RunClock
from antiphon.core.status import Event

_NUMBER = re.compile(r" for [\d.]+ s")
_T = TypeVar("_T")
_OF_BATCH = ("reward_mean", "completion_tokens_mean", "tokens", "groups_filtered")
"""Fields of a sealed batch that are shown of its step."""
_Drafted = tuple[int, DraftingStatistics]
"""Epoch, and what drafting did."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of work."""

    start_s: float
    stop_s: float
    number: int
    """Step or policy version it belongs to."""

    @property
    def seconds(self) -> float:
        return self.stop_s - self.start_s


@dataclass(slots=True)
class StepFacts:
    """One committed step and its batch."""

    commit: StepCommit
    at_s: float = 0.0
    reward_mean: float | None = None
    completion_tokens_mean: float | None = None
    tokens: int = 0
    groups: int = 0
    """Groups it trained on."""
    groups_filtered: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    epoch: int | None = None
    """Newest epoch among the groups it rewarded; None for an empty batch."""
    drafting: DraftingStatistics | None = None

    @property
    def step(self) -> int:
        return self.commit.step

    def metric(self, name: str) -> float | None:
        """Return a metric of the step whatever section its name carries; None where it has none."""
        found = (value for key, value in self.commit.metrics.items() if key.rpartition("/")[2] == name)
        return next(found, None)


@dataclass(frozen=True, slots=True)
class EvaluationFacts:
    """One finished held-out evaluation."""

    version: int
    at_s: float
    reward_mean: float
    completion_tokens_mean: float
    prompts: int


class Rows(Sequence[_T]):
    """Many rows of numbers in eight bytes each; a value is made of a row when it is read."""

    def __init__(self, width: int, make: Callable[..., _T]) -> None:
        self._width, self._make = width, make
        self._numbers = array("d")

    def add(self, *row: float) -> None:
        self._numbers.extend(row)

    def __len__(self) -> int:
        return len(self._numbers) // self._width

    def __iter__(self) -> Iterator[_T]:
        numbers = iter(self._numbers)
        return (self._make(*row) for row in zip(*[numbers] * self._width, strict=True))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        start = range(len(self))[index] * self._width
        return self._make(*self._numbers[start : start + self._width])


def _bars() -> Rows[Bar]:
    return Rows(3, lambda start, stop, number: Bar(start, stop, int(number)))


class RunView:
    """What there is to show of a run besides its state at this moment, which `RunStatus` says."""

    def __init__(self) -> None:
        self.seq = 0
        """The last event that was applied."""
        self.steps: list[StepFacts] = []
        self.alarms = StepAlarms()
        """What the steps' metrics show."""
        self.reward_range = UNIT_RANGE
        self.evaluations: list[EvaluationFacts] = []
        """In the order in which they finished."""
        self.rollout: dict[str, Rows[Bar]] = {}
        """Worker -> one bar per group it sampled, from lease to hand-in."""
        self.reward = _bars()
        self.training = _bars()
        self.evaluating = _bars()
        self.generated: Rows[tuple[float, int]] = Rows(2, lambda at, tokens: (at, int(tokens)))
        """(seconds, completion tokens) of each group handed in."""
        self.counts: Counter[str] = Counter()
        """Events by kind."""
        self.base_digest = ""
        """Digest of the weights of version 0, once its snapshot was announced."""
        self.breaks: list[float] = []
        """Seconds at which the clock stood still, since the run was interrupted."""
        self.rewards_waited_s = 0.0
        """Seconds that the learner waited for batches of which nothing but rewards was missing."""
        self.deliveries = Deliveries()
        """How versions came to the workers."""
        self.offered_again: Counter[str] = Counter()
        """Why leases ended without a hand-in, numbers left out -> groups that were offered again for it."""
        self.by_length = Differences()
        """What the longer completions of each training group earned more than the shorter ones."""
        self._lengths: dict[str, Sequence[int]] = {}
        self._clock = RunClock()
        self._timed = 0.0
        """Unix seconds of the last event that the clock counted."""
        self._leases: dict[str, tuple[float, int]] = {}
        self._submitted: dict[str, float] = {}
        self._rewarded: dict[str, tuple[float, float]] = {}
        """Training group -> when it was handed in and rewarded, until a batch has it."""
        self._committed: dict[int, float] = {}
        self._announced: dict[int, float] = {}
        self._loaded: dict[int, float] = {}
        self._opened: dict[int, tuple[float, int]] = {}
        self._sealed: dict[int, tuple[float, dict[str, Any]]] = {}
        self._epochs: dict[str, int] = {}
        self._drafted: dict[str, _Drafted] = {}
        """Training group -> what drafting did for it, until a batch books it."""
        self._filtered: list[_Drafted] = []
        """Of groups that were filtered before their batch was sealed."""
        self._booked: dict[int, list[_Drafted]] = {}
        """Step -> what its batch booked, until it is committed."""
        self._drafting: dict[int, StatisticsSum] = {}

    def apply(self, event: Event) -> None:
        """Take in the next event of the journal."""
        self.seq = event.seq
        self.counts[event.kind] += 1
        if event.kind == "snapshot.delivered":
            self.deliveries.add(DeliveryRecord(**json.loads(event.data_json)), event.at)
        handler = _HANDLERS.get(event.kind)
        if handler is None and "at_s" not in event.data_json and not event.kind.startswith("run."):
            return  # it says nothing that is shown, and no time
        data, clock = json.loads(event.data_json), self._clock
        sessions = clock.sessions
        clock.take(event.kind, data)
        if clock.sessions > max(sessions, 1):
            self.breaks.append(clock.worked_s)
        timed = data.get("at_s") is not None or clock.working_s is None
        self._timed = event.at if timed else self._timed
        if handler is not None:
            handler(self, clock.times().wall_s + max(0.0, event.at - self._timed), data)

    @property
    def publishing(self) -> list[Bar]:
        """Return, for each version, its commit until its snapshot was announced."""
        return [
            Bar(self._committed[version], at, version)
            for version, at in self._announced.items()
            if version in self._committed
        ]

    @property
    def broadcast(self) -> list[Bar]:
        """Return, for each version, its announcement until the last worker sampled with it."""
        loaded = self._loaded
        return [
            Bar(at, loaded[version], version) for version, at in self._announced.items() if version in loaded
        ]

    @property
    def drafting_by_epoch(self) -> dict[int, DraftingStatistics]:
        """Return epoch -> sum over its groups that were trained or filtered."""
        sums = {epoch: parts.total() for epoch, parts in sorted(self._drafting.items())}
        return {epoch: total for epoch, total in sums.items() if total is not None}

    def epoch_starts(self) -> list[tuple[int, int]]:
        """Return (step, epoch) for the first step that trained on each epoch after the first."""
        starts: dict[int, int] = {}
        for facts in self.steps:
            if facts.epoch is not None and facts.epoch > max(starts, default=-1):
                starts[facts.epoch] = facts.step
        return [(step, epoch) for epoch, step in starts.items()][1:]

    @property
    def window(self) -> tuple[float, float]:
        """Return the first lease and the last commit, seconds."""
        starts = [bar.start_s for bars in self.rollout.values() for bar in bars] if not self.steps else []
        return (0.0, max((step.at_s for step in self.steps), default=max(starts, default=0.0)))

    def busy_shares(self) -> dict[str, float]:
        """Return the share of the window in which each plane was at work, 0..1."""
        start, stop = self.window
        lanes: dict[str, Iterable[Bar]] = {f"rollout {name}": bars for name, bars in self.rollout.items()}
        lanes |= {"reward": self.reward, "training": self.training}
        lanes |= {"broadcast": [*self.publishing, *self.broadcast]}
        total = max(stop - start, 1e-9)
        return {name: sum(b - a for a, b in merge(bars, start, stop)) / total for name, bars in lanes.items()}

    @property
    def idle_share_from_rewards(self) -> float:
        """Return the share of the window in which the learner waited for rewards alone, 0..1."""
        return self.rewards_waited_s / max(self.window[1], 1e-9)

    def _on_run_opened(self, at: float, data: Mapping[str, Any]) -> None:
        self.reward_range = self.alarms.reward_range = range_of(data["pinned"])

    def _on_group_opened(self, at: float, data: Mapping[str, Any]) -> None:
        self._epochs[data["group_id"]] = int(data["epoch"])

    def _on_lease_granted(self, at: float, data: Mapping[str, Any]) -> None:
        self._leases[data["group_id"]] = (at, int(data["held_version"]))

    def _on_lease_expired(self, at: float, data: Mapping[str, Any]) -> None:
        if data.get("waste") != "duplicate":  # then another holder handed the group in
            self.offered_again[_NUMBER.sub("", str(data["reason"]))] += 1

    def _on_group_submitted(self, at: float, data: Mapping[str, Any]) -> None:
        group_id = data["group_id"]
        leased, version = self._leases.pop(group_id, (at, int(data["oldest_version"])))
        self.rollout.setdefault(str(data["worker_id"]), _bars()).add(leased, at, version)
        self.generated.add(at, sum(data["token_counts"]))
        self._submitted[group_id] = at
        statistics, epoch = _drafting(data), self._epochs.get(group_id)
        if epoch is not None:
            self._lengths[group_id] = data["token_counts"]
        if statistics is not None and epoch is not None:  # evaluations belong to no epoch
            self._drafted[group_id] = (epoch, statistics)

    def _on_group_rewarded(self, at: float, data: Mapping[str, Any]) -> None:
        submitted = self._submitted.pop(data["group_id"], None)
        if submitted is not None:
            self.reward.add(submitted, at, 0)
            if data["group_id"] in self._epochs:
                self._rewarded[data["group_id"]] = submitted, at
        failed = {sample for sample, _ in data.get("failures", ())}
        pairs = enumerate(zip(self._lengths.pop(data["group_id"], ()), data["rewards"], strict=False))
        self.by_length.compare([pair for sample, pair in pairs if sample not in failed])

    def _on_samples_finished(self, at: float, data: Mapping[str, Any]) -> None:
        self._submitted.pop(data["group_id"], None)  # no reward comes

    def _on_group_dropped(self, at: float, data: Mapping[str, Any]) -> None:
        drafted = self._drafted.pop(data["group_id"], None)
        if drafted is not None and data["reason"] == "filtered":
            self._filtered.append(drafted)
        for known in (self._leases, self._submitted, self._epochs, self._lengths, self._rewarded):
            known.pop(data["group_id"], None)

    def _on_batch_sealed(self, at: float, data: Mapping[str, Any]) -> None:
        groups = (*data.get("group_ids", ()), *data.get("filtered_ids", ()))
        epochs = [self._epochs.pop(group) for group in groups if group in self._epochs]
        if times := [self._rewarded.pop(group) for group in groups if group in self._rewarded]:
            handed_in, rewarded = map(max, zip(*times, strict=True))
            # Since the commit before, the learner has nothing to do; without one it is still at that step.
            free = self._committed.get(int(data["step"]), at if data["step"] else 0.0)
            self.rewards_waited_s += max(0.0, rewarded - max(handed_in, free))
        early = int(data.get("groups_filtered", 0)) - len(data.get("filtered_ids", ()))
        booked, self._filtered = self._filtered[:early], self._filtered[early:]
        drafted = (self._drafted.pop(group, None) for group in groups)
        self._booked[int(data["step"])] = [*booked, *(one for one in drafted if one is not None)]
        # As in `batch_metrics`: nothing was scored where a client of the door keeps its rewards to itself.
        scored = groups or data.get("groups_filtered") or data.get("reward_mean")
        shown = [name for name in _OF_BATCH if name in data and (scored or not name.endswith("_mean"))]
        self._sealed[int(data["step"])] = (
            at,
            {
                **{name: data[name] for name in shown},
                "groups": len(data.get("group_ids", ())),
                "staleness": {int(age): int(n) for age, n in data.get("staleness", ())},
                "epoch": max(epochs, default=None),
                "drafting": _drafting(data),
            },
        )

    def _on_step_committed(self, at: float, data: Mapping[str, Any]) -> None:
        step = int(data["step"])
        for epoch, statistics in self._booked.pop(step, ()):
            self._drafting.setdefault(epoch, StatisticsSum()).add(statistics)
        sealed_at, facts = self._sealed.pop(step, (at, {}))
        commit = StepCommit(
            step=step,
            version=step + 1,
            weights_digest=data["weights_digest"],
            batch_digest=data["batch_digest"],
            metrics={sys.intern(name): value for name, value in data["metrics"].items()},
            published=bool(data.get("published")),
            times=self._clock.times(),
            exactness=str(data.get("exactness", "")),
        )
        known = StepFacts(commit, at, **facts)
        self.steps.append(known)
        self.alarms.add(commit)
        seconds = known.metric("train_s")
        begun = at - seconds if seconds else max(sealed_at, self._committed.get(step, 0.0))
        self.training.add(begun, at, step)
        self._committed[step + 1] = at

    def _on_snapshot_announced(self, at: float, data: Mapping[str, Any]) -> None:
        if int(data["version"]) == 0:
            self.base_digest = str(data["weights_digest"])
        self._announced.setdefault(int(data["version"]), at)

    def _on_worker_loaded(self, at: float, data: Mapping[str, Any]) -> None:
        if int(data["version"]) in self._announced:
            self._loaded[int(data["version"])] = at

    def _on_evaluation_opened(self, at: float, data: Mapping[str, Any]) -> None:
        self._opened[int(data["version"])] = (at, int(data["prompts"]))

    def _on_evaluation_finished(self, at: float, data: Mapping[str, Any]) -> None:
        version = int(data["version"])
        opened, prompts = self._opened.pop(version, (at, 0))
        self.evaluating.add(opened, at, version)
        self.evaluations.append(
            EvaluationFacts(version, at, data["reward_mean"], data["completion_tokens_mean"], prompts)
        )


def merge(
    bars: Iterable[Bar], start_s: float, stop_s: float, gap_s: float = 0.0
) -> list[tuple[float, float]]:
    """Return the union of bars within [start_s, stop_s], in order, without overlaps or gaps up to `gap_s`.

    >>> merge([Bar(0, 2, 0), Bar(1, 3, 1), Bar(5, 9, 2)], 0.5, 6)
    [(0.5, 3), (5, 6)]
    """
    union: list[tuple[float, float]] = []
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        low, high = max(bar.start_s, start_s), min(bar.stop_s, stop_s)
        if low < high and union and low <= union[-1][1] + gap_s:
            union[-1] = (union[-1][0], max(union[-1][1], high))
        elif low < high:
            union.append((low, high))
    return union


_HANDLERS: dict[str, Callable[[RunView, float, Mapping[str, Any]], None]] = {
    name.removeprefix("_on_").replace("_", "."): handler
    for name, handler in vars(RunView).items()
    if name.startswith("_on_")
}
"""Kind of event -> what it changes in a view."""


def _drafting(data: Mapping[str, Any]) -> DraftingStatistics | None:
    found = data.get("drafting")
    return None if found is None else DraftingStatistics(**found)
