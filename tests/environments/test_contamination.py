"""Contamination: the prompts of two sides are compared as every pair of them would be."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from antiphon.environments.contamination import IN_TEMPLATE, WORDS, contamination, words_of

PIECES = [" ".join(f"{name}{n}" for n in range(7)) for name in "abcde"] + ["- what is", "+", "?"]
TEXTS = st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map(" ".join), max_size=9)


def rows_of_words(text: str) -> set[tuple[str, ...]]:
    words = [word for word in words_of(text) if word.isalnum()]
    return {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}


def by_pairs(evaluated: Sequence[str], trained: Sequence[str]) -> tuple[dict[int, int], dict[int, int]]:
    """Compare every prompt with every other one."""

    def is_template(row: tuple[str, ...]) -> bool:
        sides = (
            {words_of(text) for text in side if row in rows_of_words(text)} for side in (evaluated, trained)
        )
        return any(len(found) > IN_TEMPLATE for found in sides)

    same, overlapping = dict[int, int](), dict[int, int]()
    for i, ours in enumerate(evaluated):
        for j, theirs in enumerate(trained):
            shared = rows_of_words(ours) & rows_of_words(theirs)
            if words_of(ours) and words_of(ours) == words_of(theirs):
                same.setdefault(i, j)
            elif any(not is_template(row) for row in shared):
                overlapping.setdefault(i, j)
    return same, {i: j for i, j in overlapping.items() if i not in same}


@given(TEXTS, TEXTS)
def test_it_finds_what_a_comparison_of_all_pairs_finds(evaluated: list[str], trained: list[str]) -> None:
    found = contamination(evaluated, trained)
    assert (dict(found.same), dict(found.overlapping)) == by_pairs(evaluated, trained)


def test_words_in_a_row_and_whole_prompts_are_found_and_templates_are_not() -> None:
    words = [f"w{n}" for n in range(40)]
    begin = "please think about this question step by step and then say the final number "
    evaluated = [begin + f"{n} {n + 1}" for n in range(5)] + [" ".join(words[:20]), "What is $X+1$?"]
    trained = [
        begin + "something else",
        " ".join(words[20 - WORDS : 33]),
        "what is  x + 1",
        " ".join(words[9:21]),
    ]
    found = contamination(evaluated, trained)
    assert dict(found.same) == {6: 2} and dict(found.overlapping) == {5: 1}
    assert dict(contamination(evaluated, evaluated).same) == {n: n for n in range(7)}
    often = [" ".join(words[:20])] * (IN_TEMPLATE + 1)
    assert {*contamination(often, trained).overlapping} == {0, 1, 2, 3}, "a prompt that comes often is one"
