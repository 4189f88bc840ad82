"""Preemption: what a fleet of reclaimed workers loses against one that is left alone.

Eight workers sample groups of 120 s on average, two at once, for steps of 32 groups. The learner trains
as long as the undisturbed fleet needs for a batch, so demand equals supply. In the disturbed fleet each
worker is killed without notice with probability 0.4 an hour and replaced by a new machine after 600 s;
its workers are faster than the learner needs by the headroom.

Two hours of such a fleet pass in seconds of the simulator's virtual time: coordinator, worker loop,
reward service and learner loop are the production ones, engines and trainer are stand-ins, and the witness
checks every token, bound and acknowledgement.

The last line is one JSON object. `lost_throughput` is the mean over the schedules of seeds 0 to 7 of the
learner steps per hour that the disturbed fleet loses, with hand-over, 10% headroom and S=2. `table` has
this case and the others: S=2 and S=6, with and without headroom, with and without hand-over. The last one
is the first again with `stragglers`: one worker's link is so slow that a snapshot takes as long as a
learner step, and of two workers more one joins and never loads and the other one's engine hangs. Wasted
shares are of the worker seconds under leases, as the work account books them.

The exit code is 1 when `lost_throughput`, also with stragglers, is above 0.12 or anything was violated, 2
for wrong arguments.
The bar can fail: `--replacement inf --headroom 0 --one-case` loses about half and exits with 1.

    .venv/bin/python benchmarks/preemption.py
"""

import argparse
import heapq
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Any

import numpy as np

from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.core.errors import ConfigError
from antiphon.core.loop.work_account import Use, WorkAccount
from antiphon.core.seeds import generator
from antiphon.simulator.campaign import mute_logs
from antiphon.simulator.faults import Fault, FaultKind
from antiphon.simulator.scenario import Scenario
from antiphon.simulator.world import World

MAX_TOKENS = 24
"""Three times the mean length of a completion that nothing ends but the stand-in's own end token."""
END_SHARE = 1 / 8
"""Probability of the stand-in's end token at each place."""
HEARTBEAT_S = 5.0
LEASE_S = 60.0
STALL_S = 36_000.0
"""A fleet that waits for new machines has not stalled."""
CHUNKS = 2
"""A snapshot of the stand-ins has this many."""
HANGS_AT = 0.25
"""Share of the span after which an engine hangs, with groups in flight."""
WARM_UP_STEPS = 3
"""Steps left out at the beginning: the pipeline fills."""


@dataclass(frozen=True, slots=True)
class Site:
    """One fleet and its learner; times in seconds of the simulated clock."""

    max_staleness: int = 2
    headroom: float = 0.0
    """Share by which workers sample faster than `group_s` says."""
    handover: bool = True
    workers: int = 8
    stragglers: bool = False
    """The first worker's link is so slow that a snapshot takes as long as a learner step, and there are two
    workers more: one that joins and never loads, and one whose engine hangs."""
    groups_at_once: int = 2
    """Groups that one worker samples at the same time."""
    group_size: int = 4
    prompts_per_step: int = 32
    group_s: float = 120.0
    """Seconds in which a worker without headroom hands in `groups_at_once` groups."""

    @property
    def train_s(self) -> float:
        """Return the seconds of a learner step: as long as an undisturbed fleet needs for a batch."""
        return self.prompts_per_step * self.group_s / (self.workers * self.groups_at_once)

    @property
    def engine_step_s(self) -> float:
        """Return the seconds of an engine step, which gives each completion a token."""
        steps = _engine_steps_per_group(self.groups_at_once, self.group_size)
        return self.group_s / self.groups_at_once / steps / (1.0 + self.headroom)

    def trouble(self, span_s: float) -> list[Fault]:
        """Return what goes wrong in `span_s` seconds but for reclaimed workers."""
        if not self.stragglers:
            return []
        return [
            Fault(0.0, FaultKind.SLOW_LINK, "worker-0", span_s),
            Fault(0.0, FaultKind.DEAD_TRANSFER, f"worker-{self.workers}", span_s),
            Fault(HANGS_AT * span_s, FaultKind.HANG, f"worker-{self.workers + 1}", span_s),
        ]

    def scenario(self, seed: int, span_s: float) -> Scenario:
        """Return the run of `span_s` seconds."""
        return Scenario(
            name="preemption",
            run={
                "run": {"name": "preemption", "steps": 100_000, "seed": seed},
                "environment": {"train_size": 4096, "heldout_size": 1},
                "evaluation": {"prompts": 1, "interval": 0},
                "loop": {
                    "mode": "elastic",
                    "max_staleness": self.max_staleness,
                    "prompts_per_step": self.prompts_per_step,
                    "group_size": self.group_size,
                    "filter": "none",
                },
                "sampling": {"max_tokens": MAX_TOKENS},
                "rollout": {"concurrent_groups": self.groups_at_once},
                "drafting": {"enabled": False},
                "coordinator": {
                    "lease_s": LEASE_S,
                    "heartbeat_s": HEARTBEAT_S,
                    "partials_mib": 64 if self.handover else 0,
                },
                "services": {"stall_timeout_s": STALL_S},
            },
            workers=self.workers + 2 * self.stragglers,
            slow_chunk_s=self.train_s / CHUNKS,
            engine_step_s=(self.engine_step_s, self.engine_step_s),
            worker_slowness=(1.0, 1.0),
            learner_step_s=(self.train_s, self.train_s),
            limit_s=2.0 * span_s,
            span_s=span_s,
        )


