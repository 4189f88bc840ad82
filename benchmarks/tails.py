"""Tails: what long-tailed lengths do to the loop, with its production decisions in virtual time.

Completions are log-normal between prompts (`--sigma-prompt`) and within a group (`--sigma-sample`), cut at
`--cap` times the median; four workers, whose completions get slower the more of them run at once. The cells
cross S = 1, 2, 4, 8 with room for 1, 2 and S + 1 steps of groups at once, with a learner that is slower
or faster than the workers, and with quick and slow rewards. In each cell the production rule (groups keep
their places, run-ahead is measured) is compared with the best constant plan.

That best policy takes groups in the order of opening, as every policy must whose batches are to have the
distribution of what was opened; among those it is the fastest of all constant windows (steps ahead) and
shares of the workers' places, found by walking each of them through the same run. What run-ahead needs is
the least mean staleness of the constant plans within 2% of it.

The last line is one JSON object: shares and errors are fractions; `first_batches_worst` and
`length_bias_worst` are |mean length of the first three batches, of all trained / of all opened - 1|. The exit
status is 1 when a limit of `LIMITS` is exceeded in a cell.

    .venv/bin/python benchmarks/tails.py
    .venv/bin/python benchmarks/tails.py --sigma-prompt 0.4 --sigma-sample 0.25 --cap 4
"""

import argparse
import math
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.benchmarks.parts.results import above, benchmark_parser, execute, finish
from antiphon.core.capacity.loop_measures import LoopPace
from antiphon.core.capacity.run_ahead import RunAhead
from antiphon.core.config import RunConfig, build_config
from antiphon.core.loop import events as e
from antiphon.core.loop.admission import plan_leases, prompt_place
from antiphon.simulator.campaign import mute_logs
from antiphon.simulator.modelled.calibration import Calibration, SeenGroup
from antiphon.simulator.modelled.run import ModelledRun

TOKENS = 100
"""Completion tokens that stand for length 1."""
WORKERS = 4


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long completions are: log-normal between prompts and within, cut at a cap."""

    sigma_prompt: float
    sigma_sample: float
    cap: float
    """In units of the median length."""
    seed: int = 0

    def draw(self, number: int, block: int, samples: int) -> npt.NDArray[np.int64]:
        """Return the completion tokens of the `number`-th group, shape [samples].

        Every `block` prompts in a row have one from each `block`-th part of the distribution, in random
        order: the mean of any batch that was chosen blindly is then close to the population's.
        """
        order = np.random.default_rng((self.seed, 1, number // block)).permutation(block)
        random = np.random.default_rng((self.seed, 2, number))
        quantile = (order[number % block] + random.random()) / block
        median = math.exp(self.sigma_prompt * NormalDist().inv_cdf(min(1.0 - 1e-9, max(1e-9, quantile))))
        lengths = median * np.exp(self.sigma_sample * random.standard_normal(samples))
        tokens: npt.NDArray[np.int64] = np.rint(np.minimum(self.cap, lengths) * TOKENS).astype(np.int64)
        return tokens.clip(1)


@dataclass(frozen=True, slots=True)
class Setting:
    """One run: its bound, how much is sampled at once, and how fast everything is."""

    max_staleness: int
    prompts_per_step: int
    group_size: int
    steps: int
    places: int
    """Groups that each worker can sample at once."""
    learner_s: float
    reward_s: float
    broadcast_s: float
    alpha: float
    """Seconds per token of a completion that runs alone."""
    beta: float
    """Seconds per token that each further completion at the same worker adds."""
    filter: str = "none"
    varied_share: float = 1.0
    """Share of the groups whose rewards differ."""
    losses_per_hour: float = 0.0
    """Ends of one worker, which loses what it samples."""

    def config(self, run_ahead: str) -> RunConfig:
        """Return the run's configuration."""
        return build_config(
            {
                "run": {"steps": self.steps},
                "environment": {"train_size": 4 * self.prompts_per_step * (self.steps + 1)},
                "loop": {
                    "max_staleness": self.max_staleness,
                    "prompts_per_step": self.prompts_per_step,
                    "group_size": self.group_size,
                    "filter": self.filter,
                    "run_ahead": run_ahead,
                    "order": "arrival",
                },
                "broadcast": {"snapshots_kept": self.max_staleness + 8},
                "coordinator": {"partials_mib": 0},
                "evaluation": {"prompts": 1},
            }
        )

    def calibration(self, config: RunConfig, lengths: Lengths) -> Calibration:
        """Return how fast everything is, and the lengths of each prompt in the order of opening."""
        groups = []
        for number in range((self.steps + self.max_staleness + 4) * self.prompts_per_step):
            tokens = lengths.draw(number, self.prompts_per_step, self.group_size).tolist()
            varied = np.random.default_rng((lengths.seed, 3, number)).random() < self.varied_share
            index = prompt_place(config, number)[0]
            groups.append(SeenGroup(prompt=index, tokens=tokens, reward_s=self.reward_s, varied=varied))
        return Calibration(
            alpha_s=self.alpha,
            beta_s=self.beta,
            concurrent_groups=self.places,
            learner_s=self.learner_s,
            learner_fixed_share=1.0,
            step_tokens=1.0,
            broadcast_s=self.broadcast_s,
            losses_per_hour=self.losses_per_hour,
            replaced_s=1.0,
            groups=tuple(groups),
        )


