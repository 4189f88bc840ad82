"""Figures: what a run says of itself in numbers, each defined once; every view shows these and no others.

They follow from the lines of the run log (`lineage.run_log`), which hold counts of each step and the
run's clock at its commit, and from the configuration. So they are the same at any later time, and for a
run that was interrupted and continued. docs/concepts/figures.md has the table of them.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from antiphon.core.config import RunConfig
from antiphon.core.drafting.statistics import StatisticsSum, drafting_rates
from antiphon.core.records import DraftingStatistics
from antiphon.core.trust.worker_names import name_of_worker

_SECONDS_PER_HOUR = 3600.0

UNKNOWN = "–"
"""What stands where a figure is not known."""


_S, _SHARE, _COUNT, _TWO = "{:,.1f} s", "{:.1%}", "{:,.0f}", "{:,.2f}"
"""How values of one kind are written."""


@dataclass(frozen=True, slots=True)
class Figure:
    """How one figure is called, written and defined."""

    label: str
    unit: str
    form: str
    """Format of its value, with the words that come with it."""
    meaning: str
    name: str = ""
    """Field of `RunFigures`; in MLflow `summary/` stands before it."""

    def write(self, value: float) -> str:
        return self.form.format(value)


def _figure(label: str, unit: str, form: str, meaning: str, default: Any = None) -> Any:
    return field(default=default, metadata={"figure": Figure(label, unit, form, meaning)})


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of a run up to its last committed step; None where one cannot be said."""

    steps: int = _figure("steps", "steps", _COUNT, "learner steps recorded", 0)
    wall_s: float = _figure(
        "time", "s", _S, "from the first lease to the last commit, less start-ups and breaks", 0.0
    )
    seconds_per_step: float | None = _figure("time per step", "s", _S, "wall_s over steps")
    startup_s: float = _figure(
        "start-up", "s", _S, "from each opening by a coordinator to its first sign of work", 0.0
    )
    breaks: int = _figure("breaks", "breaks", _COUNT, "times that a coordinator opened the run again", 0)
    break_s: float = _figure(
        "length of breaks", "s", _S, "seconds in which no coordinator had the run open", 0.0
    )
    dollars: float = _figure(
        "cost", "USD", "${:,.2f}", "wall_s at the prices of record.worker_usd_per_hour and its like", 0.0
    )
    dollars_per_step: float | None = _figure("cost per step", "USD", "${:,.4f}", "dollars over steps")
    dollars_per_million_tokens: float | None = _figure(
        "cost per million tokens", "USD", "${:,.2f}", "dollars over millions of tokens_trained"
    )
    dollars_per_reward_point: float | None = _figure(
        "cost per reward point", "USD", "${:,.2f}", "dollars over 100 (reward_best - reward_first)"
    )
    learner_busy_share: float | None = _figure(
        "learner busy", "1", _SHARE, "seconds of the learner's steps over wall_s"
    )
    learner_idle_share: float | None = _figure("learner idle", "1", _SHARE, "1 - learner_busy_share")
    groups_trained: int = _figure("groups trained", "groups", _COUNT, "training groups in batches", 0)
    groups_filtered: int = _figure(
        "groups filtered", "groups", _COUNT, "training groups left out because their rewards were equal", 0
    )
    groups_filtered_share: float | None = _figure(
        "share filtered", "1", _SHARE, "groups_filtered over groups trained, filtered and dropped"
    )
    groups_dropped_stale: int = _figure(
        "groups dropped", "groups", _COUNT, "finished training groups that were too old", 0
    )
    groups_dropped_stale_share: float | None = _figure(
        "share dropped", "1", _SHARE, "groups_dropped_stale over groups trained, filtered and dropped"
    )
    tokens_sampled: int = _figure(
        "tokens sampled", "tokens", _COUNT, "completion tokens trained, filtered and dropped", 0
    )
    tokens_per_s: float | None = _figure(
        "tokens per second", "tokens/s", _COUNT, "tokens_sampled over wall_s"
    )
    tokens_trained: int = _figure(
        "tokens trained", "tokens", _COUNT, "completion tokens of groups_trained", 0
    )
    tokens_filtered: int = _figure(
        "tokens filtered", "tokens", _COUNT, "completion tokens of groups_filtered", 0
    )
    tokens_dropped_stale: int = _figure(
        "tokens dropped", "tokens", _COUNT, "completion tokens of groups_dropped_stale", 0
    )
    tokens_evaluated: int = _figure(
        "tokens in evaluations", "tokens", _COUNT, "completion tokens of held-out prompts", 0
    )
    staleness_mean: float | None = _figure(
        "mean staleness", "versions", _TWO, "mean staleness of the trajectories trained on"
    )
    staleness_max: int | None = _figure(
        "largest staleness", "versions", _COUNT, "largest staleness of a trajectory trained on"
    )
    drafting_acceptance: float | None = _figure(
        "drafts right", "1", _SHARE, "drafted tokens that were right over all drafted ones"
    )
    drafting_tokens_per_pass: float | None = _figure(
        "tokens per pass", "tokens", _TWO, "tokens sampled over forward passes of a completion"
    )
    drafting_gain: float | None = _figure(
        "gain by drafting", "1", "{:.2f}x", "drafting_gain, its mean weighted by tokens"
    )
    reward_first: float | None = _figure(
        "pass@1 before", "reward", _SHARE, "held-out reward of the first evaluated version"
    )
    reward_last: float | None = _figure(
        "pass@1 after", "reward", _SHARE, "held-out reward of the last evaluated version"
    )
    reward_best: float | None = _figure(
        "best pass@1", "reward", _SHARE, "best held-out reward of an evaluated version"
    )
    reward_best_error: float | None = _figure(
        "best pass@1, 95% interval", "reward", "± {:.1%}", "half of the 95% interval of reward_best"
    )
    best_version: int | None = None
    """The oldest version that scored `reward_best`."""
    best_is_noise: bool = False
    """The last version's score differs from it by no more than chance may."""
    staleness_histogram: dict[int, int] = field(default_factory=dict)
    """Staleness in versions -> trajectories trained on."""

    def text(self, name: str) -> str:
        """Return a figure as every view writes it, with its unit.

        >>> RunFigures(wall_s=31.43, learner_idle_share=0.3333).text("learner_idle_share")
        '33.3%'
        """
        value = getattr(self, name)
        return UNKNOWN if value is None else _BY_NAME[name].write(value)

    def rows(self) -> list[tuple[str, str]]:
        """Return (label, text) of every figure that can be said, in the order of `FIGURES`."""
        return [(f.label, self.text(f.name)) for f in FIGURES if getattr(self, f.name) is not None]

    def numbers(self) -> dict[str, float]:
        """Return name -> value of every figure that can be said."""
        found = {f.name: getattr(self, f.name) for f in FIGURES}
        return {name: float(value) for name, value in found.items() if value is not None}

    def lines(self) -> list[str]:
        """Return the figures in a few sentences, for a terminal."""
        said = {figure.name: self.text(figure.name) for figure in FIGURES}
        clock = "{steps} steps in {wall_s}, {seconds_per_step} per step; start-up {startup_s}"
        templates = [clock + ("; breaks {breaks}, {break_s}" if self.breaks else "")]
        if self.reward_first is not None:
            templates.append(
                "held-out pass@1 went from {reward_first} to {reward_last}; the best is {reward_best} "
                f"{{reward_best_error}} (95%), of version {self.best_version}"
                + (", which is within noise of the last one" if self.best_is_noise else "")
            )
        templates += [
            "staleness {staleness_mean} on average, at most {staleness_max}; "
            "learner busy {learner_busy_share} of the time, idle {learner_idle_share}",
            "groups: {groups_trained} trained, {groups_filtered} filtered ({groups_filtered_share}), "
            "{groups_dropped_stale} dropped as too old ({groups_dropped_stale_share})",
            "tokens: {tokens_sampled} sampled, {tokens_per_s} per second; {tokens_trained} trained, "
            "{tokens_filtered} filtered; {tokens_evaluated} more in evaluations",
        ]
        if self.dollars_per_step is not None:
            templates.append(
                "cost: {dollars}, {dollars_per_step} a step, {dollars_per_million_tokens} a million tokens "
                "trained, {dollars_per_reward_point} a reward point"
            )
        if self.drafting_acceptance is not None:
            templates.append(
                "drafting: {drafting_acceptance} of drafts right, {drafting_tokens_per_pass} tokens per pass"
            )
        return [template.format(**said) for template in templates]

    def plain(self) -> dict[str, Any]:
        """Return values that JSON keeps."""
        histogram = {str(k): v for k, v in sorted(self.staleness_histogram.items())}
        return dataclasses.asdict(self) | {"staleness_histogram": histogram}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Rebuild what `plain` returned."""
        histogram = {int(k): v for k, v in plain["staleness_histogram"].items()}
        return cls(**{**plain, "staleness_histogram": histogram})


FIGURES: tuple[Figure, ...] = tuple(
    dataclasses.replace(x.metadata["figure"], name=x.name)
    for x in dataclasses.fields(RunFigures)
    if "figure" in x.metadata
)
"""Every figure, in the order in which tables have them."""
_BY_NAME = {figure.name: figure for figure in FIGURES}


def share(value: float | None) -> str:
    """Write a share, a reward or a score, as every view does.

    >>> share(0.625), share(None)
    ('62.5%', '–')
    """
    return UNKNOWN if value is None else f"{value:.1%}"


def interval(share: float, count: int) -> float:
    """Return the half-width of a 95% interval of a mean of `count` values in 0..1, at most.

    >>> round(interval(0.5, 256), 3)
    0.061
    """
    return 1.96 * math.sqrt(max(share * (1 - share), 0.0) / count) if count else 0.0


def seconds(value: float | None) -> str:
    """Write a duration, as every view does.

    >>> seconds(1234.567)
    '1,234.6 s'
    """
    return UNKNOWN if value is None else f"{value:,.1f} s"


@dataclass(frozen=True, slots=True)
class VersionTotals:
    """What had been spent when a policy version was made."""

    version: int
    tokens_sampled: int = 0
    tokens_trained: int = 0
    wall_s: float = 0.0
    dollars: float = 0.0
    at: float = 0.0
    """Unix seconds of the commit; for the base, of the first one."""


class FiguresFold:
    """Adds up a run's steps; a step that comes early waits for those before it."""

    def __init__(self, config: RunConfig) -> None:
        """Begin at the base, version 0, which has cost nothing."""
        self._config, self._workers = config, config.rollout.workers
        self._group_size = config.loop.group_size
        self._last = VersionTotals(0)
        self._early: dict[int, Mapping[str, Any]] = {}
        self._told_base = False
        self._counts: dict[str, Any] = dict.fromkeys(_COUNTED, 0)
        self._clock: dict[str, Any] = {"startup_s": 0.0, "break_s": 0.0, "breaks": 0}
        self._busy_s = 0.0
        self._staleness: dict[int, int] = {}
        self._drafting = StatisticsSum()

    def add(self, line: Mapping[str, Any]) -> list[VersionTotals]:
        """Take a line of the run log and return the totals that are now known, by version.

        A step's line gives the totals of the version it made; the first one also gives the
        base's. A step that was added before gives nothing.
        """
        if int(line["step"]) < self._last.version:
            return []
        self._early[int(line["step"])] = line
        found = []
        while (ready := self._early.pop(self._last.version, None)) is not None:
            if not self._told_base:
                self._told_base = True
                found.append(VersionTotals(0, at=float(ready["timings"]["at"])))
            self._count(ready["batch"] or {})
            self._last = self._after(ready)
            found.append(self._last)
        return found

    def figures(self, evaluations: Iterable[Mapping[str, Any]]) -> RunFigures:
        """Return the figures of the steps so far, and of the run log's evaluations, in order."""
        last, counts, held = self._last, self._counts, list(evaluations)
        finished = sum(counts[name] for name in ("groups_trained", "groups_filtered", "groups_dropped_stale"))
        trajectories = sum(self._staleness.values())
        staleness = sum(age * count for age, count in self._staleness.items())
        busy = min(1.0, self._busy_s / last.wall_s) if last.wall_s > 0 else None
        return RunFigures(
            steps=last.version,
            wall_s=last.wall_s,
            seconds_per_step=_ratio(last.wall_s, last.version),
            dollars=last.dollars,
            **self._prices_of(last.dollars, held),
            learner_busy_share=busy,
            learner_idle_share=None if busy is None else 1.0 - busy,
            groups_filtered_share=_ratio(counts["groups_filtered"], finished),
            groups_dropped_stale_share=_ratio(counts["groups_dropped_stale"], finished),
            tokens_sampled=last.tokens_sampled,
            tokens_evaluated=sum(
                _tokens_of(line["completion_tokens_mean"], line["prompts"]) for line in held
            ),
            tokens_per_s=_ratio(last.tokens_sampled, last.wall_s),
            staleness_mean=_ratio(staleness, trajectories),
            staleness_max=max((age for age, count in self._staleness.items() if count), default=None),
            staleness_histogram=dict(sorted(self._staleness.items())),
            **counts,
            **self._clock,
            **_drafting(self._drafting.total()),
            **_rewards(held),
        )

    def _prices_of(self, dollars: float, evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not dollars:
            return {}
        rewards = [float(line["reward_mean"]) for line in evaluations] or [0.0]
        return {
            "dollars_per_step": _ratio(dollars, self._last.version),
            "dollars_per_million_tokens": _ratio(1e6 * dollars, self._counts["tokens_trained"]),
            "dollars_per_reward_point": _ratio(dollars, 100.0 * (max(rewards) - rewards[0])),
        }

    def _count(self, batch: Mapping[str, Any]) -> None:
        trained = int(batch.get("tokens", 0))
        groups, filtered = int(batch.get("groups", 0)), int(batch.get("groups_filtered", 0))
        # The mean is over every completion of these groups, so that it knows how many tokens they have.
        rewarded = _tokens_of(
            batch.get("completion_tokens_mean", 0.0), (groups + filtered) * self._group_size
        )
        found = {
            "groups_trained": groups,
            "groups_filtered": filtered,
            "groups_dropped_stale": int(batch.get("groups_dropped_stale", 0)),
            "tokens_trained": trained,
            "tokens_filtered": max(0, rewarded - trained),
            "tokens_dropped_stale": int(batch.get("tokens_dropped_stale", 0)),
        }
        for name, count in found.items():
            self._counts[name] += count
        for age, count in (batch.get("staleness_histogram") or {}).items():
            self._staleness[int(age)] = self._staleness.get(int(age), 0) + int(count)

    def _after(self, line: Mapping[str, Any]) -> VersionTotals:
        timings, last, counts = line["timings"], self._last, self._counts
        wall_s = max(last.wall_s, float(timings.get("wall_s", 0.0)))
        for name in self._clock:
            self._clock[name] = max(self._clock[name], timings.get(name, 0))
        self._busy_s += float(timings.get("train_s", 0.0))
        if timings.get("drafting"):
            self._drafting.add(DraftingStatistics(**timings["drafting"]))
        names = [name_of_worker(worker_id) for worker_id in timings.get("workers") or ()]
        names = names or [""] * self._workers  # of what an earlier version recorded
        price, at = self._config.price_of, float(timings["at"])
        rate = sum(price(name, at)[1] for name in names) + self._config.record.learner_usd_per_hour
        return VersionTotals(
            version=last.version + 1,
            tokens_sampled=sum(counts[f"tokens_{use}"] for use in ("trained", "filtered", "dropped_stale")),
            tokens_trained=counts["tokens_trained"],
            wall_s=wall_s,
            dollars=last.dollars + (wall_s - last.wall_s) * rate / _SECONDS_PER_HOUR,
            at=at,
        )


_COUNTED = (
    *("groups_trained", "groups_filtered", "groups_dropped_stale"),
    *("tokens_trained", "tokens_filtered", "tokens_dropped_stale"),
)


def figures_of(
    steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], config: RunConfig
) -> RunFigures:
    """Return a run's figures from the lines of its run log, each in order."""
    fold = FiguresFold(config)
    for line in steps:
        fold.add(line)
    return fold.figures(evaluations)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _tokens_of(mean: float, completions: int) -> int:
    return round(mean * completions)


def _drafting(statistics: DraftingStatistics | None) -> dict[str, Any]:
    if statistics is None:
        return {}
    rates = drafting_rates(statistics)
    found = {f"drafting_{name}": rates[name] for name in ("acceptance", "tokens_per_pass", "gain")}
    # A gain of 0 means that no engine compared itself yet.
    return found | {"drafting_gain": found["drafting_gain"] or None}


def _rewards(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not evaluations:
        return {}
    best, last = max(evaluations, key=lambda line: float(line["reward_mean"])), evaluations[-1]
    errors = [interval(float(line["reward_mean"]), int(line["prompts"])) for line in (best, last)]
    ahead = float(best["reward_mean"]) - float(last["reward_mean"])
    return {
        "reward_best_error": errors[0],
        "best_is_noise": best["version"] != last["version"] and ahead <= math.hypot(*errors),
        "reward_first": float(evaluations[0]["reward_mean"]),
        "reward_last": float(evaluations[-1]["reward_mean"]),
        "reward_best": float(best["reward_mean"]),
        "best_version": int(best["version"]),
    }
