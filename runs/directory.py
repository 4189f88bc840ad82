"""Run directory: where a run keeps what it must find again, and who may use it.

A configuration names its run: the same command continues the run it left unfinished, and
starts the next one once that is complete. A lock keeps two processes from running the same one.
"""

import contextlib
import difflib
import json
import os
import shlex
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from antiphon.core.config import RunConfig, dump_config, load_config
from antiphon.core.config_sections import FILE, MOST_PROMPTS
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.lineage.layout import ledger_project, shard_directories
from antiphon.lineage.run_log import STEPS_FILE, read_steps
from antiphon.lineage.run_overview import is_running
from antiphon.services.coordinator.journal.pinned import check_same_run, input_files, pinned_values
from antiphon.system.files import flush_folder, hold, write_atomically
from antiphon.system.free_space import free_bytes

FREE_BYTES = 512 << 20
"""Least free space a run starts with, where record.free_mib does not say another."""


def home_directory() -> Path:
    """Return where runs, the store and the databases live: ANTIPHON_HOME or ./.antiphon."""
    return Path(os.environ.get("ANTIPHON_HOME", ".antiphon")).absolute()


def make_usable(folder: Path, named: str) -> None:
    """Make a folder and try it, so that what cannot be written is known before anything is started.

    Args:
        folder: the folder.
        named: the option or variable that names it.

    Raises:
        ConfigError: when it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({error.strerror}); give {named} another folder"
        ) from error


def make_home(home: Path) -> None:
    """Make the home where it is missing, and let nobody but its owner in, also into one that was open.

    Raises:
        ConfigError: when it cannot be made or written, or is for the files of all users, as /tmp is.
        PermissionError: when it is another user's.
    """
    make_usable(home, "ANTIPHON_HOME")
    if home.stat().st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"{home} is a folder for the files of all users, whom a home shuts out; give ANTIPHON_HOME "
            "a folder of your own, such as one within it"
        )
    known = known_homes()
    if home not in known:
        with contextlib.suppress(OSError, RuntimeError, UnavailableError):  # as for `known_homes`
            write_atomically(_homes_file(), "".join(f"{one}\n" for one in [*known, home]).encode())
    if stat.S_IMODE(home.stat().st_mode) & 0o077:
        home.chmod(0o700)


def known_homes() -> list[Path]:
    """Return the homes in which this user's commands began runs, as far as they are still there, by name."""
    try:
        named = _homes_file().read_text(encoding="utf-8").splitlines()
    except (OSError, RuntimeError, UnicodeDecodeError):
        return []  # there are none, or nobody's home is known: this list is a help and nothing else
    # `Path.is_dir` raises where it may not look, as in a home that its owner closed.
    return sorted({Path(name) for name in named if os.path.isdir(f"{name}/runs")})


def _homes_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "antiphon" / "homes"


def store_directory(home: Path) -> Path:
    """Return the root of the artifact store."""
    return home / "store"


@dataclass(frozen=True, slots=True)
class RunPlace:
    """One run's directory and whether it was begun before."""

    run_id: str
    directory: Path
    resumed: bool


def choose_run(config: RunConfig, run_id: str | None, home: Path, fresh: bool) -> RunPlace:
    """Find the run that a configuration means: the one named, the unfinished one, or the next.

    Raises:
        ConfigError: when `run_id` does not exist, is finished, or was begun with another
            configuration; or the model or the environment changed since the unfinished one made steps, or its
            journal is gone.
    """
    runs = home / "runs"
    if run_id is not None:
        directory = runs / run_id
        if not (directory / "config.yaml").exists():
            raise ConfigError(no_such_run(home, run_id))
        if load_config(directory / "config.yaml") != config:
            raise ConfigError(
                f"run {run_id} was begun with another configuration; "
                f"start it from {directory / 'config.yaml'} without overrides"
            )
        if is_finished(directory):
            raise ConfigError(
                f"run {run_id} is finished; `antiphon report {run_id}` shows it, --fresh starts again"
            )
        if not is_running(directory):
            _opened_with(config, directory)
        return RunPlace(run_id, directory, resumed=True)
    named = config
    if config.environment.name == FILE:  # a file with more rows is the same file, changed
        sizes = {"train_size": MOST_PROMPTS, "heldout_size": MOST_PROMPTS}
        named = config.model_copy(update={"environment": config.environment.model_copy(update=sizes)})
    fingerprint = digest_bytes(dump_config(named).encode())[:8]
    stem = f"{config.run.name}-s{config.run.seed}-{fingerprint}"
    project = ledger_project(config.record, home)  # two runs never share a ledger
    for number in range(1, 1_000_000):
        candidate = f"{stem}-{number}"
        directory = runs / candidate
        if not directory.exists():
            if project is not None and shard_directories(project / config.record.ledger, candidate):
                continue  # its ledger is of another home, or of a clone whose ledgers came with git
            return RunPlace(candidate, directory, resumed=False)
        unfinished = not is_finished(directory) and (directory / "config.yaml").exists()
        if unfinished and not fresh and not _made_anew(config, directory):
            return RunPlace(candidate, directory, resumed=True)
    raise ConfigError(f"too many runs named {stem} under {runs}; give run.name another value")