@dataclass(slots=True)
class Walked:
    """What a run came to."""

    seconds_per_step: float
    staleness_mean: float
    staleness_worst: int
    wasted_share: float
    """Tokens that were sampled and not trained on, of all; without those that the filter left out."""
    restarts_worst: int
    """Most times that one group was begun again."""
    opened_mean: float
    trained_mean: float
    """Mean completion tokens; also of what the filter left out, which used up its place."""
    first_batches_mean: float
    """Of the first three batches."""
    trained: list[int]
    """Numbers of the groups in the order in which they trained."""
    plan: RunAhead | None


class TailsRun(ModelledRun):
    """A run in virtual time, with production's decisions: its run-ahead is measured, or kept to the end."""

    def __init__(
        self, setting: Setting, lengths: Lengths, plan: RunAhead | None, measured: bool, seed: int = 0
    ) -> None:
        """Prepare a run; `plan` is kept to its end (None: only the gate decides) unless it is `measured`."""
        config = setting.config("measured" if measured else "bound")
        super().__init__(config, setting.calibration(config, lengths), WORKERS, seed, keep=True)
        if not measured:
            self._planner._plan = plan

    def _grant(self) -> None:
        """Lease one group after the other, each to the worker with most room, so that load is even."""
        state, places, size = self._state, self._known.concurrent_groups, self._size
        while there := [engine for engine in self._engines if not engine.away]:
            engine = min(there, key=lambda one: one.load)
            free = (self._places - engine.load) // self._config.loop.group_size
            openings, plan = None, self._planner.plan
            if plan is not None:
                room = plan.room(state.batches * size + state.training_groups, self._newest_held, size)
                openings = max(0, int(min(plan.unused(places, engine.groups), room)))
            leased = plan_leases(state, self._config, engine.held, min(1, free), (), openings)
            if not leased.group_ids:
                return
            for opened in leased.openings:
                self._emit(opened, opened.group_id)
            engine.move(self._now)
            for group_id in leased.group_ids:
                self._begin(state.groups[group_id], engine)
            self._plan(engine, self._engines.index(engine))

    def pace(self) -> LoopPace | None:
        """Return what the run measured of itself."""
        return self._planner.measures.pace(self._now)

    def walk(self) -> Walked:
        """Walk the run and return what it came to.

        Raises:
            RuntimeError: when nothing can happen any more before the last step.
        """
        done, steps = self.run(), self._config.run.steps
        if len(done.commits_s) < steps:
            raise RuntimeError(f"nothing moves after {len(done.commits_s)} of {steps} steps")
        numbers: dict[str, int] = {}
        sampled: dict[str, e.GroupSubmitted] = {}
        batches: list[list[str]] = []
        restarts: Counter[str] = Counter()
        wasted = kept = 0.0
        opened: list[str] = []
        for _, event in self.events or ():
            if isinstance(event, e.GroupOpened):
                numbers[event.group_id] = event.number
                opened.append(event.group_id)
            elif isinstance(event, e.LeaseExpired):
                restarts[event.group_id] += 1
                wasted += event.tokens
            elif isinstance(event, e.GroupSubmitted):
                sampled[event.group_id] = event
            elif isinstance(event, e.BatchSealed):
                batches.append(sorted((*event.group_ids, *event.filtered_ids), key=numbers.__getitem__))
                kept += sum(sum(sampled[group_id].token_counts) for group_id in batches[-1])

        def mean(groups: Iterable[str]) -> float:
            return fmean(tokens for one in groups if one in sampled for tokens in sampled[one].token_counts)

        ages = done.staleness
        return Walked(
            seconds_per_step=done.commits_s[-1] / steps,
            staleness_mean=sum(age * n for age, n in ages.items()) / max(1, sum(ages.values())),
            staleness_worst=max(ages, default=0),
            wasted_share=wasted / max(1.0, wasted + kept),
            restarts_worst=max(restarts.values(), default=0),
            opened_mean=mean(opened),
            trained_mean=mean(chain(*batches)),
            first_batches_mean=mean(chain(*batches[:3])),
            trained=[numbers[group_id] for group_id in chain(*batches)],
            plan=self._planner.plan,
        )


