"""Outages: Prefect, MLflow and S3 go away for two minutes while a run trains on.

The servers are those of `antiphon up --s3`, killed as a crash would and started again by the same
command on the same ports; the run is the demo's, with more steps. Counted afterwards: what each
server has of the run, what is missing, what is there twice, and how long the slowest learner step
took beside the median.

    .venv/bin/python benchmarks/outages.py [--down 120] [--steps 100]

The last line is JSON. The exit status is 1 when something is missing, there twice or damaged, or when
the artifacts do not verify.
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.measure import (
    PROJECT,
    journal_events,
    read_rows,
    scratch_home,
    step_ends,
    tail,
)
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.cli.up import read_pages
from antiphon.core.digests import digest_bytes
from antiphon.lineage.store.remote_place import RemoteStore
from antiphon.lineage.tracking.charts import STEP_METRIC
from antiphon.runs.servers.prefect_server import server_password

SERVERS = ("prefect", "mlflow", "s3")
BUCKET = "s3://antiphon/outages"
FIRST_STEPS = 3
"""Steps before the servers go."""
COMMAND_S = 600.0
"""Longest command beside the run."""
RUN_S = 1800.0
"""Longest run."""
MUST_BE_ZERO = {
    "prefect": ("missing", "doubled", "not_completed"),
    "mlflow": ("metrics_missing", "versions_missing", "batches_missing", "doubled"),
    "s3": ("missing", "damaged", "waiting"),
}
LOOK_S = 0.5


def main() -> int:
    """Run the demo through an outage and look at what was kept."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--down", type=float, default=120.0, help="seconds that the servers are away")
    parser.add_argument("--steps", type=int, default=100, help="learner steps; enough to outlast the outage")
    arguments = parser.parse_args()
    with scratch_home() as home:
        try:
            result = _measure(home, arguments)
        finally:
            _antiphon(home, "up", "--stop")
    return finish(result, record=arguments.record, violated=violations(result))


def violations(result: Mapping[str, Any]) -> list[str]:
    """Return a sentence for everything that an outage must not cost, but did."""
    found = [
        f"{server}: {name} is {result[server][name]}, not 0"
        for server, names in MUST_BE_ZERO.items()
        for name in names
        if result[server][name]
    ]
    return found if result["verified"] else [*found, "the artifacts of the run do not verify"]


