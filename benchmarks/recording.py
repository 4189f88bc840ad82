"""Recording: what lineage costs, on the loop's path and behind it, on real files.

Batches of 64 trajectories are sealed into the store, steps and versions with the demo's weights enter a log;
ledger and MLflow follow it. This is done twice: with sinks that rest when a step begins, as in a run whose
steps take seconds, and (`busy_`) one step after the other, as fast as it goes. Then a ledger of 10,000
entries is published again and again; and a thousand artifacts are pushed with the real `dvc push` to a real
S3 server.

The last line is one JSON object: milliseconds are medians over the steps, `step_cpu_ms` is the
processor's share of a batch and a version together, `ledger_ms_per_step` and `mlflow_ms_per_step` are what
the two sinks behind the loop need. The exit status is 1 when a record or a version's weights are missing
afterwards.

    .venv/bin/python benchmarks/recording.py
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from antiphon.benchmarks.parts.made_log import MadeLog
from antiphon.benchmarks.parts.measure import PROJECT, end_on_sigterm, scratch_home
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.config import build_config
from antiphon.core.records import (
    BatchRef,
    BatchRow,
    FinishReason,
    RowTiming,
    SnapshotManifest,
    StepCommit,
    VersionSpan,
)
from antiphon.lineage.ledger.pins import Ledger
from antiphon.lineage.records import Records
from antiphon.lineage.rollout_table import encode_batch, encode_timings
from antiphon.lineage.store.artifact_store import ArtifactStore

GROUPS, GROUP_SIZE = 8, 8
"""Prompts of a batch and completions of each: 64 trajectories."""
TOKENS = 256
"""Tokens of a completion."""
PUBLISHES = 20
APPENDED_PER_PUBLISH = 16
METRICS = {f"metric_{i}": 0.1 * i for i in range(24)}
FLUSH_S = 120.0
"""Longest wait for the sinks."""
MODEL = PROJECT / "examples" / "models" / "chain-sum" / "model.safetensors"


def main() -> int:
    """Measure and print."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--entries", type=int, default=10_000, help="of the ledger (default 10,000)")
    arguments = parser.parse_args()
    end_on_sigterm()
    with scratch_home() as home:
        resting, missing = measure_loop(home, "resting", arguments.steps, rest=True)
        busy, missing_busy = measure_loop(home, "busy", arguments.steps, rest=False)
        result = {
            **resting,
            **{f"busy_{name}": busy[name] for name in ("batch_ms", "version_ms", "step_cpu_ms")},
            "trajectories": GROUPS * GROUP_SIZE,
            "weights_bytes": MODEL.stat().st_size,
            "steps": arguments.steps,
            f"publish_{arguments.entries}_ms": publish_ms(
                Ledger(home, "ledger", "long-1"), arguments.entries
            ),
        }
    return finish(result, record=arguments.record, violated=[*missing, *missing_busy])