BOUNDS = (1, 2, 4, 8)
GROUP_SIZE = 8
ALPHA_S = 0.01
"""Seconds per token of a completion that runs alone."""
CONTENTION = 0.02
"""Share of it that each further completion at the same worker adds."""
LEARNER_BOUND, ROLLOUT_BOUND = 2.0, 0.3
"""Seconds of a learner step, in those that the workers need for a step's tokens at least."""
BROADCAST, SLOW_REWARD = 0.1, 1.0
"""Seconds of a broadcast, of a slow reward; in the same unit."""
SHARES = (1.0, 0.5, 0.25)
NEEDED = 0.02
"""What run-ahead needs is measured at plans that are within this share of the fastest."""
LIMITS = {
    "wasted_worst": 0.01,
    "restarts_worst": 1,
    "length_bias_worst": 0.02,
    "first_batches_worst": 0.10,
    "staleness_excess_worst": 0.3,
    "over_best_worst": 1.05,
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table."""

    max_staleness: int
    steps_at_once: int
    """Groups that the workers have room for, in steps."""
    learner_bound: bool
    slow_reward: bool


def main() -> int:
    """Walk every cell and check the limits."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--sigma-prompt", type=float, default=0.8, help="of log lengths between prompts")
    parser.add_argument("--sigma-sample", type=float, default=0.6, help="of log lengths within a group")
    parser.add_argument("--cap", type=float, default=16.0, help="longest completion, in medians")
    parser.add_argument("--steps", type=int, default=100, help="learner steps of each run")
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--bounds", type=int, nargs="+", default=list(BOUNDS), help="values of S")
    args = parser.parse_args()
    cells = [
        Cell(bound, at_once, learner_bound, slow)
        for bound in args.bounds
        for at_once in sorted({1, 2, bound + 1})
        for learner_bound in (True, False)
        for slow in (False, True)
    ]
    found = []
    with ProcessPoolExecutor(2, initializer=mute_logs) as pool:
        for row in pool.map(_measure, cells, [args] * len(cells)):
            print(row, flush=True)
            found.append(row)
    report: dict[str, Any] = {name: max(row[name.removesuffix("_worst")] for row in found) for name in LIMITS}
    report["cells"] = found
    return finish(report, record=args.record, at_size=above(report, LIMITS))


def _measure(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    lengths = Lengths(args.sigma_prompt, args.sigma_sample, args.cap)
    places = args.prompts_per_step * cell.steps_at_once
    beta = ALPHA_S * CONTENTION
    mean = sum(float(lengths.draw(n, 64, GROUP_SIZE).mean()) for n in range(1024)) / 1024
    tokens = args.prompts_per_step * GROUP_SIZE * mean
    at_worker = places * GROUP_SIZE / WORKERS
    unit_s = tokens * (ALPHA_S + beta * at_worker) / (WORKERS * at_worker)
    setting = Setting(
        max_staleness=cell.max_staleness,
        prompts_per_step=args.prompts_per_step,
        group_size=GROUP_SIZE,
        steps=args.steps,
        places=places // WORKERS,
        learner_s=unit_s * (LEARNER_BOUND if cell.learner_bound else ROLLOUT_BOUND),
        reward_s=unit_s * SLOW_REWARD * cell.slow_reward,
        broadcast_s=unit_s * BROADCAST,
        alpha=ALPHA_S,
        beta=beta,
    )
    ours = TailsRun(setting, lengths, None, True).walk()
    constant = [
        (plan, TailsRun(setting, lengths, plan, False).walk())
        for plan in _constant_plans(cell, places, args.prompts_per_step)
    ]
    best_plan, best = min(constant, key=lambda pair: pair[1].seconds_per_step)
    needed = min(
        walked.staleness_mean
        for _, walked in constant
        if walked.seconds_per_step <= (1.0 + NEEDED) * best.seconds_per_step
    )
    return {
        **asdict(cell),
        "wasted": ours.wasted_share,
        "restarts": ours.restarts_worst,
        "length_bias": abs(ours.trained_mean / ours.opened_mean - 1.0),
        "first_batches": abs(ours.first_batches_mean / (mean or math.nan) - 1.0),
        "staleness": ours.staleness_mean,
        "staleness_needed": needed,
        "staleness_excess": ours.staleness_mean - needed,
        "staleness_worst": ours.staleness_worst,
        "seconds_per_step": ours.seconds_per_step,
        "over_best": ours.seconds_per_step / best.seconds_per_step,
        "best_plan": asdict(best_plan),
        "plan": None if ours.plan is None else asdict(ours.plan),
    }


def _constant_plans(cell: Cell, places: int, size: int) -> list[RunAhead]:
    ahead = sorted({step for step in (1, 2, 3, 4, 6, 8) if step <= cell.max_staleness})
    shares = [share for share in SHARES if share * places >= size / 4]
    return [RunAhead((steps + 1) * size, share) for steps in ahead for share in shares]


if __name__ == "__main__":
    execute(main)
