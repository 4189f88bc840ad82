"""status: one run as it is now, or in a live picture, or as JSON for programs."""

import asyncio
import dataclasses
import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from antiphon.core.errors import AntiphonError

if TYPE_CHECKING:
    from antiphon.net.security.credentials import Credentials

WATCH_S = 1.0
"""Seconds between two looks with --watch."""


def status(
    run: str | None = None,
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    watch: bool = False,
) -> int:
    """Show a run: steps, reward, held-out pass@1, staleness, and what each plane waits for.

    Args:
        run: the run's id; by default the newest.
        as_json: print everything the coordinator says, for programs.
        watch: keep looking until the run is finished.
    """
    from antiphon.core.config import load_config
    from antiphon.core.reporting.alarms import alarms_of, audit_alarm, heldout_alarm, swap_alarm
    from antiphon.lineage.run_figures import read_figures
    from antiphon.runs.alarm_watch import alarm_line, current_alarms
    from antiphon.runs.attach import commits_of, coordinator_address, look, run_credentials
    from antiphon.runs.directory import home_directory, list_runs
    from antiphon.runs.finding import find_run

    home = home_directory()
    directory = find_run(home, run)
    config = load_config(directory / "config.yaml")
    address = coordinator_address(directory, config)
    credentials = run_credentials(directory, config)
    found = None if address is None else asyncio.run(look(address, directory.name, credentials))
    if found is None or address is None:
        return _show_resting(directory, as_json)
    if watch:
        return _watch(address, directory.name, credentials)
    alarms = list(current_alarms(alarms_of(asyncio.run(commits_of(address, credentials))), config, directory))
    asked = audit_alarm(found), swap_alarm(found), heldout_alarm(found)
    alarms += [alarm for alarm in asked if alarm is not None]
    if as_json:
        plain = dataclasses.asdict(found) | {"alarms": [dataclasses.asdict(alarm) for alarm in alarms]}
        print(json.dumps(plain | {"figures": read_figures(directory).plain()}, indent=2))
        return 0

    from rich.console import Console

    from antiphon.cli.view import RunHistory, picture
    from antiphon.core.reporting.run_display import planes_of

    history = RunHistory()
    history.take(found)
    Console().print(picture(found, planes_of(found, {}), history, None))
    for line in read_figures(directory).lines():
        print(line)
    for alarm in alarms:
        print(alarm_line(alarm))
    print(f"coordinator: {address}")
    others = [d.name for d in list_runs(home) if d != directory]
    if run is None and others:
        print(f"other runs: {', '.join(others[-5:])}")
    return 0


def _watch(address: str, run_id: str, credentials: "Credentials | None") -> int:
    from antiphon.cli.view import make_view
    from antiphon.core.reporting.run_display import planes_of
    from antiphon.runs.attach import look

    view = make_view()
    tokens, at = 0, time.perf_counter()
    begun = False
    try:
        while True:
            found = asyncio.run(look(address, run_id, credentials))
            if found is None:
                view.message("the run's coordinator is gone; `antiphon status` says what is left")
                return 1
            if not begun:
                view.started(found.run_id, {})
            now, made = time.perf_counter(), sum(w.tokens_generated for w in found.workers)
            rate = max(0.0, (made - tokens) / (now - at)) if begun else 0.0
            tokens, at, begun = made, now, True
            view.status(found, planes_of(found, {"rollout": rate}))
            if found.finished:
                view.finished([f"run {found.run_id} is finished"])
                return 0
            time.sleep(WATCH_S)
    finally:
        view.close()


def _show_resting(directory: Path, as_json: bool) -> int:
    """Say what is known of a run that is not running; exit code 1 when it is unfinished."""
    from antiphon.lineage.run_figures import read_figures
    from antiphon.runs.directory import is_finished
    from antiphon.runs.outcome import RunOutcome

    figures = read_figures(directory)
    if not is_finished(directory):
        said = {"run_id": directory.name, "finished": False, "figures": figures.plain()}
        lines = f"run {directory.name}: " + "\n".join(figures.lines())
        print(json.dumps(said, indent=2) if as_json else lines)
        raise AntiphonError(
            f"run {directory.name} is not running and not finished; continue it with "
            f"`antiphon run {shlex.quote(str(directory / 'config.yaml'))} --resume {directory.name}`"
        )
    outcome = json.loads((directory / "outcome.json").read_text(encoding="utf-8"))
    outcome |= {"figures": figures.plain()}  # those of outcome.json, computed anew
    if as_json:
        print(json.dumps(outcome, indent=2))
        return 0
    for line in RunOutcome.from_summary(outcome).lines(directory / "report.html"):
        print(line)
    return 0
