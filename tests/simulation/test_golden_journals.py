"""Journals that earlier versions wrote are read by the present core, and mean what they meant."""

from pathlib import Path

import pytest

from antiphon.core.errors import IntegrityError
from antiphon.core.loop.events import dump_event, event_kinds, load_event
from tests.support.golden import facts_digest, read_golden, rebuild, write_golden

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FILES = sorted(GOLDEN.glob("*.jsonl.gz"))


def test_there_are_journals_of_both_modes_and_every_filter() -> None:
    heads = [read_golden(path)[0] for path in FILES]
    assert {(head["mode"], head["filter"]) for head in heads} == {
        (mode, filter_) for mode in ("elastic", "fixed") for filter_ in ("none", "drop", "refill")
    }
    kinds = {kind for head in heads for kind in head["kinds"]}
    assert kinds <= set(event_kinds())
    assert {"lease.expired", "run.resumed", "worker.lost", "group.dropped", "run.finished"} <= kinds
    assert sum(path.stat().st_size for path in FILES) < 100_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_a_golden_journal_replays_to_the_same_facts(path: Path) -> None:
    head, rows = read_golden(path)
    state = rebuild(rows, head["group_size"], head["payload_retention_steps"])
    assert state.finished and len(state.commits) == state.next_seal
    assert facts_digest(state) == head["facts_digest"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_what_the_present_core_writes_of_an_old_event_reads_the_same(path: Path) -> None:
    for row in read_golden(path)[1]:
        event = load_event(row.kind, row.body)
        assert load_event(row.kind, dump_event(event)) == event


def test_a_changed_journal_does_not_pass(tmp_path: Path) -> None:
    head, rows = read_golden(FILES[0])
    copy = tmp_path / "copy.jsonl.gz"
    write_golden(copy, rows, {name: head[name] for name in ("group_size", "payload_retention_steps")})
    again, kept = read_golden(copy)
    assert again["facts_digest"] == head["facts_digest"] and kept == rows
    late = next(
        i for i, row in enumerate(rows) if row.kind == "group.rewarded" and '"group_id":"g' in row.body
    )
    with pytest.raises(IntegrityError, match="contradicts itself"):
        rebuild([*rows[:late], *rows[late + 1 :]], head["group_size"], head["payload_retention_steps"])