@cache
def _engine_steps_per_group(groups_at_once: int, group_size: int, groups: int = 4096) -> float:
    """Return the engine steps in which a worker ends one group, on the average over `groups` of them.

    It begins another as soon as it has room for all of its completions, with the step after the one that
    runs.
    """
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(END_SHARE, size=(groups, group_size)), MAX_TOKENS)
    ends: list[int] = []  # a heap: the step in which each completion ends
    step = 0
    for counts in lengths:
        while len(ends) + group_size > groups_at_once * group_size:
            step = max(step, heapq.heappop(ends))
        for count in counts:
            heapq.heappush(ends, step + 1 + int(count))
    return max(ends) / groups


@dataclass(frozen=True, slots=True)
class FleetRun:
    """What one fleet came to over its span."""

    steps_per_hour: float
    """Learner steps."""
    wasted_share: float
    """Of the worker seconds under a lease: what no step trained on, as the work account books it."""
    preempted_share: float
    """The part of these that was lost with a worker."""
    continued: int
    """Leases that began with tokens of an earlier holder."""
    violations: tuple[str, ...]
    """What must not be: tokens beyond the bound, wrong tokens, lost groups."""
    hung_leases: int = 0
    """Leases that were taken back because an engine stood still."""


def shares(account: WorkAccount) -> tuple[float, float]:
    """Return the wasted and the preempted share of the seconds under a lease."""
    if (leased_s := account.leased_s) <= 0:
        return 0.0, 0.0
    wastes = (Use.STALE, Use.DUPLICATE, Use.PREEMPTED, Use.VOIDED, Use.UNTRUSTED)
    wasted = sum(account.seconds.get(use, 0.0) for use in wastes)
    return wasted / leased_s, account.seconds["preempted"] / leased_s


def steps_per_hour(commits: Sequence[float], train_s: float, span_s: float) -> float:
    """Return the rate after the warm-up; a step that is late when the span ends counts as late.

    Args:
        commits: second of each commit.
        train_s: seconds that a step takes where nothing is late.
        span_s: second at which the run was stopped.
    """
    ends = commits[WARM_UP_STEPS:]
    if len(ends) < 2:
        return 0.0
    return 3600.0 * (len(ends) - 1) / (max(ends[-1], span_s - train_s) - ends[0])


@dataclass(frozen=True, slots=True)
class Stay:
    """One worker from its start to its reclaim."""

    slot: int
    start_s: float
    stop_s: float
    """Infinite for one that is never reclaimed."""


def undisturbed(workers: int) -> list[Stay]:
    """None is reclaimed."""
    return [Stay(slot, 0.0, np.inf) for slot in range(workers)]


