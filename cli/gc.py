"""gc: say which artifacts no run needs any more, and remove them unless only asked.

It takes the lock of every run and of the store, so nothing is removed beside a running job.
What an unfinished run names is never touched. Copies in a remote store stay, as other machines
may need them, and ledgers are DVC's to clean.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from antiphon.core.config import load_config
from antiphon.core.errors import ConfigError
from antiphon.lineage.layout import find_project, keeps_no_ledger
from antiphon.lineage.store.gc import alone, digests_in, digests_of_run, pinned, survey, sweep
from antiphon.runs.directory import home_directory, list_runs, lock, store_directory
from antiphon.runs.finding import find_run, is_over
from antiphon.services.coordinator.journal.journal import journal_place
from antiphon.services.coordinator.journal.reading import event_bodies

SHOWN = 10
"""Objects that are listed by name; all are counted."""


def gc(
    *,
    home: Path | None = None,
    run: list[str] | None = None,
    dry_run: bool = False,
) -> None:
    """Remove artifacts that nothing needs any more.

    Args:
        home: the home directory; by default ANTIPHON_HOME or ./.antiphon.
        run: a run to give up, with its folder, that is finished, made no step or is a client's; may be
            repeated. Its ledger stays.
        dry_run: only say what would be freed.
    """
    home = (home or home_directory()).absolute()
    root = store_directory(home)
    given_up = [find_run(home, name) for name in run or ()]
    for directory in given_up:
        steps = 0 if is_over(directory) else sum(map(_is_commit, _journal(directory)))
        if steps:
            raise ConfigError(
                f"run {directory.name} is unfinished after {steps} steps, so nothing of it is removed; let "
                f"it finish, or remove {directory} by hand"
            )
    with ExitStack() as held:
        runs = list_runs(home)
        for directory in runs:
            held.enter_context(lock(directory))
        held.enter_context(alone(root))
        kept = [directory for directory in runs if directory not in given_up]
        named: set[str] = set()
        for directory in kept:
            named |= digests_of_run(directory)
            for body in _journal(directory):
                named |= digests_in(body.encode())
        found = survey(root, named, _pins(home, kept, [directory.name for directory in given_up]))
        folders = {directory: _size(directory) for directory in given_up}
        verb = "would free" if dry_run else "freed"
        if not dry_run:
            # First the folders: what they named is found again if this ends in between.
            for directory in given_up:
                shutil.rmtree(directory)
            sweep(found)
    for directory, size in folders.items():
        print(f"{verb} run {directory.name}: {_readable(size)}")
    for path in found.unneeded[:SHOWN]:
        print(f"{verb} {path.relative_to(home)}")
    if len(found.unneeded) > SHOWN:
        print(f"{verb} {len(found.unneeded) - SHOWN} more")
    total = f"{len(found.unneeded)} objects, {_readable(found.freed_bytes)}"
    print(f"{verb} {total}; {found.kept} objects are needed")


def _journal(directory: Path) -> Iterator[str]:
    """Return the events of a run's journal as JSON.

    Raises:
        ConfigError: when a coordinator has it open.
        IntegrityError: when it is damaged.
        UnavailableError: when its database cannot be reached.
    """
    place = journal_place(load_config(directory / "config.yaml"), directory)
    return event_bodies(place, directory.name)


def _is_commit(body: str) -> bool:
    return {"step", "version", "weights_digest", "batch_digest"}.issubset(json.loads(body))


def _pins(home: Path, kept: Sequence[Path], given_up: Sequence[str]) -> set[str]:
    """Return the md5 of what the project's ledgers pin, those of runs that are given up left out.

    Raises:
        ConfigError: when runs have a ledger and its project is not found.
    """
    folders = {
        record.ledger
        for directory in kept
        if not keeps_no_ledger(record := load_config(directory / "config.yaml").record, directory)
    }
    if not folders:
        return set()
    project = find_project(None, home)
    found: set[str] = set()
    for folder in sorted(folders):
        found |= pinned(project / folder, project / ".dvc" / "cache", frozenset(given_up))
    return found


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _readable(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
