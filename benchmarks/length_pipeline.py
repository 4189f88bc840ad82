"""Length pipeline: seconds per step of leasing by remembered lengths and by arrival, at S = 0, 1 and 2.

Coordinator, reward and learner services are production's, and so are the two workers, each a process of
its own that talks gRPC. Engines and trainer are stand-ins that sleep for as long as a step takes; the engine
imposes completion lengths of a recorded distribution, which keep their ranks from epoch to epoch. Runs of
both orders take turns in each pair, the other way round in every second one, on equal lengths. The first two
epochs do not count, nor do the last steps.

With step-scoped batches a worker asks for groups only when all of its own are handed in. `gain_s0`, `gain_s1`
and `gain_s2` are seconds per step by arrival over those by length, the default: medians of the pairs.
`shuffled_s1` is the same where each lease draws its lengths again, so that remembered ones say nothing and
the run stays with arrival by itself, and `streaming_s1` with workers as production has them, which ask
whenever they have places. `same_s1` is arrival over arrival: what the machine alone does to a ratio.
`length_bias_worst` is |mean tokens of trained groups / of opened ones - 1|.

    .venv/bin/python benchmarks/length_pipeline.py --pairs 3
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from antiphon.benchmarks.parts.imposed_worker import MAX_TOKENS, PLACES, WorkerOrder
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.benchmarks.parts.served_run import served_run
from antiphon.core.config import RunConfig, build_config
from antiphon.core.loop.events import BatchSealed, GroupOpened, GroupSubmitted, load_event
from antiphon.services.coordinator.journal.journal import StoredEvent
from antiphon.system.logs import configure_logs

ORDERS = ("arrival", "by_length")
BOUNDS = (0, 1, 2)
GAIN_LEAST, SHUFFLED_LEAST, BIAS_MOST = 1.15, 0.98, 1e-9
RUN_LIMIT_S = 1800.0
WORKERS = 2
PROMPTS = 48
ALPHA_S, BETA_S = 0.006, 0.0003
"""Seconds of an engine step without completions, and those that each completion at once adds."""
LEARNER_S = 0.35
LENGTHS = ("recorded", "shuffled")
EPOCH_STEPS = PROMPTS // (2 * WORKERS * PLACES)
"""Steps that one epoch of the prompts fills."""
LEASE_KEY = bytes(32)
"""Shuffled lengths are drawn by lease, and a pair compares orders on equal ones."""


@dataclass(frozen=True, slots=True)
class RunShape:
    """One run."""

    order: str
    max_staleness: int
    counted: int
    """Steps between the first and the last commits that count, whole epochs of them."""
    seed: int
    step_scoped: bool = True
    shuffled: bool = False

    @property
    def skipped(self) -> int:
        """Steps at the beginning that do not count: every prompt was sampled twice, and the loop is full."""
        return 2 * EPOCH_STEPS + self.max_staleness

    @property
    def steps(self) -> int:
        """All steps; in the last ones nothing more is opened, and they do not count either."""
        return self.skipped + self.counted + EPOCH_STEPS + self.max_staleness + 1

    def config(self) -> RunConfig:
        """Return the run's configuration."""
        return build_config(
            {
                "run": {"name": "lengths", "steps": self.steps, "seed": self.seed},
                "environment": {"train_size": PROMPTS, "heldout_size": 1},
                "evaluation": {"prompts": 1, "interval": 0},
                "loop": {
                    "max_staleness": self.max_staleness,
                    "prompts_per_step": 2 * WORKERS * PLACES,
                    "group_size": 4,
                    "filter": "none",
                    "run_ahead": "bound",
                    "order": self.order,
                },
                "sampling": {"max_tokens": MAX_TOKENS},
                "rollout": {"concurrent_groups": PLACES},
                "learner": {"checkpoint_interval": 1000},
                "coordinator": {"speculation": 0.0},
                "drafting": {"enabled": False},
            }
        )