def by_chance(
    workers: int, span_s: float, share_per_hour: float, replacement_s: float, seed: int
) -> list[Stay]:
    """Each is reclaimed with probability `share_per_hour` in an hour; a replacement comes later.

    Args:
        workers: slots of the fleet.
        span_s: seconds to plan for.
        share_per_hour: in [0, 1).
        replacement_s: seconds until the slot is filled again; infinite for never.
        seed: of the chance.
    """
    hazard = -np.log1p(-share_per_hour) / 3600.0
    chance = generator("preemption", seed)
    stays = []
    for slot in range(workers):
        at = 0.0
        while at < span_s:
            stop = at + float(chance.exponential(1.0 / hazard))
            stays.append(Stay(slot, at, stop))
            at = stop + replacement_s
    return stays


def as_faults(stays: Sequence[Stay], workers: int) -> list[Fault]:
    """Return what keeps the simulator's workers to the schedule: each slot is empty between two stays."""
    found = []
    for slot in range(workers):
        own = sorted((stay.start_s, stay.stop_s) for stay in stays if stay.slot == slot)
        edges = [0.0, *(edge for stay in own for edge in stay), np.inf]
        empty = zip(edges[::2], edges[1::2], strict=True)  # before, between and after the stays
        found += [
            Fault(at_s, FaultKind.RECLAIM, f"worker-{slot}", until_s - at_s)
            for at_s, until_s in empty
            if at_s < until_s
        ]
    return sorted(found, key=lambda fault: (fault.at_s, fault.target))


def reclaimed(stays: Sequence[Stay], span_s: float) -> int:
    """Return how many workers are taken away within the span."""
    return sum(stay.stop_s < span_s for stay in stays)


def simulate_fleet(site: Site, stays: Sequence[Stay], span_s: float, seed: int) -> FleetRun:
    """Simulate one fleet; the witness checks every token, bound and acknowledgement on the way."""
    faults = [*as_faults(stays, site.workers), *site.trouble(span_s)]
    world = World(site.scenario(seed, span_s), seed, faults)
    outcome = world.run()
    coordinator = world.shared.state_machines[-1]
    wasted_share, preempted_share = shares(coordinator.state.work_accounts.account(coordinator.clock()))
    rows = list(world.shared.journal.written())
    return FleetRun(
        steps_per_hour=steps_per_hour([at_s for at_s, _ in world.witness.commits], site.train_s, span_s),
        wasted_share=wasted_share,
        preempted_share=preempted_share,
        continued=sum(row.kind == "lease.granted" and '"continued":0' not in row.body for row in rows),
        violations=outcome.violations,
        hung_leases=sum(row.kind == "lease.expired" and '"hung":true' in row.body for row in rows),
    )


MOST_LOST = 0.12
"""Bar of `lost_throughput` where workers are reclaimed by chance."""


def plan(arguments: argparse.Namespace, seed: int) -> list[Stay]:
    """Return the disturbed fleet's schedule."""
    span_s = 3600.0 * arguments.hours
    return by_chance(arguments.workers, span_s, arguments.share, arguments.replacement, seed)


def lost(calm: FleetRun, disturbed: FleetRun) -> float:
    """Return the share of the undisturbed fleet's steps per hour that the other one lacks.

    Raises:
        ConfigError: when there are too few steps to tell.
    """
    if not calm.steps_per_hour:
        raise ConfigError("--hours is too short for the learner's steps; give more")
    return 1.0 - disturbed.steps_per_hour / calm.steps_per_hour


def summary(values: Iterable[float]) -> dict[str, Any]:
    """Return mean, worst (largest) and all values, rounded."""
    rounded = [round(value, 4) for value in values]
    return {"mean": round(mean(rounded), 4), "worst": max(rounded), "values": rounded}


