"""The capacity model against the loop in virtual time: bounds never broken, and the rule at the knee.

Random schedules with deaths, filtering, pauses and jitter are walked by single completions, half of them with
a cap on what is in flight, half with the production gate. Then the least supply with which the learner waits
at most 1% of the time is searched for and compared with the rule. The last line is one JSON object.

    .venv/bin/python benchmarks/capacity.py
"""

import sys
from dataclasses import replace
from statistics import median

import numpy as np

from antiphon.benchmarks.parts.capacity.schedules import Schedule, random_schedule, walk
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.capacity.model import LoopShape, largest_staleness, required_supply

IDLE = 0.01
KNEES = [
    (interval, broadcast, pauses, acceptance)
    for interval, broadcast in ((1, 0.2), (1, 0.5), (2, 0.5), (2, 1.2), (3, 0.5), (5, 2.5))
    for pauses in (True, False)
    for acceptance in (1.0, 0.7)
]
"""Publish interval, broadcast over training, whether workers pause, acceptance."""


def main() -> int:
    """Walk, search and print."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--knees", type=int, default=len(KNEES))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    violations = deadlocks = attained = 0
    for number in range(arguments.schedules):
        gated = number % 2 == 1
        schedule = random_schedule(np.random.default_rng([arguments.seed, number]), gated=gated)
        walked = walk(schedule, np.random.default_rng([arguments.seed, number, 1]))
        bound = schedule.max_staleness
        if bound is None:
            bound = largest_staleness(schedule.shape, schedule.publish_interval, schedule.run_ahead)
        violations += walked.staleness_max > bound
        deadlocks += walked.steps < schedule.steps
        attained += walked.staleness_max == bound
    print(f"{arguments.schedules} schedules: {violations} violations, {deadlocks} deadlocks")
    errors = [abs(knee_error(*knee)) for knee in KNEES[: arguments.knees]]
    print(f"{len(errors)} knees: the rule is {median(errors):.1%} off, {max(errors):.1%} at most")
    result = {
        "violations": violations,
        "deadlocks": deadlocks,
        "attained": attained,
        "median_error": round(median(errors), 4),
        "worst_error": round(max(errors), 4),
        "schedules": arguments.schedules,
        "seed": arguments.seed,
    }
    broken = {"steps above the bound": violations, "deadlocks": deadlocks}
    violated = [
        f"{count} {what} in {arguments.schedules} schedules" for what, count in broken.items() if count
    ]
    return finish(result, record=arguments.record, violated=violated)


def knee_error(interval: int, broadcast: float, pauses: bool, acceptance: float) -> float:
    """Return how far the rule is above the least supply that keeps the learner busy, as a share."""
    shape = LoopShape(64, 10.0, 10.0 * broadcast, 2.0, acceptance, pauses)
    rule = required_supply(shape, interval)
    low, high = 0.7 * rule, 1.3 * rule
    while high / low > 1.005:
        supply = (low + high) / 2.0
        if _idle(shape, interval, supply) <= IDLE:
            high = supply
        else:
            low = supply
    return rule / high - 1.0


def _idle(shape: LoopShape, interval: int, supply: float) -> float:
    slots = max(1, round(supply * shape.group_s))
    schedule = Schedule(
        replace(shape, group_s=slots / supply),
        interval,
        (slots,),
        run_ahead=3.0 + 2.0 * np.ceil(shape.broadcast_s / shape.train_s),
        steps=60,
        counted_from=20,
    )
    return 1.0 - shape.train_s / walk(schedule, np.random.default_rng(0)).step_s


if __name__ == "__main__":
    sys.exit(main())
