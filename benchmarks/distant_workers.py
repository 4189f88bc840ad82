"""Distant workers: whole runs whose two workers sit behind links of 20 Mbit/s with 40 ms one way.

Each run is the main job (without Prefect and records) with certificates and tokens on a host of its own, and
two real workers that join it as from other machines: `antiphon worker --relay-address`, in network namespaces
with shaped uplinks, which do not see the run's files. The model is the demo's with wider MLPs, published in
bfloat16 (5 MB) and trained at a learning rate of 1e-6; S=1.

- `star_full`: `broadcast.relay=off broadcast.patches=off`; both fetch whole snapshots from the learner.
- `chain_full`: `broadcast.relay=auto`; one hands them on.
- `chain_patch`: also `broadcast.patches=on`.

For each: `seconds_per_step`, the median after the first steps; `idle_share`, the learner's, waiting for a
batch; `mb_per_version`, what a worker fetched for a version; `delivery_s`, the median until it was there;
`relayed_share` of all bytes. `sampling_during_download` is the rate of the engine of `far-1` while snapshots
arrive over the rate otherwise, in steps with as many requests, over the runs with whole snapshots. This
worker has a core for itself, all others share the rest, and what other processes took of that core is left
out; where that is more than a fifth (`core_share_of_others`), the figure is null.

Fails when a worker holds other weights than were announced, sent or received something wrong, when nothing
was relayed, or when sampling during a download falls below 0.9 of undisturbed. Needs root, iproute2,
/dev/net/tun and two cores, and is skipped with a reason otherwise. The last line is JSON.

    .venv/bin/python benchmarks/distant_workers.py [--steps 12]
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from antiphon.benchmarks.overlap import WARM_UP_STEPS, idle_share, step_seconds
from antiphon.benchmarks.parts.measure import end_on_sigterm, scratch_home
from antiphon.benchmarks.parts.network.distant_run import Finished, run_far
from antiphon.benchmarks.parts.network.namespaces import missing, network_of
from antiphon.benchmarks.parts.results import benchmark_parser, finish

UPLINK, DELAY_S, WORKERS = 20e6 / 8, 0.040, 2
"""Bytes per second; seconds one way."""
CASES = {
    "star_full": ("broadcast.relay=off", "broadcast.patches=off"),
    "chain_full": ("broadcast.relay=auto", "broadcast.patches=off"),
    "chain_patch": ("broadcast.relay=auto", "broadcast.patches=on"),
}
COMMON = (
    "run.name=distant",
    "model.dtype=bfloat16",
    "loop.max_staleness=1",
    "loop.prompts_per_step=4",
    "loop.filter=none",
    "sampling.max_tokens=64",
    "learner.learning_rate=1e-6",
    "learner.warmup_steps=0",
    "learner.schedule=constant",
    "rollout.concurrent_groups=2",
    "drafting.enabled=false",
    "coordinator.heartbeat_s=0.5",
    "evaluation.interval=0",
    "evaluation.prompts=8",
    "broadcast.streams=4",
)
WATCHED = "far-1"
LEAST_DURING, LEAST_STEPS = 0.9, 50
"""The first in engine's steps with as many requests, of which there must be so many."""
MOST_OTHERS = 0.2
"""Share of the engine's steps in which other processes had its core. Beyond it the figure is not given: a
download costs CPU time by the second, so it costs an engine more that has less of a core."""
REQUESTS_ALIKE = 4
"""Steps are compared when their numbers of requests differ by less."""

Step = tuple[float, float, float, int]
"""As `watched_worker` notes it."""


