"""The demo, measured: held-out pass@1 before and after, seconds and peak memory, for one seed.

.venv/bin/python benchmarks/demo.py --seed 0
"""

import argparse

from antiphon.benchmarks.parts.measure import PROJECT, end_on_sigterm, print_result, run_job, scratch_home


def main() -> None:
    """Run the demo's configuration with one seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None, help="learner steps (default: the demo's)")
    arguments = parser.parse_args()
    end_on_sigterm()
    overrides = [f"run.seed={arguments.seed}"]
    if arguments.steps is not None:
        overrides.append(f"run.steps={arguments.steps}")
    with scratch_home() as home:
        job = run_job(home, PROJECT / "examples" / "quickstart.yaml", overrides, "demo", 1800)
        metrics, timings = job.metrics(), job.timings()
    print_result(
        {
            "seed": arguments.seed,
            "pass_before": metrics["pass_before"],
            "pass_after": metrics["pass_after"],
            "pass_gain": metrics["pass_after"] - metrics["pass_before"],
            "seconds": round(job.seconds, 1),
            "loop_seconds": round(timings["loop_s"], 1),
            "peak_gb": round(job.peak_gb, 2),
            "staleness": metrics["staleness"],
            "dropped_stale_share": timings["dropped_stale_share"],
            "learner_idle_share": round(timings["learner_idle_share"], 4),
        }
    )


if __name__ == "__main__":
    main()
