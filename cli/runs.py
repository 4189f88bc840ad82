"""runs: every run of this home in a table, newest first."""

import json
import time
from typing import TYPE_CHECKING, Any

from antiphon.cli.arguments import Json
from antiphon.core.reporting.figures import seconds, share

if TYPE_CHECKING:
    from antiphon.lineage.run_overview import RunSummary


def runs(*, as_json: Json = False) -> int:
    """List all runs: state, steps, held-out pass@1 before, after and at best, age, and time of the loop.

    Args:
        as_json: print one JSON document, with every figure of each run.
    """
    from antiphon.lineage.run_overview import overview
    from antiphon.runs.directory import home_directory, list_runs

    found, unreadable = overview(reversed(list_runs(home_directory())))
    if as_json:
        print(json.dumps([_plain(run) for run in found], indent=2))
        return 0
    for sentence in unreadable:
        print(f"not shown: {sentence}")
    if not found:
        print(f"there are no runs under {home_directory() / 'runs'}; start one with `antiphon demo`")
        return 0

    rows = [_HEAD, *map(_cells, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, differs in zip(rows, [{}, *(run.differs for run in found)], strict=True):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if differs:
            print("    " + "  ".join(f"{name}={json.dumps(value)}" for name, value in differs.items()))
    if any(run.differs for run in found):
        print("below a run: the keys in which the runs of its name differ")
    open_ones = [run for run in found if run.state in ("cancelled", "unfinished")]
    for run in open_ones[:3]:
        print(f"continue {run.run_id}: {run.next_command}")
    if len(found) > 1:
        print(f"compare: antiphon compare {found[1].run_id} {found[0].run_id}")
    return 0


_HEAD = ("run", "state", "steps", "before", "after", "best", "began", "time")


def _cells(run: "RunSummary") -> tuple[str, ...]:
    figures = run.figures
    best = share(figures.reward_best)
    return (
        *(run.run_id, run.state, f"{figures.steps}/{run.steps_total}"),
        *(share(figures.reward_first), share(figures.reward_last)),
        best if figures.best_version is None else f"{best} v{figures.best_version}",
        *(_ago(run.begun_at), seconds(figures.wall_s)),
    )


def _plain(run: "RunSummary") -> dict[str, Any]:
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
