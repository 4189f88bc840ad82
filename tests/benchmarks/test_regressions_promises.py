"""Promises of the comparison of two benchmark tables, for whatever was measured."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from antiphon.benchmarks.parts.nightly.table import (
    KNOWN,
    Direction,
    Measure,
    Verdict,
    compare,
    measure_for,
    usual_distance,
)
from antiphon.benchmarks.parts.results import flatten

LOWER = Measure("seconds", Direction.LOWER, 0.05)
HIGHER = Measure("score", Direction.HIGHER, 0.05)
values = st.floats(0.01, 1e6)
tables = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), values, min_size=1, max_size=9)
pairs = st.lists(st.tuples(values, values), min_size=1, max_size=9)
OPPOSITE = {Verdict.WORSE: Verdict.BETTER, Verdict.BETTER: Verdict.WORSE, Verdict.SAME: Verdict.SAME}


def two(rows: list[tuple[float, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the tables before and after that have these pairs."""
    named = {str(i): row for i, row in enumerate(rows)}
    return {c: r[0] for c, r in named.items()}, {c: r[1] for c, r in named.items()}


@given(tables)
def test_equal_tables_hold_no_regression(table: dict[str, float]) -> None:
    for figure in (LOWER, HIGHER):
        found = compare(figure, table, dict(table))
        assert found.verdict is Verdict.SAME and found.change == 0.0


@given(pairs)
def test_going_back_turns_the_verdict_round(rows: list[tuple[float, float]]) -> None:
    before, after = two(rows)
    assert compare(LOWER, after, before).verdict is OPPOSITE[compare(LOWER, before, after).verdict]


@given(pairs)
def test_the_other_better_side_turns_the_verdict_round(rows: list[tuple[float, float]]) -> None:
    before, after = two(rows)
    assert compare(HIGHER, before, after).verdict is OPPOSITE[compare(LOWER, before, after).verdict]


@given(pairs, st.integers(-12, 12))
def test_the_unit_does_not_matter(rows: list[tuple[float, float]], power: int) -> None:
    scale = 2.0**power  # exact, so that no rounding can flip a verdict at its edge
    scaled = [(b * scale, a * scale) for b, a in rows]
    assert compare(LOWER, *two(rows)).verdict is compare(LOWER, *two(scaled)).verdict


@given(tables, tables)
def test_only_shared_cases_count(shared: dict[str, float], other: dict[str, float]) -> None:
    more = {f"only {name}": value for name, value in other.items()}
    alone = compare(LOWER, shared, shared)
    assert compare(LOWER, shared | more, shared) == alone
    assert compare(LOWER, shared, shared | more) == alone
    assert compare(LOWER, shared, more).verdict is Verdict.UNDECIDED


@given(tables, st.floats(1.01, 10.0))
def test_a_change_of_all_cases_alike_is_judged_by_the_tolerance_alone(
    table: dict[str, float], factor: float
) -> None:
    after = {name: value * factor for name, value in table.items()}
    found = compare(LOWER, table, after)
    assert found.change is not None and found.allowance is not None
    assert found.allowance < 2.0 * LOWER.tolerance + 1e-9
    assert (found.verdict is Verdict.WORSE) == (found.change > found.allowance)


@given(st.lists(values, min_size=5, max_size=9), values)
def test_one_case_alone_never_makes_a_regression(before: list[float], wild: float) -> None:
    rows = [(value, value) for value in before]
    rows[0] = (before[0], wild)
    assert compare(LOWER, *two(rows)).verdict is Verdict.SAME


@given(tables, st.floats(0.02, 0.4))
def test_a_history_that_sways_is_noise(table: dict[str, float], sway: float) -> None:
    up = {name: value * (1.0 + sway) for name, value in table.items()}
    history = [table, up, table, up, table]
    assert compare(LOWER, table, up, history).verdict is Verdict.SAME


@given(tables, st.lists(tables, max_size=4))
def test_history_never_makes_a_regression(table: dict[str, float], history: list[dict[str, float]]) -> None:
    after = {name: value * 1.2 for name, value in table.items()}
    with_history = compare(LOWER, table, after, history)
    without = compare(LOWER, table, after)
    assert with_history.verdict in {without.verdict, Verdict.SAME}
    assert usual_distance(history) >= 0.0


def test_a_table_of_decisions() -> None:
    steady = {"s0": 10.0, "s1": 11.0, "s2": 12.0, "s3": 9.0}
    slower = {case: 1.2 * value for case, value in steady.items()}
    assert compare(LOWER, steady, slower).verdict is Verdict.WORSE
    assert compare(LOWER, slower, steady).verdict is Verdict.BETTER
    assert compare(HIGHER, steady, slower).verdict is Verdict.BETTER
    assert compare(Measure("n"), steady, slower).verdict is Verdict.UNDECIDED
    mixed = {"s0": 12.0, "s1": 9.0, "s2": 15.0, "s3": 8.0}
    assert compare(LOWER, steady, mixed).verdict is Verdict.SAME
    # Two pairs must move further than four.
    twice = compare(LOWER, {"a": 10.0, "b": 10.0}, {"a": 10.8, "b": 10.8})
    assert twice.verdict is Verdict.SAME and twice.allowance == 0.1
    assert compare(LOWER, {"a": 0.0}, {"a": 0.0}).verdict is Verdict.SAME
    assert compare(LOWER, {"a": float("nan")}, {"a": 1.0}).verdict is Verdict.UNDECIDED


def test_names_tell_the_better_side() -> None:
    assert measure_for("peak_gb").better is Direction.LOWER
    assert measure_for("tokens_per_second").better is Direction.HIGHER
    assert measure_for("steps").better is Direction.NEITHER
    assert measure_for("pass_after") == KNOWN["pass_after"]
    assert measure_for("pairs_per_s").better is Direction.HIGHER
    assert measure_for("lost").better is Direction.LOWER and measure_for("lost").tolerance == 0.0
    assert measure_for("unhelpful.c4").better is Direction.HIGHER
    assert measure_for("kills_by_role.worker-0").better is Direction.NEITHER


@given(st.sampled_from(sorted(KNOWN)), st.sampled_from(["4", "c64", "16.c4"]))
def test_the_size_at_which_a_figure_was_measured_changes_no_side(name: str, size: str) -> None:
    assert replace(measure_for(f"{name}.{size}"), name=name) == KNOWN[name]


numbers = st.integers(-9, 9) | st.floats(-1e9, 1e9)
nested = st.recursive(
    st.dictionaries(st.text("ab", min_size=1, max_size=2), numbers, max_size=3),
    lambda inner: st.dictionaries(st.text("cd", min_size=1, max_size=2), inner | numbers, max_size=3),
    max_leaves=8,
)


@given(nested)
def test_every_number_of_nested_objects_is_found_under_its_path(given_: dict[str, Any]) -> None:
    found = flatten(given_ | {"true": True, "none": None, "nan": float("nan"), "list": [1], "text": "x"})
    for path, value in found.items():
        place: Any = given_
        for part in path.split("."):
            place = place[part]
        assert place == value
    assert len(found) == count_numbers(given_)


def count_numbers(value: Any) -> int:
    """Return how many numbers an object holds."""
    return sum(map(count_numbers, value.values())) if isinstance(value, dict) else 1
