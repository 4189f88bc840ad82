"""plan: how many workers a configuration needs, what a run then takes and costs, before it is started."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from antiphon.cli.arguments import Json
from antiphon.core.capacity.cover import Redundancy
from antiphon.core.capacity.estimate import find_gpu
from antiphon.core.capacity.measured import Measured, measure
from antiphon.core.capacity.model_shape import SHAPES, count
from antiphon.core.capacity.offers import Offers, build_offers, load_offers
from antiphon.core.capacity.planner import Assessment, Plan, Planner, staleness_warning
from antiphon.core.config import RunConfig, load_config
from antiphon.core.errors import AntiphonError, InfeasibleError
from antiphon.core.ranks.memory import MemoryPlan, check_memory, plan_memory, trained_parameters
from antiphon.environments.registry import with_sizes
from antiphon.lineage.retention import disk_need, disk_words
from antiphon.lineage.run_log import read_steps
from antiphon.models.codec import model_folder
from antiphon.models.directory import expected_tensors, known_tensors
from antiphon.models.learning_rate import with_learning_rate
from antiphon.runs.directory import home_directory, list_runs
from antiphon.runs.finding import find_run
from antiphon.services.rollout.engine.environment import device
from antiphon.system.free_space import free_bytes
from antiphon.system.logs import without_native_output
from antiphon.system.memory import host_bytes

MOST_LOCAL = 64


def plan(
    path: Path,
    /,
    *overrides: str,
    offers: Path | None = None,
    run: str | None = None,
    idle: float | None = None,
    budget: float | None = None,
    confidence: float = 0.95,
    survives: float = 0.0,
    plot: Path | None = None,
    memory: bool = False,
    gpu: str | None = None,
    as_json: Json = False,
) -> None:
    """Say how many workers a configuration needs, and what a run takes and costs.

    Rates come from a run that was recorded here with the same model and environment; where there is none,
    they are estimated from data sheets. A bound that is too small for a learner that never waits is planned
    with all the same, and the wait is told. The exit code is 3 when a demand cannot be met.

    Args:
        path: the YAML file.
        overrides: key=value pairs, such as loop.max_staleness=4.
        offers: YAML file of what can be rented, as in examples/plan/.
        run: measure by this run; by default the newest with the same model and environment.
        idle: largest share of time that the learner may wait, 0 to 1.
        budget: most US dollars that the run may cost.
        confidence: probability with which supply is enough although workers are lost at times.
        survives: share of the need that must be left when any one zone is reclaimed, 0 to 1.
        plot: SVG file for the drawing over bounds and numbers of workers.
        memory: say what each rank and engine needs of memory instead, and a version of the disk.
        gpu: class of the GPUs that must hold it, such as H100; by default this machine must.
        as_json: print one JSON document.
    """
    if memory:
        return plan_memories(load_config(path, list(overrides)), gpu, as_json)
    config = with_sizes(with_learning_rate(load_config(path, list(overrides))))
    for name, value in (("--idle", idle), ("--budget", budget)):
        if value is not None and not 0.0 <= value < math.inf:
            raise InfeasibleError(f"{name} {value:g} cannot be met by any plan; give 0 or more")
    found = measured_run(config, run)
    measured, source, before = found or (None, "", with_learning_rate(load_config(path)))
    wanted = load_offers(offers) if offers is not None else _local(config, measured)
    planner = Planner(config, wanted, measured, Redundancy(confidence, survives))
    with without_native_output():  # HiGHS prints lines that no option of it ends
        made = planner.plan(idle, budget)
    warning = staleness_warning(config, before)
    notes = [*made.notes, *([warning] if warning else [])]
    folder, known = model_folder(config.model.path), SHAPES.get(config.model.path)
    tensors = expected_tensors(folder) if folder is not None else known.tensors() if known is not None else {}
    parameters = count(tensors) or planner.parameters
    if parameters is not None:
        trained = trained_parameters(config.learner, tensors) if tensors else None
        need = disk_need(config, parameters, planner.tokens, ledger=config.record.dvc, trained=trained)
        free = "" if offers is not None else f"; {free_bytes(home_directory()) / 1e9:,.1f} GB are free here"
        notes.append(f"{disk_words(need)}{free}")
    if source:
        notes.append(f"measured by run {source}, {measured.steps if measured else 0} steps")
    if plot is not None:
        from antiphon.report.pictures import picture
        from antiphon.report.run_charts import capacity

        plot.write_text(picture(capacity(made, config.loop.max_staleness)), encoding="utf-8")
    if as_json:
        print(json.dumps(plain(config, made, notes), indent=2))
    else:
        print("\n".join(lines(config, made, notes)))


def plan_memories(config: RunConfig, gpu: str | None, as_json: bool) -> None:
    """Print what ranks, engines and versions take, before anything is started.

    Raises:
        InfeasibleError: when it does not fit, naming what would need less.
    """
    tensors, shape = known_tensors(config.model.path, model_folder(config.model.path))
    made = plan_memory(config, tensors, shape)
    gpus = gpu is not None or device() == "gpu"
    there = find_gpu(gpu).memory_bytes if gpu is not None else None if gpus else float(host_bytes())
    if as_json:
        told = {"parameters": count(tensors), "memory_bytes": there, "needed_bytes": made.fullest(gpus)}
        print(json.dumps({**told, **asdict(made)}, indent=2))
    else:
        print("\n".join(memory_lines(made, count(tensors), gpus, there)))
    if there is not None:
        check_memory(config, tensors, shape, there, gpus)


def memory_lines(made: MemoryPlan, parameters: int, gpus: bool, there: float | None) -> list[str]:
    """Say it, for a terminal; GB are 10^9 bytes."""
    found = [f"parameters         {parameters / 1e9:,.3f} billion"]
    for name, number, parts in (("rank", made.ranks, made.rank), ("engine", made.engines, made.engine)):
        uses = ", ".join(f"{use} {size / 1e9:,.2f}" for use, size in parts.items() if size)
        found.append(f"{f'each {name}, of {number}':18s} {sum(parts.values()) / 1e9:,.2f} GB: {uses}")
    place = "the fullest GPU" if gpus else "this machine"
    has = "" if there is None else f" of {there / 1e9:,.1f}"
    sent = f", {made.transfer / 1e9:,.3f} to a worker" if made.transfer < made.snapshot else ""
    return [
        *found,
        f"{place:18s} {made.fullest(gpus) / 1e9:,.2f}{has} GB",
        f"a version          {made.snapshot / 1e9:,.2f} GB of the disk{sent}",
        f"a checkpoint       {made.checkpoint / 1e9:,.2f} GB of the disk",
    ]


def measured_run(config: RunConfig, run: str | None) -> "tuple[Measured, str, RunConfig] | None":
    """Return what a run measured, its id and its configuration; None where none is like this one."""
    home = home_directory()
    if run is not None:
        directory = find_run(home, run)
        its = load_config(directory / "config.yaml")
        return measure(read_steps(directory), its.loop), directory.name, its
    for directory in reversed(list_runs(home)):
        try:
            its = load_config(directory / "config.yaml")
            if (its.model, its.environment) == (config.model, config.environment):
                return measure(read_steps(directory), its.loop), directory.name, its
        except AntiphonError:
            continue  # of an older version, or without a step: it says nothing
    return None


def _local(config: RunConfig, measured: Measured | None) -> Offers:
    """Return this machine's own workers as offers."""
    if measured is None:
        raise InfeasibleError(
            f"no run with model.path={config.model.path} and environment.name={config.environment.name} was "
            "measured here, and no offers were given; run it for a few steps first, or give --offers "
            "FILE as in examples/plan/"
        )
    record = config.record
    worker = {"name": "worker", "usd_per_hour": record.worker_usd_per_hour, "most": MOST_LOCAL}
    return build_offers({"learner": {"usd_per_hour": record.learner_usd_per_hour}, "workers": [worker]})


