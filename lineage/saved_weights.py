"""Saved weights: which versions clients of the door keep, under which names.

`RUN_DIR/saved/KIND/NAME/saved.json` says which version a name stands for, and until when; the learner of a
run writes it, last. Of a run whose services are down, the holder of its lock can drop what is saved.
"""

import re
import shutil
from pathlib import Path

from pydantic import TypeAdapter

from antiphon.api.client_run import ModelOrder, SavedVersion
from antiphon.core.client_records import SavedWeights
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.frozen import frozen
from antiphon.system.files import write_atomically

SCHEME = "tinker://"
SAVED, NOTE = "saved", "saved.json"
KINDS = ("weights", "sampler_weights")
MODEL = "client.json"
"""In the folder of a run that a client drives: what it asked for when it created its model."""
_PATH = re.compile(
    r"tinker://([A-Za-z0-9][A-Za-z0-9._-]{0,127})/(weights|sampler_weights)/([A-Za-z0-9._-]{1,128})"
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_order = TypeAdapter(ModelOrder)


@frozen
class SavedNote:
    """What a name stands for."""

    version: int
    digest: str
    """blake3 of the version's weights."""
    bytes: int
    """Of the checkpoint; of weights that can only be sampled from 0, as the snapshot is not theirs alone."""
    at: float = 0.0
    """When it was saved, Unix seconds."""
    expires_at: float | None = None
    """When its time is over, Unix seconds; None: never."""


_note = TypeAdapter(SavedNote)


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


def check_name(name: str) -> str:
    """Return a name when a folder can have it.

    Raises:
        ContractError: when it cannot.
    """
    if not _NAME.fullmatch(name):
        raise ContractError(
            f"{name[:40]!r} cannot be a name; give 1 to 128 of A-Z a-z 0-9 . _ -, the first neither . nor -"
        )
    return name


def saved_folder(run_dir: Path, kind: str, name: str) -> Path:
    """Return the folder of a name.

    Raises:
        ContractError: when there can be no such kind or name.
    """
    if kind not in KINDS:
        raise ContractError(f"{kind!r} cannot be saved; give one of {' and '.join(KINDS)}")
    return run_dir / SAVED / kind / check_name(name)


def read_note(folder: Path) -> SavedNote | None:
    """Return what the name of a folder stands for, or None.

    Raises:
        IntegrityError: when its note cannot be read.
    """
    try:
        return _note.validate_json((folder / NOTE).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{folder / NOTE} is not readable; save the weights again") from error


def write_note(folder: Path, note: SavedNote) -> None:
    """Note what the name of a folder stands for.

    Raises:
        UnavailableError: when the disk is full or cannot be written.
    """
    write_atomically(folder / NOTE, _note.dump_json(note))


def drop_saved(run_dir: Path, kind: str, name: str) -> None:
    """Give up what was saved under a name, its note first; what is not there is ignored.

    Raises:
        ContractError: when there can be no such kind or name.
    """
    folder = saved_folder(run_dir, kind, name)
    (folder / NOTE).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def order_of(run_dir: Path) -> ModelOrder:
    """Return what the client asked for that created a run."""
    return _order.validate_json((run_dir / MODEL).read_bytes())


def write_order(run_dir: Path, order: ModelOrder) -> None:
    """Write what a client asks for that creates a run."""
    write_atomically(run_dir / MODEL, _order.dump_json(order))


def find_saved(home: Path, saved: SavedWeights) -> SavedVersion:
    """Return what is known of saved weights.

    Raises:
        ContractError: when a home does not have them.
        IntegrityError: when their note cannot be read.
    """
    found = read_saved(home / "runs" / saved.run_id, saved)
    if found is None:
        raise ContractError(f"{saved.path} is not here, or was deleted; list the checkpoints that are")
    return found


def saved_of(run_dir: Path) -> list[SavedVersion]:
    """Return what a run has saved, oldest first.

    Raises:
        IntegrityError: when a note cannot be read.
    """
    notes = (run_dir / SAVED).glob(f"*/*/{NOTE}")
    names = [saved_at(f"{SCHEME}{run_dir.name}/{'/'.join(path.parts[-3:-1])}") for path in notes]
    found = [one for name in names if (one := read_saved(run_dir, name)) is not None]
    return sorted(found, key=lambda one: one.at)


def read_saved(run_dir: Path, saved: SavedWeights) -> SavedVersion | None:
    """Return what is known of something that a run saved, or None.

    Raises:
        ContractError: when there can be no such name.
        IntegrityError: when its note cannot be read.
    """
    note = read_note(saved_folder(run_dir, saved.kind, saved.name))
    if note is None:
        return None
    said = (note.version, note.digest, note.bytes, note.at, note.expires_at)
    return SavedVersion(saved, *said, order_of(run_dir))
