"""Run pins: what the ledger holds of a finished run beside its artifacts, so that others can look at it.

From these files and the artifacts a run's folder can be made again on any machine: `report`, `status`,
`evaluate` and the others then say the same there. They are pinned once, when the run is finished.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.lineage.names import RUN_FOLDER
from antiphon.lineage.run_events import EVENTS_FILE

if TYPE_CHECKING:
    from antiphon.lineage.ledger.pins import Ledger

OUTCOME_FILE = "outcome.json"
RUN_FILES = (
    *("config.yaml", "starts.json", "base.json", "metrics.jsonl", "evaluations.jsonl"),
    *("metrics.json", "timings.json", "final.json", "cpu_seconds.json"),
)
"""Files of a run's folder that are pinned as they are, where the run has them: all that its report reads."""


def pin_run_files(ledger: "Ledger", run_dir: Path, events: bytes) -> None:
    """Pin a finished run's log, configuration and outcome, and its journal's events; again changes nothing.

    `events` are those that `EventPacker` packed. They come last: a ledger that has them has the others.
    """
    if ledger.md5(f"{RUN_FOLDER}/{EVENTS_FILE}") is not None:
        return
    for name in RUN_FILES:
        if (run_dir / name).is_file():
            # Copies: a later command may write the run's folder again, and entries never change.
            ledger.append(f"{RUN_FOLDER}/{name}", (run_dir / name).read_bytes())
    outcome = json.loads((run_dir / OUTCOME_FILE).read_bytes())
    outcome.pop("run_dir", None)  # a path of this machine
    ledger.append(f"{RUN_FOLDER}/{OUTCOME_FILE}", json.dumps(outcome, sort_keys=True).encode() + b"\n")
    ledger.append(f"{RUN_FOLDER}/{EVENTS_FILE}", events)
