"""fleet: the engines that workers of a pool are started by: tried, looked at, and cleaned up."""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Literal

from antiphon.cli.arguments import Json
from antiphon.core.config import load_config
from antiphon.core.errors import ConfigError
from antiphon.runs.directory import home_directory
from antiphon.runs.finding import find_run
from antiphon.runs.fleet.engines import make_launcher
from antiphon.runs.fleet.launcher import elsewhere, launch_site


def fleet(
    action: Literal["check", "render", "list", "stop"],
    what: str | None = None,
    /,
    *overrides: str,
    out: Path | None = None,
    grace: float | None = None,
    limit: float = 300.0,
    as_json: Json = False,
) -> int:
    """Try the engines that a pool's workers are started by, or list and stop a run's workers there.

    `check CONFIG` has each class start one worker that samples nothing, sees it reach the coordinator's
    address, and says what is missing. `render CONFIG` writes what would be submitted. `list RUN` and
    `stop RUN` ask the engines themselves, so they work when the run's own process is gone.

    Args:
        action: check, render, list or stop.
        what: a YAML file, as in examples/; of list and stop a run's id, by default the newest.
        overrides: with check and render: key=value pairs, such as rollout.threads=8.
        out: with render: folder for the files; by default they are printed.
        grace: with stop: seconds that workers have to hand over; by default the run's rollout.grace_s.
        limit: with check: longest wait for the worker of a class, seconds.
        as_json: print one JSON document.
    """
    if action in ("list", "stop") and overrides:
        raise ConfigError(f"fleet {action} takes a run, whose configuration stands; leave {overrides[0]} out")
    if action in ("check", "render") and what is None:
        raise ConfigError(f"fleet {action} needs a configuration; give its file")
    if action == "check":
        return _check(str(what), overrides, limit, as_json)
    if action == "render":
        return _render(str(what), overrides, out)
    directory = find_run(home_directory(), what)
    return _list(directory, as_json) if action == "list" else _stop(directory, grace, as_json)


def _check(path: str, overrides: tuple[str, ...], limit_s: float, as_json: bool) -> int:
    from antiphon.runs.fleet.commands import check_fleet

    config = load_config(Path(path), list(overrides))
    with tempfile.TemporaryDirectory(prefix="antiphon-fleet-") as folder:
        found = asyncio.run(check_fleet(config, Path(folder), limit_s))
    if as_json:
        rows = [{"class": name, "missing": missing, "seen": seen} for name, missing, seen in found]
        print(json.dumps({"classes": rows}, indent=2))
    for name, missing, seen in () if as_json else found:
        for sentence in missing:
            print(f"{name}: {sentence}")
        if seen:
            print(f"{name}: {seen}")
    if not found and not as_json:
        print("no class of provisioning.pool has a launcher of another kind than local")
    return 1 if any(missing for _, missing, _ in found) else 0


def _render(path: str, overrides: tuple[str, ...], out: Path | None) -> int:
    config = load_config(Path(path), list(overrides))
    classes = elsewhere(config)
    with tempfile.TemporaryDirectory(prefix="antiphon-fleet-") as folder:
        address = f"{config.services.reached_at}:{config.services.coordinator_port}"
        site = launch_site(config, "RUN", Path(folder), address)
    files: dict[str, str] = {}
    for one in classes:
        files |= make_launcher(one, site).render(site.draft(one.workers[0]))
    for name, text in files.items():
        if out is None:
            print(f"# {name}\n{text}")
            continue
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")
        print(out / name)
    if not files:
        print("nothing is submitted: no class of provisioning.pool is started elsewhere", file=sys.stderr)
    return 0


def _list(directory: Path, as_json: bool) -> int:
    from antiphon.runs.fleet.commands import list_fleet

    rows = asyncio.run(list_fleet(directory))
    if as_json:
        plain = [
            {
                "worker": row.worker,
                "noted": row.noted,
                "instance": row.instance and row.instance.name,
                "state": row.instance and row.instance.state,
                "up_s": row.instance and round(row.instance.up_s, 1),
                "reason": row.reason,
            }
            for row in rows
        ]
        print(json.dumps({"run": directory.name, "workers": plain}, indent=2))
        return 0
    for row in rows:
        engine = f"{row.instance.state}, {row.instance.name}" if row.instance else "not there"
        up = f", up {row.instance.up_s:.0f} s" if row.instance and row.instance.up_s else ""
        why = f" ({row.reason})" if row.reason else ""
        print(f"{row.worker}: noted as {row.noted or 'unknown'}; its engine: {engine}{up}{why}")
    if not rows:
        print(f"{directory.name} has ordered no worker")
    return 0


def _stop(directory: Path, grace_s: float | None, as_json: bool) -> int:
    from antiphon.runs.fleet.commands import stop_fleet

    if grace_s is None:
        grace_s = load_config(directory / "config.yaml").rollout.grace_s
    ended, left = asyncio.run(stop_fleet(directory, grace_s))
    if as_json:
        print(json.dumps({"run": directory.name, "ended": ended, "left": left}))
    else:
        print(f"{directory.name}: {', '.join(ended) or 'no worker'} ended")
        for name in left:
            print(f"{name} does not end; end it by its engine's own command")
    return 1 if left else 0
