"""Ledger layout: the names and bytes of a ledger on disk, without DVC's libraries.

A ledger is a row of shards. The first is ``<run>/`` with its pointer and ``<run>.journal``;
when it is full the next is ``<run>.s001/`` with its own two files, and so on. A shard's tree
is DVC's directory object: the JSON list of its entries, sorted by path, named by the md5 of
these bytes. The journal has a line for each entry that came, and one for each that left.
The pointer names the tree. It is ``<run>.pointer``, which git ignores and DVC does
not know; a ledger that is kept has ``<run>.dvc`` instead, the same bytes for both of them.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from antiphon.core.config_sections import RecordSection
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.lineage.names import VERSIONS

SHARD_ENTRIES = 4096
"""Entries of a full shard: publishing writes one tree, so its price must not grow with the run."""

PUBLISH_ENTRIES = 16
"""New entries after which the tree is published."""

GITIGNORE = """\
# What runs leave here; `antiphon keep RUN` writes RUN.dvc, which git and DVC see.
/*/
/*.journal
/*.pointer
/.incoming-*
"""
"""Written into a new ledger folder. A rule for .dvc files would make DVC overlook those that are kept."""


_ENDS = (".dvc", ".pointer", ".journal")


@dataclass(frozen=True, slots=True)
class Entry:
    """One pinned file of a shard."""

    rel: str
    """Path inside the shard's directory."""
    md5: str
    size: int | None
    """Bytes; None where only a tree is known, which does not say."""


@dataclass(frozen=True, slots=True)
class ShardJournal:
    """What a shard's journal says, by path."""

    entries: Mapping[str, Entry]
    """What was appended and is to be there."""
    left: Mapping[str, Entry]
    """What was taken away; a tree or a file of it may be there still."""


def find_project(project: Path | None, home: Path) -> Path:
    """Return the DVC project of the ledger: `project`, or the nearest one above `home` or here.

    Raises:
        ConfigError: when there is none.
    """
    starts = [project] if project is not None else [home, Path.cwd()]
    for start in starts:
        for folder in (start.absolute(), *start.absolute().parents):
            if (folder / ".dvc").is_dir():
                return folder
    raise ConfigError(
        f"this needs a ledger, but {starts[-1]} is in no DVC project; run `dvc init` there, then begin a run"
    )


def ledger_project(record: RecordSection, home: Path, project: Path | None = None) -> Path | None:
    """Return the DVC project that the ledger of a run with `record` is in, as `find_project` does.

    None where the run has no ledger: with record.dvc=false, and outside of a DVC project.
    """
    try:
        return find_project(project, home) if record.dvc else None
    except ConfigError:
        return None


def keeps_no_ledger(record: RecordSection, run_dir: Path) -> bool:
    """Return whether the run in `run_dir` was recorded without a ledger."""
    return not record.dvc or (run_dir / VERSIONS).is_dir()


def shard_name(run_id: str, number: int) -> str:
    """Return the name of a run's shard.

    >>> shard_name("demo-1", 0), shard_name("demo-1", 2)
    ('demo-1', 'demo-1.s002')
    """
    return run_id if number == 0 else f"{run_id}.s{number:03d}"


def shard_directories(folder: Path, run_id: str) -> list[Path]:
    """Return the directories of a run's shards, in order, whatever of each is still there."""
    found: list[Path] = []
    while True:
        directory = folder / shard_name(run_id, len(found))
        if not any(path.exists() for path in (directory, pointer_of(directory), journal_of(directory))):
            return found
        found.append(directory)


def ledger_names(folder: Path) -> list[str]:
    """Return the names of all ledgers in a folder of ledgers, whatever of each is there, sorted."""
    found = [*(path for path in folder.glob("*/")), *(p for e in _ENDS for p in folder.glob(f"*{e}"))]
    named = {path if path.is_dir() else path.with_suffix("") for path in found}
    return sorted({run_of(path) for path in named if not path.name.startswith(".")})


def run_of(directory: Path) -> str:
    """Return the run that a shard belongs to.

    >>> run_of(Path("ledger/demo-1.s002")), run_of(Path("ledger/demo-1"))
    ('demo-1', 'demo-1')
    """
    return re.sub(r"\.s\d{3,}$", "", directory.name)


def pointer_of(directory: Path) -> Path:
    """Return where a shard's pointer lies: its ``.dvc`` file where it has one, else one that git ignores."""
    kept = kept_pointer_of(directory)
    return kept if kept.exists() else directory.with_name(f"{directory.name}.pointer")


