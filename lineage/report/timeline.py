"""Run picture: what a run's journal says about time, folded into bars, curves and totals.

All instants are seconds since the run's first event, on the coordinator's wall clock: good
enough to look at, and nothing decides by it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from antiphon.core.drafting.statistics import add_statistics
from antiphon.core.records import DraftingStatistics
from antiphon.core.status import Event


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
    """One committed step."""

    step: int
    at_s: float = 0.0
    reward_mean: float | None = None
    completion_tokens_mean: float | None = None
    tokens: int = 0
    groups_filtered: int = 0
    staleness: dict[int, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    weights_digest: str = ""
    batch_digest: str = ""
    epoch: int | None = None
    """Newest epoch among the groups it rewarded; None for an empty batch."""
    drafting: DraftingStatistics | None = None


@dataclass(frozen=True, slots=True)
class EvaluationFacts:
    """One finished held-out evaluation."""

    version: int
    at_s: float
    reward_mean: float
    completion_tokens_mean: float
    prompts: int


@dataclass(slots=True)
class RunPicture:
    """Everything the report draws."""

    steps: list[StepFacts] = field(default_factory=list)
    evaluations: list[EvaluationFacts] = field(default_factory=list)
    rollout: dict[str, list[Bar]] = field(default_factory=dict)
    """Worker -> one bar per group it sampled."""
    reward: list[Bar] = field(default_factory=list)
    training: list[Bar] = field(default_factory=list)
    publishing: list[Bar] = field(default_factory=list)
    """Commit of a version until its snapshot was announced."""
    broadcast: list[Bar] = field(default_factory=list)
    """Snapshot announced until the last worker sampled with it."""
    evaluating: list[Bar] = field(default_factory=list)
    generated: list[tuple[float, int]] = field(default_factory=list)
    """(seconds, completion tokens) of each group handed in."""
    drafting_by_epoch: dict[int, DraftingStatistics] = field(default_factory=dict)
    """Epoch -> sum over its training groups that were handed in, also those that never trained."""
    counts: Counter[str] = field(default_factory=Counter)
    """Events by kind."""
    started: float = 0.0
    """Unix seconds of the first event."""

    def epoch_starts(self) -> list[tuple[int, int]]:
        """Return (step, epoch) for the first step that trained on each epoch after the first."""
        starts: dict[int, int] = {}
        for facts in self.steps:
            if facts.epoch is not None and facts.epoch > max(starts, default=-1):
                starts[facts.epoch] = facts.step
        return [(step, epoch) for epoch, step in starts.items()][1:]

    @property
    def window(self) -> tuple[float, float]:
        """From the first lease to the last commit, seconds."""
        starts = [bar.start_s for bars in self.rollout.values() for bar in bars]
        stops = [step.at_s for step in self.steps]
        return (min(starts, default=0.0), max(stops, default=max(starts, default=0.0)))

    def busy_shares(self) -> dict[str, float]:
        """Return the share of the window in which each plane was at work, 0..1."""
        start, stop = self.window
        lanes: dict[str, list[Bar]] = {f"rollout {name}": bars for name, bars in self.rollout.items()}
        lanes |= {"reward": self.reward, "training": self.training}
        lanes |= {"broadcast": [*self.publishing, *self.broadcast]}
        total = max(stop - start, 1e-9)
        return {name: sum(b - a for a, b in merge(bars, start, stop)) / total for name, bars in lanes.items()}


def merge(bars: Iterable[Bar], start_s: float, stop_s: float) -> list[tuple[float, float]]:
    """Return the union of bars within [start_s, stop_s], in order, without overlaps.

    >>> merge([Bar(0, 2, 0), Bar(1, 3, 1), Bar(5, 9, 2)], 0.5, 6)
    [(0.5, 3), (5, 6)]
    """
    union: list[tuple[float, float]] = []
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        low, high = max(bar.start_s, start_s), min(bar.stop_s, stop_s)
        if low < high and union and low <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], high))
        elif low < high:
            union.append((low, high))
    return union


def fold(events: Sequence[Event]) -> RunPicture:
    """Draw the picture from a run's events, in the order of the journal."""
    picture = RunPicture(started=events[0].at if events else 0.0)
    folder = _Folder(picture)
    for event in events:
        picture.counts[event.kind] += 1
        folder.take(event.at - picture.started, event.kind, json.loads(event.data_json))
    folder.finish()
    return picture


def find_value(metrics: Mapping[str, float], name: str) -> float | None:
    """Return a metric whatever section its name carries."""
    return next((value for key, value in metrics.items() if key.rpartition("/")[2] == name), None)


def _drafting(data: Mapping[str, Any]) -> DraftingStatistics | None:
    found = data.get("drafting")
    return None if found is None else DraftingStatistics(**found)


