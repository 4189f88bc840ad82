"""Overhead: whole jobs in turns, as shipped, without records, and without Prefect.

Every round runs the same work at S=2 three times, each in a job of its own: as shipped; without MLflow and
DVC (`record.mlflow=false record.dvc=false`; the run log is always kept); and with the stages in plain
threads instead of Prefect tasks, without a Prefect server, but with records. The order rotates from round
to round. Counted are wall seconds and the CPU seconds of all processes of a job, from its first to its
last. `wall_share` and `cpu_share` are the shares of the job as shipped that go when records go;
`prefect_wall_share` and `prefect_cpu_share` those that go when Prefect goes; `loop_` shares leave out start
and end.

    .venv/bin/python benchmarks/overhead.py
"""

from collections.abc import Mapping, Sequence
from typing import Any

from antiphon.benchmarks.overlap import SAME_WORK
from antiphon.benchmarks.parts.measure import PROJECT, JobRun, run_job, run_module, scratch_home
from antiphon.benchmarks.parts.results import add, benchmark_parser, execute, finish

VARIANTS = ("shipped", "no_records", "plain_stages")
RUN_S = 1200.0
"""Longest job."""


def main() -> int:
    """Run the jobs in turns and compare them."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each kind")
    parser.add_argument("--steps", type=int, default=20, help="learner steps of each job")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for all jobs")
    arguments = parser.parse_args()
    overrides = [*SAME_WORK, f"run.steps={arguments.steps}", "loop.max_staleness=2", *arguments.overrides]
    samples: dict[str, list[float]] = {}
    violated: list[str] = []
    for number in range(arguments.rounds):
        turn = number % len(VARIANTS)
        found = {name: run_variant(name, overrides) for name in (*VARIANTS[turn:], *VARIANTS[:turn])}
        for variant, (_, timings) in found.items():
            sinks = {writer["name"] for writer in timings["records"]["writers"]}
            if bool(sinks & {"ledger", "mlflow"}) == (variant == "no_records"):
                violated.append(f"round {number + 1}: the job {variant} recorded {timings['records']}")
        compared = compare(found, arguments.steps)
        print(f"round {number + 1}: {compared}", flush=True)
        add(samples, compared)
    result = {"rounds": arguments.rounds, "steps": arguments.steps}
    return finish(result, record=arguments.record, samples=samples, violated=violated)


def run_variant(variant: str, overrides: Sequence[str]) -> tuple[JobRun, dict[str, Any]]:
    """Run one job in a home directory of its own; return what it took and its timings."""
    config = PROJECT / "benchmarks" / "overlap.yaml"
    with scratch_home() as home:
        if variant == "plain_stages":
            results = home / "results"
            words = ["antiphon.benchmarks.parts.plain_job", str(config), *overrides]
            job = run_module(home, [*words, "--results", str(results)], variant, RUN_S, results)
        else:
            off = ["record.mlflow=false", "record.dvc=false"] if variant == "no_records" else []
            job = run_job(home, config, [*overrides, *off], variant, RUN_S)
        return job, job.timings()


def compare(found: Mapping[str, tuple[JobRun, dict[str, Any]]], steps: int) -> dict[str, float]:
    """Return shares of the job as shipped, and what they are made of.

    Args:
        found: variant -> job and its timings.
        steps: learner steps of each job.
    """
    wall = {name: job.seconds for name, (job, _) in found.items()}
    cpu = {name: job.cpu_s for name, (job, _) in found.items()}
    loop = {name: timings["figures"]["wall_s"] for name, (_, timings) in found.items()}
    records = found["shipped"][1]["records"]

    def share(of: Mapping[str, float], without: str) -> float:
        return 1.0 - of[without] / of["shipped"]

    compared = {
        "wall_share": share(wall, "no_records"),
        "cpu_share": share(cpu, "no_records"),
        "loop_wall_share": share(loop, "no_records"),
        "prefect_wall_share": share(wall, "plain_stages"),
        "prefect_cpu_share": share(cpu, "plain_stages"),
        "prefect_loop_wall_share": share(loop, "plain_stages"),
        "writer_cpu_s_per_step": records["writer_cpu_s"] / steps,
        **{f"{name}_wall_s": wall[name] for name in VARIANTS},
        **{f"{name}_cpu_s": cpu[name] for name in VARIANTS},
    }
    return {name: round(value, 4) for name, value in compared.items()}


if __name__ == "__main__":
    execute(main)
