"""Browse: how soon the page of rollouts shows and a filter answers, with 100,000 trajectories.

A run of this size is made up, with batches, timings and log as runs write them, and is served.
`first_page_s` is the page, script and styles, its head and the first rows, one after another; `filter_s` the
slowest of the filters, text search included; each is the median of its repetitions. `start_s` is from the
command to its address, `texts_s` from there until all texts can be searched. Fails beyond `LIMITS`.

    .venv/bin/python benchmarks/browse.py [--trajectories 100000]
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from urllib.parse import urlencode

import numpy as np

from antiphon.api.sink import LogRecord
from antiphon.benchmarks.parts.measure import PROJECT
from antiphon.benchmarks.parts.results import above, benchmark_parser, execute, finish
from antiphon.core.config import build_config, dump_config
from antiphon.core.loop.events import StepCommitted
from antiphon.core.records import BatchRef, BatchRow, FinishReason, RowTiming, VersionSpan
from antiphon.lineage.rollout_table import encode_batch, encode_timings
from antiphon.lineage.run_log import RunLog, step_line
from antiphon.lineage.store.artifact_store import ArtifactStore

STEP, GROUP, TOKENS = 512, 8, 1000
"""Trajectories of a step and of a group; tokens of an answer, of which a fifth more or less."""
WORDS = 39
"""Of the demo's tokens the first, which have four characters on average, as those of large vocabularies."""
FILTERS = (
    {"step": "3..40", "sort": "-reward"},
    {"staleness": "1..", "reward": "..0.5", "sort": "tokens"},
    {"prompt": "-77", "reason": "length"},
    {"text": "final answer"},
    {"text": "no answer has these words"},
)
LIMITS = {"start_s": 30.0, "first_page_s": 1.0, "filter_s": 0.3}
TEXTS_S = 600.0
"""Longest wait until texts are read."""
FIRST = ("", "browse.css", "browse.js", "api/run", "api/rows?offset=0")


def make_run(home: Path, trajectories: int) -> Path:
    """Write a run of this many trajectories and return its folder."""
    config = build_config({"run": {"name": "made"}, "record": {"dvc": False, "mlflow": False}})
    folder, store, rng = home / "runs" / "made-1", ArtifactStore(home / "store"), np.random.default_rng(0)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    records = []
    for step in range(-(-trajectories // STEP)):
        rows = [row_of(step, i, rng) for i in range(min(STEP, trajectories - step * STEP))]
        timings = [
            RowTiming(row.group_id, row.sample_index, "w", "0" * 32, 1, 1.0, 0.0, 1.0, 2.0) for row in rows
        ]
        digests = store.put(encode_batch(rows)), store.put(encode_timings(timings))
        batch = BatchRef(step, *digests, len(rows), len(rows) // GROUP, 0, 0, 1, 0.5, {1: len(rows)}, TOKENS)
        commit = StepCommitted(step, step + 1, f"{step:064x}", batch.digest, {}, True)
        line = step_line(commit, batch, float(step), None)
        records.append(LogRecord(step + 1, float(step), "step.committed", step, line))
    RunLog(folder).write(records)
    return folder


def row_of(step: int, place: int, rng: np.random.Generator) -> BatchRow:
    """Return a trajectory of random tokens."""
    size, group = int(TOKENS * rng.uniform(0.8, 1.2)), step * STEP + place // GROUP
    key = np.random.default_rng(group)
    return BatchRow(
        rng.integers(0, WORDS, size, dtype=np.int32),
        -rng.random(size, dtype=np.float32),
        (VersionSpan(max(0, step - 1), 0, size // 2), VersionSpan(step, size // 2, size)),
        FinishReason.LENGTH if place % 5 == 0 else FinishReason.STOP,
        group_id=f"g{group}",
        prompt_key=f"train-0-{group % 4096}",
        sample_index=place % GROUP,
        prompt_token_ids=key.integers(0, WORDS, 40, dtype=np.int32),
        reward=float(rng.integers(0, 3)) / 2,
        advantage=0.0,
    )


def measure(address: str, began: float, repetitions: int) -> dict[str, float]:
    """Ask a server as the page does; return seconds and how many trajectories it has."""

    def ask(path: str) -> bytes:
        with urllib.request.urlopen(address + path, timeout=60.0) as answer:
            return bytes(answer.read())

    def seconds(*paths: str) -> float:
        taken = []
        for _ in range(repetitions):
            start = time.perf_counter()
            for path in paths:
                ask(path)
            taken.append(time.perf_counter() - start)
        return round(median(taken), 4)

    started = time.perf_counter()
    while (said := json.loads(ask("api/rows")))["searched"] < said["total"]:
        if time.perf_counter() - started > TEXTS_S:
            raise SystemExit(f"after {TEXTS_S:g} s only {said['searched']} texts are read")
        time.sleep(0.2)
    texts_s = time.perf_counter() - started
    return {
        "trajectories": said["total"],
        "first_page_s": seconds(*FIRST),
        "filter_s": max(seconds(f"api/rows?{urlencode(query)}") for query in FILTERS),
        "start_s": round(started - began, 2),
        "texts_s": round(texts_s, 2),
    }


def main() -> int:
    """Make the run, ask as the page does, and report."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="antiphon-browse-") as folder:
        run = make_run(Path(folder), options.trajectories)
        began = time.perf_counter()
        command = [sys.executable, "-P", "-m", "antiphon.cli.app", "browse", str(run), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT) as server:
            try:
                line = server.stdout.readline() if server.stdout else ""
                found = measure(line.split(": ")[1].split()[0], began, options.repetitions)
            finally:
                server.terminate()
                server.wait(30.0)
    return finish(found, record=options.record, at_size=above(found, LIMITS))


if __name__ == "__main__":
    execute(main)