def main() -> int:
    """Run every case and compare them."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=12, help="learner steps of each run")
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(CASES)}")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for all runs")
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP_STEPS + 2:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + 2}: the first {WARM_UP_STEPS} do not count")
    reason = missing()
    if reason is None and len(os.sched_getaffinity(0)) < 2:
        reason = "the measured worker needs a core for itself, and there is one in all"
    if reason is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        print(json.dumps({"skipped": reason}))
        return 0
    end_on_sigterm()
    wanted = arguments.only.split(",") if arguments.only else list(CASES)
    report: dict[str, Any] = {}
    whole: list[Finished] = []
    violated: list[str] = []
    at_size: list[str] = []
    for name in wanted:
        done = _run(arguments, CASES[name])
        report[name] = row = _row(done)
        print(f"{name}: {row}", flush=True)
        violated += [f"{name}: {problem}" for problem in _problems(name, done, row)]
        if name.endswith("full"):
            whole.append(done)
    if whole:
        notes = [done.notes[WATCHED] for done in whole]
        during, steps = sampling_during_download(notes)
        others = taken_by_others(notes)
        report |= {"engine_steps_during_download": steps, "core_share_of_others": others}
        report["sampling_during_download"] = during if others <= MOST_OTHERS else None
        if others > MOST_OTHERS:
            print(f"the core of {WATCHED} was taken by others for {others:.0%} of its steps: not judged")
        elif during is None:
            at_size.append(f"{steps} steps of the engine during downloads can be compared; give more --steps")
        elif during < LEAST_DURING:
            at_size.append(f"sampling during a download is {during} of undisturbed; at least {LEAST_DURING}")
    return finish(report, record=arguments.record, violated=violated, at_size=at_size)


def sampling_during_download(notes: Iterable[Mapping[str, Any]]) -> tuple[float | None, int]:
    """Return the engine's rate while snapshots arrive over its rate otherwise, and the steps compared.

    Args:
        notes: of one worker in several runs, as `watched_worker` writes them. Steps next to a swap are left
            out: requests are computed anew there.
    """
    alike: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for note in notes:
        transfers = [(begin, end) for begin, end, size in note["transfers"] if size]
        for begin, end, seconds, requests in _apart_from(note["loads"], note["steps"]):
            during = any(start <= begin and end <= stop for start, stop in transfers)
            if during or not any(start < end and begin < stop for start, stop in transfers):
                alike[requests // REQUESTS_ALIKE, during].append(seconds)
    took_s = undisturbed_s = 0.0
    compared = 0
    for (requests, during), found in alike.items():
        others = alike.get((requests, False), [])
        if during and len(others) >= REQUESTS_ALIKE:
            took_s, compared = took_s + sum(found), compared + len(found)
            undisturbed_s += len(found) * fmean(others)
    return (round(undisturbed_s / took_s, 4) if compared >= LEAST_STEPS else None), compared


def taken_by_others(notes: Iterable[Mapping[str, Any]]) -> float:
    """Return the share of the engine's steps in which processes of others had its core."""
    steps = [step for note in notes for step in note["steps"]]
    whole_s = sum(end - begin for begin, end, _, _ in steps)
    return round(1 - sum(seconds for _, _, seconds, _ in steps) / whole_s, 4) if whole_s else 0.0


def _apart_from(loads: Sequence[tuple[float, float]], steps: Sequence[Step]) -> list[Step]:
    """Return the steps during which no swap waited, without the first one after each."""
    left = []
    before = float("-inf")
    for step in steps:
        begin, end, *_ = step
        if not any(start < end and before < stop for start, stop in loads):
            left.append(step)
        before = begin
    return left


def _run(arguments: argparse.Namespace, changed: Sequence[str]) -> Finished:
    *shared, own = sorted(os.sched_getaffinity(0))
    cores = [shared, [own], shared]
    overrides = [*COMMON, f"run.steps={arguments.steps}", *changed, *arguments.overrides]
    with network_of([UPLINK] * (1 + WORKERS), DELAY_S) as network, scratch_home() as home:
        return run_far(home, network.hosts, overrides, cores)


def _row(done: Finished) -> dict[str, Any]:
    fetched = [delivery for delivery in done.deliveries if delivery.version > 0 and delivery.bytes]
    total = sum(delivery.bytes for delivery in fetched)
    from_origin = sum(delivery.bytes_from.get("", 0) for delivery in fetched)
    return {
        "seconds_per_step": round(step_seconds(done.timings), 3),
        "idle_share": round(idle_share(done.timings), 4),
        "mb_per_version": round(total / len(fetched) / 1e6, 3) if fetched else None,
        "delivery_s": round(median(delivery.seconds for delivery in fetched), 2) if fetched else None,
        "deliveries": len(fetched),
        "relayed_share": round(1 - from_origin / total, 3) if total else 0.0,
    }


def _problems(name: str, done: Finished, row: Mapping[str, Any]) -> list[str]:
    found = list(done.problems)
    for delivery in done.deliveries:
        found += [
            f"{source or 'the learner'} {what} to {delivery.worker_id}"
            for source, what in delivery.culprits.items()
        ]
    if not row["deliveries"]:
        found.append("no version came over the network")
    if name == "chain_full" and not row["relayed_share"]:  # a patch is so small that a star may be faster
        found.append("no worker handed anything on")
    return found


if __name__ == "__main__":
    sys.exit(main())
