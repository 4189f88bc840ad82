"""The demo, measured: what it learns, how fast, and what is thrown away, for several seeds.

`filtered_share`, `stale_share`, `staleness_mean`, `idle_share`, `loop_s` and `drafting_*` are the run's own
figures (docs/concepts/figures.md). `evaluation_exact_share`: of the held-out answers of the journal, the
share whose every token the evaluated version sampled; below 1 the benchmark fails. `stale_token_share` counts
tokens that were sampled and thrown away, for whatever reason; `length_bias` is how far the mean length of one
staleness is from that of the same batches, at most (of staleness that at least 5% of the groups have).
`drafts_rested_share`: of the tokens that were sampled while over 0.8 of the newest drafts were right, the
share sampled without drafts. The base model was taught the careful method and then had it buried
(docs/concepts/demo-model.md), so the score says how fast a buried habit comes back.

    .venv/bin/python benchmarks/demo.py --seeds 5
"""

from pathlib import Path
from statistics import median

from antiphon.benchmarks.parts.measure import PROJECT, JobRun, count_groups, run_job, scratch_home
from antiphon.benchmarks.parts.results import add, benchmark_parser, execute, finish

LAST = 3
"""Evaluations at the end that are averaged: a single one is noisy."""
COMMON = 0.05
"""Share of the groups that a staleness must have for its lengths to be compared."""
RUN_S = 1800.0
"""Longest run of one seed."""
CONFIG = PROJECT / "examples" / "quickstart.yaml"


def main() -> int:
    """Run the demo's configuration once for each seed."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (default 3)")
    parser.add_argument("--steps", type=int, default=None, help="learner steps (default: the demo's)")
    parser.add_argument("overrides", nargs="*", help="key=value pairs besides")
    arguments = parser.parse_args()
    overrides = [*arguments.overrides, *([f"run.steps={arguments.steps}"] if arguments.steps else [])]
    samples: dict[str, list[float]] = {}
    staleness: dict[str, int] = {}
    seeds = list(range(arguments.seeds))
    for seed in seeds:
        words = [f"run.seed={seed}", *overrides]
        with scratch_home() as home:
            job = run_job(home, CONFIG, words, "demo", RUN_S)
            found = measured(job, home)
            for age, count in job.metrics()["staleness"].items():
                staleness[age] = staleness.get(age, 0) + count
        print(f"seed {seed}: {found}", flush=True)
        add(samples, found)
    oldest = max(map(int, staleness))
    result = {
        "seeds": seeds,
        "staleness": staleness,
        "staleness_max": oldest,
        "pass_after_min": min(samples["pass_after"]),
        "pass_after_median": median(samples["pass_after"]),
        "pass_best_minus_last_max": max(samples["pass_best_minus_last"]),
        "stale_share_max": max(samples["stale_share"]),
        "evaluation_exact_share": min(samples["evaluation_exact_share"]),
    }
    violated = [f"a sample was {oldest} versions old, the bound is 2"] if oldest > 2 else []
    if result["evaluation_exact_share"] != 1.0:
        violated.append(
            f"{result['evaluation_exact_share']:.1%} of the held-out answers are of their version"
        )
    return finish(result, record=arguments.record, samples=samples, violated=violated)


def measured(job: JobRun, home: Path) -> dict[str, float]:
    """Return what one run shows."""
    metrics, timings = job.metrics(), job.timings()
    drafting, figures = timings["drafting"], timings["figures"]
    groups = count_groups(home, timings["run_id"])
    scores = [evaluation["pass_at_1"] for evaluation in metrics["evaluations"]]
    last = scores[1:][-LAST:] or scores
    return {
        "pass_before": metrics["pass_before"],
        "pass_after": metrics["pass_after"],
        "pass_gain": metrics["pass_after"] - metrics["pass_before"],
        "pass_last_three": sum(last) / len(last),
        "pass_best_minus_last": max(scores) - scores[-1],
        "filtered_share": figures["groups_filtered_share"],
        "stale_share": figures["groups_dropped_stale_share"],
        "stale_token_share": groups.stale_token_share,
        "evaluation_exact_share": groups.evaluation_exact_share,
        "length_bias": max(
            abs(ratio - 1.0)
            for age, ratio in groups.length_by_staleness.items()
            if groups.staleness_shares[age] >= COMMON
        ),
        "staleness_mean": figures["staleness_mean"],
        "idle_share": figures["learner_idle_share"],
        "wall_s": job.seconds,
        "loop_s": figures["wall_s"],
        "cpu_s": job.cpu_s,
        "peak_memory_gb": job.peak_gb,
        **{name: figures[name] for name in ("drafting_acceptance", "drafting_tokens_per_pass") if drafting},
        **({"drafts_rested_share": drafting["rested_share"]} if drafting else {}),
    }


if __name__ == "__main__":
    execute(main)
