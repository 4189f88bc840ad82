"""report: one self-contained HTML page about a run, finished or not; or several runs side by side."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from antiphon.cli.arguments import Json, columns
from antiphon.core.config import load_config
from antiphon.core.errors import ConfigError
from antiphon.core.reporting.run_view import RunView
from antiphon.core.status import RunStatus
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.report.comparison import SEED_HEAD, Comparison, build_comparison_page, read_run, seed_rows
from antiphon.runs.attach import attached, read_events
from antiphon.runs.directory import home_directory, store_directory
from antiphon.runs.finding import RECORD, find_run, find_sft
from antiphon.runs.samples import explainer

MOST_IN_A_NAME = 3
"""Runs that the name of a page about several names."""


def report(*runs: str, out: Path | None = None, as_json: Json = False) -> None:
    """Write one self-contained HTML page about a run, or about several side by side.

    It shows learning curve, staleness, overlap timeline, throughput, where the seconds went; of several which
    parameters differ, their figures side by side, and their rewards.

    Args:
        runs: ids of runs; by default the newest one. One may be the folder's name of a supervised training.
        out: file to write; by default report.html in the run's folder, or compare-RUN1-RUN2.html in the home
            directory.
        as_json: of several runs, print one JSON document.
    """
    if len(runs) > 1:
        return _compare(runs, out, as_json)
    if as_json:
        raise ConfigError(
            "--json compares two runs or more; `antiphon status RUN --json` prints those of one"
        )
    return _one_page(runs[0] if runs else None, out)


def _one_page(run: str | None, out: Path | None) -> None:
    from antiphon.report.page import build_report

    home = home_directory()
    if (folder := find_sft(home, run)) is not None:
        from antiphon.report.sft_page import build_sft_page
        from antiphon.runs.sft import read_lines

        target = out or folder / "report.html"
        build_sft_page(folder.name, json.loads((folder / RECORD).read_bytes()), read_lines(folder), target)
        print(target)
        return
    directory = find_run(home, run)

    async def read() -> tuple[RunView, RunStatus]:
        async with attached(directory) as (coordinator, _):
            return await read_events(coordinator, RunView()), await coordinator.status()

    view, status = asyncio.run(read())
    store, target = ArtifactStore(store_directory(home)), out or directory / "report.html"
    build_report(directory, store, view, status, target, explainer(load_config(directory / "config.yaml")))
    print(target)


def _compare(names: Sequence[str], out: Path | None, as_json: bool) -> None:
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{twice} is named twice; a comparison needs different runs")
    home = home_directory()
    found = Comparison([read_run(find_run(home, name)) for name in names])
    stem = "-".join(names[:MOST_IN_A_NAME]) + (f"-and-{len(names) - MOST_IN_A_NAME}-more" * (len(names) > 3))
    page = build_comparison_page(found, out or home / f"compare-{stem}.html")
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
        return
    parameters = [[key, *map(json.dumps, values)] for key, values in found.parameters.items()]
    same = ["(all equal)", *("" for _ in names)]
    lines = columns([["parameter", *names], *(parameters or [same])], right=True)
    lines += [
        "",
        *columns([["figure", *names], *([label, *texts] for label, _, texts in found.figures)], True),
    ]
    if rows := seed_rows(found):
        lines += ["", "means over seeds, with 95% intervals:", *columns([SEED_HEAD, *rows], right=True)]
    print("\n".join([*lines, *(f"note: {said}" for said in found.warnings), f"page: {page}"]))
