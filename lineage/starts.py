"""Starts: which command and which code began and continued a run, as `starts.json` in its folder says."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from antiphon.lineage.documents.manifest import code_revision, source_tree
from antiphon.lineage.names import RUN
from antiphon.system.clock import wall_clock
from antiphon.system.files import write_atomically

FILE = "starts.json"


@dataclass(frozen=True, slots=True)
class Start:
    """One process that began or continued a run."""

    command: str
    """What was typed; empty where no command line started it, as from a form."""
    commit: str
    """Git commit of the code; empty outside a checkout."""
    modified: bool
    """Tracked files differed from that commit."""
    at: float | None = None
    """Unix seconds; None where they were not noted."""


def add_start(run_dir: Path, command: str) -> None:
    """Note that this process begins or continues the run in `run_dir`.

    Raises:
        UnavailableError: when the file cannot be written.
    """
    code = code_revision(source_tree())
    start = Start(command, code.get("revision", ""), bool(code.get("modified")), wall_clock())
    starts = [asdict(one) for one in _noted(run_dir)]
    write_atomically(run_dir / FILE, json.dumps([*starts, asdict(start)], indent=2).encode() + b"\n")


def read_starts(run_dir: Path) -> list[Start]:
    """Return a run's starts, oldest first; of a run that noted none, what its manifest says of the first."""
    if noted := _noted(run_dir):
        return noted
    try:
        code = json.loads((run_dir / RUN).read_text(encoding="utf-8"))["code"]
    except FileNotFoundError:
        return []
    return [Start("", code["revision"], code["modified"])] if code else []


def _noted(run_dir: Path) -> list[Start]:
    try:
        return [Start(**plain) for plain in json.loads((run_dir / FILE).read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
