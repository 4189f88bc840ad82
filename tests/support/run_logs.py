"""Run logs of runs that a test made up as events."""

from collections.abc import Iterable
from pathlib import Path

from antiphon.api.sink import LogRecord
from antiphon.core.loop import events as e
from antiphon.core.status import Event
from antiphon.lineage.log_fold import LogFold
from antiphon.lineage.run_log import RunLog


def write_run_log(run_dir: Path, events: Iterable[e.JournalEvent]) -> list[LogRecord]:
    """Write the lines that the records of a run with these events would have; return the records."""
    fold, log, records = LogFold(), RunLog(run_dir), []
    for seq, event in enumerate(events, start=1):
        record = fold.take(Event(seq, float(seq), event.kind, e.dump_event(event)))
        records += [] if record is None else [record]
    log.write(records)
    return records