def lines(config: RunConfig, made: Plan, notes: Sequence[str]) -> list[str]:
    """Say a plan, for a terminal."""
    one, bound = made.chosen, config.loop.max_staleness
    shape, pace = one.shape, one.pace
    fleet = " and ".join(f"{count} {name}" for name, count in one.counts.items())
    paused = "no number of them" if math.isinf(made.required_paused) else f"{made.required_paused:.3g}/s"
    need = made.least_staleness
    verdict = (
        "the learner never waits for the bound"
        if bound >= need
        else f"the learner waits {pace.wait_s:,.1f} s of each step; from S = {need} on it need not"
    )
    found = [
        f"workers            {fleet}: {one.supply:.3g} completions/s; {made.required:.3g}/s keep the "
        f"learner busy ({paused}, if workers paused for broadcasts)",
        f"regime             {pace.regime.value}-bound: {pace.step_s:,.1f} s a step, "
        f"learner idle {pace.idle_share:.1%}",
        f"staleness          S = {bound}, S_min = {need}: {verdict}; at most {made.staleness_reached} occurs",
        f"publish interval   {pace.publish_interval}, with {shape.run_ahead:.2g} batches in flight",
        f"a step             train {shape.train_s:,.1f} s, broadcast {shape.broadcast_s:,.1f} s, "
        f"longest group {shape.group_s:,.1f} s",
        f"cost               ${one.usd_per_step:,.3f} a step, ${one.usd_per_hour:,.2f} an hour",
        f"the run            {config.run.steps} steps in {made.run_hours:,.1f} h for ${made.run_usd:,.2f}",
    ]
    if any(rate.availability < 1.0 for rate in made.rates.values()):
        found.append(f"when a zone goes   {made.survives:.0%} of what the learner needs is left")
    found += ["", "class            tokens/s  completions/s  there  source"]
    for name, rate in made.rates.items():
        source = "measured" if rate.measured else "estimate"
        found.append(
            f"{name:15s}  {rate.sampling.tokens_per_s:8,.0f}  {rate.completions_per_s:13.3g}  "
            f"{rate.availability:5.1%}  {source}"
        )
    found += ["", "   S  interval   s/step   idle  USD/step"]
    for number, other in enumerate(made.by_bound):
        found.append(
            f"{number:4d}  {other.pace.publish_interval:8d}{_row(other)}{'  <-' if number == bound else ''}"
        )
    found += ["", "workers          s/step   idle  USD/step"]
    for other in made.by_workers:
        found.append(f"{other.workers:7d}       {_row(other)}{'  <-' if other.counts == one.counts else ''}")
    return [*found, *([""] if notes else []), *(f"note: {note}" for note in notes)]


