"""Simulator: what a calibrated model predicts of real runs, and how long a large fleet takes to simulate.

Two real runs are recorded: the main job without Prefect, MLflow and DVC, with the demo's model, real engines
and a real learner. They are the calibration. In one, a worker and the learner alternate (S=0), which shows
how fast each is alone; in the other, two workers and the learner are busy at once, which shows how many cores
they have beside all else. Three runs that it was not calibrated on, of other staleness bounds and numbers of
workers, are predicted by that alone and compared with what was measured. A fourth, which crowds the machine
more than any that calibrates, is shown (`..._beyond`) and not judged. The pace of a machine that others use
too drifts meanwhile, so all that is done in several rounds, in another order each.
`seconds_per_step_error` and `dollars_error` are the largest of the three, as shares of what was measured,
each the median of its rounds; `staleness_error` is the largest share of completions that trained at another
staleness than predicted, likewise. `..._most` are the largest of all rounds.

`fleet_seconds` are the CPU seconds of one core for 1,000 workers over 24 hours of virtual time, with losses.
Fails when an error is above 10%, the fleet takes above 60 s, or the same seed gives another digest. The last
line is JSON.

    .venv/bin/python benchmarks/simulator.py --rounds 3
    .venv/bin/python benchmarks/simulator.py --only-fleet
"""

import asyncio
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import structlog

from antiphon.benchmarks.parts.lengths import draw_groups
from antiphon.benchmarks.parts.measure import PROJECT, run_module, scratch_home
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.benchmarks.parts.run_figures import RunFigures, measured_figures, predicted_figures
from antiphon.core.config import RunConfig, build_config, load_config
from antiphon.simulator.modelled.calibration import Calibration, SeenGroup, TimedEvent, read_journal
from antiphon.simulator.modelled.run import Modelled, ModelledRun, Recorded, calibrate_machine

CONFIG = PROJECT / "examples" / "quickstart.yaml"
MOST_ERROR, MOST_FLEET_S = 0.10, 60.0
RUN_S = 900.0
COMMON = (
    "run.name=simulator",
    "loop.prompts_per_step=16",
    "loop.filter=none",
    "sampling.max_tokens=192",
    "learner.learning_rate=1e-9",
    "rollout.concurrent_groups=4",
    "drafting.enabled=false",
    "evaluation.interval=0",
    "evaluation.prompts=1",
    "record.mlflow=false",
    "record.dvc=false",
    "record.worker_usd_per_hour=0.667",
    "record.learner_usd_per_hour=3.5",
)
"""A learning rate so small that lengths stay what they are."""
WORKERS, HOURS = 1000, 24.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What is varied."""

    workers: int
    max_staleness: int
    steps: int

    @property
    def overrides(self) -> list[str]:
        bound = f"loop.max_staleness={self.max_staleness}"
        return [f"rollout.workers={self.workers}", bound, f"run.steps={self.steps}"]


CALIBRATED = (Setting(workers=1, max_staleness=0, steps=40), Setting(workers=2, max_staleness=1, steps=40))
PREDICTED = (Setting(2, 0, 40), Setting(1, 1, 40), Setting(1, 2, 40))
BEYOND = Setting(2, 2, 40)
"""Half a minute each: a shorter run shows what else the machine does, and how its parts warm up."""


def main() -> int:
    """Simulate the fleet, and predict real runs."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--only-fleet", action="store_true", help="without the real runs")
    parser.add_argument("--rounds", type=int, default=3, help="of six real runs each (default 3)")
    parser.add_argument("--hours", type=float, default=HOURS, help="of the fleet, virtual")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    result, violated, slow = fleet(arguments.hours)
    if not arguments.only_fleet:
        found, problems = predictions(arguments.rounds)
        result, slow = result | found, slow + problems
    return finish(result, record=arguments.record, violated=violated, at_size=slow)


def fleet(hours: float) -> tuple[dict[str, Any], list[str], list[str]]:
    """Simulate a large fleet; a short part of it twice."""
    begun = time.process_time()
    done = fleet_run(WORKERS, hours)
    seconds = time.process_time() - begun
    same = fleet_run(100, 1.0).digest == fleet_run(100, 1.0).digest
    violated = [] if same else ["the same seed gave another digest"]
    slow = []
    if seconds > MOST_FLEET_S:
        slow.append(f"{WORKERS} workers for {hours:g} h took {seconds:.1f} s; at most {MOST_FLEET_S:g} s")
    result = {
        "fleet_seconds": round(seconds, 2),
        "fleet_hours": hours,
        "fleet_steps": len(done.commits_s),
        "fleet_events": done.events,
        "fleet_losses": done.losses,
        "fleet_idle_share": round(done.idle_share, 4),
        "fleet_usd_per_million_tokens": round(done.usd / done.tokens * 1e6, 4),
        "fleet_digest": done.digest,
        "same_digest": same,
    }
    print(result, flush=True)
    return result, violated, slow


