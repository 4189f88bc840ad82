"""Rollouts are found by what a reader asks, in the asked order, and what differs is marked, nothing else."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError
from antiphon.core.reporting import rollouts
from antiphon.core.reporting.rollouts import (
    ROLLOUT,
    Table,
    differing,
    group_of,
    over_versions,
    read_query,
    select,
)


@dataclass(frozen=True)
class Made:
    """One trajectory of a made-up run."""

    step: int
    age: int
    sample: int
    prompt: int
    reward: float
    text: str


MADE = st.builds(
    Made,
    *(st.integers(-1, 3), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)),
    *(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), st.text("aßS", max_size=3)),
)


def table_of(made: list[Made]) -> Table:
    rows = [
        (
            *(f"t{x.step}.{i}", "held-out" if x.step < 0 else "trained", x.step, x.age),
            *(-1 if x.step < 0 else x.step - x.age, x.reward, x.sample, 5, f"g{x.step}", f"p{x.prompt}"),
            *("stop" if x.sample else "length", ""),
        )
        for i, x in enumerate(made)
    ]
    return np.array(rows, ROLLOUT)


@given(st.lists(MADE, max_size=12), st.integers(-1, 3))
def test_what_is_selected_is_what_was_asked_for(made: list[Made], low: int) -> None:
    asked = {"step": f"{low}..", "reward": "..0.5", "reason": "sto", "prompt": "p1", "text": "a"}
    among = np.array(["a" in x.text for x in made], dtype=bool)
    found = select(table_of(made), read_query(asked), among).tolist()
    assert found == [
        i
        for i, x in enumerate(made)
        if x.step >= max(low, 0) and x.reward <= 0.5 and x.sample and x.prompt == 1
        if "a" in x.text
    ]


@given(st.lists(MADE, max_size=12), st.sampled_from(["-step", "reward", "-reward", "-staleness", "tokens"]))
def test_an_order_keeps_all_and_equal_ones_as_recorded(made: list[Made], sort: str) -> None:
    table = table_of(made)
    found = select(table, read_query({"sort": sort})).tolist()
    name, sign = sort.lstrip("-"), -1 if sort[0] == "-" else 1
    assert found == sorted(range(len(made)), key=lambda i: (sign * table[name][i], i))


@given(st.lists(MADE, min_size=1, max_size=12))
def test_a_prompt_has_one_trajectory_a_version_and_the_open_one_is_among_them(made: list[Made]) -> None:
    table = table_of(made)
    for place, own in enumerate(made):
        shown = over_versions(table, place)
        assert place in shown and {made[i].prompt for i in shown} == {own.prompt}
        versions = [made[i].age for i in shown]
        assert versions == sorted({x.age for x in made if x.prompt == own.prompt})
        assert [made[i].sample for i in group_of(table, place)] == sorted(
            x.sample for x in made if x.step == own.step
        )


SHORT = st.lists(st.integers(0, 2), max_size=12)


@given(SHORT, SHORT)
def test_what_is_not_marked_stood_there_before_in_the_same_order(before: list[int], after: list[int]) -> None:
    marked = differing(before, after)
    assert all(start < stop for start, stop in marked) and marked == sorted(marked)
    left = [token for i, token in enumerate(after) if not any(start <= i < stop for start, stop in marked)]
    rest = iter(before)
    assert all(token in rest for token in left)
    assert (before == after) <= (marked == [])


def test_long_texts_are_marked_between_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "COMPARED", 3)
    assert differing([1, 2, 3, 4, 5], [1, 9, 3, 8, 5]) == [(1, 4)]


@pytest.mark.parametrize(
    ("text", "found"),
    [("3", (3, 3)), ("1..4", (1, 4)), ("..0.5", (-np.inf, 0.5)), ("-2..", (-2, np.inf)), (" ", None)],
)
def test_ranges(text: str, found: tuple[float, float] | None) -> None:
    assert read_query({"reward": text}).reward == found


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"step": "1-4"}, "step='1-4' means nothing here: .*write a number, or a range such as"),
        ({"reward": ".."}, "reward='..' means nothing"),
        ({"reward": "nan"}, "reward='nan' means nothing"),
        ({"part": "lost"}, "part='lost' means nothing"),
        ({"sort": "name"}, "sort='name' means nothing"),
        ({"offset": "-1"}, "offset='-1' means nothing"),
        ({"text": "x" * 401}, "text='x+' means nothing"),
        ({"<b>": "1"}, "<b>='1' means nothing here: .*; there are run, part, step"),
    ],
)
def test_a_parameter_that_means_nothing_is_named(parameters: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_query(parameters)
