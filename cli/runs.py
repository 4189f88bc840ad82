"""runs: every run of this home in a table, newest first."""

import json
import shlex
import time
from typing import Any

from antiphon.cli.arguments import Json, columns
from antiphon.core.reporting.figures import seconds
from antiphon.lineage.run_overview import RunSummary, overview
from antiphon.runs.directory import home_directory, known_homes, list_runs
from antiphon.system.set_up import command


def runs(*, as_json: Json = False) -> None:
    """List all runs, newest first.

    Of each: state, steps, held-out pass@1 before, after and at best, age, and time of the loop. Starts that
    were stopped before their first step are named below, and other homes that have runs.

    Args:
        as_json: print one JSON document, with every figure of each run.
    """
    home = home_directory()
    found, unreadable = overview(reversed(list_runs(home)))
    if as_json:
        print(json.dumps([_plain(run) for run in found], indent=2))
        return
    for sentence in unreadable:
        print(f"not shown: {sentence}")
    others = {other: names for other in known_homes() if other != home and (names := list_runs(other))}
    elsewhere = [
        f"{len(names)} of another home, the newest {names[-1].name}: "
        f"ANTIPHON_HOME={shlex.quote(str(other))} {command()} runs"
        for other, names in others.items()
    ]
    if not found:
        print(f"there are no runs under {home / 'runs'}; start one with `{command()} demo`")
        print("\n".join(elsewhere), end="\n" * bool(elsewhere))
        return

    began = [run for run in found if run.state in ("cancelled", "unfinished") and not run.figures.steps]
    found = [run for run in found if run not in began]
    rows = columns([_HEAD, *map(_cells, found)])
    for row, differs in zip(rows, [{}, *(run.differs for run in found)], strict=True):
        print(row)
        if differs:
            print("    " + "  ".join(f"{name}={json.dumps(value)}" for name, value in differs.items()))
    if any(run.differs for run in found):
        print("below a run: the keys in which the runs of its name differ")
    stopped = [run for run in found if run.state in ("cancelled", "unfinished")]
    for run in [run for run in stopped if run.steps_total is not None][:3]:  # others go on with their clients
        print(f"continue {run.run_id}: {run.next_command}")
    if len(found) > 1:
        print(f"compare: {command()} report {found[1].run_id} {found[0].run_id}")
    if began:
        print(f"stopped before the first step: {', '.join(run.run_id for run in began)}")
        print(f"  remove them: {command()} gc {' '.join(f'--run {run.run_id}' for run in began)}")
    print("\n".join(elsewhere), end="\n" * bool(elsewhere))


_HEAD = ("run", "state", "steps", "before", "after", "best", "began", "time")


def _cells(run: RunSummary) -> tuple[str, ...]:
    figures = run.figures
    best = figures.text("reward_best")
    return (
        *(run.run_id, run.state, f"{figures.steps}" + (f"/{run.steps_total}" if run.steps_total else "")),
        *(figures.text("reward_first"), figures.text("reward_last")),
        best if figures.best_version is None else f"{best} v{figures.best_version}",
        *(_ago(run.begun_at), seconds(figures.wall_s)),
    )


def _plain(run: RunSummary) -> dict[str, Any]:
    return {
        "run": run.run_id,
        "state": run.state,
        "steps_total": run.steps_total,
        "began_at": run.begun_at,
        "differs": run.differs,
        "next": run.next_command,
        "figures": run.figures.plain(),
    }


def _ago(at: float) -> str:
    age_s = max(0.0, time.time() - at)
    for size_s, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= size_s:
            return f"{age_s / size_s:.0f} {name} ago"
    return "now"
