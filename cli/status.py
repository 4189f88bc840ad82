"""status: one run as it is now, in a live picture, or as JSON for programs; and what happened to it."""

import asyncio
import dataclasses
import json
import shlex
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from antiphon.cli.arguments import Json
from antiphon.core.config import load_config
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.loop.events import event_kinds
from antiphon.core.reporting.alarms import Alarm, StepAlarms
from antiphon.core.reporting.figures import RunFigures
from antiphon.core.reporting.plain_text import plain
from antiphon.core.reporting.run_display import TokenRates, planes_of
from antiphon.core.status import Event
from antiphon.lineage.cursors import standing
from antiphon.lineage.hosts import GatewayRecord, read_gateway, waiting_for_host
from antiphon.lineage.judgements import judgement_lines
from antiphon.lineage.run_overview import read_figures
from antiphon.net.security.credentials import Credentials
from antiphon.runs.alarm_watch import alarm_line, current_alarms, records_alarms
from antiphon.runs.attach import attached, commits_of, coordinator_address, look, run_credentials
from antiphon.runs.directory import home_directory, is_finished, list_runs
from antiphon.runs.finding import find_run
from antiphon.runs.outcome import RunOutcome

WATCH_S = 1.0
"""Seconds between two looks with --watch."""

DIGEST_CHARACTERS = 12
"""Enough of a digest to find it again."""


def status(
    run: str | None = None,
    /,
    *,
    as_json: Json = False,
    watch: bool = False,
    events: bool = False,
    kind: tuple[str, ...] = (),
    last: int | None = None,
    follow: bool = False,
) -> int:
    """Show a run as it is now; with --events, what happened to it.

    As it is now: steps, reward, held-out pass@1, staleness, and what each plane waits for. What happened, in
    order: leases, losses, batches, commits, pauses.

    Args:
        run: the run's id; by default the newest.
        as_json: print everything the coordinator says, for programs; of events one JSON object per line.
        watch: keep looking until the run is finished.
        events: print the run's events; each of the options below means it too.
        kind: only events of this kind or of this noun, such as lease.expired or worker; repeatable.
        last: only the newest of the events.
        follow: continue until the run is finished; Ctrl-C stops the watching, not the run.
    """
    if events or kind or last is not None or follow:
        return _show_events(run, kind, last, follow, as_json)

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
    shown = StepAlarms(asyncio.run(commits_of(address, credentials)), found.reward_range)
    alarms, figures = current_alarms(shown, found, config, directory), read_figures(directory)
    found = waiting_for_host(found, directory, config.gateway.host_timeout_s)
    gateway = read_gateway(directory)
    if as_json:
        _print_json(dataclasses.asdict(found), alarms, figures, gateway)
        return 0

    from rich.console import Console

    from antiphon.cli.view import RunHistory, picture

    history = RunHistory()
    history.take(found)
    Console().print(picture(found, planes_of(found, {}), history, None))
    beside = [*gateway.lines(), *judgement_lines(directory)]
    print("\n".join([*figures.lines(), *map(alarm_line, alarms), *beside, f"coordinator: {address}"]))
    if gateway.url:
        print(f"gateway: {gateway.url}")
    others = [d.name for d in list_runs(home) if d != directory]
    if run is None and others:
        print(f"other runs: {', '.join(others[-5:])}")
    return 0


def _print_json(
    said: Mapping[str, Any], alarms: Sequence[Alarm], figures: RunFigures, gateway: GatewayRecord
) -> None:
    plain_alarms = [dataclasses.asdict(alarm) for alarm in alarms]
    hosts = {"gateway": dataclasses.asdict(gateway)} if gateway.url else {}
    print(json.dumps({**said, **hosts, "alarms": plain_alarms, "figures": figures.plain()}, indent=2))


