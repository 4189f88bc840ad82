"""events: what happened to a run, one line each, from its journal."""

import asyncio
import json
import sys
from collections import deque
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from antiphon.core.reporting.plain_text import plain

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.core.status import Event

DIGEST_CHARACTERS = 12
"""Enough of a digest to find it again."""


def events(
    run: str | None = None,
    /,
    *,
    kind: tuple[str, ...] = (),
    last: int | None = None,
    follow: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Print what happened to a run, in order: leases, losses, batches, commits, pauses.

    Args:
        run: the run's id; by default the newest.
        kind: only events of this kind or of this noun, such as lease.expired or worker; repeatable.
        last: only the newest of them.
        follow: continue until the run is finished; Ctrl-C stops the watching, not the run.
        as_json: one JSON object per line, for programs.
    """
    from antiphon.cli.catalogue import event_classes
    from antiphon.core.errors import ConfigError
    from antiphon.runs.directory import home_directory
    from antiphon.runs.finding import find_run

    kinds = [cls.kind for cls in event_classes()]
    for wanted in kind:
        if not any(_fits(known, wanted) for known in kinds):
            raise ConfigError(f"--kind {wanted}: there is no such event; kinds are {', '.join(kinds)}")
    if last is not None and last < 1:
        raise ConfigError(f"--last {last}: give a number from 1 on, or leave it out for all events")
    home = home_directory()
    return asyncio.run(_print(find_run(home, run), home, kind, last, follow, as_json))


async def _print(
    directory: "Path", home: "Path", kinds: tuple[str, ...], last: int | None, follow: bool, as_json: bool
) -> int:
    from antiphon.runs.attach import attached
    from antiphon.runs.directory import store_directory

    async with attached(directory, store_directory(home)) as (client, running):
        seen = 0
        newest: deque[Event] = deque(maxlen=last)
        async for event in client.watch_events(0, follow=False):
            seen = event.seq
            if not _wanted(event, kinds):
                continue
            if last is None:
                print(_as_json(event) if as_json else event_line(event))
            else:
                newest.append(event)
        for event in newest:
            print(_as_json(event) if as_json else event_line(event))
        sys.stdout.flush()
        if follow and running:
            async for event in client.watch_events(seen, follow=True):
                if _wanted(event, kinds):
                    print(_as_json(event) if as_json else event_line(event), flush=True)
    return 0


def event_line(event: "Event") -> str:
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


def _as_json(event: "Event") -> str:
    plain = {"seq": event.seq, "at": event.at, "kind": event.kind, **json.loads(event.data_json)}
    return json.dumps(plain)


def _wanted(event: "Event", kinds: tuple[str, ...]) -> bool:
    return not kinds or any(_fits(event.kind, wanted) for wanted in kinds)


def _fits(kind: str, wanted: str) -> bool:
    return kind == wanted or kind.partition(".")[0] == wanted
