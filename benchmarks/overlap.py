"""Overlap: the same work at S=0 and at S=2, with a slow broadcast.

A short synchronous run without a cap measures what rollout and training of one step take;
then the origin's uplink is capped so that one snapshot takes half of that, and the same steps are run at
S=0 and at S=2. `ratio` compares the two. Hiding only the injected transfer gives 1.5, so
`ratio_over_stage_sum` compares the overlapped step with rollout and training alone, one after the other
and without the transfer: above 1, rollout and training themselves overlap with a gain.

The policy is a random Qwen3 of 3.2 million parameters. With the demo's 0.45 million the two cores are shared
evenly between the learner and everything else, so nothing could keep the learner busy all the time; here
training is the largest stage, as it must be for the capacity model to promise a learner that never waits
(rollout + broadcast <= 2 training steps at S=2).

In all runs the learning rate is so small that the policy, and with it the work, stays the same.

    .venv/bin/python benchmarks/overlap.py
"""

from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from antiphon.benchmarks.parts.measure import PROJECT, run_job, scratch_home, step_ends, step_spans
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish

CONFIG = PROJECT / "benchmarks" / "overlap.yaml"
POLICY = {"hidden_size": 256, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "mlp_size": 768}
"""Shape of the random policy (see `benchmarks.parts.warmstart.tiny_model`)."""

SIZES = ("loop.prompts_per_step=16", "rollout.concurrent_groups=16", "sampling.max_tokens=48")
"""A step small enough that 24 of them take minutes."""

SAME_WORK = (
    "learner.learning_rate=1e-9",
    "loop.filter=none",
    "evaluation.interval=0",
    "evaluation.prompts=1",
)
"""Nothing is learned and nothing filtered, so every step has the same work."""

BOUND = 2
"""The staleness bound S of the overlapped runs."""
PROBE_STEPS = 10
RUN_S = 1800.0
"""Longest run."""

WARM_UP_STEPS = 3
"""Steps left out at the beginning: caches fill and the pipeline starts."""


def step_seconds(timings: dict[str, Any]) -> float:
    """Return the median of the seconds between the ends of successive steps."""
    ends = step_ends(timings)[WARM_UP_STEPS:]
    return float(median(b - a for a, b in pairwise(ends)))


def busy_seconds(timings: dict[str, Any]) -> float:
    """Return the median of the seconds of rollout, reward and training of one synchronous step.

    The reward stage begins with the sampling of a step and ends with its sealed batch.
    """
    batches = {s["number"]: s for s in timings["stages"] if s["stage"] == "reward"}
    steps = {s["number"]: s for s in timings["stages"] if s["stage"] == "step"}
    return float(
        median(
            batches[n]["ended_s"] - batches[n]["started_s"] + steps[n]["ended_s"] - steps[n]["started_s"]
            for n in sorted(steps)[WARM_UP_STEPS:]
        )
    )


def idle_share(timings: dict[str, Any]) -> float:
    """Return the share of the learner's steady seconds in which it waited for a batch."""
    ends = step_ends(timings)[WARM_UP_STEPS:]
    busy = sum(s["ended_s"] - s["started_s"] for s in step_spans(timings)[WARM_UP_STEPS + 1 :])
    return max(0.0, float(1.0 - busy / (ends[-1] - ends[0])))


def main() -> int:
    """Run the jobs and compare them."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=24, help="learner steps of each run")
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP_STEPS + 2:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + 2}: the first {WARM_UP_STEPS} do not count")
    with scratch_home() as home:
        found, staleness = slow_broadcast(home, arguments.steps)
    oldest, ratio = max(map(int, staleness)), found["ratio"]
    violated = [f"a sample was {oldest} versions old, the bound is {BOUND}"] if oldest > BOUND else []
    hidden = f"S={BOUND} hides nothing of a slow broadcast: its step takes {1 / ratio:.2f} of S=0"
    at_size = [hidden] if ratio <= 1.0 else []
    result = {"steps": arguments.steps, "staleness_overlapped": staleness, **found}
    return finish(result, record=arguments.record, violated=violated, at_size=at_size)


def slow_broadcast(home: Path, steps: int) -> tuple[dict[str, float], dict[str, int]]:
    """Compare S=0 and S=2 while a broadcast takes half of a step; return metrics and ages of samples."""
    common = [
        *SAME_WORK,
        *SIZES,
        "broadcast.links=false",
        f"model.path={make_policy(home / 'policy')}",
    ]
    probe_steps = f"run.steps={min(PROBE_STEPS, steps)}"
    words = [*common, "loop.max_staleness=0", probe_steps]
    # A random policy earns nothing.
    probe = run_job(home, CONFIG, words, "probe", RUN_S, untaught=True)
    busy = busy_seconds(probe.timings())
    cap = f"broadcast.uplink_bytes_per_s={payload_bytes(home) / (0.5 * busy):.0f}"
    same = [*common, cap, f"run.steps={steps}"]
    sync, over = (
        run_job(home, CONFIG, [*same, f"loop.max_staleness={bound}"], label, RUN_S, untaught=True)
        for label, bound in (("sync", 0), ("overlapped", BOUND))
    )
    seconds_sync, seconds_over = step_seconds(sync.timings()), step_seconds(over.timings())
    found = {
        "seconds_per_step_sync": seconds_sync,
        "seconds_per_step_overlapped": seconds_over,
        "ratio": seconds_sync / seconds_over,
        "ratio_over_stage_sum": busy_seconds(sync.timings()) / seconds_over,
        "idle_share_overlapped": idle_share(over.timings()),
        "rollout_and_training_s": busy,
        "broadcast_s": 0.5 * busy,
    }
    return {name: round(value, 4) for name, value in found.items()}, over.metrics()["staleness"]


def make_policy(out: Path) -> Path:
    """Write a random policy with a tokenizer that fits the task, and return its directory."""
    from antiphon.benchmarks.parts.warmstart.tiny_model import (
        ModelShape,
        build_model,
        build_tokenizer,
        save_tiny_model,
    )
    from antiphon.core.config import load_config
    from antiphon.environments.registry import make_environment

    section = load_config(CONFIG).environment
    environment = make_environment(section.name, section.parameters, section.seed, 1, 1)
    shape = ModelShape(**POLICY)
    tokenizer = build_tokenizer(environment.problem("train", 0).text, shape)
    save_tiny_model(build_model(shape, seed=0), tokenizer, out)
    return out


def payload_bytes(home: Path) -> int:
    """Return the size of one snapshot: what the origin sent for the first version."""
    for path in sorted(home.glob("runs/*/payloads/*.payload")):
        return path.stat().st_size
    raise SystemExit("the probe run left no manifest behind")


if __name__ == "__main__":
    execute(main)
