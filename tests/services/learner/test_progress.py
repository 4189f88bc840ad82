"""The learner's progress counter never falls, whatever is counted and however it is looked at."""

from hypothesis import given
from hypothesis import strategies as st

from antiphon.services.learner.progress import ProgressCounter

ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9)),
        st.tuples(st.just("look"), st.integers(0, 9)),
        st.tuples(st.just("begin"), st.just(0)),
        st.tuples(st.just("watch"), st.just(0)),
    ),
    max_size=40,
)


@given(ACTS)
def test_a_counter_never_falls_and_a_beginning_counts_nothing(acts: list[tuple[str, int]]) -> None:
    progress, there = ProgressCounter(), [0]
    seen = progress.read().counter
    for act, number in acts:
        before = progress.read().counter
        if act == "add":
            progress.add(number)
            assert progress.read().counter == before + number
        elif act == "look":  # a folder grows, and is gone when it gets its last name
            there[0] = number
        else:
            there[0] = 0
            if act == "begin":
                progress.begin("training step 3", "micro-batch")
            else:
                progress.counting("byte", lambda: there[0])
            assert progress.read().counter == before
        assert progress.read().counter >= seen
        seen = progress.read().counter
