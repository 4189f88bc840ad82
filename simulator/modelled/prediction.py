"""Prediction: what the calibration of a recorded run says of the same job in another setting."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from antiphon.core.config import RunConfig
from antiphon.core.loop import events as e
from antiphon.core.loop.run_state import fold, new_state
from antiphon.simulator.modelled.calibration import Calibration, TimedEvent, calibrate
from antiphon.simulator.modelled.outcome import Modelled
from antiphon.simulator.modelled.run import HOUR_S, ModelledRun

SKIPPED = 4
"""Steps at the beginning that do not count: the loop fills."""
_ROUNDS = 4
_HALVINGS = 8
_LEAST_CORES = 0.25


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a run came to, measured or predicted."""

    seconds_per_step: float
    """Mean of the steps behind the first `SKIPPED`."""
    staleness: dict[int, float]
    """Staleness in versions -> share of the trained completions."""
    usd: float

    def staleness_distance(self, other: "RunFigures") -> float:
        """Return the share of completions whose staleness differs, 0..1 (total variation)."""
        ages = self.staleness.keys() | other.staleness.keys()
        return sum(abs(self.staleness.get(age, 0.0) - other.staleness.get(age, 0.0)) for age in ages) / 2.0


def seconds_per_step(commits_s: Sequence[float]) -> float:
    """Return the mean of the seconds between successive commits; NaN of a run too short for one."""
    counted = commits_s[min(SKIPPED, max(0, len(commits_s) - 2)) :]
    return (counted[-1] - counted[0]) / (len(counted) - 1) if len(counted) > 1 else math.nan


def measured_figures(config: RunConfig, events: Sequence[TimedEvent]) -> RunFigures:
    """Return the figures of a recorded run: from its first lease to its last commit."""
    state = fold(new_state(config), (event for _, event in events))
    commits = [at for at, event in events if isinstance(event, e.StepCommitted)]
    begin_s = next(at for at, event in events if isinstance(event, e.LeaseGranted))
    workers = len({event.worker_name for _, event in events if isinstance(event, e.WorkerRegistered)})
    record = config.record
    price = record.learner_usd_per_hour + workers * record.worker_usd_per_hour
    usd = price * (commits[-1] - begin_s) / HOUR_S
    return RunFigures(seconds_per_step(commits), _shares(state.staleness_histogram), usd)


def predicted_figures(done: Modelled) -> RunFigures:
    """Return the figures of a modelled run."""
    return RunFigures(seconds_per_step(done.commits_s), _shares(done.staleness), done.usd)


def figure_lines(done: Modelled) -> list[str]:
    """Say what a modelled run came to, for a terminal."""
    found = predicted_figures(done)
    ages = ", ".join(f"{age}: {share:.1%}" for age, share in found.staleness.items())
    per_million = f", ${done.usd / done.tokens * 1e6:,.3f} per million accepted tokens" if done.usd else ""
    return [
        f"a step           {found.seconds_per_step:,.2f} s; the learner waits {done.idle_share:.1%} of it",
        f"the run          {len(done.commits_s)} steps in {done.seconds / HOUR_S:,.2f} h for ${done.usd:,.2f}"
        f"{per_million}",
        f"staleness        {ages}",
        f"digest           {done.digest}",
    ]


def _shares(histogram: dict[int, int]) -> dict[int, float]:
    total = sum(histogram.values())
    return {age: count / total for age, count in sorted(histogram.items()) if count}


def calibrate_shared(
    config: RunConfig, events: Sequence[TimedEvent], workers: int, shared_cores: float, source: str = ""
) -> Calibration:
    """Return the calibration of a run whose workers and learner shared the cores of one machine.

    What was measured is slower than each is alone. So the run itself is modelled, and what is calibrated is
    corrected until the modelled run takes the seconds per lease and per learner step that were measured.

    Args:
        config: of the run.
        events: of its journal.
        workers: that it had.
        shared_cores: of the machine.
        source: what reports call the run.
    """
    measured = calibrate(config, events, source)
    found = measured.model_copy(update={"shared_cores": shared_cores})
    for _ in range(_ROUNDS):
        run = ModelledRun(config, found, workers, keep=True)
        run.run()
        rows = run.events or []
        pace = _lease_s(events) / _lease_s(rows)
        learner = measured.learner_s / calibrate(config, rows).learner_s
        found = found.model_copy(
            update={
                "start_s": found.start_s * pace,
                "alpha_s": found.alpha_s * pace,
                "beta_s": found.beta_s * pace,
                "learner_s": found.learner_s * learner,
            }
        )
    return found


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run whose parts shared the cores of one machine."""

    config: RunConfig
    events: Sequence[TimedEvent]
    """Of its journal."""
    workers: int


def calibrate_crowded(sparse: Recorded, crowded: Recorded, cores: float, source: str = "") -> Calibration:
    """Return the calibration of two runs on one machine, which says how many cores its engines really have.

    What a machine loses when more processes are busy, to all that is neither engine nor learner and to
    caches that they share, shows only where runs crowd it differently. So the paces are those of the
    crowded run, and the cores those with which the model also takes the sparse run's seconds per lease.

    Args:
        sparse: the run with fewer workers.
        crowded: the one with more.
        cores: of the machine; no more are found.
        source: what reports call the runs.
    """
    wanted_s, low, high = _lease_s(sparse.events), _LEAST_CORES, cores
    for _ in range(_HALVINGS):
        found = (low + high) / 2.0
        known = calibrate_shared(crowded.config, crowded.events, crowded.workers, found, source)
        run = ModelledRun(sparse.config, known, sparse.workers, keep=True)
        run.run()
        if _lease_s(run.events or []) > wanted_s:
            high = found
        else:
            low = found
    return calibrate_shared(crowded.config, crowded.events, crowded.workers, (low + high) / 2.0, source)


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
