"""Overlap: the same work at S=0 and at S=2 while a broadcast takes half a synchronous step.

First a short synchronous run without a cap measures what rollout and training of one step
take; then the origin's uplink is capped so that one snapshot takes half of that, and the same
steps are run at S=0 and at S=2. The learning rate is so small that the policy, and with it
the work, stays the same.

The policy is a random Qwen3 of 3.2 million parameters. With the demo's 0.45 million the two
cores are shared evenly between the learner and everything else, so nothing could keep the
learner busy all the time; here training is the largest stage, as it must be for the capacity
model to promise a learner that never waits (rollout + broadcast <= 2 training steps at S=2).

    .venv/bin/python benchmarks/overlap.py
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from antiphon.benchmarks.parts.measure import (
    PROJECT,
    JobRun,
    end_on_sigterm,
    print_result,
    run_job,
    scratch_home,
    step_ends,
)

POLICY = {"hidden_size": 256, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "mlp_size": 768}
"""Shape of the random policy (see `services.learner.warmstart.tiny_model`)."""

SIZES = ("loop.prompts_per_step=16", "rollout.concurrent_groups=16", "sampling.max_tokens=48")
"""A step small enough that 24 of them take minutes."""

SAME_WORK = (
    "learner.learning_rate=1e-9",
    "loop.filter=none",
    "evaluation.interval=0",
    "evaluation.prompts=1",
)
"""Nothing is learned and nothing filtered, so every step has the same work."""

WARM_UP_STEPS = 3
"""Steps left out at the beginning: caches fill and the pipeline starts."""


def step_seconds(timings: dict[str, Any]) -> float:
    """Return the median of the seconds between the ends of successive steps."""
    ends = step_ends(timings)[WARM_UP_STEPS:]
    return float(median(b - a for a, b in pairwise(ends)))


def busy_seconds(timings: dict[str, Any]) -> float:
    """Return the median of rollout plus training seconds of one synchronous step."""
    collects = {s["number"]: s for s in timings["stages"] if s["stage"] == "collect"}
    steps = {s["number"]: s for s in timings["stages"] if s["stage"] == "step"}
    return float(
        median(
            collects[n]["ended_s"] - collects[n]["started_s"] + steps[n]["ended_s"] - steps[n]["started_s"]
            for n in sorted(steps)[WARM_UP_STEPS:]
        )
    )


def idle_share(job: JobRun) -> float:
    """Return the share of the learner's steady seconds in which it waited for a batch."""
    timings = job.timings()
    ends = step_ends(timings)[WARM_UP_STEPS:]
    spans = sorted((s for s in timings["stages"] if s["stage"] == "step"), key=lambda s: s["number"])
    busy = sum(s["ended_s"] - s["started_s"] for s in spans[WARM_UP_STEPS + 1 :])
    return max(0.0, float(1.0 - busy / (ends[-1] - ends[0])))


def main() -> None:
    """Run the three jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--config", default=str(PROJECT / "benchmarks" / "overlap.yaml"))
    arguments = parser.parse_args()
    end_on_sigterm()
    steps = f"run.steps={arguments.steps}"
    with scratch_home() as home:
        config = Path(arguments.config)
        common = [*SAME_WORK, *SIZES, steps, f"model.path={make_policy(config, home / 'policy')}"]
        probe = run_job(home, config, [*common, "loop.max_staleness=0", "run.steps=10"], "probe", 900)
        busy = busy_seconds(probe.timings())
        payload = payload_bytes(home)
        cap = f"broadcast.uplink_bytes_per_s={payload / (0.5 * busy):.0f}"
        sync = run_job(home, config, [*common, "loop.max_staleness=0", cap], "sync", 1800)
        over = run_job(home, config, [*common, "loop.max_staleness=2", cap], "overlapped", 1800)
        seconds_sync, seconds_over = step_seconds(sync.timings()), step_seconds(over.timings())
        result = {
            "seconds_per_step_sync": round(seconds_sync, 3),
            "seconds_per_step_overlapped": round(seconds_over, 3),
            "ratio": round(seconds_sync / seconds_over, 3),
            "idle_share_overlapped": round(idle_share(over), 4),
            "rollout_and_training_s": round(busy, 3),
            "broadcast_s": round(0.5 * busy, 3),
            "steps": arguments.steps,
            "staleness_overlapped": over.metrics()["staleness"],
        }
    print_result(result)


def make_policy(config: Path, out: Path) -> Path:
    """Write a random policy with a tokenizer that fits the task, and return its directory."""
    from antiphon.core.config import load_config
    from antiphon.environments.registry import make_environment
    from antiphon.services.learner.warmstart.tiny_model import (
        ModelShape,
        build_model,
        build_tokenizer,
        save_tiny_model,
    )

    section = load_config(config).environment
    environment = make_environment(section.name, section.parameters, section.seed, 1, 1)
    shape = ModelShape(**POLICY)
    tokenizer = build_tokenizer(environment.problem("train", 0).text, shape)
    save_tiny_model(build_model(shape, seed=0), tokenizer, out)
    return out


def payload_bytes(home: Path) -> int:
    """Return the size of one snapshot: what the origin sent for the first version."""
    for path in sorted(home.glob("runs/*/chunks/manifests/*.json")):
        return int(json.loads(path.read_text())["payload_bytes"])
    raise SystemExit("the probe run left no manifest behind")


if __name__ == "__main__":
    main()
