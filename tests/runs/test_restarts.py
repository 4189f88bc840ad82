"""A service is started again a limited number of times within any window, with pauses that grow."""

from hypothesis import given
from hypothesis import strategies as st

from antiphon.runs.supervisor import MOST_PAUSE_S, WORKED_S, RestartRule


@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.floats(0.0, 400.0), st.floats(0.0, 100.0)), max_size=60),
)
def test_no_window_has_more_restarts_than_the_limit(limit: int, ends: list[tuple[float, float]]) -> None:
    window_s, now = 600.0, 0.0
    rule, restarts = RestartRule(limit, window_s), []
    for gap_s, ready_s in ends:
        now += gap_s
        pause_s = rule.after_end(now, ready_s)
        within = [at for at in restarts if now - at <= window_s]
        if pause_s is None:
            assert len(within) == limit
        else:
            assert len(within) < limit and 0.0 <= pause_s <= MOST_PAUSE_S
            restarts.append(now)


def test_pauses_double_while_a_service_cannot_work_and_begin_again_once_it_did() -> None:
    rule = RestartRule(100, 1e9)
    pauses = [rule.after_end(float(n), 0.0) for n in range(10)]
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MOST_PAUSE_S, MOST_PAUSE_S, MOST_PAUSE_S]
    assert rule.after_end(20.0, WORKED_S) == 0.0
    assert [rule.after_end(21.0, 0.0), rule.after_end(22.0, 0.0)] == [0.0, 1.0]


def test_what_ended_a_service_was_taken_away_and_its_restarts_are_forgotten() -> None:
    rule = RestartRule(2, 1e9)
    assert [rule.after_end(float(n), 0.0) for n in range(3)] == [0.0, 1.0, None]
    rule.begin_again()
    assert [rule.after_end(float(n), 0.0) for n in range(3, 6)] == [0.0, 1.0, None]


def test_a_run_of_a_week_may_lose_a_service_every_hour() -> None:
    rule = RestartRule(5, 3600.0)
    assert all(rule.after_end(3700.0 * n, 3600.0) == 0.0 for n in range(170))
