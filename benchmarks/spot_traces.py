"""Spot traces: what an accepted token costs when workers are taken and reclaimed as real ones were.

Pools of spot workers come and go as recorded by SkyPilot's and Bamboo's authors, at prices of A100s as
providers asked them in 2026, cleaned; `benchmarks/parts/capacity/spot.py` says how the files look and what is
assumed. A learner needs a half of what a pool has on average. It is run on each pool with

- `all_on`: all workers that can be had;
- `greedy`: production's activator with the mean alone, `Redundancy(0.5)`;
- `greedy_redundancy`: with a supply that is enough at 95% of all moments;
- `default`: production's activator as it is;
- further confidences, shares that survive a zone and margins: the cheapest of all is the best in hindsight.

`usd_per_accepted` is in US dollars per accepted GPU-hour of sampling, to which tokens are proportional;
`lost_share` are the learner's steps that were lost to waiting. Fails when over all pools the default costs
more than 5% above the best policy in hindsight. Skipped with a reason where the traces are not. The last line
is JSON.

    ANTIPHON_TRACES=FOLDER .venv/bin/python benchmarks/spot_traces.py
"""

import json
import os
import sys
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from antiphon.benchmarks.parts.capacity.spot import (
    FILES,
    Pool,
    Spent,
    SpotPolicy,
    read_pools,
    walk,
)
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.capacity.activation import Activator
from antiphon.core.capacity.cover import Redundancy

NAMED = (
    SpotPolicy("all_on"),
    SpotPolicy("greedy", Redundancy(confidence=0.5)),
    SpotPolicy("greedy_redundancy", Redundancy(confidence=0.95)),
    SpotPolicy("default", Activator().redundancy),
)
HINDSIGHT = tuple(
    SpotPolicy(f"confidence {confidence:g}, survives {survives:g}, margin {margin:g}", redundancy, margin)
    for confidence, survives, margin in product((0.5, 0.8, 0.95, 0.99), (0.0, 0.7), (0.85, 1.0, 1.2))
    for redundancy in [Redundancy(confidence, survives)]
)
MOST_ABOVE = 0.05


def main() -> int:
    """Walk every pool under every policy."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--traces", type=Path, default=os.environ.get("ANTIPHON_TRACES"))
    parser.add_argument("--hours", type=float, default=24.0, help="of each window")
    parser.add_argument("--windows", type=int, default=2, help="of each pool, spread over its trace")
    parser.add_argument("--only-named", action="store_true", help="without the policies in hindsight")
    arguments = parser.parse_args()
    if arguments.traces is None or not all((arguments.traces / name).is_file() for name in FILES):
        reason = f"no folder with {', '.join(FILES)}; name it with --traces or ANTIPHON_TRACES"
        print(f"skipped: {reason}", file=sys.stderr)
        print(json.dumps({"skipped": reason}))
        return 0
    policies = NAMED if arguments.only_named else (*NAMED, *HINDSIGHT)
    spent: dict[str, list[Spent]] = {policy.name: [] for policy in policies}
    rows = []
    for whole in read_pools(arguments.traces):
        for pool in windows(whole, arguments.hours, arguments.windows):
            found = {policy.name: walk(pool, policy) for policy in policies}
            for name, one in found.items():
                spent[name].append(one)
            rows.append(row := _row(pool, found))
            print(row, flush=True)
    totals = {name: total(found) for name, found in spent.items()}
    best = min(totals, key=lambda name: totals[name].usd_per_accepted)
    above = totals["default"].usd_per_accepted / totals[best].usd_per_accepted - 1.0
    result: dict[str, Any] = {
        "default_above_best": round(above, 4),
        "best": best,
        "default_above_best_of_each_pool": round(median(row["default_above_best"] for row in rows), 4),
        "worst_pool": round(max(row["default_above_best"] for row in rows), 4),
        "pools": rows,
    }
    for policy in NAMED:
        result |= {f"{key}_{policy.name}": value for key, value in _figures(totals[policy.name]).items()}
    at_size = []
    if above > MOST_ABOVE:
        at_size.append(f"the default costs {above:.1%} more than {best}; at most {MOST_ABOVE:.0%}")
    return finish(result, record=arguments.record, at_size=at_size)


def windows(pool: Pool, hours: float, count: int) -> list[Pool]:
    """Return windows of a pool's trace, spread evenly; all of a trace that is short."""
    spare_s = (pool.hours - hours) * 3600.0
    if spare_s <= 0.0:
        return [pool]
    found = [pool.window(spare_s * (n + 0.5) / count, hours) for n in range(count)]
    return [one for one in found if one.need > 0.0]


def total(found: list[Spent]) -> Spent:
    """Return the mean over pools, each with the same weight: prices per accepted GPU-hour are added up."""
    return Spent(
        sum(one.usd / one.wanted for one in found),
        sum(one.accepted / one.wanted for one in found),
        float(len(found)),
        sum(one.starts for one in found),
    )


def _figures(one: Spent) -> dict[str, float]:
    return {
        "usd_per_accepted": round(one.usd_per_accepted, 4),
        "lost_share": round(one.lost_share, 4),
        "starts": one.starts,
    }


def _row(pool: Pool, found: dict[str, Spent]) -> dict[str, Any]:
    best = min(found, key=lambda name: found[name].usd_per_accepted)
    above = found["default"].usd_per_accepted / found[best].usd_per_accepted - 1.0
    return {
        "pool": pool.name,
        "hours": round(pool.hours, 1),
        "need_gpus": round(pool.need, 2),
        "best": best,
        "default_above_best": round(above, 4),
        **{policy.name: _figures(found[policy.name]) for policy in NAMED},
    }


if __name__ == "__main__":
    sys.exit(main())