async def run_once(shape: RunShape, folder: Path, pace: float) -> tuple[float, float]:
    """Run to the last step, all seconds times `pace`; return the seconds per step and the length bias.

    Raises:
        TimeoutError: when that takes too long.
    """
    orders = [
        WorkerOrder(f"w{number}", pace * ALPHA_S, pace * BETA_S, LENGTHS[shape.shuffled], shape.step_scoped)
        for number in range(WORKERS)
    ]
    async with served_run(shape.config(), folder, pace * LEARNER_S, lease_key=LEASE_KEY) as run:
        await run.start(orders)
        async with asyncio.timeout(RUN_LIMIT_S):
            await run.flow.run()
        events = await run.events()
    return seconds_per_step(shape, events), length_bias(events)


def seconds_per_step(shape: RunShape, events: Sequence[StoredEvent]) -> float:
    """Return the seconds between the commits of one epoch and of one `counted` steps later, per step.

    Times are those of an epoch's commits in the mean: single steps take 0.4 to 2.9 s in turn, for two batches
    often become complete together, and a span that begins or ends with one of them would be as wrong.
    """
    commits = [row.at for row in events if row.kind == "step.committed"][shape.skipped :]
    first, last = commits[:EPOCH_STEPS], commits[shape.counted : shape.counted + EPOCH_STEPS]
    return (fmean(last) - fmean(first)) / shape.counted


def length_bias(events: Sequence[StoredEvent]) -> float:
    """Return by how much the mean length of trained groups differs from that of those opened before them."""
    opened: list[str] = []
    tokens: dict[str, int] = {}
    trained: list[str] = []
    for row in events:
        event = load_event(row.kind, row.body)
        if isinstance(event, GroupOpened):
            opened.append(event.group_id)
        elif isinstance(event, GroupSubmitted):
            tokens[event.group_id] = sum(event.token_counts)
        elif isinstance(event, BatchSealed):
            trained += event.group_ids
    first = opened[: len(trained)]
    return abs(sum(tokens[i] for i in trained) / sum(tokens.get(i, 0) for i in first) - 1.0)


def main() -> int:
    """Run pairs of both orders."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="turns of both orders (default 3)")
    parser.add_argument("--steps", type=int, default=3 * EPOCH_STEPS, help="that count (default 9)")
    parser.add_argument("--bounds", type=int, nargs="+", default=list(BOUNDS), help="S (default 0 1 2)")
    parser.add_argument("--pace", type=float, default=1.0, help="factor of all seconds that are imposed")
    options = parser.parse_args()
    if options.pairs < 1 or options.steps < EPOCH_STEPS or 1 not in options.bounds:
        parser.error(f"--pairs must be at least 1, --steps at least {EPOCH_STEPS}, and --bounds must name 1")
    configure_logs("error")
    samples: dict[str, list[float]] = {}
    biases: list[float] = []

    def run(order: str, bound: int, pair: int, **kind: bool) -> float:
        shape = RunShape(order, bound, options.steps, pair, **kind)
        with tempfile.TemporaryDirectory(prefix="antiphon-lengths-") as folder:
            seconds, bias = asyncio.run(run_once(shape, Path(folder), options.pace))
        print(f"S={bound} {order} {kind or ''}: {seconds:.3f} s a step", flush=True)
        biases.append(bias)
        return seconds

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
    violated, lost = [], []
    if max(biases) > BIAS_MOST:
        violated.append(f"mean lengths of trained and opened groups differ by {max(biases):.3g}")
    for name, least in (("gain_s1", GAIN_LEAST), ("shuffled_s1", SHUFFLED_LEAST)):
        if median(samples[name]) < least:
            lost.append(f"{name} is {median(samples[name]):.3f}, not at least {least}")
    result: dict[str, Any] = {"length_bias_worst": max(biases)}
    return finish(result, record=options.record, samples=samples, violated=violated, at_size=lost)


if __name__ == "__main__":
    execute(main)
