"""compare: several runs side by side, on the terminal and on one page."""

import json
from collections.abc import Sequence
from pathlib import Path

from antiphon.cli.arguments import Json
from antiphon.core.errors import ConfigError

MOST_IN_A_NAME = 3
"""Runs that the page's own file name names."""


def compare(first: str, second: str, /, *more: str, output: Path | None = None, as_json: Json = False) -> int:
    """Show which parameters of runs differ, their figures side by side, and their rewards on one page.

    Args:
        first: a run's id.
        second: another run's id.
        more: further runs' ids.
        output: file of the page; by default compare-RUN1-RUN2.html in the home directory.
        as_json: print one JSON document.
    """
    from antiphon.report.compare_page import SEED_HEAD, build_comparison_page, seed_rows
    from antiphon.report.comparison import Comparison, read_run
    from antiphon.runs.directory import home_directory
    from antiphon.runs.finding import find_run

    names = (first, second, *more)
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{twice} is named twice; a comparison needs different runs")
    home = home_directory()
    found = Comparison([read_run(find_run(home, name)) for name in names])
    stem = "-".join(names[:MOST_IN_A_NAME]) + (f"-and-{len(names) - MOST_IN_A_NAME}-more" * (len(names) > 3))
    page = build_comparison_page(found, output or home / f"compare-{stem}.html")
    if as_json:
        plain = {
            "runs": list(names),
            "parameters": found.parameters,
            "figures": {run.run_id: run.figures.plain() for run in found.runs},
            "over_seeds": [
                {
                    "runs": [run.run_id for run in group.runs],
                    "scores": {
                        name: {"mean": mean, "half": half} for name, (mean, half) in group.scores.items()
                    },
                }
                for group in found.over_seeds
            ],
            "warnings": found.warnings,
            "page": str(page),
        }
        print(json.dumps(plain, indent=2))
        return 0
    parameters = [[key, *map(json.dumps, values)] for key, values in found.parameters.items()]
    _print_table("parameter", names, parameters or [["(all equal)", *("" for _ in names)]])
    print()
    _print_table("figure", names, [[label, *texts] for label, _, texts in found.figures])
    if rows := seed_rows(found):
        print("\nmeans over seeds, with 95% intervals:")
        _print_table(SEED_HEAD[0], SEED_HEAD[1:], rows)
    for sentence in found.warnings:
        print(f"note: {sentence}")
    print(f"page: {page}")
    return 0


def _print_table(head: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = [[head, *names], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells).rstrip())
