"""Spot traces: what an accepted token costs when workers are taken and reclaimed as real ones were.

Pools of spot workers come and go as recorded by SkyPilot's and Bamboo's authors, at prices of A100s as
providers asked them in 2026, cleaned; `benchmarks/spot_traces.py` says how the files look and what is
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

import csv
import gzip
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.capacity.activation import Activator
from antiphon.core.capacity.cover import Redundancy, WorkerOffer
from antiphon.core.capacity.model import availability
from antiphon.core.errors import InfeasibleError

FILES = SKYPILOT, BAMBOO, PRICES = (
    "spot_skypilot.jsonl.gz",
    "spot_bamboo.jsonl.gz",
    "gpu_prices.csv.gz",
)
GPU = "A100_SXM_80GB"
OUTLIER = 3.0
"""A price is left out that differs from the median of its GPU and kind by more than this factor: some rows of
the source hold the price of a whole machine, or of a fraction of a GPU."""
ZONE_WORKERS = 4
"""Where a trace says only whether a zone had an instance, it is taken to have this many; they go together."""
STEP_S, BATCHES_AHEAD = 120.0, 2.0
"""Seconds of a learner step, and batches that S lets lie ready."""
TICK_S = 60.0
JOIN_S = 180.0
"""From an order until a worker samples: it is paid for meanwhile."""
UNSAFE_S = 5.0
"""Seconds of work that a sudden end destroys: a heartbeat's worth; another worker continues the rest."""
GPUS_PER_LEARNER_GPU = 4.0
"""Workers' GPUs that keep one GPU of the learner busy; an assumption that fixes the learner's price."""
HOUR_S = 3600.0
_USUAL_LOSSES, _USUAL_S = 0.25, HOUR_S
"""What is taken to have been seen of a zone of which nothing was seen yet: a loss in four hours."""


@dataclass(frozen=True, slots=True)
class Pool:
    """Spot workers and when they could be had."""

    name: str
    offers: tuple[WorkerOffer, ...]
    """Rates in GPUs, prices in US dollars per hour of the worker, groups are zones."""
    tick_s: float
    there: npt.NDArray[np.bool_]
    """(ticks, workers)."""
    learner_usd_per_gpu_hour: float

    @property
    def need(self) -> float:
        """Return the job's size in GPUs: a half of what is there on average, so that there is a choice."""
        rates = np.array([one.rate for one in self.offers])
        return 0.5 * float((self.there * rates).sum(axis=1).mean())

    def window(self, begin_s: float, hours: float) -> "Pool":
        """Return some hours of it."""
        first, count = int(begin_s / self.tick_s), max(1, int(hours * HOUR_S / self.tick_s))
        return replace(self, there=self.there[first : first + count])

    @property
    def hours(self) -> float:
        return len(self.there) * self.tick_s / HOUR_S


@dataclass(frozen=True, slots=True)
class Spent:
    """What a run on a pool came to."""

    usd: float
    accepted: float
    """GPU-seconds of sampling that were trained on."""
    wanted: float
    """The same if the learner had never waited."""
    starts: int

    @property
    def usd_per_accepted(self) -> float:
        """Return US dollars per GPU-hour of accepted sampling; tokens are proportional to it."""
        return self.usd * HOUR_S / self.accepted if self.accepted else float("inf")

    @property
    def lost_share(self) -> float:
        """Return the share of the learner's steps that were lost to waiting."""
        return 1.0 - self.accepted / self.wanted


@dataclass(frozen=True, slots=True)
class SpotPolicy:
    """How workers are chosen; without redundancy all that are there are taken."""

    name: str
    redundancy: Redundancy | None = None
    margin: float = 1.0
    """Of the need."""


def clean_prices(rows: Sequence[dict[str, str]], gpu: str, kind: str) -> dict[str, float]:
    """Return provider -> median price per GPU-hour of its days, without outliers.

    Raises:
        InfeasibleError: when nothing is left.

    >>> row = {"gpu_model": "A100", "rental_type": "spot", "provider": "a"}
    >>> clean_prices([row | {"price_median_usd": p} for p in ("1", "1.2", "8.8", "-1", "")], "A100", "spot")
    {'a': 1.1}
    """
    found = defaultdict[str, list[float]](list)
    for row in rows:
        if row["gpu_model"] == gpu and row["rental_type"] == kind and row["price_median_usd"]:
            found[row["provider"]].append(float(row["price_median_usd"]))
    known = [price for prices in found.values() for price in prices if price > 0.0]
    if not known:
        raise InfeasibleError(f"the price table has no {kind} price of {gpu}; fetch its file again")
    usual = median(known)
    kept = {
        name: [p for p in prices if usual / OUTLIER <= p <= usual * OUTLIER] for name, prices in found.items()
    }
    return {name: round(median(prices), 6) for name, prices in sorted(kept.items()) if prices}


