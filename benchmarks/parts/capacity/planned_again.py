"""Planned again: runs of production's decisions in virtual time, and what plans by their records say.

A run is walked with imposed lengths, rewards and paces (`simulator.modelled`) and recorded as a run on a
machine is: what each batch had, and what the run measured of itself. The planner gets that record alone; its
seconds per step are compared with the run's own.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from antiphon.core.capacity.measured import Measured, measure
from antiphon.core.capacity.offers import build_offers
from antiphon.core.capacity.planner import Assessment, Planner
from antiphon.core.config import RunConfig, build_config
from antiphon.core.loop import events as e
from antiphon.simulator.modelled.calibration import Calibration, SeenGroup
from antiphon.simulator.modelled.prediction import predicted_figures
from antiphon.simulator.modelled.run import ModelledRun

PROMPTS, GROUP_SIZE = 16, 4
"""Of one step."""
SEEN = 480
"""Groups whose lengths and rewards a run draws from."""
TRAIN_S = 10.0
MEAN_TOKENS = 40.0


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run that is walked, recorded and planned again."""

    filter: str = "drop"
    varied: float = 0.6
    """Share of the groups whose rewards differ."""
    max_staleness: int = 2
    interval: int = 1
    supply: float = 1.0
    """Of full workers, over what sampling R / a completions in T takes."""
    broadcast: float = 0.3
    """T_b / T."""
    places: float = 1.0
    """Completions that are sampled at once, over those of a batch."""
    spread: float = 0.3
    """Standard deviation of the logarithm of the lengths."""
    workers: int = 2
    steps: int = 60
    seed: int = 0

    def config(self) -> RunConfig:
        """Return the run's configuration."""
        return build_config(
            {
                "run": {"steps": self.steps, "seed": self.seed},
                "environment": {"train_size": SEEN, "heldout_size": 1},
                "evaluation": {"prompts": 1, "interval": 0},
                "loop": {
                    "max_staleness": self.max_staleness,
                    "publish_interval": self.interval,
                    "prompts_per_step": PROMPTS,
                    "group_size": GROUP_SIZE,
                    "filter": self.filter,
                    "refill_limit": 4.0,
                },
                "sampling": {"max_tokens": 8 * round(MEAN_TOKENS)},
            }
        )

    def calibration(self) -> Calibration:
        """Return how fast everything is: half of a full worker's seconds per token are due to its load."""
        random = np.random.default_rng([self.seed, 1])
        lengths = np.exp(self.spread * random.standard_normal((SEEN, GROUP_SIZE)) - self.spread**2 / 2.0)
        tokens = np.clip(np.rint(MEAN_TOKENS * lengths), 1, 8 * MEAN_TOKENS).astype(int).tolist()
        varied = random.permutation(SEEN) < round(self.varied * SEEN)
        groups = max(1, round(self.places * PROMPTS / self.workers))
        sampled = PROMPTS * GROUP_SIZE / (self.varied if self.filter == "refill" else 1.0)
        full = groups * GROUP_SIZE
        token_s = full * self.workers * TRAIN_S / (self.supply * sampled * MEAN_TOKENS)
        return Calibration(
            alpha_s=token_s / 2.0,
            beta_s=token_s / 2.0 / full,
            concurrent_groups=groups,
            learner_s=TRAIN_S,
            learner_fixed_share=1.0,
            step_tokens=1.0,
            broadcast_s=self.broadcast * TRAIN_S,
            groups=tuple(
                SeenGroup(prompt=number, tokens=tuple(counts), reward_s=0.2, varied=bool(varied[number]))
                for number, counts in enumerate(tokens)
            ),
        )

    def walk(self) -> "Recorded":
        """Walk the run and return its record."""
        run = ModelledRun(self.config(), self.calibration(), self.workers, self.seed, keep=True)
        done = run.run()
        batches = [event for _, event in run.events or [] if isinstance(event, e.BatchSealed)]
        lines = [
            _line(batch, at_s, self.workers, {} if plan is None else plan.numbers())
            for batch, at_s, plan in zip(batches, done.commits_s, run.plans, strict=False)
        ]
        return Recorded(self, predicted_figures(done).seconds_per_step, lines)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run that was walked."""

    run: PlannedRun
    step_s: float
    """Its own seconds per step."""
    lines: list[dict[str, Any]]
    """As in its run log."""

    def measured(self) -> Measured:
        """Return what its record says."""
        return measure(self.lines, self.run.config().loop)

    def planned(self) -> Assessment:
        """Return what the planner says of the same run."""
        offers = build_offers(
            {"learner": {"usd_per_hour": 0.0}, "workers": [{"name": "worker", "usd_per_hour": 0.0}]}
        )
        planner = Planner(self.run.config(), offers, self.measured())
        return planner.assess({"worker": self.run.workers}, interval=self.run.interval)

    @property
    def error(self) -> float:
        """Return planned over own seconds per step, less 1; NaN where the run did not get far enough."""
        return self.planned().pace.step_s / self.step_s - 1.0 if self.step_s > 0.0 else math.nan


def _line(batch: e.BatchSealed, at_s: float, workers: int, plan: dict[str, float]) -> dict[str, Any]:
    names = {f"worker-{number}": 1 for number in range(workers)}
    return {
        "batch": {
            "trajectories": batch.trajectories,
            "groups_filtered": batch.groups_filtered,
            "groups_dropped_stale": batch.groups_dropped_stale,
            "completion_tokens_mean": batch.completion_tokens_mean,
        },
        "timings": {"train_s": TRAIN_S, "wall_s": at_s, "workers": names, **plan},
    }


FILTERS = [
    PlannedRun(name, varied, max_staleness=bound, supply=supply, spread=spread, seed=number)
    for number, (name, varied) in enumerate([("none", 1.0), ("drop", 0.5), ("refill", 0.5), ("refill", 0.8)])
    for bound in (0, 2, 6)
    for supply, spread in ((0.7, 0.3), (1.0, 0.3), (1.6, 0.3), (1.0, 0.8))
]
"""Runs of each filter: bound by sampling, by training and by the bound, with short and long tails."""
SMALL = [
    PlannedRun("drop", 0.8, bound, interval, supply, broadcast)
    for interval in (2, 3, 4)
    for bound in range(interval - 1, 2 * interval - 1)
    for supply in (0.9, 1.1)
    for broadcast in (0.3, 1.0)
]
"""Runs with S from kappa - 1 to 2 kappa - 2 near the edge of the supply."""
