"""Golden journals: event logs of earlier versions, and the facts that any later core must read in them.

A golden journal is a gzipped file of JSON lines: one with where it came from and the digest of its
facts, then one for each event. The facts are what a user would miss, in plain values, not the
layout of the state; a core that gains fields still finds the same facts.
"""

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.core.loop.events import load_event
from antiphon.core.loop.run_state import RunState, fold
from antiphon.services.coordinator.journal.journal import StoredEvent


def facts(state: RunState) -> dict[str, Any]:
    """Return what a state says about its run, in plain values that JSON keeps as they are."""
    return {
        "run_id": state.run_id,
        "opened_steps": state.opened_steps,
        "next_number": state.next_number,
        "groups": {
            group.group_id: [group.phase.value, group.attempt, group.oldest_version, list(group.rewards)]
            for group in state.groups.values()
        },
        "receipts": {name: receipt.payload_digest for name, receipt in state.receipts.items()},
        "sealed": [[ref.step, ref.digest, ref.trajectories, ref.groups_filtered] for ref in state.sealed],
        "commits": [[c.step, c.version, c.weights_digest, c.batch_digest] for c in state.commits],
        "snapshots": {str(version): digest for version, digest in state.snapshots.items()},
        "evaluations": {str(v): [e.prompts, e.rewarded, *e.means()] for v, e in state.evaluations.items()},
        "staleness": {str(age): count for age, count in state.staleness_histogram.items()},
        "counters": [state.groups_dropped_stale, state.groups_filtered, state.groups_requeued],
        "registrations": state.registrations,
        "finished": state.finished,
    }


def facts_digest(state: RunState) -> str:
    """Return the digest of a state's facts."""
    return digest_bytes(json.dumps(facts(state), sort_keys=True).encode())


def rebuild(rows: Sequence[StoredEvent], group_size: int, payload_retention_steps: int) -> RunState:
    """Return the state that the present core makes of recorded events."""
    state = RunState(group_size=group_size, payload_retention_steps=payload_retention_steps)
    return fold(state, (load_event(row.kind, row.body) for row in rows))


def write_golden(path: Path, rows: Sequence[StoredEvent], origin: dict[str, Any]) -> None:
    """Keep a journal with the facts that the present core finds in it.

    Args:
        path: the file to write.
        rows: the journal.
        origin: at least `group_size` and `payload_retention_steps` of its run.
    """
    state = rebuild(rows, origin["group_size"], origin["payload_retention_steps"])
    head = {**origin, "events": len(rows), "kinds": dict(Counter(row.kind for row in rows))}
    head["facts_digest"] = facts_digest(state)
    lines = [json.dumps(head, sort_keys=True)]
    lines += [json.dumps([row.seq, row.at, row.kind, row.body]) for row in rows]
    # Without a time in the header the same journal gives the same file.
    path.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))


def read_golden(path: Path) -> tuple[dict[str, Any], list[StoredEvent]]:
    """Return where a golden journal came from, and its events.

    Raises:
        IntegrityError: when the file holds another number of events than it says.
    """
    first, *rest = gzip.decompress(path.read_bytes()).decode().splitlines()
    head: dict[str, Any] = json.loads(first)
    rows = [StoredEvent(*json.loads(line)) for line in rest]
    if len(rows) != head["events"]:
        raise IntegrityError(f"{path.name} holds {len(rows)} events, but says {head['events']}")
    return head, rows
