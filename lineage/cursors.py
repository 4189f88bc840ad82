"""Cursors: how far each sink of a run is, a file of the run for each.

`seq`, `at` and `fold` are the position in the log and `place` is where the sink's records are. Where records
were refused, `refused` is the position from which the next start goes on. `gap` says that the run went on
without the sink for a while. `delayed` is why it has been away for long, `stopped` why it takes no more.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from antiphon.core.errors import AntiphonError, IntegrityError
from antiphon.lineage.log_fold import LogFold
from antiphon.system.files import write_atomically

FOLDER = "followers"
"""Folder of a run with the cursors of its sinks."""
WEIGHT_SINKS = ("ledger", "weights")
"""Sinks that take the weights of published versions, one of them in each run."""


def write_cursor(path: Path, cursor: Mapping[str, Any]) -> None:
    """Write a cursor.

    Raises:
        UnavailableError: when the folder has no space left or cannot be written.
    """
    write_atomically(path, json.dumps(cursor, sort_keys=True).encode())


def read_cursor(path: Path) -> dict[str, Any]:
    """Return a cursor; empty where there is none.

    Raises:
        IntegrityError: when it cannot be read.
    """
    try:
        cursor: dict[str, Any] = json.loads(path.read_bytes())
        for position in (cursor, cursor.get("refused", cursor)):
            int(position["seq"]), float(position["at"])
            LogFold().restore(position["fold"])
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError, AntiphonError) as error:
        raise IntegrityError(
            f"the cursor {path} cannot be read: {error!r}; remove it to write its records again"
        ) from error
    return cursor


def leave_off(run_dir: Path, name: str) -> None:
    """Note that a sink of the run does not follow any more: nothing is held for it.

    Raises:
        UnavailableError: when the cursor cannot be written.
    """
    path = run_dir / FOLDER / f"{name}.json"
    with suppress(IntegrityError):  # one that cannot be read holds nothing either
        cursor = read_cursor(path)
        if cursor and "stopped" not in cursor:
            write_cursor(path, {**cursor, "stopped": ""})


def recorded_version(run_dir: Path) -> int | None:
    """Return the newest version that no sink of the run needs any more: weights of later ones must stay.

    None where no sink keeps weights, or it stopped; a cursor that cannot be read is one of a sink that stops.
    """
    versions = []
    for name in WEIGHT_SINKS:
        with suppress(IntegrityError):
            cursor = read_cursor(run_dir / FOLDER / f"{name}.json")
            if cursor and "stopped" not in cursor:
                versions.append(int(cursor["fold"]["version"]))
    return min(versions, default=None)


def standing(run_dir: Path) -> list[str]:
    """Return a sentence for each sink of a run that stopped or was away for long, as its cursor says."""
    said = []
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        try:
            cursor = read_cursor(path)
        except IntegrityError as error:
            said.append(str(error))
            continue
        reason = cursor.get("stopped") or cursor.get("delayed")
        said += [f"{path.stem}: {reason}"] if reason else []
    return said
