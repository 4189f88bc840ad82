"""Provisioning: the supply at which a learner really stops waiting, against the rule of the capacity model.

Real processes: production's coordinator, reward service, learner loop and two workers over gRPC. Engines and
trainer are stand-ins that take the seconds that are imposed on them, so that nothing depends on how fast the
machine is. First some runs measure what the model is given, as a plan does: T, the seconds of a learner step
with its commit, where completions abound; and, for each rate, how long a place of a worker is empty between
two groups where the learner never holds it up. Then each cell, a time of a broadcast, an acceptance and a
mode (workers pause for a broadcast, or sample on while it arrives), is run with several supplies, as shares
of the rule's.

Below the knee the seconds per step are fitted by A / supply + B, and the observed knee is where that line
meets T. `median_error` and `worst_error` are |rule / knee - 1|; `idle_at_rule` is the learner's largest idle
share over the cells with the rule's own supply, `rows` has every cell.

Then runs of production's decisions in virtual time are planned again by their own records (`PlannedRun`): of
each filter, and with S from kappa - 1 to 2 kappa - 2 near the supply's edge. `filter_error_worst` and
`small_s_error_worst` are |planned / own seconds per step - 1|, `planned` has every run.
The exit status is 1 when a limit of `LIMITS` is exceeded.

    .venv/bin/python benchmarks/provisioning.py
    .venv/bin/python benchmarks/provisioning.py --cells 2 --steps 12
"""

import argparse
import asyncio
import math
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from antiphon.benchmarks.parts.imposed_worker import MEAN_TOKENS, PROMPTS, WorkerOrder, is_accepted
from antiphon.benchmarks.parts.results import above, benchmark_parser, execute, finish
from antiphon.benchmarks.parts.run_figures import predicted_figures
from antiphon.benchmarks.parts.served_run import served_run
from antiphon.core.capacity.measured import Measured
from antiphon.core.capacity.measured import measure as measure_record
from antiphon.core.capacity.model import LoopShape, least_staleness, required_supply
from antiphon.core.capacity.offers import build_offers
from antiphon.core.capacity.planner import Assessment, Planner
from antiphon.core.config import RunConfig, build_config
from antiphon.core.loop import events as e
from antiphon.core.seeds import derive_seed
from antiphon.environments.environment import Problem
from antiphon.simulator.campaign import mute_logs
from antiphon.simulator.modelled.calibration import Calibration, SeenGroup
from antiphon.simulator.modelled.run import ModelledRun
from antiphon.simulator.standins.engines import ArithmeticEnvironment

PLANNED_PROMPTS, PLANNED_SAMPLES = 16, 4
"""Groups of a step that is planned again, and completions of each."""
SEEN = 480
"""Groups whose lengths and rewards a run draws from."""
TRAIN_S = 10.0


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
                    "prompts_per_step": PLANNED_PROMPTS,
                    "group_size": PLANNED_SAMPLES,
                    "filter": self.filter,
                    "refill_limit": 4.0,
                },
                "sampling": {"max_tokens": 8 * round(MEAN_TOKENS)},
            }
        )

    def calibration(self) -> Calibration:
        """Return how fast everything is: half of a full worker's seconds per token are due to its load."""
        random = np.random.default_rng([self.seed, 1])
        lengths = np.exp(self.spread * random.standard_normal((SEEN, PLANNED_SAMPLES)) - self.spread**2 / 2.0)
        tokens = np.clip(np.rint(MEAN_TOKENS * lengths), 1, 8 * MEAN_TOKENS).astype(int).tolist()
        varied = random.permutation(SEEN) < round(self.varied * SEEN)
        groups = max(1, round(self.places * PLANNED_PROMPTS / self.workers))
        sampled = PLANNED_PROMPTS * PLANNED_SAMPLES / (self.varied if self.filter == "refill" else 1.0)
        full = groups * PLANNED_SAMPLES
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
        return measure_record(self.lines, self.run.config().loop)

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


WORKERS = 2
PLACES = 4
"""Groups that a worker samples at once."""
GROUPS, GROUP_SIZE = 8, 2
"""Of one learner step."""
SKIPPED = 5
"""Steps at the beginning that do not count: the loop fills."""
BLOCK = 10
"""Steps whose mean counts as one value; the median of these values is taken. Lengths and acceptance repeat
after 20 prompts, of which a half or all are trained, and an interval has one or two steps: all end with 10
steps. Fewer steps are one block. Blocks of 6, with half of the groups filtered, had 88 groups or 98, and the
median was 8% off."""


