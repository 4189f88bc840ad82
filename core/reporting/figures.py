"""Figures: what a run says of itself in numbers, each defined once; every view shows these and no others.

They follow from the lines of the run log (`lineage.run_log`), which hold counts of each step and the
run's clock at its commit, and from the configuration. So they are the same at any later time, and for a
run that was interrupted and continued. docs/concepts/figures.md has the table of them.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from antiphon.core.config import RunConfig
from antiphon.core.drafting.statistics import StatisticsSum, drafting_rates
from antiphon.core.messages import UNIT_RANGE, RewardRange
from antiphon.core.records import DraftingStatistics
from antiphon.core.trust.worker_names import name_of_worker

_SECONDS_PER_HOUR = 3600.0

UNKNOWN = "–"
"""What stands where a figure is not known."""


_S, _SHARE, _COUNT, _TWO = "{:,.1f} s", "{:.1%}", "{:,.0f}", "{:,.2f}"
"""How values of one kind are written."""
_SCORE = "{}"
"""Of a figure in the unit of rewards, which `score` writes."""


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

    def write(self, value: float, within: RewardRange = UNIT_RANGE) -> str:
        """Return the value as text; `within` is the range of rewards."""
        return self.form.format(score(value, within) if self.unit == "reward" else value)

    def title(self, within: RewardRange) -> str:
        """Return the label for a run of this range of rewards."""
        return self.label.replace("pass@1", score_name(within))


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
        "pass@1 before", "reward", _SCORE, "held-out reward of the first evaluated version"
    )
    reward_last: float | None = _figure(
        "pass@1 after", "reward", _SCORE, "held-out reward of the last evaluated version"
    )
    reward_best: float | None = _figure(
        "best pass@1", "reward", _SCORE, "best held-out reward of an evaluated version"
    )
    reward_best_error: float | None = _figure(
        "best pass@1, 95% interval", "reward", "± {}", "half of the 95% interval of reward_best"
    )
    best_version: int | None = None
    """The oldest version that scored `reward_best`."""
    best_is_noise: bool = False
    """The last version's score differs from it by no more than chance may."""
    staleness_histogram: dict[int, int] = field(default_factory=dict)
    """Staleness in versions -> trajectories trained on."""
    reward_range: RewardRange = UNIT_RANGE
    """Of the environment."""

    def text(self, name: str) -> str:
        """Return a figure as every view writes it, with its unit.

        >>> RunFigures(wall_s=31.43, learner_idle_share=0.3333).text("learner_idle_share")
        '33.3%'
        """
        value = getattr(self, name)
        return UNKNOWN if value is None else _BY_NAME[name].write(value, self.reward_range)

    def rows(self) -> list[tuple[str, str]]:
        """Return (label, text) of every figure that can be said, in the order of `FIGURES`."""
        found = [f for f in FIGURES if getattr(self, f.name) is not None]
        return [(f.title(self.reward_range), self.text(f.name)) for f in found]

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
                f"held-out {score_name(self.reward_range)} went from "
                "{reward_first} to {reward_last}; the best is {reward_best} "
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
        found = dataclasses.asdict(self) | {"staleness_histogram": histogram}
        return {k: v for k, v in found.items() if k != "reward_range" or v != UNIT_RANGE}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Rebuild what `plain` returned."""
        histogram = {int(k): v for k, v in plain["staleness_histogram"].items()}
        return cls(**{**plain, "staleness_histogram": histogram, "reward_range": range_of_line(plain)})


FIGURES: tuple[Figure, ...] = tuple(
    dataclasses.replace(x.metadata["figure"], name=x.name)
    for x in dataclasses.fields(RunFigures)
    if "figure" in x.metadata
)
"""Every figure, in the order in which tables have them."""
_BY_NAME = {figure.name: figure for figure in FIGURES}


def share(value: float | None) -> str:
    """Write a share, as every view does.

    >>> share(0.625), share(None)
    ('62.5%', '–')
    """
    return UNKNOWN if value is None else f"{value:.1%}"


def score(value: float | None, within: RewardRange) -> str:
    """Write a reward or a mean of rewards, as every view does: a share of 1, or a number of another range.

    >>> score(0.625, (0.0, 1.0)), score(-12.5, (-100.0, 100.0)), score(None, (0.0, 1.0))
    ('62.5%', '-12.5', '–')
    """
    return share(value) if value is None or within == UNIT_RANGE else f"{value:,.4g}"


def score_name(within: RewardRange) -> str:
    """Return what a held-out score is called: pass@1 says something of shares alone."""
    return "pass@1" if within == UNIT_RANGE else "reward"


def interval(mean: float, count: int, within: RewardRange = UNIT_RANGE) -> float:
    """Return the half-width of a 95% interval of a mean of `count` values of a range, at most.

    >>> round(interval(0.5, 256), 3), round(interval(0.0, 256, (-1.0, 1.0)), 3)
    (0.061, 0.122)
    """
    low, high = within
    return 1.96 * math.sqrt(max((mean - low) * (high - mean), 0.0) / count) if count else 0.0


def range_of_line(evaluation: Mapping[str, Any]) -> RewardRange:
    """Return the range of rewards by a line of the run log, which says it where it is not 0..1."""
    low, high = evaluation.get("reward_range", UNIT_RANGE)
    return low, high


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


def next_totals(last: VersionTotals, line: Mapping[str, Any], config: RunConfig) -> VersionTotals:
    """Return what a step's version had cost, by its line of the run log and the version before."""
    counts, timings = _counts(line["batch"], config), line["timings"]
    wall_s, at = max(last.wall_s, float(timings.get("wall_s", 0.0))), float(timings["at"])
    names = [name_of_worker(worker_id) for worker_id in timings.get("workers") or ()]
    names = names or [""] * config.rollout.workers  # of what an earlier version recorded
    rate = sum(config.price_of(name, at)[1] for name in names) + config.record.learner_usd_per_hour
    sampled = sum(counts[f"tokens_{use}"] for use in ("trained", "filtered", "dropped_stale"))
    return VersionTotals(
        version=last.version + 1,
        tokens_sampled=last.tokens_sampled + sampled,
        tokens_trained=last.tokens_trained + counts["tokens_trained"],
        wall_s=wall_s,
        dollars=last.dollars + (wall_s - last.wall_s) * rate / _SECONDS_PER_HOUR,
        at=at,
    )


