"""Prediction: what the calibration of a recorded run says of the same job in another setting."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from antiphon.core.config import RunConfig
from antiphon.core.errors import InfeasibleError
from antiphon.core.loop import events as e
from antiphon.simulator.modelled.calibration import Calibration, TimedEvent, calibrate
from antiphon.simulator.modelled.run import HOUR_S, Modelled, ModelledRun

SKIPPED = 4
"""Steps at the beginning that do not count: the loop fills."""
_HALVINGS = 10
_LEAST_CORES = 0.25


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