@dataclass(frozen=True, slots=True)
class SupplyRun:
    """One run of the grid."""

    shape: LoopShape
    """Its `train_s` is what the learner sleeps; what a step takes beside it is measured."""
    interval: int
    supply: float
    """Completions per second of all workers."""
    steps: int
    between_s: float = 0.0
    """Seconds from the last token of a group until its place samples again, as measured."""
    headroom: int = 0
    """Versions by which the staleness bound exceeds S_min."""

    def config(self) -> RunConfig:
        """Return the run's configuration."""
        return build_config(
            {
                "run": {"name": "supply", "steps": self.steps + SKIPPED},
                "environment": {"train_size": PROMPTS, "heldout_size": 1},
                "evaluation": {"prompts": 1, "interval": 0},
                "loop": {
                    "max_staleness": least_staleness(self.shape) + self.interval - 1 + self.headroom,
                    "publish_interval": self.interval,
                    "prompts_per_step": GROUPS,
                    "group_size": GROUP_SIZE,
                    "filter": "refill",
                    "run_ahead": "bound",
                },
                "sampling": {"max_tokens": 2 * MEAN_TOKENS},
                "rollout": {"concurrent_groups": PLACES},
                "learner": {"checkpoint_interval": 1000},
                "coordinator": {"speculation": 0.0},
                "drafting": {"enabled": False},
            }
        )

    def orders(self) -> list[WorkerOrder]:
        """Return how the workers sample."""
        group_s = WORKERS * PLACES * GROUP_SIZE / self.supply
        if group_s <= self.between_s:
            raise SystemExit(f"{self.supply:.3g} completions/s cannot be sampled here; give a longer --train")
        step_s, shape = (group_s - self.between_s) / MEAN_TOKENS, self.shape
        return [
            WorkerOrder(
                f"w{number}", step_s, lengths="even", broadcast_s=shape.broadcast_s, pauses=shape.pauses
            )
            for number in range(WORKERS)
        ]


class FilteringEnvironment(ArithmeticEnvironment):
    """Rewards that differ in a given share of the groups."""

    def __init__(self, config: RunConfig, acceptance: float) -> None:
        super().__init__(config, 1)
        self._acceptance = acceptance

    def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        """Return a reward of each completion's own where the group is to be accepted, else zeros."""
        index = int(problem.key.rpartition("-")[2])
        accepted = is_accepted(index, self._acceptance)
        return [accepted * (derive_seed("reward", text) % 10_007) / 10_007 for text in completions]


async def seconds_per_step(run: SupplyRun, folder: Path, limit_s: float) -> float:
    """Run to the last step and return the seconds from one commit to the next, the median over blocks.

    Raises:
        TimeoutError: when that takes longer than `limit_s` seconds.
    """
    config = run.config()
    environment = FilteringEnvironment(config, run.shape.acceptance)
    async with served_run(config, folder, run.shape.train_s, environment) as served:
        await served.start(run.orders())
        async with asyncio.timeout(limit_s):
            await served.flow.run()
        events = await served.events()
    commits = [row.at for row in events if row.kind == "step.committed"][SKIPPED - 1 :]
    block = min(BLOCK, run.steps)
    return median(
        (end - begin) / block for begin, end in zip(commits[::block], commits[block::block], strict=False)
    )


COMPLETIONS = GROUPS * GROUP_SIZE
PLACES_IN_ALL = WORKERS * PLACES * GROUP_SIZE
"""Completions that are sampled at once."""
CELLS = [
    (broadcast, interval, acceptance, pauses)
    for broadcast, interval in ((0.25, 1), (0.75, 2))
    for acceptance in (1.0, 0.5)
    for pauses in (False, True)
]
"""Broadcast over training, publish interval, acceptance, whether workers pause."""
BELOW = (0.6, 0.9)
"""Supplies at which the learner waits, as shares of the rule's: far apart, and one of them near the knee, so
that a line through both says where that is."""
ABUNDANT = 3.0
AT_ONCE = 2
"""Cells that run side by side; they sleep."""
LIMITS = {
    "median_error": 0.05,
    "worst_error": 0.10,
    "idle_at_rule": 0.02,
    "planned_error_median": 0.05,
    "filter_error_worst": 0.10,
    "small_s_error_worst": 0.10,
}


