"""Run logs of runs that a test made up as events."""

from collections.abc import Iterable
from pathlib import Path

from antiphon.core.loop import events as e
from antiphon.core.status import Event
from antiphon.lineage.log_fold import LogFold
from antiphon.lineage.run_log import RunLog


def write_run_log(run_dir: Path, events: Iterable[e.JournalEvent]) -> None:
    """Write the lines that the records of a run with these events would have."""
    fold, log = LogFold(), RunLog(run_dir)
    for seq, event in enumerate(events, start=1):
        record = fold.take(Event(seq, float(seq), event.kind, e.dump_event(event)))
        log.write([] if record is None else [record])
