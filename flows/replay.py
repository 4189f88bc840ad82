"""replay: a recorded run executed again as a flow, span by span, so that its page shows how far it holds.

What a span found is one task run and one line of the table on the run's page. Differences end the
flow as failed, with the first of them as the reason, after everything was compared.
"""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from pydantic import Field

from antiphon.core.errors import IntegrityError
from antiphon.core.reporting.replay_checks import choose_steps
from antiphon.flows.run_page import artifact_key
from antiphon.runs.directory import home_directory
from antiphon.runs.finding import find_artifacts

if TYPE_CHECKING:
    from antiphon.services.learner.replay.steps import Replayer


@task(task_run_name="restore v{first}", cache_policy=NO_CACHE, persist_result=False)
def restore(replayer: "Replayer", first: int) -> int:
    """Restore the newest version up to `first` and return it."""
    return replayer.start(first)


@task(task_run_name="replay {first} to {last}", cache_policy=NO_CACHE, persist_result=False)
def replay_span(replayer: "Replayer", first: int, last: int) -> dict[str, Any]:
    """Execute steps again; return how many were equal and what the first difference was."""
    checks = [replayer.step(step) for step in range(first, last + 1)]
    odd = [check.words() for check in checks if not check.equal]
    return {
        "steps": f"{first} to {last}",
        "equal": len(checks) - len(odd),
        "of": len(checks),
        "seconds": round(sum(check.seconds for check in checks), 2),
        "first difference": odd[0] if odd else "",
    }


@task(task_run_name="rollouts {first} to {last}", cache_policy=NO_CACHE, persist_result=False)
def score_span(replayer: "Replayer", first: int, last: int) -> dict[str, Any]:
    """Score the trajectories of steps again; return how many log-probabilities agree."""
    checks = [replayer.score(step) for step in range(first, last + 1)]
    worst = max(checks, key=lambda check: check.largest)
    return {
        "steps": f"rollouts {first} to {last}",
        "equal": sum(check.within for check in checks),
        "of": sum(check.tokens for check in checks),
        "seconds": "",
        "first difference": f"largest {worst.largest:.3g} nats, step {worst.step}, {worst.where}",
    }


def name_of_replay() -> str:
    """Return the name of the current flow run: what it repeats."""
    return f"replay {flow_run.get_parameters().get('run') or 'the newest finished run'}"


@flow(name="replay", flow_run_name=name_of_replay, persist_result=False, validate_parameters=True)
def replay(
    run: str = "",
    first: Annotated[int | None, Field(ge=0)] = None,
    last: Annotated[int | None, Field(ge=0)] = None,
    rollouts: bool = False,
    copy_folder: str = "",
    span: Annotated[int, Field(ge=1, le=1000)] = 10,
) -> dict[str, Any]:
    """Execute a run's recorded steps again from its artifacts and compare every bit.

    Args:
        run: the run's id; empty means the newest finished one.
        first: first step; none means 0.
        last: last step; none means the run's last.
        rollouts: score the recorded trajectories again as well.
        copy_folder: folder with a copy of the run's ledger; empty takes the project's own.
        span: steps of one task run.
    """
    # Named here: it brings torch, which forms need not wait for.
    from antiphon.services.learner.replay.steps import Replayer

    copy = Path(copy_folder) if copy_folder else None
    artifacts, own = find_artifacts(home_directory(), run or None, copy)
    steps = choose_steps(len(artifacts.steps), artifacts.config.planned_steps, first, last)
    artifacts.require(steps)
    replayer = Replayer(artifacts, own_checkpoints=own, rollouts=rollouts)
    with closing(replayer):
        begun = restore(replayer, steps[0])
        lines = [replay_span(replayer, a, b) for a, b in _spans(begun, steps[-1], span)]
        if rollouts:
            lines += [score_span(replayer, a, b) for a, b in _spans(steps[0], steps[-1], span)]
    summary = replayer.summary
    said = "\n\n".join(summary.lines())
    create_table_artifact(lines, key=artifact_key("replay", summary.run_id), description=said)
    difference = summary.first_difference()
    if difference is not None:
        raise IntegrityError(difference)
    return summary.plain()


def _spans(first: int, last: int, span: int) -> list[tuple[int, int]]:
    """Cut steps [first, last] into spans, both ends included.

    >>> _spans(0, 6, 3)
    [(0, 2), (3, 5), (6, 6)]
    """
    return [(begin, min(last, begin + span - 1)) for begin in range(first, last + 1, span)]