def _measure(home: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    _up(home, {})
    pages = read_pages(home)
    ports = {name: page.url.rpartition(":")[2] for name, page in pages.items()}
    lines = (home / "s3" / "credentials.env").read_text().splitlines()
    keys = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    overrides = [f"run.steps={arguments.steps}", f"record.artifact_url={BUCKET}"]
    overrides += [f"record.artifact_endpoint={pages['s3'].url}"]
    user, _, password = server_password(home).partition(":")  # which the home's MLflow server asks for
    mlflow = {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
    mlflow["MLFLOW_TRACKING_URI"] = pages["mlflow"].url
    log, results = home / "run.log", home / "results"
    words = ["run", str(PROJECT / "examples" / "quickstart.yaml"), *overrides, "--results", str(results)]
    with log.open("wb") as output:
        run = subprocess.Popen(
            _command(*words),
            cwd=PROJECT,
            env=_environment(home) | keys | mlflow,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_for_steps(home, FIRST_STEPS, run, log)
        for name in SERVERS:
            os.killpg(pages[name].pid, signal.SIGKILL)
        print(f"{', '.join(SERVERS)}: killed after {len(_commits(home))} steps", flush=True)
        time.sleep(arguments.down)
        meanwhile = len(_commits(home))
        if run.poll() is not None:
            raise SystemExit(f"the run was over before the outage was; give more --steps\n{tail(log)}")
        _up(home, ports)
        print(f"back after {meanwhile} steps", flush=True)
        status = run.wait(RUN_S)
    except subprocess.TimeoutExpired:
        raise SystemExit(f"the run took longer than {RUN_S:g} s\n{tail(log)}") from None
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(60)
    if status != 0:
        raise SystemExit(f"the run ended with status {status}\n{tail(log)}")
    steps = range(arguments.steps)
    ends = step_ends(json.loads((results / "timings.json").read_text()))
    between = [after - before for before, after in itertools.pairwise(ends)]
    batches = _commits(home)
    (run_dir,) = (home / "runs").iterdir()
    return {
        "down_s": arguments.down,
        "steps": len(batches),
        "steps_during": meanwhile - FIRST_STEPS,
        "median_step_s": round(statistics.median(between), 3),
        "longest_step_s": round(max(between), 3),
        "prefect": _prefect(home, steps),
        "mlflow": _mlflow(home, steps),
        "s3": _s3(home, pages["s3"].url, keys, batches),
        "verified": _antiphon(home, "lineage", run_dir.name, "--verify") == 0,
    }


def _prefect(home: Path, steps: range) -> dict[str, int]:
    database = home / "prefect" / "prefect.db"
    expected = {f"{stage} {t}" for stage in ("collect", "reward", "step") for t in steps}
    expected |= {f"broadcast v{version}" for version in range(steps.stop + 1)}
    tasks = Counter(name for (name,) in read_rows(database, "SELECT name FROM task_run"))
    if missing := sorted(expected - set(tasks)):
        print(f"prefect lacks {', '.join(missing)}", flush=True)
    unfinished = "SELECT COUNT(*) FROM task_run WHERE state_type != 'COMPLETED'"
    return {
        "tasks": tasks.total(),
        "missing": len(missing),
        "doubled": sum(count - 1 for count in tasks.values()),
        "not_completed": read_rows(database, unfinished)[0][0],
    }


def _mlflow(home: Path, steps: range) -> dict[str, int]:
    database = home / "mlflow" / "mlflow.db"
    query = f"SELECT step FROM metrics JOIN runs USING (run_uuid) WHERE key = '{STEP_METRIC}'"
    losses = Counter(step for (step,) in read_rows(database, query))
    models = Counter(name for (name,) in read_rows(database, "SELECT name FROM logged_models"))
    batches = Counter(name for (name,) in read_rows(database, "SELECT name FROM datasets"))
    versions = {f"policy-v{version}" for version in range(steps.stop + 1)}
    counted = (*losses.values(), *models.values(), *batches.values())
    return {
        "metrics": losses.total(),
        "metrics_missing": steps.stop - len(losses),
        "versions_missing": len(versions - set(models)),
        "batches_missing": len({f"batch-t{t:06d}" for t in steps} - set(batches)),
        "doubled": sum(count - 1 for count in counted),
    }


def _s3(home: Path, endpoint: str, keys: dict[str, str], batches: Sequence[str]) -> dict[str, int]:
    """Count the run's batches in the bucket and what still waits to be sent."""
    os.environ.update(keys)
    remote = RemoteStore(BUCKET, endpoint)
    missing = damaged = 0
    for digest in batches:
        path = remote.bring(digest, home)
        missing += path is None
        damaged += path is not None and digest_bytes(path.read_bytes()) != digest
    outbox = home / "store" / "outbox"
    waiting = [path for path in outbox.glob("*/*") if len(path.name) == 64]
    return {"batches": len(batches), "missing": missing, "damaged": damaged, "waiting": len(waiting)}


def _wait_for_steps(home: Path, steps: int, run: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.perf_counter() + COMMAND_S
    while len(_commits(home)) < steps:
        if run.poll() is not None or time.perf_counter() > deadline:
            raise SystemExit(f"the run did not get to step {steps}\n{tail(log)}")
        time.sleep(LOOK_S)


def _commits(home: Path) -> list[str]:
    """Return the batch digests of the committed steps, in order."""
    journals = (home / "runs").glob("*/journal.db")
    events = (event for path in journals for event in journal_events(path))
    return [body["batch_digest"] for kind, body in events if kind == "step.committed"]


def _up(home: Path, ports: dict[str, str]) -> None:
    """Start what is not up, on free ports the first time and on the same ones later."""
    chosen = [word for name in SERVERS for word in (f"--{name}-port", ports.get(name, "0"))]
    if _antiphon(home, "up", "--s3", *chosen) != 0:
        raise SystemExit("the servers did not start; what they said stands above")


def _environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return kept | {"ANTIPHON_HOME": str(home)}


def _command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "antiphon.cli.app", *words]


def _antiphon(home: Path, *words: str) -> int:
    ended = subprocess.run(
        _command(*words), cwd=PROJECT, env=_environment(home), timeout=COMMAND_S, check=False
    )
    return ended.returncode


if __name__ == "__main__":
    execute(main)