def totals_of(steps: Sequence[Mapping[str, Any]], config: RunConfig) -> list[VersionTotals]:
    """Return what each version had cost by the run log's lines, in order, version 0 first; [] without steps.

    A line after a missing one counts once that is there.
    """
    totals = [VersionTotals(0, at=float(steps[0]["timings"]["at"]))] if steps else []
    for step, line in enumerate(steps):
        if int(line["step"]) != step:
            break
        totals.append(next_totals(totals[-1], line, config))
    return totals


def figures_of(
    steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], config: RunConfig
) -> RunFigures:
    """Return a run's figures from the lines of its run log, each in order."""
    *_, last = [VersionTotals(0), *totals_of(steps, config)]
    counts, staleness, drafting, busy_s = Counter[str](), Counter[int](), StatisticsSum(), 0.0
    clock: dict[str, Any] = {"startup_s": 0.0, "break_s": 0.0, "breaks": 0}
    for line in steps[: last.version]:
        batch, timings = line["batch"] or {}, line["timings"]
        counts.update(_counts(batch, config))
        staleness.update({int(age): int(n) for age, n in batch.get("staleness_histogram", {}).items()})
        clock = {name: max(known, timings.get(name, 0)) for name, known in clock.items()}
        busy_s += float(timings.get("train_s", 0.0))
        if timings.get("drafting"):
            drafting.add(DraftingStatistics(**timings["drafting"]))
    finished = sum(counts[name] for name in ("groups_trained", "groups_filtered", "groups_dropped_stale"))
    busy = min(1.0, busy_s / last.wall_s) if last.wall_s > 0 else None
    rewards = [float(line["reward_mean"]) for line in evaluations] or [0.0]
    return RunFigures(
        steps=last.version,
        wall_s=last.wall_s,
        seconds_per_step=_ratio(last.wall_s, last.version),
        dollars=last.dollars,
        dollars_per_step=_ratio(last.dollars, last.version) or None,
        dollars_per_million_tokens=_ratio(1e6 * last.dollars, counts["tokens_trained"]) or None,
        dollars_per_reward_point=_ratio(last.dollars, 100.0 * (max(rewards) - rewards[0])) or None,
        learner_busy_share=busy,
        learner_idle_share=None if busy is None else 1.0 - busy,
        groups_filtered_share=_ratio(counts["groups_filtered"], finished),
        groups_dropped_stale_share=_ratio(counts["groups_dropped_stale"], finished),
        tokens_sampled=last.tokens_sampled,
        tokens_evaluated=sum(
            round(e["completion_tokens_mean"] * e["prompts"] * e.get("samples", 1)) for e in evaluations
        ),
        tokens_per_s=_ratio(last.tokens_sampled, last.wall_s),
        staleness_mean=_ratio(sum(age * n for age, n in staleness.items()), staleness.total()),
        staleness_max=max((age for age, n in staleness.items() if n), default=None),
        staleness_histogram=dict(sorted(staleness.items())),
        **dict[str, Any](counts),
        **clock,
        **_drafting(drafting.total()),
        **_rewards(evaluations),
    )


def _counts(batch: Mapping[str, Any] | None, config: RunConfig) -> dict[str, int]:
    """Return groups and tokens of a batch by what became of them."""
    batch = batch or {}
    trained, groups, filtered = (int(batch.get(name, 0)) for name in ("tokens", "groups", "groups_filtered"))
    # The mean is over every completion of these groups, so that it knows how many tokens they have.
    completions = (groups + filtered) * config.loop.group_size
    rewarded = round(batch.get("completion_tokens_mean", 0.0) * completions)
    return {
        "groups_trained": groups,
        "groups_filtered": filtered,
        "groups_dropped_stale": int(batch.get("groups_dropped_stale", 0)),
        "tokens_trained": trained,
        "tokens_filtered": max(0, rewarded - trained),
        "tokens_dropped_stale": int(batch.get("tokens_dropped_stale", 0)),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


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
    within = range_of_line(last)
    errors = [interval(float(line["reward_mean"]), int(line["prompts"]), within) for line in (best, last)]
    ahead = float(best["reward_mean"]) - float(last["reward_mean"])
    return {
        "reward_best_error": errors[0],
        "best_is_noise": best["version"] != last["version"] and ahead <= math.hypot(*errors),
        "reward_first": float(evaluations[0]["reward_mean"]),
        "reward_last": float(evaluations[-1]["reward_mean"]),
        "reward_best": float(best["reward_mean"]),
        "best_version": int(best["version"]),
        "reward_range": within,
    }
