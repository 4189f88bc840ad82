"""CPU section: which process of a run took which CPU seconds, kept in the run's folder for its report."""

import json
from collections.abc import Mapping
from pathlib import Path

from antiphon.core.reporting.figures import share
from antiphon.system.files import write_atomically

FILE = "cpu_seconds.json"
PAYS = ("workers", "learner")
"""What samples and trains; the rest is overhead."""


def write_cpu_seconds(run_dir: Path, seconds: Mapping[str, float]) -> None:
    """Keep the CPU seconds of each kind of process (`system.cpu_time`) when a run is about to end.

    Raises:
        UnavailableError: when the file cannot be written.
    """
    write_atomically(run_dir / FILE, json.dumps(seconds, indent=2).encode() + b"\n")


def outside_share(seconds: Mapping[str, float]) -> float:
    """Return the share of CPU seconds that neither workers nor learner took; 0 where nothing was counted.

    >>> outside_share({"workers": 6.0, "learner": 3.0, "flow": 1.0})
    0.1
    """
    total = sum(seconds.values())
    return sum(taken for kind, taken in seconds.items() if kind not in PAYS) / total if total else 0.0


def cpu_rows(run_dir: Path) -> list[tuple[str, str, str]]:
    """Return (kind of process, seconds, share) of a finished run, largest first; [] where none were kept."""
    path = run_dir / FILE
    if not path.exists():
        return []
    seconds: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    total = sum(seconds.values()) or 1.0
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    outside = outside_share(seconds)
    return [
        *((kind, f"{taken:.1f}", share(taken / total)) for kind, taken in rows),
        ("outside of workers and learner", f"{outside * total:.1f}", share(outside)),
    ]