def cases(arguments: argparse.Namespace) -> list[Site]:
    """Return the disturbed fleets; the first is the one of `lost_throughput`."""
    headrooms = dict.fromkeys((arguments.headroom, 0.0))
    found = [
        Site(bound, headroom, handover, arguments.workers)
        for bound in (2, 6)
        for headroom in headrooms
        for handover in (True, False)
    ]
    troubled = replace(found[0], stragglers=True)
    return found[:1] if arguments.one_case else [*found, troubled]


def measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str], list[str]]:
    """Simulate every case with every schedule; return the result, what was violated and what was lost."""
    span_s = 3600.0 * arguments.hours
    table: list[dict[str, Any]] = []
    schedules = {
        seed: plan(arguments, seed) for seed in range(arguments.seed, arguments.seed + arguments.seeds)
    }
    calm: dict[int, list[FleetRun]] = {}
    violations: list[str] = []

    def run(site: Site, stays: Sequence[Stay], seed: int) -> FleetRun:
        done = simulate_fleet(site, stays, span_s, seed)
        violations.extend(f"S={site.max_staleness} seed {seed}: {found}" for found in done.violations)
        return done

    for site in cases(arguments):
        bound = site.max_staleness
        if bound not in calm:
            alone = replace(site, headroom=0.0)
            calm[bound] = [run(alone, undisturbed(site.workers), seed) for seed in schedules]
        runs = [run(site, stays, seed) for seed, stays in schedules.items()]
        row: dict[str, Any] = {
            "max_staleness": bound,
            "headroom": site.headroom,
            "handover": site.handover,
            "stragglers": site.stragglers,
            "lost_throughput": summary(map(lost, calm[bound], runs)),
            "wasted_share": summary(run.wasted_share for run in runs),
            "preempted_share": summary(run.preempted_share for run in runs),
            "steps_per_hour": round(mean(run.steps_per_hour for run in runs), 3),
            "steps_per_hour_undisturbed": round(mean(run.steps_per_hour for run in calm[bound]), 3),
            "continued_leases": sum(run.continued for run in runs),
            "hung_leases": sum(run.hung_leases for run in runs),
        }
        table.append(row)
        print(row, flush=True)
    kills = sum(reclaimed(stays, span_s) for stays in schedules.values())
    # Of workers, until they are reclaimed or the span ends.
    whole = [stay for stays in schedules.values() for stay in stays]
    hours = sum(max(0.0, min(stay.stop_s, span_s) - stay.start_s) for stay in whole) / 3600.0
    share = table[0]["lost_throughput"]["mean"]
    result = {
        "lost_throughput": share,
        "table": table,
        "violations": len(violations),
        "seeds": list(schedules),
        "hours": arguments.hours,
        "reclaimed": kills,
        "reclaimed_share": round(1.0 - float(np.exp(-kills / hours)), 3),
        "replacement_s": arguments.replacement if arguments.replacement < np.inf else None,
        "steps_per_hour_wanted": round(3600.0 / Site(workers=arguments.workers).train_s, 3),
    }
    slow: list[str] = []
    for row in table:
        bound_row = row is table[0] or row["stragglers"]
        if bound_row and row["lost_throughput"]["mean"] > MOST_LOST:
            where = " with stragglers" if row["stragglers"] else ""
            slow.append(f"lost_throughput{where} is {row['lost_throughput']['mean']:g}, above {MOST_LOST:g}")
    return result, violations, slow


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line, or `words` instead."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--hours", type=float, default=2.0, help="hours of each fleet (default 2)")
    parser.add_argument("--share", type=float, default=0.4, help="reclaimed per hour (default 0.4)")
    parser.add_argument("--replacement", type=float, default=600.0, help="seconds, inf: never (default 600)")
    parser.add_argument("--headroom", type=float, default=0.1, help="of the disturbed fleet (default 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="first schedule (default 0)")
    parser.add_argument("--seeds", type=int, default=8, help="schedules (default 8)")
    parser.add_argument("--one-case", action="store_true", help="only the case of lost_throughput")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, and tell by the exit code whether every bar held."""
    arguments = parse(words)
    mute_logs()
    try:
        result, violated, slow = measure(arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return finish(result, record=arguments.record, violated=violated, at_size=slow)


if __name__ == "__main__":
    execute(main)