def read_pools(folder: Path) -> list[Pool]:
    """Read every pool of GPUs that the traces describe.

    Raises:
        OSError: when a file is not there.
    """
    with gzip.open(folder / PRICES, "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    spot = sorted(clean_prices(rows, GPU, "spot").values())
    learner = median(clean_prices(rows, GPU, "on_demand").values())

    def priced(name: str, tick_s: float, zones: list[tuple[str, int, npt.NDArray[np.int64]]]) -> Pool:
        """Make a pool of zones (name, GPUs of a worker, workers there at each tick)."""
        ticks = min(len(count) for _, _, count in zones)
        offers, there = [], []
        for number, (zone, gpus, count) in enumerate(zones):
            price = spot[number * len(spot) // len(zones)]
            for worker in range(int(count.max())):
                offers.append(WorkerOffer(f"{zone}-{worker:02d}", price * gpus, float(gpus), group=zone))
                there.append(count[:ticks] > worker)
        return Pool(name, tuple(offers), tick_s, np.stack(there, axis=1), learner)

    pools = []
    for name, records in _by_start(_lines(folder / SKYPILOT)).items():
        zones = []
        for record in records:
            count = np.concatenate([np.full(ticks, here) for here, ticks in record["rle"]])
            each = ZONE_WORKERS if record["nodes_wanted"] == 1 else 1
            zones.append((f"{record['zone']}_{record['instance']}", _gpus(record), count * each))
        pools.append(priced(name, float(records[0]["gap_seconds"]), zones))
    for record in _lines(folder / BAMBOO):
        count = _counts(record["events"])
        pools.append(priced(f"bamboo {Path(record['id']).stem}", TICK_S, [("zone", 1, count)]))
    return pools


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from (json.loads(line) for line in file)


def _gpus(record: dict[str, Any]) -> int:
    return int(record["instance"].split("_")[1])


def _by_start(records: Iterator[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group what was observed at the same time; only V100, the newest GPU."""
    found = defaultdict[str, list[dict[str, Any]]](list)
    for record in records:
        if record["instance"].startswith("v100"):
            found[f"{record['kind']} {record['nodes_wanted']}-node {record['start']}"].append(record)
    return dict(found)


def _counts(events: Sequence[Sequence[Any]]) -> npt.NDArray[np.int64]:
    """Return how many nodes were there in each `TICK_S`."""
    if isinstance(events[0][1], str):
        changes = [(at / 1000.0, 1 if what == "add" else -1) for at, what, _ in events]
    else:
        begin = datetime.fromisoformat(events[0][0])
        seconds = [(datetime.fromisoformat(at) - begin).total_seconds() for at, _ in events]
        counts = [int(count) for _, count in events]
        changes = [(0.0, counts[0])]
        changes += [(at, b - a) for at, (a, b) in zip(seconds[1:], pairwise(counts), strict=True)]
    found: npt.NDArray[np.int64] = np.zeros(int(changes[-1][0] / TICK_S) + 1, dtype=np.int64)
    for at, change in changes:
        found[int(at / TICK_S) :] += change
    return found


def walk(pool: Pool, policy: SpotPolicy) -> Spent:
    """Run a learner on a pool and return what it cost.

    A tick at a time: what was reclaimed is lost, production's activator orders, the active workers sample,
    and the learner trains on what lies ready. Availabilities are those that were seen so far, zone by zone.
    """
    decide = _activation(policy, pool.need * policy.margin, pool.hours * HOUR_S)
    learner_usd = pool.need / GPUS_PER_LEARNER_GPU * pool.learner_usd_per_gpu_hour
    offers = {one.name: one for one in pool.offers}
    active: dict[str, float] = {}
    losses, lived_s = defaultdict[str, float](float), defaultdict[str, float](float)
    ready = usd = accepted = 0.0
    starts, most_ready = 0, BATCHES_AHEAD * STEP_S * pool.need
    ticks = int(pool.hours * HOUR_S / TICK_S)
    for tick in range(ticks):
        now = tick * TICK_S
        here = pool.there[min(len(pool.there) - 1, int(now / pool.tick_s))]
        names = {one.name for one, flag in zip(pool.offers, here, strict=True) if flag}
        for name in active.keys() - names:
            ready -= UNSAFE_S * offers[name].rate if now - active.pop(name) >= JOIN_S else 0.0
            losses[offers[name].group] += 1.0
        seen = {
            zone: availability((losses[zone] + _USUAL_LOSSES) / (lived_s[zone] + _USUAL_S), JOIN_S)
            for zone in {one.group for one in pool.offers}
        }
        known = [replace(offers[name], availability=seen[offers[name].group]) for name in sorted(names)]
        added, drained = decide(now, known, active)
        starts += len(added)
        active |= dict.fromkeys(added, now)
        for name in drained:
            del active[name]
        supply = 0.0
        for name, since in active.items():
            supply += offers[name].rate if now - since >= JOIN_S else 0.0
            lived_s[offers[name].group] += TICK_S
        usd += (learner_usd + sum(offers[name].usd_per_hour for name in active)) * TICK_S / HOUR_S
        ready = max(0.0, ready + supply * TICK_S)
        used = min(ready, pool.need * TICK_S)
        accepted += used
        ready = min(most_ready, ready - used)
    return Spent(usd, accepted, ticks * TICK_S * pool.need, starts)


_Orders = tuple[Sequence[str], Sequence[str]]


def _activation(
    policy: SpotPolicy, need: float, whole_s: float
) -> Callable[[float, Sequence[WorkerOffer], dict[str, float]], _Orders]:
    if policy.redundancy is None:
        return lambda _, known, active: ([one.name for one in known if one.name not in active], ())
    activator = Activator(policy.redundancy)

    def decide(now: float, known: Sequence[WorkerOffer], active: dict[str, float]) -> _Orders:
        orders = activator.decide(now, known, active, need, left_s=whole_s - now, join_s=JOIN_S)
        return orders.activate, orders.drain

    return decide


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
