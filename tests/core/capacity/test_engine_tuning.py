"""Engine tuning: what is chosen costs least of what was tried, and compiling waits for a long run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.capacity.engine_tuning import WORTH, Settings, Trial, choose


def settings(threads: int = 1, block_size: int = 32, compiled: bool = False) -> Settings:
    return {"threads": threads, "block_size": block_size, "prefix_caching": False, "compiled": compiled}


BEGIN = settings()
VALUES = {
    "threads": (1, 2, 4),
    "block_size": (32, 64, 128),
    "prefix_caching": (False, True),
    "compiled": (False, True),
}


def trial(start_s: float, seconds: float, completion_tokens: float = 100.0) -> Trial:
    both = {"seconds": start_s, "cpu_seconds": 2.0 * start_s}
    return Trial(both, {"seconds": seconds, "cpu_seconds": 2.0 * seconds}, 1000, completion_tokens)


@given(
    st.dictionaries(
        st.sampled_from(range(36)), st.tuples(st.floats(0.1, 60), st.floats(0.01, 10)), max_size=36
    ),
    st.integers(1, 100_000),
    st.sampled_from(["seconds", "cpu_seconds"]),
)
def test_the_choice_costs_no_more_than_what_is_set(
    known: dict[int, tuple[float, float]], completions: int, unit: str
) -> None:
    tried: dict[tuple[object, ...], Trial | None] = {}

    def attempt(choice: Settings) -> Trial | None:
        key = tuple(choice.values())
        assert key not in tried
        found = known.get(hash(key) % 36, (8.0, 1.0) if choice == BEGIN else None)
        tried[key] = trial(*found) if found else None
        return tried[key]

    chosen = choose(BEGIN, VALUES, attempt, unit, completions)  # type: ignore[arg-type]
    assert len(tried) <= 1 + 2 + 2 + 1 + 1
    cost = {choice: one.cost(unit, 100.0 * completions) for choice, one in tried.items() if one}  # type: ignore[arg-type]
    if chosen != BEGIN:
        paid = cost[tuple(chosen.values())]
        assert paid < (1.0 - WORTH) * cost[tuple(BEGIN.values())]
        assert paid == min(cost.values()) or paid * (1.0 - WORTH) <= min(cost.values())


@pytest.mark.parametrize(("completions", "compiled"), [(100, False), (10_000, True)])
def test_compiling_is_for_long_runs(completions: int, compiled: bool) -> None:
    def attempt(choice: Settings) -> Trial:
        return trial(40.0, 0.5) if choice["compiled"] else trial(8.0, 1.0)

    found = choose(BEGIN, VALUES, attempt, "seconds", completions)
    assert found == settings(compiled=compiled)


def test_settings_that_cannot_be_had_are_passed_over() -> None:
    def attempt(choice: Settings) -> Trial | None:
        return None if choice["block_size"] != 32 else trial(8.0, 1.0 / choice["threads"])

    assert choose(BEGIN, VALUES, attempt, "seconds", 10_000) == settings(4)
    with pytest.raises(ValueError, match="set now"):
        choose(settings(block_size=64), VALUES, attempt, "seconds", 10_000)


def test_a_trial_that_was_cut_short_is_compared_by_its_rate() -> None:
    def attempt(choice: Settings) -> Trial:
        return trial(8.0, 1.0, 10.0 if choice["threads"] == 2 else 100.0)

    assert choose(BEGIN, {"threads": (1, 2)}, attempt, "seconds", 10_000) == BEGIN
