"""Display: what a run shows to the people who watch it, independent of terminals and connections.

The flow calls a `RunDisplay` about once a second; it never raises and never makes the run wait.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from antiphon.core.config_sections import MOST_STEPS
from antiphon.core.records import StepCommit
from antiphon.core.reporting.alarms import failing_swaps
from antiphon.core.reporting.figures import UNKNOWN, score, score_name, share
from antiphon.core.status import LearnerProgress, RunStatus, WorkerState


@dataclass(frozen=True, slots=True)
class PlaneView:
    """One plane of the loop at a glance."""

    name: str
    """rollout, reward, learner or broadcast."""
    state: str
    """What it is doing, in a few words."""
    rate: float
    """Tokens per second since the last look; 0 when it is idle or does not count tokens."""
    waits_for: str
    """What it waits for; empty while it works."""


class RunDisplay:
    """Where a run is shown; this one shows nothing."""

    def started(self, run_id: str, links: Mapping[str, str]) -> None:
        """The services are up; `links` names pages and folders to look at."""

    def status(self, status: RunStatus, planes: Mapping[str, PlaneView]) -> None:
        """Take one look, about once a second."""

    def message(self, text: str) -> None:
        """Say one sentence."""

    def stopping(self, text: str) -> None:
        """The run was interrupted; `text` says what has to end. No look follows."""

    def finished(self, lines: Sequence[str]) -> None:
        """The run is complete; `lines` say what came of it."""


class TokenRates:
    """Turns two looks at a run into tokens per second, by plane."""

    def __init__(self) -> None:
        self._tokens, self._at = 0, math.inf

    def take(self, status: RunStatus, now: float) -> dict[str, float]:
        """Return the rates since the last look; `now` is in seconds that never go back."""
        tokens, seconds = sum(w.tokens_generated for w in status.workers), now - self._at
        sampled = max(0.0, (tokens - self._tokens) / seconds) if seconds > 0 else 0.0
        self._tokens, self._at = tokens, now
        last = {} if status.last_commit is None else status.last_commit.metrics
        train_s = last.get("train_s", 0.0)
        return {
            "rollout": sampled,
            "learner": last.get("completion_tokens", 0.0) / train_s if train_s > 0 else 0.0,
        }


def planes_of(
    status: RunStatus, rates: Mapping[str, float], learner: LearnerProgress | None = None
) -> dict[str, PlaneView]:
    """Say what the planes do, from a look at the run.

    `rates`: plane -> tokens per second, where known; `learner`: what it does, where it was asked.
    """
    active = sum(worker.state is WorkerState.ACTIVE for worker in status.workers)
    joining = sum(worker.state is WorkerState.JOINING for worker in status.workers)
    workers = f"{active} worker{'s' * (active != 1)}" + (f", {joining} joining" if joining else "")
    training = status.sealed_steps > status.committed_steps
    missing = {name for worker in status.workers for name in worker.missing_abilities} - {"drafts"}
    if missing:
        workers += f", engines without {', '.join(sorted(missing))}"
    failing = [f"{w.worker_id}: {w.swap_error}" for w in failing_swaps(status)[:2]]
    views = [
        ("rollout", f"{status.groups_leased} groups at {workers}", status.waiting),
        (
            "reward",
            f"{status.groups_to_reward} to reward, {status.groups_ready} ready",
            "" if status.groups_to_reward else "finished groups",
        ),
        (
            "learner",
            f"version {status.committed_steps}" + ("" if learner is None else f", {learner.doing}"),
            "" if training else f"the batch of step {status.committed_steps}",
        ),
        ("broadcast", f"newest version {status.newest_version}", "; ".join(failing)),
    ]
    return {name: PlaneView(name, state, rates.get(name, 0.0), waits) for name, state, waits in views}


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that is said of a run at the moment."""

    label: str
    value: str
    unit: str = ""

    @property
    def text(self) -> str:
        return f"{self.value} {self.unit}".rstrip()