def _row(one: Assessment) -> str:
    return f"{one.pace.step_s:9,.1f}  {one.pace.idle_share:5.1%}  {one.usd_per_step:8,.3f}"


def plain(config: RunConfig, made: Plan, notes: Sequence[str]) -> dict[str, Any]:
    """Return a plan as plain values; seconds, US dollars, completions per second."""

    def told(one: Assessment) -> dict[str, Any]:
        return {
            "workers": one.counts,
            "supply": one.supply,
            "regime": one.pace.regime.value,
            "publish_interval": one.pace.publish_interval,
            "step_s": one.pace.step_s,
            "wait_s": one.pace.wait_s,
            "learner_idle_share": one.pace.idle_share,
            "usd_per_hour": one.usd_per_hour,
            "usd_per_step": one.usd_per_step,
        }

    of_plan = ("least_staleness", "staleness_reached", "acceptance", "run_hours", "run_usd", "survives")
    of_shape = ("run_ahead", "train_s", "broadcast_s", "group_s")
    return {
        **told(made.chosen),
        **{name: getattr(made, name) for name in of_plan},
        **{name: getattr(made.chosen.shape, name) for name in of_shape},
        "max_staleness": config.loop.max_staleness,
        "required_supply": made.required,
        "required_supply_paused": None if math.isinf(made.required_paused) else made.required_paused,
        "classes": {
            name: {
                "tokens_per_s": rate.sampling.tokens_per_s,
                "at_once": rate.sampling.at_once,
                "completions_per_s": rate.completions_per_s,
                "availability": rate.availability,
                "source": "measured" if rate.measured else "estimate",
            }
            for name, rate in made.rates.items()
        },
        "by_bound": [told(one) for one in made.by_bound],
        "by_workers": [told(one) for one in made.by_workers],
        "notes": list(notes),
    }
