"""Replay: a demo-sized run executed again from a copy of its artifacts, everything else deleted.

A run of 40 overlapped steps is trained, its ledger copied to a fresh folder, and the run's folder,
store, journal, DVC cache and ledger removed. Then `antiphon replay --rollouts` repeats every step from
the copy and scores every trajectory again. The base model lies in the run's home and is removed
with it, so a replay that needs more than the copy has nothing to fall back on. The seconds of the
replay are those of the whole command, start-up and scoring included; those of the training are the
loop's alone. The exit status is 1 when a step does not repeat bit for bit.

    .venv/bin/python benchmarks/replay.py
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from antiphon.benchmarks.parts.measure import PROJECT, run_job, scratch_home
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.core.config import load_config
from antiphon.models.codec import resolve_model_path

CONFIG = PROJECT / "examples" / "quickstart.yaml"
STALENESS = 2
TRAIN_S = 1800.0
REPLAY_S = 1800.0
"""Longest wait for either."""


def copy_artifacts(home: Path, run_id: str, out: Path) -> float:
    """Copy a run's ledger, all of its shards, and return the megabytes."""
    shards = [home / "ledger" / run_id, *sorted((home / "ledger").glob(f"{run_id}.s[0-9]*/"))]
    for shard in shards:
        shutil.copytree(shard, out / shard.name)
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 1e6


def train(home: Path, steps: int, overrides: list[str]) -> str:
    """Train a run from a copy of its base model in `home`, and return its id."""
    model = home / "base-model"
    shutil.copytree(resolve_model_path(load_config(CONFIG, overrides).model.path), model)
    sizes = [f"run.steps={steps}", f"loop.max_staleness={STALENESS}", *overrides, f"model.path={model}"]
    job = run_job(home, CONFIG, sizes, "train", TRAIN_S)
    return str(job.timings()["run_id"])


def replay(run_id: str, copy: Path, empty: Path) -> tuple[float, dict[str, Any]]:
    """Replay a copy in a process that knows nothing else; return its seconds and what it found.

    Raises:
        SystemExit: when there is no result, with what the command said.
    """
    empty.mkdir()
    results = empty / "replay.json"
    command = [sys.executable, "-P", "-m", "antiphon.cli.app", "replay", run_id, "--rollouts"]
    command += ["--copy", str(copy), "--results", str(results)]
    begun = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=empty,
        env={**os.environ, "ANTIPHON_HOME": str(empty)},
        capture_output=True,
        text=True,
        timeout=REPLAY_S,
        check=False,
    )
    seconds = time.perf_counter() - begun
    if not results.is_file():
        raise SystemExit(
            f"the replay ended with status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    found: dict[str, Any] = json.loads(results.read_text())
    return seconds, found


def main() -> int:
    """Train, copy, delete, replay."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="learner steps")
    parser.add_argument("overrides", nargs="*", help="key=value pairs for it")
    arguments = parser.parse_args()
    with scratch_home() as home, scratch_home() as fresh:
        run_id = train(home, arguments.steps, arguments.overrides)
        outcome = json.loads((home / "runs" / run_id / "outcome.json").read_text())
        megabytes = copy_artifacts(home, run_id, fresh / "copy")
        for name in ("model/config.json", "versions/v000000.safetensors"):
            if not list((fresh / "copy").glob(f"{run_id}*/{name}")):
                raise SystemExit(f"the artifacts of {run_id} lack {name}: the base model would be another")
        shutil.rmtree(home)
        seconds, found = replay(run_id, fresh / "copy", fresh / "empty")
    share = found["steps_equal_share"]
    violated = [f"{share:.1%} of the steps repeat bit for bit, not all"] if share < 1 else []
    taken = ["steps", "steps_equal_share", "logprobs_equal_share", "logprobs"]
    taken += ["largest_logprob_difference", "first_difference"]
    result = {name: found[name] for name in taken} | {
        "replay_seconds": round(seconds, 1),
        "train_seconds": round(outcome["figures"]["wall_s"], 1),
        "scoring_seconds": round(found["score_seconds"], 1),
        "copy_mb": round(megabytes, 1),
    }
    return finish(result, record=arguments.record, violated=violated)


if __name__ == "__main__":
    execute(main)
