"""CPU seconds: which processes of the demo's job take them, and what its start waits for.

Each round runs the demo's job as a user does, in a home of its own, and counts the CPU seconds of all its
processes: workers, learner, coordinator, reward service, Prefect server, and the flow with the writers of
MLflow and the ledger. `outside_share` is the share of all but workers and learner, `outside_loop_cpu_s` what
they took after the first lease. `first_lease_s` are the wall seconds from the command to the first lease,
and `start` says when each part was ready; `cores` of the machine share that work. With `--against`
another checkout, which must have been set up, runs the same job in turns; its figures stand below `against`.

Then one job of many small steps runs; `growth_mib_per_step` says by how much the memory of each kind of
process grows in a step: the median of all slopes (Theil and Sen) after the first fifth.

The share counts start and end, so fewer steps make it larger. It fails when processes are not told apart:
less than 0.9 of the CPU seconds that the system counted.

    .venv/bin/python benchmarks/cpu_seconds.py
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import theilslopes

from antiphon.benchmarks.parts.measure import PROJECT, read_rows, run_job, scratch_home
from antiphon.benchmarks.parts.results import add, benchmark_parser, execute, finish, medians
from antiphon.report.cpu_section import PAYS, outside_share
from antiphon.system.cpu_time import KINDS

WANTED_SHARE, WANTED_LEASE_S = 0.10, 10.0
"""What is aimed at, printed beside what was measured."""
COUNTED = 0.9
RUN_S = 1200.0
"""Longest job."""
SMALL_STEPS = (
    *("loop.prompts_per_step=2", "loop.group_size=2", "sampling.max_tokens=16", "loop.filter=none"),
    *("evaluation.interval=100", "evaluation.prompts=4"),
)
STARTS = {
    "coordinator": "run.opened",
    "worker_registered": "worker.registered",
    "first_snapshot": "snapshot.announced",
    "engine": "worker.loaded",
    "first_step_opened": "step.opened",
    "first_lease": "lease.granted",
}
"""Part of a start -> the journal's first event of this kind ends it."""


def main() -> int:
    """Run the jobs and tell where their CPU seconds went."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="jobs that are measured")
    parser.add_argument("--steps", type=int, default=60, help="learner steps of each job")
    parser.add_argument(
        "--growth-steps", type=int, default=500, help="of the job of small steps; 0 leaves it out"
    )
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, in turns")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for all jobs")
    arguments = parser.parse_args()
    overrides = [f"run.steps={arguments.steps}", *arguments.overrides]
    samples: dict[str, list[float]] = {}
    at_size: list[str] = []
    against: dict[str, list[float]] = {}
    for number in range(arguments.rounds):
        if arguments.against:
            add(against, measure(overrides, arguments.against.absolute()))
        found = measure(overrides)
        if found["counted_share"] < COUNTED:
            at_size.append(f"round {number + 1}: only {found['counted_share']:.0%} of the CPU was told apart")
        print(f"round {number + 1}: {found}", flush=True)
        add(samples, found)
    result = {
        "rounds": arguments.rounds,
        "steps": arguments.steps,
        "cores": len(os.sched_getaffinity(0)),
        "wanted_outside_share": WANTED_SHARE,
        "wanted_first_lease_s": WANTED_LEASE_S,
        **medians(samples),
        **{f"against.{name}": value for name, value in medians(against).items()},
    }
    if arguments.growth_steps:
        grown = growth(arguments.growth_steps)
        result |= {f"growth_mib_per_step.{kind}": round(value, 4) for kind, value in grown.items()}
    return finish(result, record=arguments.record, samples=samples, at_size=at_size)


def growth(steps: int) -> dict[str, float]:
    """Run a job of many small steps; return by how many MiB each kind of process grows in a step."""
    with scratch_home() as home:
        moment = time.time() - time.perf_counter()
        overrides = [f"run.steps={steps}", *SMALL_STEPS]
        job = run_job(home, PROJECT / "examples" / "quickstart.yaml", overrides, "growth", RUN_S)
        (run,) = (home / "runs").iterdir()
        rows = read_rows(
            run / "journal.db", "SELECT at FROM events WHERE kind = 'step.committed' ORDER BY seq"
        )
    ends = np.array([at - moment for (at,) in rows])
    first, last = ends[len(ends) // 5], ends[-1]
    looks = [look for look in job.looks if first <= look.at <= last]
    at_step = np.searchsorted(ends, [look.at for look in looks])
    kinds = [kind for kind in KINDS if all(kind in look.memory for look in looks)]
    return {kind: float(theilslopes([look.memory[kind] for look in looks], at_step)[0]) for kind in kinds}


def measure(overrides: Sequence[str], checkout: Path = PROJECT) -> dict[str, float]:
    """Run one job of a checkout; return its figures by name."""
    with scratch_home() as home:
        begun, begun_at = time.perf_counter(), time.time()
        job = run_job(home, PROJECT / "examples" / "quickstart.yaml", overrides, "job", RUN_S, checkout)
        starts = start_times(home, begun_at)
    by_kind = job.kinds_after()
    after_s = job.kinds_after(begun + starts["first_lease_s"])
    found = {
        "job_s": job.seconds,
        "job_cpu_s": job.cpu_s,
        "outside_share": outside_share(by_kind),
        "outside_loop_cpu_s": sum(taken for kind, taken in after_s.items() if kind not in PAYS),
        **{f"{kind}_cpu_s": taken for kind, taken in by_kind.items()},
        **{f"{kind}_loop_cpu_s": taken for kind, taken in after_s.items()},
        **{name if name == "first_lease_s" else f"start.{name}": s for name, s in starts.items()},
        "counted_share": sum(by_kind.values()) / job.cpu_s,
    }
    return {name: round(value, 3) for name, value in found.items()}


def start_times(home: Path, begun_at: float) -> dict[str, float]:
    """Return part of the start -> seconds after the command until it was ready, of the home's only run."""
    (run,) = (home / "runs").iterdir()
    found = {}
    for part, kind in STARTS.items():
        rows = read_rows(run / "journal.db", f"SELECT MIN(at) FROM events WHERE kind = '{kind}'")
        found[f"{part}_s"] = rows[0][0] - begun_at
    ready = {path.stem: path.stat().st_mtime for path in (run / "services").glob("*.json")}
    return found | {f"{name}_ready_s": ready[name] - begun_at for name in ("learner", "reward", "worker-0")}


if __name__ == "__main__":
    execute(main)
