"""Ledger layout: the names and bytes of a ledger on disk, without DVC's libraries.

A ledger is the directory ``<run>/`` with its pointer. The directory's tree is DVC's directory object: the
JSON list of its entries, sorted by path, named by the md5 of these bytes. The pointer names the tree. It is
``<run>.pointer``, which git ignores and DVC does not know; a ledger that is kept has ``<run>.dvc`` instead,
the same bytes for both of them. Earlier releases began a further directory, ``<run>.s001/`` and so on with
their own pointers, when one was full; each is a shard of the ledger.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from antiphon.core.config_sections import RecordSection
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.lineage.names import VERSIONS
from antiphon.system.files import PREFIX

GITIGNORE = """\
# What runs leave here; `antiphon keep RUN` writes RUN.dvc, which git and DVC see.
/*/
/*.journal
/*.pointer
/.incoming-*
"""
"""Written into a new ledger folder. A rule for .dvc files would make DVC overlook those that are kept."""


_ENDS = (".dvc", ".pointer")


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


def shard_directories(folder: Path, run_id: str) -> list[Path]:
    """Return the directories of a run's ledger, in order, whatever of each is still there."""
    found: list[Path] = []
    while True:
        directory = folder / (f"{run_id}.s{len(found):03d}" if found else run_id)
        if not (directory.exists() or pointer_of(directory).exists()):
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


def journal_of(directory: Path) -> Path:
    """Return where a shard's journal lies: what came, or leaves, since its tree was written."""
    return directory.with_name(f"{directory.name}.unpublished.journal")


def journal_line(rel: str, md5: str) -> str:
    """Return the line that a journal has of an entry; it ends what a kill cut off before it."""
    return f"\n{json.dumps([rel, md5])}"


def read_journal(directory: Path) -> tuple[set[str], dict[str, str]] | None:
    """Return a shard's journal: the trees that it may follow, and the md5 of each entry by path.

    None where an earlier release had none. A tree is a line without a path, written before its pointer; "" is
    none. Lines that a kill cut off are left out. An entry whose file is not in the directory was not placed
    yet, or has left.
    """
    try:
        lines = journal_of(directory).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    trees, found = set(), {}
    for line in lines:
        with suppress(ValueError, TypeError):
            rel, md5 = map(str, json.loads(line))
            if rel:
                found[rel] = md5
            else:
                trees.add(md5)
    return trees, found


def keep(folder: Path, name: str) -> list[Path]:
    """Let git and DVC see a ledger, and return its ``.dvc`` files; none for a ledger without pointers."""
    directories = shard_directories(folder, name)
    for directory in directories:
        pointer = pointer_of(directory)
        if pointer.exists():
            os.replace(pointer, kept_pointer_of(directory))
    return [kept for directory in directories if (kept := kept_pointer_of(directory)).exists()]


def half_written(path: Path) -> bool:
    """Return whether a file is one that we or DVC were writing, which a killed process left."""
    return path.name.startswith(PREFIX) or (path.name.startswith(".") and path.suffix == ".tmp")


def files_in(directory: Path) -> dict[str, Path]:
    """Return the whole files of a shard by their path in it."""
    paths = (path for path in directory.rglob("*") if path.is_file() and not half_written(path))
    return {path.relative_to(directory).as_posix(): path for path in paths}


def ledger_files(folder: Path, run_id: str) -> dict[str, Path]:
    """Return the whole files of a run's ledger by their path in it; none without a ledger."""
    return {rel: path for shard in shard_directories(folder, run_id) for rel, path in files_in(shard).items()}


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


def read_tree(place: Path) -> dict[str, str] | None:
    """Return the md5 of each entry, by path, of a tree in DVC's cache.

    None where it is not there, or is not what its name says.

    Raises:
        IntegrityError: when it is no tree.
    """
    try:
        body = place.read_bytes()
    except FileNotFoundError:
        return None
    if tree_name(body) != place.parent.name + place.name:
        return None
    try:
        return {str(item["relpath"]): str(item["md5"]) for item in json.loads(body)}
    except (ValueError, TypeError, KeyError) as error:
        raise IntegrityError(f"{place} is no tree of a ledger: {error!r}") from error


def tree_name(body: bytes) -> str:
    """Return the name of a tree in DVC's cache."""
    return f"{hashlib.md5(body, usedforsecurity=False).hexdigest()}.dir"


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
