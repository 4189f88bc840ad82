"""A state that was written and read is the state, entry by entry, whatever happened before."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.errors import IntegrityError
from antiphon.core.loop.run_state import RunState, fold
from antiphon.services.coordinator.journal.state_codec import (
    GROWING,
    StateDump,
    dump_entries,
    dump_state,
    load_state,
)
from tests.support.loop_model import LoopModel, act, make_config

SEEDS = st.integers(0, 2**32 - 1)


class KeptEntries:
    """Keeps the entries of dumps, as a journal does."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, int], str] = {}
        self.known: dict[str, int] = {}

    def take(self, dump: StateDump) -> StateDump:
        for name, place, body in dump.entries:
            self.entries[name, place] = body
            self.known[name] = place + 1
        return dump

    def read(self, name: str, count: int) -> list[str]:
        return [self.entries[name, place] for place in range(count) if (name, place) in self.entries]


def same(left: RunState, right: RunState) -> None:
    """Equal, also in the order of every mapping and in what is one object."""
    assert left == right
    for field in dataclasses.fields(left):
        value = getattr(left, field.name)
        if isinstance(value, dict):
            assert list(value) == list(getattr(right, field.name)), field.name
    assert repr(left) == repr(right)
    for group_id, group in left.open_groups.items():
        assert group is left.groups[group_id]


@settings(max_examples=60)
@given(SEEDS, st.sampled_from(["none", "drop", "refill"]), st.sampled_from(["elastic", "fixed"]), st.data())
def test_a_snapshot_and_the_events_after_it_are_the_fold_of_all(
    seed: int, filter_: str, mode: str, data: st.DataObject
) -> None:
    model = LoopModel(make_config(mode=mode, filter_=filter_), workers=3)
    kept, rng, dumps = KeptEntries(), np.random.default_rng(seed), []
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 120))):
            act(model, rng, faults=0.1)
            if rng.random() < 0.02:
                model.open_evaluation(model.state.newest_version or 0)
        if data.draw(st.booleans()):
            kept.take(dump_entries(model.state, kept.known))
        else:
            dumps.append((len(model.journal), kept.take(dump_state(model.state, kept.known))))
    for seen, dump in dumps:  # an earlier snapshot is as good, though the lists have grown since
        state = model.fresh()
        load_state(dump.body, kept.read, state)
        same(state, fold(model.fresh(), model.journal[:seen]))
        same(fold(state, model.journal[seen:]), model.state)


def test_a_later_dump_writes_only_what_became_final() -> None:
    model, kept, rng = LoopModel(make_config(filter_="none")), KeptEntries(), np.random.default_rng(1)
    written = 0
    while not model.done:
        act(model, rng, faults=0.0)
        dump = kept.take(dump_state(model.state, kept.known))
        written += len(dump.entries)
        fields = json.loads(dump.body)["fields"]
        assert not fields["commits"] and not fields["snapshots"]
        assert len(fields["sealed"]) == len(model.state.sealed) - len(model.state.commits)  # may be voided
    lengths = [len(getattr(model.state, name)) for name in GROWING]
    assert min(lengths[:3]) > 0 and written == sum(lengths)


def test_what_the_configuration_decides_is_not_read_from_a_snapshot() -> None:
    model, kept = LoopModel(make_config()), KeptEntries()
    dump = kept.take(dump_state(model.state, kept.known))
    state = RunState(group_size=2, payload_retention_steps=9)
    load_state(dump.body, kept.read, state)
    assert state.payload_retention_steps == 9 and state.run_id == model.state.run_id


@pytest.mark.parametrize("damage", ["cut", "entry", "fields", "group"])
def test_a_snapshot_that_cannot_be_read_leaves_the_state_as_it_was(damage: str) -> None:
    model, kept, rng = LoopModel(make_config(filter_="none")), KeptEntries(), np.random.default_rng(3)
    while len(model.state.commits) < 2 or not model.state.open_groups:
        act(model, rng, faults=0.3)
    body = kept.take(dump_state(model.state, kept.known)).body
    if damage == "cut":
        body = body[: len(body) // 2]
    elif damage == "entry":
        del kept.entries["commits", 1]
    elif damage == "fields":
        content = json.loads(body)
        del content["fields"]["receipts"]
        body = json.dumps(content)
    else:
        content = json.loads(body)
        content["fields"]["groups"].pop(content["open_groups"][0])
        body = json.dumps(content)
    state = model.fresh()
    with pytest.raises(IntegrityError):
        load_state(body, kept.read, state)
    same(state, model.fresh())


def test_metrics_that_are_no_numbers_are_read_as_they_were_written() -> None:
    model, kept, rng = LoopModel(make_config(filter_="none")), KeptEntries(), np.random.default_rng(2)
    while len(model.state.commits) < 3:
        act(model, rng, faults=0.0)
    odd = {"nan": float("nan"), "inf": float("inf"), "low": -float("inf")}
    model.state.commits[0] = dataclasses.replace(model.state.commits[0], metrics=odd)
    dump, state = kept.take(dump_state(model.state, kept.known)), model.fresh()
    load_state(dump.body, kept.read, state)
    assert repr(state.commits[0].metrics) == repr(odd)
