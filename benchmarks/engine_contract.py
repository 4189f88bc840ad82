"""Engine contract: each engine is put to the checks of all abilities that it declares.

Two engines are examined on the demo's model in float32: `vllm`, the engine in a worker's own process, with
the keyed sampler and drafts, and `vllm_server`, a vLLM server process over HTTP (`rollout.engine: http`).
The checks are those of benchmarks/parts/contract.py; what log-probabilities and version spans should be
comes from transformers. For each engine the result has `declared` and `passed`, names of abilities, and
`failed`, name -> why; `engine` among them is what every engine promises. docs/concepts/engines.md says what a
missing one costs.

With `--train` the demo's task is trained three times: as it is, and by a worker whose engine gives no
log-probabilities, with `rollout.logprobs=learner`, without staleness and with `loop.max_staleness=2`.
`points_behind` is how much less the second one scores on held-out problems in the end, in percent of all, and
`stale_points_behind` the third one; `batches_recomputed` says that each batch of both was marked, and
`stale_tokens_share` how many tokens of the third one an earlier version had sampled.
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
from antiphon.lineage.rollout_table import decode_batch, is_recomputed
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
        if trained["batches_recomputed"] != 2 * options.steps:
            violated.append(f"{trained['batches_recomputed']} of {2 * options.steps} batches say recomputed")
        if not trained["stale_tokens_share"]:
            at_size.append("with loop.max_staleness=2 no token was stale")
        for name in ("points_behind", "stale_points_behind"):
            if trained[name] > MOST_POINTS:
                at_size.append(f"without log-probabilities {name} is {trained[name]:.1f}")
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
    marked, tokens, stale = 0, 0, 0
    for name, overrides in (
        ("ordinary", ()),
        ("recomputed", (*RECOMPUTED, "loop.max_staleness=0")),
        ("stale_recomputed", (*RECOMPUTED, "loop.max_staleness=2")),
    ):
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
                batches = batches_of(home)
                marked += sum(map(is_recomputed, batches))
                ages = [tokens_by_age(step, batch) for step, batch in enumerate(batches)]
                tokens, stale = sum(map(sum, ages)), sum(sum(own[1:]) for own in ages)
    return {
        **found,
        "points_behind": found["ordinary"] - found["recomputed"],
        "stale_points_behind": found["ordinary"] - found["stale_recomputed"],
        "stale_tokens_share": stale / tokens,
        "batches_recomputed": marked,
    }


def tokens_by_age(step: int, batch: bytes) -> list[int]:
    """Return the tokens of a batch that the version of its step sampled, and those of earlier ones."""
    spans = [span for row in decode_batch(batch) for span in row.spans]
    sizes = [(span.version < step, span.stop - span.start) for span in spans]
    return [sum(size for older, size in sizes if older is wanted) for wanted in (False, True)]


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
