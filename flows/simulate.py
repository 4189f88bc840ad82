"""simulate: whole runs under virtual time as a flow, for the deployment's form and for schedules."""

from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from pydantic import Field

from antiphon.core.errors import AntiphonError
from antiphon.flows.run_page import artifact_key
from antiphon.simulator.campaign import Campaign, mute_logs
from antiphon.simulator.report import Summary, failure_lines
from antiphon.simulator.scenario import load_scenario

TOLD_EVERY = 10
"""Seeds between two looks at the progress on the page."""


@flow(name="simulate", flow_run_name="simulate {seeds} seeds from {first_seed}", persist_result=False)
def simulate(
    scenario: str = "",
    first_seed: Annotated[int, Field(ge=0)] = 0,
    seeds: Annotated[int, Field(ge=1, le=100_000)] = 100,
) -> dict[str, Any]:
    """Simulate runs with faults drawn from seeds and check every event of them.

    Args:
        scenario: a YAML file as in examples/; empty: each seed draws its own.
        first_seed: the first seed.
        seeds: how many.

    Raises:
        ConfigError: for a scenario that is invalid.
        AntiphonError: when a promise was broken; the page shows the seeds and how to see them again.
    """
    chosen = load_scenario(Path(scenario)) if scenario else None
    mute_logs()
    summary, failures = Summary(), list[str]()
    name = f"seeds {first_seed} to {first_seed + seeds - 1}"
    progress = create_progress_artifact(0.0, key=artifact_key("simulated", name), description=name)
    for outcome in Campaign(chosen).seeds(range(first_seed, first_seed + seeds)):
        summary.add(outcome)
        if outcome.violations:
            failures += failure_lines(outcome, scenario)
        if summary.seeds % TOLD_EVERY == 0:
            update_progress_artifact(progress, 100.0 * summary.seeds / seeds)
    update_progress_artifact(progress, 100.0)
    lines = [*(f"- {line}" for line in summary.lines()), *(f"    {line}" for line in failures)]
    create_markdown_artifact("\n".join(lines), key=artifact_key("simulation", name), description=name)
    if summary.failing:
        raise AntiphonError(f"{len(summary.failing)} of {seeds} seeds broke a promise: {failures[0]}")
    return summary.plain()
