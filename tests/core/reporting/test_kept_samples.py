"""Which completions are shown: the same ones however often one asks."""

from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.reporting.kept_samples import KINDS, Candidate, choose, drawn_number

REWARDS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=40)


def candidates(rewards: list[float]) -> list[Candidate]:
    return [Candidate(str(i), reward, drawn_number(3, f"train-0-{i}", 0)) for i, reward in enumerate(rewards)]


@given(REWARDS, st.integers(0, 4), st.randoms())
def test_the_choice_does_not_depend_on_the_order(rewards, count, chance):
    whole = candidates(rewards)
    order = list(whole)
    chance.shuffle(order)
    assert choose(order, count) == choose(whole, count)
    assert {kind: len(found) for kind, found in choose(whole, count).items()} == dict.fromkeys(
        KINDS, min(count, len(whole))
    )


@given(REWARDS.filter(bool))
def test_the_best_is_best_and_the_worst_is_worst(rewards):
    found = choose(candidates(rewards), 1)
    assert found["best"][0].reward == max(rewards) and found["worst"][0].reward == min(rewards)


def test_equal_rewards_still_show_different_completions():
    found = choose(candidates([0.0] * 40), 1)
    assert len({candidate.name for chosen in found.values() for candidate in chosen}) == 3


def test_the_same_prompts_are_drawn_at_every_version():
    at = [{c.name for c in choose(candidates([reward] * 30), 2)["random"]} for reward in (0.0, 1.0)]
    assert at[0] == at[1]
