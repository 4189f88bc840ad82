"""Length pipeline: the seconds per step of each order of leasing by remembered lengths, at S = 0, 1 and 2.

Coordinator, reward and learner services are production's, and so are the two workers, each a process of
its own that talks gRPC. Engines and trainer are stand-ins that sleep for as long as a step takes; the engine
imposes completion lengths of a recorded distribution, which keep their ranks from epoch to epoch. Runs of all
orders take turns in each pair. Steps of the first epoch do not count: nothing is remembered before.

With step-scoped batches a worker asks for groups only when all of its own are handed in. `gain_s0`, `gain_s1`
and `gain_s2` are seconds per step by arrival over those of the best order (named in `best`), medians of the
pairs; `shuffled_s1` is the same at S = 1 for that order where each lease draws its lengths anew, so that
remembered ones say nothing and the run falls back to arrival by itself. `streaming_s1` is arrival over `auto`
with workers as production has them, which ask whenever they have places. `length_bias_worst` is |mean tokens
of trained groups / of opened ones - 1|. `simulated` has the gains of the same code over arrival in virtual
time, for fleets of 16 and 128 workers.

    .venv/bin/python benchmarks/length_pipeline.py --pairs 3
    .venv/bin/python benchmarks/length_pipeline.py --simulated-only
"""

import asyncio
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from antiphon.benchmarks.parts.lengths.site import PLACES, PROMPTS, WORKERS, RunFigures, RunShape, run_once
from antiphon.benchmarks.parts.measure import end_on_sigterm
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.simulator.length_pipeline import Row, walk_fleets
from antiphon.system.logs import configure_logs

ORDERS = ("arrival", "longest_first", "alternating", "two_tier")
BOUNDS = (0, 1, 2)
GAIN_LEAST, SHUFFLED_LEAST, BIAS_MOST = 1.15, 0.98, 1e-9
EPOCH_STEPS = -(-PROMPTS // (2 * WORKERS * PLACES))
RUN_LIMIT_S = 1800.0


def measure(shape: RunShape) -> RunFigures:
    """Run once, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="antiphon-lengths-") as place:
        found = asyncio.run(run_once(shape, Path(place), RUN_LIMIT_S))
    kind = "step-scoped" if shape.step_scoped else "streaming"
    print(
        f"S={shape.max_staleness} {kind}{', shuffled' if shape.shuffled else ''} {shape.order}: "
        f"{found.seconds_per_step:.3f} s a step; {found.order or 'arrival'}",
        flush=True,
    )
    return found


def best_order(ratios: dict[str, list[float]]) -> tuple[str, list[float]]:
    """Return the order of the highest median gain over arrival, and its gains."""
    name = max(ratios, key=lambda order: median(ratios[order]))
    return name, ratios[name]


def table(fleets: list[int], steps: int) -> list[Row]:
    """Walk the fleets and print a line for each."""
    rows = []
    for row in walk_fleets(fleets, BOUNDS, steps):
        rows.append(row)
        kind = "step-scoped" if row.step_scoped else "streaming"
        told = ", ".join(
            f"{name} {seconds:.1f} s ({row.gains[name]:.2f}x)" for name, seconds in row.seconds.items()
        )
        print(f"simulated: {row.workers} workers, S={row.max_staleness}, {kind}: {told}", flush=True)
    return rows


def violations(result: dict[str, Any], bias: float) -> list[str]:
    """Return a sentence for everything that does not hold."""
    found = []
    if result["gain_s1"] < GAIN_LEAST:
        found.append(f"at S=1 the best order gains {result['gain_s1']:.3f}x, not at least {GAIN_LEAST}x")
    if result["shuffled_s1"] < SHUFFLED_LEAST:
        found.append(f"with shuffled ranks: {result['shuffled_s1']:.3f}x, not at least {SHUFFLED_LEAST}x")
    if bias > BIAS_MOST:
        found.append(f"mean lengths of trained and opened groups differ by {bias:.3g}")
    return found


def main() -> int:
    """Run pairs of every order and print the table of the simulated fleets."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="turns of all orders (default 3)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a run that count (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the first pair (default 0)")
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=list(BOUNDS), help="values of S (default 0 1 2)"
    )
    parser.add_argument("--fleets", type=int, nargs="*", default=[16, 128], help="workers that are simulated")
    parser.add_argument("--simulated-only", action="store_true", help="only walk the simulated fleets")
    options = parser.parse_args()
    if options.pairs < 1 or options.steps < 2 or 1 not in options.bounds:
        parser.error("--pairs must be at least 1, --steps at least 2, and --bounds must name 1")
    end_on_sigterm()
    configure_logs("error")
    simulated = [
        {**asdict(row), "gains": {name: round(gain, 3) for name, gain in row.gains.items()}}
        for row in table(options.fleets, options.steps)
    ]
    if options.simulated_only:
        return finish({"simulated": simulated}, record=False)

    gains: dict[int, dict[str, list[float]]] = {bound: {} for bound in options.bounds}
    seconds: dict[str, list[float]] = {}
    shuffled: dict[str, list[float]] = {}
    streaming: list[float] = []
    biases: list[float] = []

    def run(order: str, bound: int, pair: int, **kind: bool) -> float:
        skipped = EPOCH_STEPS + bound + 3
        shape = RunShape(order, bound, skipped + options.steps, skipped, options.seed + pair, **kind)
        found = measure(shape)
        biases.append(found.length_bias)
        return found.seconds_per_step

    for pair in range(options.pairs):
        for bound in options.bounds:
            turn = ORDERS if pair % 2 == 0 else ORDERS[::-1]
            took = {order: run(order, bound, pair) for order in turn}
            for order, taken in took.items():
                seconds.setdefault(f"s{bound}_{order}_s", []).append(round(taken, 4))
                if order != "arrival":
                    gains[bound].setdefault(order, []).append(round(took["arrival"] / taken, 4))
        by_arrival = run("arrival", 1, pair, shuffled=True)
        for order in ORDERS[1:]:
            taken = run(order, 1, pair, shuffled=True)
            shuffled.setdefault(order, []).append(round(by_arrival / taken, 4))
        streamed = {order: run(order, 1, pair, step_scoped=False) for order in ("arrival", "auto")}
        streaming.append(round(streamed["arrival"] / streamed["auto"], 4))
    samples, best = dict(seconds), {}
    for bound in options.bounds:
        best[f"s{bound}"], samples[f"gain_s{bound}"] = best_order(gains[bound])
    samples["shuffled_s1"] = shuffled[best["s1"]]
    samples["streaming_s1"] = streaming
    medians = {name: median(samples[name]) for name in ("gain_s1", "shuffled_s1")}
    result = {"best": best, "length_bias_worst": max(biases), "simulated": simulated}
    return finish(result, record=options.record, samples=samples, violated=violations(medians, max(biases)))


if __name__ == "__main__":
    sys.exit(main())