def kept_pointer_of(directory: Path) -> Path:
    """Return where a shard's ``.dvc`` file lies once the ledger is kept."""
    return directory.with_name(f"{directory.name}.dvc")


def keep(folder: Path, name: str) -> list[Path]:
    """Let git and DVC see a ledger, and return its ``.dvc`` files; none for a ledger without pointers."""
    directories = shard_directories(folder, name)
    for directory in directories:
        pointer = pointer_of(directory)
        if pointer.exists():
            os.replace(pointer, kept_pointer_of(directory))
    return [kept for directory in directories if (kept := kept_pointer_of(directory)).exists()]


def journal_of(directory: Path) -> Path:
    """Return where a shard's journal lies."""
    return directory.with_name(f"{directory.name}.journal")


def check_rel(rel: str) -> str:
    """Return `rel` when it names a path inside a ledger.

    Raises:
        IntegrityError: when it would lead out of it.
    """
    path = PurePosixPath(rel)
    if path.is_absolute() or not path.parts or ".." in path.parts:
        raise IntegrityError(
            f"{rel!r} is no path inside a ledger; use relative names such as batches/t000001"
        )
    return path.as_posix()


def tree_bytes(entries: Mapping[str, Entry]) -> bytes:
    """Return the tree of entries, given by path, as DVC writes it."""
    tree = [{"md5": entries[rel].md5, "relpath": rel} for rel in sorted(entries)]
    return json.dumps(tree, sort_keys=True).encode()


def tree_name(body: bytes) -> str:
    """Return the name of a tree in DVC's cache."""
    return f"{hashlib.md5(body, usedforsecurity=False).hexdigest()}.dir"


def read_tree(body: bytes) -> list[Entry]:
    """Return the entries of a tree.

    Raises:
        IntegrityError: when the bytes are no tree.
    """
    try:
        return [Entry(item["relpath"], item["md5"], None) for item in json.loads(body)]
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"the bytes are no tree of a ledger: {error!r}") from error


def pointer_bytes(directory: Path, tree: str, size: int, count: int) -> bytes:
    """Return a shard's pointer, as DVC writes it: its tree in the cache, bytes and number of entries."""
    out = {"md5": tree, "size": size, "nfiles": count, "hash": "md5", "path": directory.name}
    return yaml.safe_dump({"outs": [out]}, sort_keys=False).encode()


def read_pointer(body: bytes) -> Mapping[str, Any]:
    """Return what a pointer says of its one directory.

    Raises:
        IntegrityError: when it is no such file.
    """
    try:
        (out,) = yaml.safe_load(body)["outs"]
        if not isinstance(out["md5"], str) or not out["md5"].endswith(".dir"):
            raise ValueError(f"md5 is {out['md5']!r}")
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, TypeError, KeyError) as error:
        words = " ".join(str(error).split())[:120]
        raise IntegrityError(f"the bytes are no pointer to a ledger: {words}") from error
    return dict(out)


def journal_line(entry: Entry, *, left: bool = False) -> str:
    """Return the line that a journal keeps of an entry that came, or that `left`."""
    plain = {"rel": entry.rel, "md5": entry.md5, "size": entry.size}
    return json.dumps(plain | {"left": True} if left else plain) + "\n"


def read_journal(text: str) -> ShardJournal:
    """Return what a journal's whole lines say; what comes after the last line end is left out.

    Raises:
        IntegrityError: when a whole line is none of a journal.

    >>> lines = journal_line(Entry("a", "0" * 32, 1)), journal_line(Entry("a", "0" * 32, 1), left=True)
    >>> list(read_journal(lines[0]).entries), list(read_journal("".join(lines)).entries)
    (['a'], [])
    """
    entries: dict[str, Entry] = {}
    left: dict[str, Entry] = {}
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            plain = json.loads(line)
            entry = Entry(str(plain["rel"]), str(plain["md5"]), int(plain["size"]))
            to, away = (left, entries) if plain.get("left") is True else (entries, left)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise IntegrityError(f"line {number} of the journal cannot be read: {error!r}") from error
        to[entry.rel] = entry
        away.pop(entry.rel, None)
    return ShardJournal(entries, left)


def journal_text(directory: Path) -> str:
    """Return the text of a shard's journal; "" without one."""
    journal = journal_of(directory)
    return journal.read_text(encoding="utf-8") if journal.is_file() else ""