class _Folder:
    """The few things to remember between one event and the next."""

    def __init__(self, picture: RunPicture) -> None:
        self._picture = picture
        self._leases: dict[str, tuple[float, str, int]] = {}
        self._submitted: dict[str, float] = {}
        self._committed: dict[int, float] = {}
        self._announced: dict[int, float] = {}
        self._loaded: dict[int, float] = {}
        self._opened: dict[int, tuple[float, int]] = {}
        self._sealed: dict[int, tuple[float, Mapping[str, Any]]] = {}
        self._epochs: dict[str, int] = {}
        self._drafting: dict[int, list[DraftingStatistics]] = {}

    def take(self, at: float, kind: str, data: Mapping[str, Any]) -> None:
        handler = getattr(self, "_on_" + kind.replace(".", "_"), None)
        if handler is not None:
            handler(at, data)

    def finish(self) -> None:
        """Close what only the end can close."""
        for version, at in self._announced.items():
            if version in self._committed and version - 1 in {step.step for step in self._picture.steps}:
                self._picture.publishing.append(Bar(self._committed[version], at, version))
            if version in self._loaded:
                self._picture.broadcast.append(Bar(at, self._loaded[version], version))
        for epoch, parts in sorted(self._drafting.items()):
            whole = add_statistics(parts)
            if whole is not None:
                self._picture.drafting_by_epoch[epoch] = whole

    def _on_group_opened(self, at: float, data: Mapping[str, Any]) -> None:
        self._epochs[data["group_id"]] = int(data["epoch"])

    def _on_lease_granted(self, at: float, data: Mapping[str, Any]) -> None:
        self._leases[data["group_id"]] = (at, data["worker_id"], int(data["held_version"]))

    def _on_group_submitted(self, at: float, data: Mapping[str, Any]) -> None:
        leased, _, version = self._leases.get(data["group_id"], (at, "", int(data["oldest_version"])))
        worker = str(data["worker_id"])
        self._picture.rollout.setdefault(worker, []).append(Bar(leased, at, version))
        self._picture.generated.append((at, sum(data["token_counts"])))
        self._submitted[data["group_id"]] = at
        statistics, epoch = _drafting(data), self._epochs.get(data["group_id"])
        if statistics is not None and epoch is not None:  # evaluations belong to no epoch
            self._drafting.setdefault(epoch, []).append(statistics)

    def _on_group_rewarded(self, at: float, data: Mapping[str, Any]) -> None:
        submitted = self._submitted.get(data["group_id"])
        if submitted is not None:
            self._picture.reward.append(Bar(submitted, at, 0))

    def _on_batch_sealed(self, at: float, data: Mapping[str, Any]) -> None:
        self._sealed[int(data["step"])] = (at, data)

    def _on_step_committed(self, at: float, data: Mapping[str, Any]) -> None:
        step = int(data["step"])
        sealed_at, batch = self._sealed.get(step, (at, {}))
        facts = StepFacts(
            step=step,
            at_s=at,
            reward_mean=batch.get("reward_mean"),
            completion_tokens_mean=batch.get("completion_tokens_mean"),
            tokens=batch.get("tokens", 0),
            groups_filtered=batch.get("groups_filtered", 0),
            staleness={int(k): int(n) for k, n in batch.get("staleness", ())},
            metrics=dict(data["metrics"]),
            weights_digest=data["weights_digest"],
            batch_digest=data["batch_digest"],
            epoch=self._newest_epoch(batch),
            drafting=_drafting(batch),
        )
        self._picture.steps.append(facts)
        seconds = find_value(facts.metrics, "train_s")
        begun = at - seconds if seconds else max(sealed_at, self._committed.get(step, 0.0))
        self._picture.training.append(Bar(begun, at, step))
        self._committed[step + 1] = at

    def _newest_epoch(self, batch: Mapping[str, Any]) -> int | None:
        groups = (*batch.get("group_ids", ()), *batch.get("filtered_ids", ()))
        return max((self._epochs[group] for group in groups if group in self._epochs), default=None)

    def _on_snapshot_announced(self, at: float, data: Mapping[str, Any]) -> None:
        self._announced.setdefault(int(data["version"]), at)

    def _on_worker_loaded(self, at: float, data: Mapping[str, Any]) -> None:
        if int(data["version"]) in self._announced:
            self._loaded[int(data["version"])] = at

    def _on_evaluation_opened(self, at: float, data: Mapping[str, Any]) -> None:
        self._opened[int(data["version"])] = (at, int(data["prompts"]))

    def _on_evaluation_finished(self, at: float, data: Mapping[str, Any]) -> None:
        version = int(data["version"])
        opened, prompts = self._opened.get(version, (at, 0))
        self._picture.evaluating.append(Bar(opened, at, version))
        self._picture.evaluations.append(
            EvaluationFacts(version, at, data["reward_mean"], data["completion_tokens_mean"], prompts)
        )
