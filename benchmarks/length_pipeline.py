"""Length pipeline: the seconds per step of each order of leasing by remembered lengths, at S = 0, 1 and 2.

Coordinator, reward and learner services are production's, and so are the two workers, each a process of
its own that talks gRPC. Engines and trainer are stand-ins that sleep for as long as a step takes; the engine
imposes completion lengths of a recorded distribution, which keep their ranks from epoch to epoch. Runs of all
orders take turns in each pair, the other way round in every second one, on equal lengths. The first two
epochs do not count, nor do the last steps.

With step-scoped batches a worker asks for groups only when all of its own are handed in. `gain_s0`, `gain_s1`
and `gain_s2` are seconds per step by arrival over those by length, the default: medians of the pairs.
`shuffled_s1` is the same where each lease draws its lengths anew, so that remembered ones say nothing and the
run stays with arrival by itself, and `streaming_s1` with workers as production has them, which ask whenever
they have places. `same_s1` is arrival over arrival: what the machine alone does to a ratio.
`length_bias_worst` is |mean tokens of trained groups / of opened ones - 1|. `simulated` has the gains of each
order over arrival in virtual time, for fleets of 16 and 128 workers.

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

from antiphon.benchmarks.parts.lengths.pipeline import Row, walk_fleets
from antiphon.benchmarks.parts.lengths.site import EPOCH_STEPS, RunFigures, RunShape, run_once
from antiphon.benchmarks.parts.measure import end_on_sigterm
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.system.logs import configure_logs

ORDERS = ("arrival", "by_length")
BOUNDS = (0, 1, 2)
GAIN_LEAST, SHUFFLED_LEAST, BIAS_MOST = 1.15, 0.98, 1e-9
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


def lost(result: dict[str, Any]) -> list[str]:
    """Return a sentence for every gain that is too small."""
    found = []
    if result["gain_s1"] < GAIN_LEAST:
        found.append(f"at S=1 leasing by length gains {result['gain_s1']:.3f}x, not at least {GAIN_LEAST}x")
    if result["shuffled_s1"] < SHUFFLED_LEAST:
        found.append(f"with shuffled ranks: {result['shuffled_s1']:.3f}x, not at least {SHUFFLED_LEAST}x")
    return found


def main() -> int:
    """Run pairs of every order and print the table of the simulated fleets."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="turns of all orders (default 3)")
    parser.add_argument(
        "--steps", type=int, default=3 * EPOCH_STEPS, help="steps of a run that count (default 9)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first pair (default 0)")
    parser.add_argument(
        "--bounds", type=int, nargs="+", default=list(BOUNDS), help="values of S (default 0 1 2)"
    )
    parser.add_argument("--fleets", type=int, nargs="*", default=[16, 128], help="workers that are simulated")
    parser.add_argument("--simulated-only", action="store_true", help="only walk the simulated fleets")
    options = parser.parse_args()
    if options.pairs < 1 or options.steps < EPOCH_STEPS or 1 not in options.bounds:
        parser.error(f"--pairs must be at least 1, --steps at least {EPOCH_STEPS}, and --bounds must name 1")
    end_on_sigterm()
    configure_logs("error")
    simulated = [
        {**asdict(row), "gains": {name: round(gain, 3) for name, gain in row.gains.items()}}
        for row in table(options.fleets, options.steps)
    ]
    if options.simulated_only:
        return finish({"simulated": simulated}, record=False)

    samples: dict[str, list[float]] = {}
    biases: list[float] = []

    def run(order: str, bound: int, pair: int, **kind: bool) -> float:
        found = measure(RunShape(order, bound, options.steps, options.seed + pair, **kind))
        biases.append(found.length_bias)
        return found.seconds_per_step

    def gain(bound: int, pair: int, **kind: bool) -> float:
        """Return the gain over arrival; the two orders take turns."""
        took = {order: run(order, bound, pair, **kind) for order in (ORDERS if pair % 2 else ORDERS[::-1])}
        for order, taken in took.items():
            kinds = "".join(f"{name}_" for name in kind)
            samples.setdefault(f"s{bound}_{kinds}{order}_s", []).append(round(taken, 4))
        return round(took["arrival"] / took["by_length"], 4)

    for pair in range(options.pairs):
        for bound in options.bounds:
            samples.setdefault(f"gain_s{bound}", []).append(gain(bound, pair))
        again = run("arrival", 1, pair)
        samples.setdefault("same_s1", []).append(round(samples["s1_arrival_s"][-1] / again, 4))
        samples.setdefault("shuffled_s1", []).append(gain(1, pair, shuffled=True))
        samples.setdefault("streaming_s1", []).append(gain(1, pair, step_scoped=False))
    medians = {name: median(samples[name]) for name in ("gain_s1", "shuffled_s1")}
    result = {"length_bias_worst": max(biases), "simulated": simulated}
    violated = []
    if max(biases) > BIAS_MOST:
        violated.append(f"mean lengths of trained and opened groups differ by {max(biases):.3g}")
    return finish(result, record=options.record, samples=samples, violated=violated, at_size=lost(medians))


if __name__ == "__main__":
    sys.exit(main())
