"""evaluate: the held-out scores of a run as a flow, for the deployment's form and for schedules."""

from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run
from pydantic import Field

from antiphon.flows.run_page import artifact_key
from antiphon.runs.attach import held_out_scores, plain_scores, write_scores
from antiphon.runs.directory import home_directory


def name_of_evaluation() -> str:
    """Return the name of the current flow run: what it evaluates."""
    return f"evaluate {flow_run.get_parameters().get('run') or 'the newest run'}"


@flow(name="evaluate", flow_run_name=name_of_evaluation, persist_result=False, validate_parameters=True)
def evaluate(
    run: str = "",
    version: Annotated[int | None, Field(ge=0)] = None,
    results: str = "",
    timeout_s: Annotated[float, Field(gt=0.0)] = 600.0,
) -> dict[str, Any]:
    """Read a run's held-out scores, or have a running run measure one; they show on the run page.

    Args:
        run: the run's id; empty means the newest.
        version: policy version; none means every one that was evaluated.
        results: JSON file to write the scores to; empty writes none.
        timeout_s: longest wait for an evaluation, seconds.
    """
    run_id, scores = held_out_scores(home_directory(), run or None, version, timeout_s)
    if results:
        write_scores(run_id, scores, Path(results))
    plain = plain_scores(scores)
    create_table_artifact(
        plain, key=artifact_key("scores", run_id), description=f"Held-out scores of {run_id}"
    )
    return {"run": run_id, "evaluations": plain}
