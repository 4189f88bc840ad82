"""Saved weights: which versions clients of the door keep, under which names: `saved/index.json` of a run."""

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from antiphon.api.client_run import SavedVersion
from antiphon.core.client_records import SavedWeights
from antiphon.core.errors import ContractError, UnavailableError
from antiphon.system.files import write_atomically

SCHEME = "tinker://"
INDEX = "saved/index.json"
MODEL = "client.json"
"""In the folder of a run that a client drives: what it asked for when it created its model."""
_PATH = re.compile(
    r"tinker://([A-Za-z0-9][A-Za-z0-9._-]{0,127})/(weights|sampler_weights)/([A-Za-z0-9._-]{1,128})"
)
_list = TypeAdapter(list[SavedVersion])


def saved_at(path: str) -> SavedWeights:
    """Return what a path such as tinker://RUN/weights/NAME names.

    Raises:
        ContractError: when it names nothing.
    """
    found = _PATH.fullmatch(path)
    if found is None:
        raise ContractError(
            f"{path[:200]!r} names no saved weights; write tinker://RUN/weights/NAME or "
            "tinker://RUN/sampler_weights/NAME"
        )
    run_id, kind, name = found.groups()
    return SavedWeights(run_id, "weights" if kind == "weights" else "sampler_weights", name)


def saved_of(run_dir: Path) -> list[SavedVersion]:
    """Return what a run has saved, oldest first.

    Raises:
        UnavailableError: when the list cannot be read.
    """
    try:
        return _list.validate_json((run_dir / INDEX).read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{run_dir / INDEX} cannot be read: {error}; restore it") from error


def find_saved(home: Path, saved: SavedWeights) -> SavedVersion:
    """Return what is known of saved weights.

    Raises:
        ContractError: when a home does not have them.
    """
    for one in saved_of(home / "runs" / saved.run_id):
        if one.saved == saved:
            return one
    raise ContractError(f"{saved.path} is not here, or was deleted; list the checkpoints that are")


def note_saved(run_dir: Path, saved: Sequence[SavedVersion]) -> None:
    """Write what a run has saved.

    Raises:
        UnavailableError: when the disk is full; the list before it is still there.
    """
    (run_dir / INDEX).parent.mkdir(exist_ok=True)
    write_atomically(run_dir / INDEX, _list.dump_json(list(saved)))