def status_rows(status: RunStatus) -> list[Row]:
    """Say how a run goes; what did not happen has no row."""
    commit, scores = status.last_commit, status.scores
    of_step = "" if commit is None else f" (step {commit.step})"
    planned = f" of {status.steps_total}" if status.steps_total < MOST_STEPS else ""  # a client decides
    within = status.reward_range
    held_out = score(scores[-1].reward_mean if scores else None, within)
    if len(scores) > 1:
        held_out += f", from {score(scores[0].reward_mean, within)} at version {scores[0].version}"
    rows = [
        Row("step", f"{status.committed_steps}{planned}", "steps"),
        Row("reward", score(reward_of(commit), within) + of_step),
        Row(f"held-out {score_name(within)}", held_out),
        Row("staleness", staleness_words(status.staleness_histogram), "in all steps"),
    ]
    if drafts := drafting_words(commit):
        rows.append(Row("drafts", drafts + of_step))
    rows += [
        Row("voided", f"batch {batch.digest[:12]} of step {batch.step}, by {batch.operator}: {batch.reason}")
        for batch in status.voided
    ]
    capacity = "" if status.capacity is None else status.capacity.describe()
    workers = ", ".join(f"{w.worker_id} ({w.state})" for w in status.workers)
    said = {
        "not scored": unscored_words(status),
        "run-ahead": status.run_ahead,
        "capacity": capacity,
        "lease order": status.order,
        "paused": status.paused_reason,
        "workers": workers or "none",
        "waiting for": status.waiting or "nothing",
    }
    return [*rows, *(Row(label, value) for label, value in said.items() if value)]


def staleness_words(histogram: Mapping[int, int]) -> str:
    """Say how stale the trajectories were: mean, maximum and the share of each staleness.

    >>> staleness_words({0: 1, 2: 3})
    'mean 1.50, max 2   0: 25%  2: 75%'
    """
    total = sum(histogram.values())
    if not total:
        return UNKNOWN
    mean = sum(s * n for s, n in histogram.items()) / total
    shares = "  ".join(f"{s}: {n / total:.0%}" for s, n in sorted(histogram.items()))
    return f"mean {mean:.2f}, max {max(histogram)}   {shares}"


def unscored_words(status: RunStatus) -> str:
    """Say how many answers could not be scored, and why the last one; "" where all could."""
    if not status.trajectories_failed:
        return ""
    return (
        f"{status.trajectories_failed} answers could not be scored, which train nothing and count as "
        f"{status.reward_range[0]:g} in held-out scores; the last: {status.last_failure}"
    )


def reward_of(commit: StepCommit | None) -> float | None:
    """Return the mean training reward of a step, or None when it reported none."""
    return None if commit is None else commit.metrics.get("reward_mean")


RESTING = 0.05
"""A smaller share of drafted tokens comes from probes: the gate is closed, and drafts cost nothing."""


def drafting_words(commit: StepCommit | None) -> str:
    """Say in a few words what drafting did for the batch of a step; "" where no engine drafted.

    >>> drafting_words(StepCommit(0, 1, "", "", {"drafting_acceptance": 0.625, "drafting_coverage": 0.5,
    ...     "drafting_tokens_per_pass": 2.25, "drafting_gain": 1.5}))
    '62.5% of drafts right, 2.25 tokens per pass, 1.50x as fast as undrafted'
    >>> drafting_words(StepCommit(0, 1, "", "", {"drafting_acceptance": 0.0, "drafting_coverage": 0.01,
    ...     "drafting_gain": 0.75}))
    'drafts rest, 0.75x as fast as undrafted when tried'
    """
    metrics = {} if commit is None else commit.metrics
    if "drafting_acceptance" not in metrics:
        return ""
    if metrics.get("drafting_coverage", 1.0) < RESTING:
        tried = metrics.get("drafting_gain", 0.0)
        return f"drafts rest, {tried:.2f}x as fast as undrafted when tried" if tried > 0 else "drafts rest"
    said = [
        f"{share(metrics['drafting_acceptance'])} of drafts right",
        f"{metrics.get('drafting_tokens_per_pass', 0.0):.2f} tokens per pass",
    ]
    gain = metrics.get("drafting_gain", 0.0)
    return ", ".join([*said, f"{gain:.2f}x as fast as undrafted"] if gain > 0 else said)