def _watch(address: str, run_id: str, credentials: Credentials | None) -> int:
    from antiphon.cli.view import make_view

    view = make_view()
    rates, begun = TokenRates(), False
    try:
        while True:
            found = asyncio.run(look(address, run_id, credentials))
            if found is None:
                view.message("the run's coordinator is gone; `antiphon status` says what is left")
                return 1
            if not begun:
                view.started(found.run_id, {})
                begun = True
            view.status(found, planes_of(found, rates.take(found, time.perf_counter())))
            if found.finished:
                view.finished([f"run {found.run_id} is finished"])
                return 0
            time.sleep(WATCH_S)
    finally:
        view.close()


def _show_resting(directory: Path, as_json: bool) -> int:
    """Say what is known of a run that is not running; exit code 1 when it is unfinished."""
    figures, alarms = read_figures(directory), records_alarms(standing(directory))
    finished = is_finished(directory)
    outcome: dict[str, Any] = {"run_id": directory.name, "finished": False}
    if finished:
        outcome = json.loads((directory / "outcome.json").read_text(encoding="utf-8"))
        outcome |= {"figures": figures.plain()}  # those of outcome.json, computed again
        lines = RunOutcome.from_summary(outcome).lines(directory / "report.html")
    else:
        first, *rest = figures.lines()
        lines = [f"run {directory.name}: {first}", *rest]
    gateway = read_gateway(directory)
    if as_json:
        _print_json(outcome, alarms, figures, gateway)
    else:
        beside = [*gateway.lines(), *judgement_lines(directory)]
        print("\n".join([*lines, *map(alarm_line, alarms), *beside]))
    if not finished and load_config(directory / "config.yaml").client_driven:
        print("its services are away until `antiphon door` serves its client again")
    elif not finished:
        raise AntiphonError(
            f"run {directory.name} is not running and not finished; continue it with "
            f"`antiphon run {shlex.quote(str(directory / 'config.yaml'))} --resume {directory.name}`"
        )
    return 0


def _show_events(
    run: str | None, kind: tuple[str, ...], last: int | None, follow: bool, as_json: bool
) -> int:
    kinds = event_kinds()
    for wanted in kind:
        if not any(_fits(known, (wanted,)) for known in kinds):
            raise ConfigError(f"--kind {wanted}: there is no such event; kinds are {', '.join(kinds)}")
    if last is not None and last < 1:
        raise ConfigError(f"--last {last}: give a number from 1 on, or leave it out for all events")
    spell = _as_json if as_json else event_line

    async def show(directory: Path) -> None:
        seen, newest = 0, deque[Event](maxlen=last)
        async with attached(directory) as (client, running):
            async for event in client.watch_events(0, follow=False):
                seen = event.seq
                if _fits(event.kind, kind):
                    newest.append(event)
                while last is None and newest:
                    print(spell(newest.popleft()))
            for event in newest:
                print(spell(event))
            sys.stdout.flush()
            if follow and running:
                async for event in client.watch_events(seen, follow=True):
                    if _fits(event.kind, kind):
                        print(spell(event), flush=True)

    asyncio.run(show(find_run(home_directory(), run)))
    return 0


def event_line(event: Event) -> str:
    """Spell one event: number, local time, kind, and its fields, digests cut short."""
    at = datetime.fromtimestamp(event.at).strftime("%H:%M:%S")
    fields = json.loads(event.data_json)
    said = " ".join(f"{name}={_short(value)}" for name, value in fields.items())
    return plain(f"{event.seq:6d} {at} {event.kind:22s} {said}".rstrip())


def _short(value: object) -> str:
    if isinstance(value, str):
        is_digest = len(value) == 64 and set(value) <= set("0123456789abcdef")
        return value[:DIGEST_CHARACTERS] if is_digest else value
    said = json.dumps(value)
    return said if len(said) <= 100 else f"{said[:97]}..."


def _as_json(event: Event) -> str:
    return json.dumps({"seq": event.seq, "at": event.at, "kind": event.kind, **json.loads(event.data_json)})


def _fits(kind: str, wanted: tuple[str, ...]) -> bool:
    """Tell whether an event is of a wanted kind or noun; of nothing wanted all are."""
    return not wanted or kind in wanted or kind.partition(".")[0] in wanted
