"""Preemption curves: the reward of real runs whose workers are killed, against runs that nobody disturbs.

Each seed is run twice: two vLLM workers, the DeepSpeed learner, the demo's task. In one of the two a
worker is killed without notice every so often; the run starts it again by itself. Elastic mode, so
that the disturbance may show: in fixed mode both runs have the same weights anyway.
"""

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import psutil

from antiphon.benchmarks.parts.measure import PROJECT, run_job, scratch_home
from antiphon.core.seeds import generator

WORKERS = 2
TIMEOUT_S = 3600.0


class Reclaimer:
    """Kills a worker of a run every `every_s` seconds, each with the same chance."""

    def __init__(self, home: Path, every_s: float, seed: int) -> None:
        self._home, self._every_s = home, every_s
        self._chance = generator("preemption-curves", seed)
        self._over = threading.Event()
        self.killed = 0
        self._thread = threading.Thread(target=self._reclaim, daemon=True)

    def _reclaim(self) -> None:
        while not self._over.wait(self._every_s):
            name = f"worker-{int(self._chance.integers(WORKERS))}.json"
            for ready in self._home.glob(f"runs/*/services/{name}"):
                self.killed += kill_worker(int(json.loads(ready.read_text(encoding="utf-8"))["pid"]))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Kill inside the block."""
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join(10.0)


def kill_worker(pid: int) -> bool:
    """Kill a worker process; False when there is none of that id, because it is being started again."""
    try:
        process = psutil.Process(pid)
        if "worker" not in process.cmdline():
            return False
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def run_pair(seed: int, steps: int, every_s: float) -> dict[str, Any]:
    """Run one seed undisturbed and disturbed."""
    overrides = [
        f"run.seed={seed}",
        f"run.steps={steps}",
        f"rollout.workers={WORKERS}",
        "rollout.concurrent_groups=12",
        "evaluation.interval=5",
        "coordinator.heartbeat_s=0.5",
        "services.restart_limit=1000",
        "record.mlflow=false",
        "record.dvc=false",
    ]
    found: dict[str, Any] = {"seed": seed}
    for name in ("undisturbed", "disturbed"):
        with scratch_home() as home:
            reclaimer = Reclaimer(home, every_s if name == "disturbed" else TIMEOUT_S, seed)
            with reclaimer.at_work():
                job = run_job(home, PROJECT / "examples" / "quickstart.yaml", overrides, name, TIMEOUT_S)
            metrics = job.metrics()
            found[name] = {
                "curve": [e["pass_at_1"] for e in metrics["evaluations"]],
                "pass_after": metrics["pass_after"],
                "seconds": round(job.seconds, 1),
                "killed": reclaimer.killed,
            }
            print(seed, name, found[name], flush=True)
    return found


def compare_curves(seeds: Iterable[int], steps: int, every_s: float) -> dict[str, Any]:
    """Run every seed twice and compare the held-out reward.

    Args:
        seeds: of the pairs.
        steps: learner steps of each run.
        every_s: seconds between two kills in the disturbed runs.
    """
    pairs = [run_pair(seed, steps, every_s) for seed in seeds]
    gaps = [pair["disturbed"]["pass_after"] - pair["undisturbed"]["pass_after"] for pair in pairs]
    areas = [mean(p["disturbed"]["curve"]) - mean(p["undisturbed"]["curve"]) for p in pairs]
    slowdown = [p["disturbed"]["seconds"] / p["undisturbed"]["seconds"] for p in pairs]
    return {
        "pairs": pairs,
        "killed": sum(pair["disturbed"]["killed"] for pair in pairs),
        "pass_gap_mean": round(mean(gaps), 4),
        "pass_gap_stdev": round(stdev(gaps), 4) if len(gaps) > 1 else None,
        "curve_gap_mean": round(mean(areas), 4),
        "curve_gap_stdev": round(stdev(areas), 4) if len(areas) > 1 else None,
        "seconds_ratio_mean": round(mean(slowdown), 3),
    }
