"""Engine contract: each engine is put to the checks of all abilities that it declares.

Two engines are examined on the demo's model in float32: `vllm`, the engine in a worker's own process, with
the keyed sampler and drafts, and `vllm_server`, a vLLM server process over HTTP (`rollout.engine: http`).
The checks are those of benchmarks/parts/contract.py; what log-probabilities and version spans should be
comes from transformers. For each engine the result has `declared` and `passed`, names of abilities, and
`failed`, name -> why; `engine` among them is what every engine promises. docs/concepts/engines.md says what a
missing one costs.

With `--train` the demo's task is trained twice: as it is, and by a worker whose engine gives no
log-probabilities, with `rollout.logprobs=learner` and so without staleness. `points_behind` is how much less
the second one scores on held-out problems in the end, in percent of all; `batches_recomputed` says that each
batch of it was marked.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.measure import PROJECT, journal_events, run_job, scratch_home
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.benchmarks.parts.vllm_server import serving
from antiphon.lineage.rollout_table import is_recomputed
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.services.rollout.engine.environment import child_environment

PROGRAM = "antiphon.benchmarks.parts.examine_engine"
MODEL = PROJECT / "examples" / "models" / "chain-sum"
MUTE = "antiphon.benchmarks.parts.mute_worker"
QUICKSTART = PROJECT / "examples" / "quickstart.yaml"
ENGINES = ("vllm", "vllm_server")
RECOMPUTED = (
    "rollout.workers=0",
    "rollout.logprobs=learner",
    "loop.max_staleness=0",
    "trust.audits=off",
)
MOST_POINTS = 5.0
PATIENCE_S, JOB_S, END_S = 400.0, 500.0, 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--url", default="", help="of a server that runs already, in place of a new one")
    parser.add_argument("--train", action="store_true", help="train without log-probabilities too")
    parser.add_argument("--steps", type=int, default=60, help="of each training")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"vllm": examined("vllm", "")}
    with tempfile.TemporaryDirectory(prefix="antiphon-contract-") as name:
        if options.url:
            result["vllm_server"] = examined("http", options.url)
        else:
            with serving(MODEL, Path(name) / "server.log") as url:
                result["vllm_server"] = examined("http", url)
    violated, at_size = list[str](), list[str]()
    if options.train:
        trained = train(options.steps)
        if trained["batches_recomputed"] != options.steps:
            violated.append(f"{trained['batches_recomputed']} of {options.steps} batches say recomputed")
        if trained["points_behind"] > MOST_POINTS:
            at_size.append(f"without log-probabilities {trained['points_behind']:.1f} points are missing")
        result |= trained
    violated += [
        f"{engine} declares {ability}, but {why}"
        for engine in ENGINES
        for ability, why in result[engine]["failed"].items()
    ]
    return finish(result, record=options.record, violated=violated, at_size=at_size)


def train(steps: int) -> dict[str, Any]:
    """Train with and without log-probabilities from the engine, and compare."""
    found: dict[str, float] = {}
    recomputed = 0
    for name, overrides in (("ordinary", ()), ("recomputed", RECOMPUTED)):
        with scratch_home() as home:
            ours = name == "ordinary"
            worker = None if ours else start_mute(home)
            try:
                job = run_job(
                    home, QUICKSTART, [f"run.steps={steps}", "record.mlflow=false", *overrides], name, JOB_S
                )
            finally:
                if worker is not None:
                    worker.terminate()
                    worker.wait(END_S)
            found[name] = 100.0 * job.metrics()["pass_after"]
            if not ours:
                recomputed = sum(map(is_recomputed, batches_of(home)))
    return {
        "ordinary": found["ordinary"],
        "recomputed": found["recomputed"],
        "points_behind": found["ordinary"] - found["recomputed"],
        "batches_recomputed": recomputed,
    }


def batches_of(home: Path) -> list[bytes]:
    """Return the batch files of the only run of a home."""
    (run,) = (home / "runs").iterdir()
    store = ArtifactStore(home / "store")
    sealed = [fields for name, fields in journal_events(run / "journal.db") if name == "batch.sealed"]
    return [store.get(fields["digest"]) for fields in sealed]


def start_mute(home: Path) -> "subprocess.Popen[bytes]":
    """Start the worker without log-probabilities; it waits for the run."""
    with (home / "mute.log").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", MUTE, str(home)], env=child_environment(1), stdout=out, stderr=out
        )


def examined(engine: str, url: str) -> dict[str, Any]:
    """Return what `examine` finds of an engine, in a process that is started as a worker is."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", PROGRAM, engine, str(MODEL), url],
        env=child_environment(1),
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    execute(main)