def fleet_run(workers: int, hours: float) -> Modelled:
    """Run spot workers that sample some 25 tokens per second each; one is lost every four hours."""
    samples = 16
    drawn = draw_groups(512, samples, 12_000.0, 0)
    groups = tuple(SeenGroup(prompt=n, tokens=g.counts, reward_s=2.0) for n, g in enumerate(drawn))
    mean = sum(sum(group.tokens) for group in groups) / len(groups)
    prompts = int(0.512 * workers)
    calibration = Calibration(
        alpha_s=0.028, beta_s=0.0002, concurrent_groups=4, learner_s=150.0, step_tokens=mean * prompts,
        broadcast_s=30.0, losses_per_hour=0.25, replaced_s=600.0, worker_usd_per_hour=0.667,
        learner_usd_per_hour=0.056 * workers, groups=groups,
    )  # fmt: skip
    config = build_config(
        {
            "run": {"steps": 1_000_000},
            "environment": {"train_size": 17_000, "heldout_size": 1},
            "evaluation": {"prompts": 1, "interval": 0},
            "loop": {
                "max_staleness": 4,
                "prompts_per_step": prompts,
                "group_size": samples,
                "filter": "none",
            },
        }
    )
    return ModelledRun(config, calibration, workers, hours=hours).run()


def predictions(rounds: int) -> tuple[dict[str, Any], list[str]]:
    """Calibrate by two real runs and predict three others, as often as `rounds` says."""
    rows: dict[Setting, list[dict[str, Any]]] = {setting: [] for setting in (*PREDICTED, BEYOND)}
    calibrations = []
    for number in range(rounds):
        settings = [*CALIBRATED, *PREDICTED, BEYOND]
        turn = number % len(settings)
        with scratch_home() as home:
            runs = {setting: real_run(home, setting) for setting in (*settings[turn:], *settings[:turn])}
        sparse, crowded = (Recorded(*runs[setting], setting.workers) for setting in CALIBRATED)
        calibration = calibrate_machine(sparse, crowded, "benchmark")
        calibrations.append(calibration.model_dump(exclude={"groups"}))
        print(f"calibrated by {CALIBRATED}: {calibrations[-1]}", flush=True)
        for setting in rows:
            config = load_config(CONFIG, [*COMMON, *setting.overrides])
            predicted = predicted_figures(ModelledRun(config, calibration, setting.workers).run())
            rows[setting].append(row := compared(predicted, measured_figures(*runs[setting])))
            print(setting, row, flush=True)
    result: dict[str, Any] = {
        "rounds": rounds,
        "calibrations": calibrations,
        "runs": [{**asdict(setting), "rounds": found} for setting, found in rows.items()],
    }
    wrong = []
    beyond = rows.pop(BEYOND)
    for name in ("seconds_per_step_error", "dollars_error", "staleness_error"):
        typical = [median(row[name] for row in found) for found in rows.values()]
        result[name] = worst = round(max(abs(error) for error in typical), 4)
        result[f"{name}_most"] = max(abs(row[name]) for found in rows.values() for row in found)
        result[f"{name}_beyond"] = median(row[name] for row in beyond)
        if worst > MOST_ERROR:
            wrong.append(f"{name} is {worst:.1%}; at most {MOST_ERROR:.0%}")
    return result, wrong


def real_run(home: Path, setting: Setting) -> tuple[RunConfig, list[TimedEvent]]:
    """Run the job as it is, and return its configuration and the events of its journal."""
    label = f"w{setting.workers}-s{setting.max_staleness}-n{setting.steps}"
    its, results = home / label, home / label / "results"
    its.mkdir()
    words = ["antiphon.benchmarks.parts.plain_job", str(CONFIG)]
    words += [*COMMON, *setting.overrides, "--results", str(results)]
    run_module(its, words, label, RUN_S, results)
    directory = next(its.glob("runs/*/journal.db")).parent
    config = load_config(directory / "config.yaml")
    return config, asyncio.run(read_journal(directory, config))


def compared(predicted: RunFigures, measured: RunFigures) -> dict[str, Any]:
    """Return both, and how far the prediction is off, as shares of what was measured."""
    return {
        "predicted": asdict(predicted),
        "measured": asdict(measured),
        "seconds_per_step_error": round(predicted.seconds_per_step / measured.seconds_per_step - 1.0, 4),
        "dollars_error": round(predicted.usd / measured.usd - 1.0, 4),
        "staleness_error": round(predicted.staleness_distance(measured), 4),
    }


if __name__ == "__main__":
    execute(main)
