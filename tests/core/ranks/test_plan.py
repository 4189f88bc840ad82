"""Plan of ranks: every row once, equal counts, the budget kept, and one rank as ever."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.ranks.plan import SLOTS_PER_POSITION, RankPlan, plan_ranks


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths, and what each row has in common with the one before."""
    lengths = draw(st.lists(st.integers(1, 60), max_size=40))
    common = [0, *(draw(st.integers(0, min(pair))) for pair in pairwise(lengths))]
    return lengths, common[: len(lengths)]


def positions(lengths: list[int], common: list[int], part: slice) -> int:
    return sum(lengths[part]) - sum(common[part][1:])


@given(rows(), st.integers(1, 200), st.integers(1, 9))
def test_every_row_is_computed_once_within_the_budget_and_all_ranks_work_equally_often(
    given: tuple[list[int], list[int]], budget: int, ranks: int
) -> None:
    lengths, common = given
    plan = plan_ranks(lengths, common, budget, ranks)
    assert [place for part in plan.micro_batches for place in range(len(lengths))[part]] == list(
        range(len(lengths))
    )
    for part in plan.micro_batches:
        alone = part.stop - part.start == 1
        assert alone or positions(lengths, common, part) <= budget
        assert alone or sum(lengths[part]) <= SLOTS_PER_POSITION * budget
    dealt = [number for own in plan.ranks for number in own if number is not None]
    assert sorted(dealt) == list(range(len(plan.micro_batches)))
    assert len(plan.ranks) == ranks and len({len(own) for own in plan.ranks}) == 1
    for own in plan.ranks:
        real = [number for number in own if number is not None]
        assert list(own) == sorted(real) + [None] * (len(own) - len(real))
    assert plan == plan_ranks(lengths, common, budget, ranks)


@given(rows(), st.integers(1, 200), st.integers(2, 9))
def test_more_ranks_need_no_further_round_and_the_longest_part_is_no_longer(
    given: tuple[list[int], list[int]], budget: int, ranks: int
) -> None:
    lengths, common = given
    alone, several = plan_ranks(lengths, common, budget, 1), plan_ranks(lengths, common, budget, ranks)
    assert len(several.ranks[0]) == -(-len(alone.micro_batches) // ranks)

    def longest(plan: RankPlan) -> int:
        return max((positions(lengths, common, part) for part in plan.micro_batches), default=0)

    assert longest(several) <= longest(alone)


def test_fewer_rows_than_ranks_leave_dummies_and_no_rows_leave_nothing() -> None:
    assert plan_ranks([5, 5], [0, 0], 100, 3).ranks == ((0,), (1,), (None,))
    assert plan_ranks([], [], 100, 3).ranks == ((), (), ())