def _made_anew(config: RunConfig, directory: Path) -> bool:
    """Return whether the model or the environment of a run changed before it made a step: it is given up.

    Raises:
        ConfigError: when they changed after it.
    """
    if is_running(directory):
        return False  # its lock says so
    before, committed = _opened_with(config, directory)
    try:
        check_same_run(directory.name, before, pinned_values(config, input_files(config)))
    except ConfigError:
        if committed:
            raise
        return True
    return False


def _opened_with(config: RunConfig, directory: Path) -> tuple[dict[str, str], bool]:
    """Return what a run was opened with, and whether it has committed a step.

    Raises:
        ConfigError: when its journal lacks the steps that were recorded: it would begin again.
    """
    # They load SQLAlchemy, a third of what the processes load that only want to know where the home is.
    from antiphon.services.coordinator.journal.journal import journal_place
    from antiphon.services.coordinator.journal.reading import opened_with

    place = journal_place(config, directory)
    before, committed = opened_with(place, directory.name)
    if not committed and read_steps(directory):
        journal = place if isinstance(place, Path) else "in coordinator.journal_url"
        raise ConfigError(
            f"{directory / STEPS_FILE} has steps of run {directory.name}, and its journal {journal} is gone "
            "or has none; put a copy of the journal back, or start another run (--fresh)"
        )
    return before, committed


def is_finished(directory: Path) -> bool:
    """Return whether the run in `directory` reached its last step."""
    return (directory / "outcome.json").exists()


def create(place: RunPlace, config: RunConfig) -> None:
    """Make the directory of a new run; an existing one is left as it is.

    Raises:
        ConfigError: when there is too little space, or another process just made it.
    """
    check_place(place, config)
    if place.resumed:
        return
    place.directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.directory.mkdir()
    except FileExistsError:
        raise ConfigError(
            f"another process has just started run {place.run_id}; wait for it, or add --fresh"
        ) from None
    write_atomically(place.directory / "config.yaml", dump_config(config).encode())
    flush_folder(place.directory.parent)


def check_place(place: RunPlace, config: RunConfig) -> None:
    """Check that a run could begin or continue at a place, before anything is started for it.

    Raises:
        ConfigError: when there is too little space, or another process runs it.
    """
    home = place.directory.parent.parent
    free, floor = free_bytes(home), config.record.free_bytes
    needed = FREE_BYTES if floor is None else floor
    if free < needed:
        raise ConfigError(
            f"only {free >> 20} MiB are free under {home}; a run needs {needed >> 20} MiB (record.free_mib): "
            "free some space, or set ANTIPHON_HOME to a larger disk"
        )
    if place.resumed:
        lock(place.directory).close()


def lock(directory: Path) -> IO[bytes]:
    """Take the run for this process; keep the handle until the run is closed.

    Raises:
        ConfigError: when another process runs it.
    """
    path = directory / "lock"
    handle = hold(path)
    if handle is None:
        owner = path.read_text(encoding="utf-8").strip() or "unknown"
        raise ConfigError(
            f"run {directory.name} is already running (process {owner}); wait for it or stop it first"
        )
    handle.truncate(0)
    handle.write(str(os.getpid()).encode())
    handle.flush()
    return handle


def write_outcome(directory: Path, outcome: dict[str, object]) -> None:
    """Mark the run as finished; the last thing a complete run does."""
    text = json.dumps(outcome, indent=2, sort_keys=True) + "\n"
    write_atomically(directory / "outcome.json", text.encode())


def list_runs(home: Path) -> list[Path]:
    """Return the directories of all runs, oldest first."""
    runs = home / "runs"
    if not runs.is_dir():
        return []
    found = [d for d in runs.iterdir() if d.name[0] != "." and (d / "config.yaml").exists()]
    return sorted(found, key=lambda d: (d / "config.yaml").stat().st_mtime)


def no_such_run(home: Path, run_id: str, ledgers: Sequence[Path] = ()) -> str:
    """Return the sentence for a run that neither `home` nor a ledger has, with those whose names are near."""
    known = [directory.name for directory in list_runs(home)]
    near = difflib.get_close_matches(run_id, known, n=3, cutoff=0.6)
    if not known:
        hint = "there are none yet; start one with `antiphon demo`"
    else:
        hint = f"did you mean {' or '.join(near)}?" if near else f"the newest is {known[-1]}"
    if elsewhere := [other for other in known_homes() if (other / "runs" / run_id).is_dir()]:
        other = shlex.quote(str(elsewhere[0]))
        hint = f"it is in another home: give the command again after `export ANTIPHON_HOME={other}`"
    places = " or in ".join(map(str, [home / "runs", *ledgers]))
    return f"there is no run {run_id} under {places}; {hint}"