def measure_loop(home: Path, name: str, steps: int, rest: bool) -> tuple[dict[str, float], list[str]]:
    """Seal, tell and commit `steps` steps; return what they took, and what is missing afterwards.

    Args:
        home: the home directory.
        name: of the run.
        steps: how many.
        rest: whether the sinks have done everything before a step begins.
    """
    from safetensors.torch import load_file

    from antiphon.weights.payload_store import PAYLOADS, PayloadStore
    from antiphon.weights.snapshot import weights_of, write_snapshot

    store, run_id = ArtifactStore(home / "store"), f"{name}-1"
    run_dir = home / "runs" / run_id
    run_dir.mkdir(parents=True)
    config = build_config({"run": {"name": name, "steps": steps}})
    payloads = PayloadStore(run_dir / PAYLOADS)
    log = MadeLog()
    records = Records(
        run_id, config, run_dir, home, store.root, log, weights_file=lambda v: payloads.checked(made[v])
    )
    made: dict[int, SnapshotManifest] = {}
    tensors = load_file(MODEL)
    largest = max(tensors.values(), key=lambda tensor: tensor.numel())

    def publish(version: int) -> SnapshotManifest:
        largest.view(-1)[0] = version  # other weights than before
        made[version] = write_snapshot(payloads, run_id, version, weights_of(tensors))
        return made[version]

    log.announce(publish(0))
    before = [writer.busy_s for writer in records.flush(FLUSH_S).writers]  # MLflow's start among it
    batches, versions, computing = [], [], []
    chance = np.random.default_rng(0)
    for step in range(steps):
        rows, timings = make_rows(step, chance)
        manifest = publish(step + 1)
        if rest:
            records.flush(FLUSH_S)
        started, worked = time.perf_counter(), time.thread_time()
        digest, timings_digest = store.put(encode_batch(rows)), store.put(encode_timings(timings))
        batch = make_reference(step, rows, digest, timings_digest)
        told = time.perf_counter()
        commit = StepCommit(step, step + 1, manifest.weights_digest, digest, METRICS, published=True)
        log.commit(commit, batch)
        log.announce(manifest)
        versions.append(1e3 * (time.perf_counter() - told))
        computing.append(1e3 * (time.thread_time() - worked))
        batches.append(1e3 * (told - started))
    report = records.close(FLUSH_S)
    _, ledger_s, mlflow_s = (w.busy_s - b for w, b in zip(report.writers, before, strict=True))
    took = {
        "batch_ms": median(batches),
        "version_ms": median(versions),
        "step_cpu_ms": median(computing),
        "ledger_ms_per_step": 1e3 * ledger_s / steps,
        "mlflow_ms_per_step": 1e3 * mlflow_s / steps,
    }
    missing = [] if report.complete else [f"the records of {name} are not complete: {report.writers}"]
    kept = len(list((home / "ledger").glob(f"{run_id}*/versions/*.safetensors")))
    if kept != steps + 1:
        missing.append(f"the ledger of {name} holds the weights of {kept} versions, not {steps + 1}")
    return {key: round(value, 3) for key, value in took.items()}, missing


def make_rows(step: int, chance: np.random.Generator) -> tuple[list[BatchRow], list[RowTiming]]:
    """Return one batch as the coordinator has it when the last group is rewarded."""
    rows, timings = [], []
    spans = (VersionSpan(max(0, step - 1), 0, TOKENS // 2), VersionSpan(step, TOKENS // 2, TOKENS))
    for group in range(GROUPS):
        for sample in range(GROUP_SIZE):
            rows.append(
                BatchRow(
                    group_id=f"t{step:06d}-{group:04d}",
                    prompt_key=f"train/0/{group}",
                    sample_index=sample,
                    prompt_token_ids=chance.integers(0, 32_000, 48, dtype=np.int32),
                    token_ids=chance.integers(0, 32_000, TOKENS, dtype=np.int32),
                    logprobs=-chance.random(TOKENS, dtype=np.float32),
                    spans=spans,
                    finish_reason=FinishReason.STOP,
                    reward=float(chance.random()),
                    advantage=float(chance.normal()),
                )
            )
            timings.append(
                RowTiming(f"t{step:06d}-{group:04d}", sample, "w0", f"{group:032x}", 1, 1.0, 2.0, 3.0, 4.0)
            )
    return rows, timings


def make_reference(step: int, rows: list[BatchRow], digest: str, timings_digest: str) -> BatchRef:
    """Return what the coordinator says of a sealed batch."""
    tokens = sum(len(row.token_ids) for row in rows)
    staleness = {1: len(rows)} if step else {0: len(rows)}
    return BatchRef(
        step, digest, timings_digest, len(rows), GROUPS, 0, 0, tokens, 0.5, staleness, float(TOKENS)
    )


def publish_ms(ledger: Ledger, entries: int) -> float:
    """Fill a ledger with this many entries and return the median milliseconds of a publication."""

    def append(number: int) -> None:
        ledger.append(f"versions/v{number:06d}.json", b'{"version":%d}' % number)

    for number in range(entries):
        append(number)
    ledger.publish()
    taken = []
    for round_number in range(PUBLISHES):
        for number in range(APPENDED_PER_PUBLISH):
            append(entries + round_number * APPENDED_PER_PUBLISH + number)
        taken.append(timed(ledger.publish))
    ledger.close()
    return 1e3 * median(taken)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that `work` took."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
