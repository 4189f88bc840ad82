"""Recorded journal: the events of a finished run as one file, and the journal that they make again.

The file is what the ledger keeps: JSON lines, compressed, the same bytes for the same events. The journal
that comes of it answers every question about the run. It lacks payloads and history, which only a run that
goes on would need.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from antiphon.core.errors import IntegrityError
from antiphon.lineage.run_events import read_events
from antiphon.services.coordinator.journal.databases import open_sql_store
from antiphon.services.coordinator.journal.store import StoredEvent, TrainedRow, WriteBatch


def make_journal(place: Path, run_id: str, recorded: bytes) -> None:
    """Write the journal of a run from its recorded events.

    Args:
        place: path of the SQLite file; there must be none.
        run_id: the run.
        recorded: what `lineage.run_events.pack_events` made.

    Raises:
        IntegrityError: when the bytes are no recorded events, or contradict themselves.
        UnavailableError: when it cannot be written.
    """
    events = [StoredEvent(e.seq, e.at, e.kind, e.data_json) for e in read_events(recorded)]
    if not events:
        raise IntegrityError("the recorded events are none at all; take another copy of them")
    store = open_sql_store(place, run_id)
    try:
        store.write(WriteBatch(events=events, trained=_trained(events)))
    finally:
        store.close()


def _trained(events: Iterable[StoredEvent]) -> list[TrainedRow]:
    """Return the rows of committed steps, as the coordinator wrote them beside the events."""
    groups: dict[int, tuple[str, ...]] = {}
    found = []
    for event in events:
        if event.kind == "batch.sealed":
            sealed = json.loads(event.body)
            groups[sealed["step"]] = tuple(sealed["group_ids"])
        elif event.kind == "step.committed":
            step = json.loads(event.body)
            if step["step"] not in groups:
                raise IntegrityError(f"the recorded events commit step {step['step']} before its batch")
            digests = step["weights_digest"], step["batch_digest"]
            found.append(TrainedRow(step["step"], step["version"], *digests, groups[step["step"]]))
    return found