def main() -> int:
    """Measure every cell and check the limits."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--train", type=float, default=1.2, help="seconds that the learner sleeps in a step")
    parser.add_argument("--steps", type=int, default=30, help="learner steps that count")
    parser.add_argument("--cells", type=int, default=len(CELLS), help="how many of the cells")
    parser.add_argument("--planned", type=int, help="how many runs of each kind are planned again")
    args = parser.parse_args()
    mute_logs()
    with tempfile.TemporaryDirectory(prefix="antiphon-provisioning-") as folder:
        report, problems = measure(args, Path(folder))
    return finish(report, record=args.record, at_size=problems)


@dataclass(frozen=True, slots=True)
class Site:
    """What the runs of all cells have in common."""

    train: float
    """Seconds that the learner sleeps in a step."""
    steps: int
    folder: Path

    def step_s(self, label: str, run: SupplyRun) -> float:
        """Run once, in a folder of its own, and return the seconds per step."""
        limit_s = 60.0 + 10.0 * self.train * run.steps
        return asyncio.run(seconds_per_step(run, self.folder / label, limit_s))

    def shape(self, **fields: Any) -> LoopShape:
        """Return a step that is broadcast at once, with some fields replaced."""
        return replace(LoopShape(COMPLETIONS, self.train, 0.0, self.train), **fields)


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the report, and what is above its limit."""
    site = Site(args.train, args.steps, folder)
    abundant = ABUNDANT * COMPLETIONS / args.train
    train_s = site.step_s("train", SupplyRun(site.shape(), 1, abundant, args.steps, headroom=1))
    print(f"a learner step takes {train_s:.3f} s", flush=True)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(AT_ONCE, context, initializer=mute_logs) as pool:
        rows = list(pool.map(partial(measure_cell, site, train_s), range(args.cells)))
        filters, small = (list(pool.map(plan_again, runs[: args.planned])) for runs in (FILTERS, SMALL))
    errors = [abs(row["error"]) for row in rows]
    report: dict[str, Any] = {
        "median_error": round(median(errors), 4),
        "worst_error": max(errors),
        "idle_at_rule": max(row["idle_at_rule"] for row in rows),
        "train_seconds": round(train_s, 4),
        "planned_error_median": median(abs(row["error"]) for row in (*filters, *small)),
        "filter_error_worst": max(abs(row["error"]) for row in filters),
        "small_s_error_worst": max(abs(row["error"]) for row in small),
        "rows": rows,
        "planned": [*filters, *small],
    }
    return report, above(report, LIMITS)


def measure_cell(site: Site, train_s: float, number: int) -> dict[str, Any]:
    """Run a cell at every supply and return its row; all processes of it sleep most of the time."""
    broadcast, interval, acceptance, pauses = CELLS[number]
    known = site.shape(
        train_s=train_s, broadcast_s=broadcast * site.train, group_s=1.0, acceptance=acceptance, pauses=pauses
    )
    rule = required_supply(known, interval)
    # Little's law: what all places sample at once, at this rate.
    known = replace(known, group_s=PLACES_IN_ALL / rule)
    idle_learner = site.shape(train_s=site.train / 50.0, group_s=site.train / 50.0)
    alone = SupplyRun(idle_learner, 1, rule, site.steps, headroom=3)
    group_s = PLACES_IN_ALL * site.step_s(f"{number}-alone", alone) / COMPLETIONS
    between_s = max(0.0, group_s - PLACES_IN_ALL / rule)
    imposed = replace(known, train_s=site.train)
    measured = {
        share: site.step_s(
            f"{number}-{share}", SupplyRun(imposed, interval, share * rule, site.steps, between_s)
        )
        for share in (*BELOW, 1.0)
    }
    slope, rest = np.polyfit([1.0 / (share * rule) for share in BELOW], [measured[s] for s in BELOW], 1)
    knee = slope / (train_s - rest)
    row: dict[str, Any] = {
        "broadcast_s": known.broadcast_s,
        "publish_interval": interval,
        "acceptance": acceptance,
        "pauses": pauses,
        "between_groups_seconds": round(between_s, 4),
        "rule": round(rule, 2),
        "knee": round(float(knee), 2),
        "error": round(float(rule / knee - 1.0), 4),
        "idle_at_rule": round(max(0.0, 1.0 - train_s / measured[1.0]), 4),
        "step_seconds": {str(share): round(seconds, 4) for share, seconds in measured.items()},
    }
    print(row, flush=True)
    return row


def plan_again(run: PlannedRun) -> dict[str, Any]:
    """Walk a run, plan it by its record, and return the row."""
    recorded = run.walk()
    row = {
        **asdict(run),
        "step_seconds": round(recorded.step_s, 4),
        "planned_seconds": round(recorded.planned().pace.step_s, 4),
        "error": round(recorded.error, 4),
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    execute(main)
