"""Run figures: what a run came to, measured or predicted by its model, to compare the two."""

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.core.config import RunConfig
from antiphon.core.loop import events as e
from antiphon.core.loop.run_state import fold, new_state
from antiphon.simulator.modelled.calibration import TimedEvent
from antiphon.simulator.modelled.run import HOUR_S, Modelled, seconds_per_step, staleness_shares


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a run came to, measured or predicted."""

    seconds_per_step: float
    """Mean of the steps behind the first few."""
    staleness: dict[int, float]
    """Staleness in versions -> share of the trained completions."""
    usd: float

    def staleness_distance(self, other: "RunFigures") -> float:
        """Return the share of completions whose staleness differs, 0..1 (total variation)."""
        ages = self.staleness.keys() | other.staleness.keys()
        return sum(abs(self.staleness.get(age, 0.0) - other.staleness.get(age, 0.0)) for age in ages) / 2.0


def measured_figures(config: RunConfig, events: Sequence[TimedEvent]) -> RunFigures:
    """Return the figures of a recorded run: from its first lease to its last commit."""
    state = fold(new_state(config), (event for _, event in events))
    commits = [at for at, event in events if isinstance(event, e.StepCommitted)]
    begin_s = next(at for at, event in events if isinstance(event, e.LeaseGranted))
    workers = len({event.worker_name for _, event in events if isinstance(event, e.WorkerRegistered)})
    record = config.record
    price = record.learner_usd_per_hour + workers * record.worker_usd_per_hour
    usd = price * (commits[-1] - begin_s) / HOUR_S
    return RunFigures(seconds_per_step(commits), staleness_shares(state.staleness_histogram), usd)


def predicted_figures(done: Modelled) -> RunFigures:
    """Return the figures of a modelled run."""
    return RunFigures(seconds_per_step(done.commits_s), staleness_shares(done.staleness), done.usd)
