"""Poker: chips are never made or lost, luck is taken out without a bias, and nobody sees what is hidden."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pokerkit import Automation, NoLimitTexasHoldem, StandardHighHand

from antiphon.core.errors import ConfigError, ContractError
from antiphon.core.messages import Ended, Message, Reply
from antiphon.core.seeds import generator
from antiphon.environments.conversation import Conversation
from antiphon.environments.poker.cards import CARDS, equity, parse, shown, strength
from antiphon.environments.poker.hand import Hand
from antiphon.environments.poker.opponents import OPPONENTS, at_random
from antiphon.environments.poker.table import Poker
from antiphon.environments.registry import describe, environment_names, make_environment
from antiphon.environments.scoring.conversations import InProcessConversations

seeds = st.integers(0, 2**32 - 1)


def dealt(seed: int, seats: int, stacks: tuple[int, ...] = ()) -> Hand:
    random = generator("deal", seed)
    chips = stacks or random.integers(5, 200, seats).tolist()
    return Hand(random.permutation(len(CARDS)).tolist(), chips, (1, 2))


def played(hand: Hand, seed: int) -> tuple[Hand, list[str]]:
    """Play a hand to its end, a random opponent at every seat; return it and the actions."""
    random, actions = generator("play", seed), list[str]()
    while hand.actor is not None:
        actions.append(at_random(hand, random))
        hand.act(actions[-1])
    return hand, actions


def by_pokerkit(deck: list[int], stacks: tuple[int, ...], actions: list[str]) -> list[int]:
    """Return the chips that each seat ends with when pokerkit plays all of a hand, showdown and pots too."""
    dealing = (Automation.HOLE_DEALING, Automation.BOARD_DEALING, Automation.CARD_BURNING)
    automated = tuple(one for one in Automation if one not in dealing)
    state = NoLimitTexasHoldem.create_state(automated, True, 0, (1, 2), 2, stacks, len(stacks))
    for seat in range(len(stacks)):
        state.deal_hole(shown(deck[2 * seat : 2 * seat + 2]))
    board, left = deck[2 * len(stacks) :], list(actions)
    while state.status:
        if state.actor_index is None:
            count = 1 if len(state.board_cards) else 3
            state.burn_card("??")
            state.deal_board(shown(board[:count]))
            board = board[count:]
        elif (action := left.pop(0)) == "f":
            state.fold()
        elif action == "c":
            state.check_or_call()
        else:
            state.complete_bet_or_raise_to(int(action[1:]))
    assert not left
    return [int(chips) for chips in state.stacks]


@settings(max_examples=60)
@given(seed=seeds, seats=st.integers(2, 6))
def test_chips_stay_at_the_table_and_pots_are_shared_as_the_rules_say(seed: int, seats: int) -> None:
    hand, actions = played(dealt(seed, seats), seed)
    won = hand.won()
    deck = [*(card for hole in hand.holes for card in hole), *hand._undealt]
    ended = by_pokerkit(deck, hand.stacks, actions)
    assert [stack + chips for stack, chips in zip(hand.stacks, won, strict=True)] == ended
    assert sum(won) == 0
    expected = hand.expected(generator("luck"))
    assert sum(expected) == pytest.approx(0)
    if len(hand.live) == 1 or len(hand.board) == 5:
        assert expected == won, "no card was to come that could count"


@settings(max_examples=50)
@given(seed=seeds)
def test_strength_orders_hands_as_pokerkit_does(seed: int) -> None:
    cards = generator("strength", seed).permutation(len(CARDS)).tolist()
    board, mine, other = cards[:5], cards[5:7], cards[7:9]
    ours = [-strength([*hole, *board]) for hole in (mine, other)]
    theirs = [StandardHighHand.from_game(shown(hole), shown(board)) for hole in (mine, other)]
    assert (ours[0] < ours[1], ours[0] == ours[1]) == (theirs[0] < theirs[1], theirs[0] == theirs[1])


@settings(max_examples=10)
@given(seed=seeds)
def test_an_all_in_on_the_turn_counts_as_the_mean_of_all_rivers(seed: int) -> None:
    cards = generator("rivers", seed).permutation(len(CARDS)).tolist()

    def all_in(deck: list[int]) -> Hand:
        hand = Hand(deck, [100, 60], (1, 2))
        for action in ("c", "c", "c", "c", "r98", "c"):
            hand.act(action)
        assert hand.actor is None
        return hand

    known, rivers = cards[:8], cards[8:]
    won = [all_in([*known, river, *(card for card in rivers if card != river)]).won() for river in rivers]
    assert all_in(cards).expected(generator("luck")) == pytest.approx(np.mean(won, axis=0))


def test_an_all_in_before_the_flop_has_little_luck_left() -> None:
    first = parse("AhAd7c2sKsKdKcQsQd")
    hand = Hand([*first, *(card for card in range(52) if card not in first)], [100, 100], (1, 2))
    hand.act("r100")
    hand.act("c")
    expected = hand.expected(generator("luck"))
    assert 60 < expected[0] < 95 and sum(expected) == pytest.approx(0)


@settings(max_examples=40)
@given(seed=seeds, seats=st.integers(2, 6), name=st.sampled_from(sorted(OPPONENTS)))
def test_an_opponent_does_what_is_legal_and_sees_no_hidden_card(seed: int, seats: int, name: str) -> None:
    hand = dealt(seed, seats)
    random = generator("steps", seed)
    for _ in range(int(random.integers(0, 6))):
        if hand.actor is not None:
            hand.act(at_random(hand, random))
    if (seat := hand.actor) is None:
        return
    line = hand.seen_by(seat)
    chosen = OPPONENTS[name](hand, generator("choice", seed))
    assert hand.legal().allows(chosen)
    for other in range(seats):
        if other != seat:
            assert shown(hand.holes[other]) not in line
            hand.holes[other] = [0, 0]
    hand._undealt = [*hand.board, *[0] * 40]
    assert (OPPONENTS[name](hand, generator("choice", seed)), hand.seen_by(seat)) == (chosen, line)


def test_equity_is_that_of_the_tables() -> None:
    aces, table = parse("AhAd"), generator("equity")
    mean = np.mean([equity(aces, [], 1, table) for _ in range(20)])
    assert mean == pytest.approx(0.852, abs=0.02)  # two aces against any two cards
    assert equity(parse("AhKh"), parse("QhJhTh"), 5, table) == 1.0


@pytest.mark.parametrize(
    ("seats", "seen"),
    [
        (2, "c2"),  # the button posts the small blind and acts first
        (3, "f c2 r4-40"),
    ],
)
def test_who_acts_first_and_what_it_is_told(seats: int, seen: str) -> None:
    hand = Hand(list(range(52)), [40] * seats, (1, 2))
    assert hand.actor == seats - 1
    assert seen in hand.seen_by(seats - 1) or hand.legal().call == 1
    with pytest.raises(ContractError, match="not legal"):
        hand.act("r3")


def talk(table: Poker, index: int, replies: list[str]) -> tuple[list[str], Ended]:
    """Return what a conversation said, the last reply being repeated until it ended."""
    conversation: Conversation = table.conversation()
    turn = conversation.begin(table.problem("train", index), 5)
    said = [turn[-1].content]
    for place in range(60):
        turn_or_end = conversation.answer(Reply(replies[min(place, len(replies) - 1)]))
        if isinstance(turn_or_end, Ended):
            return said, turn_or_end
        said.append(turn_or_end[-1].content)
    raise AssertionError("the hand does not end")


@settings(max_examples=50)
@given(
    index=st.integers(0, 63),
    replies=st.lists(st.text(max_size=8) | st.from_regex(r"r\d{1,3}"), min_size=1, max_size=9),
)
def test_whatever_is_replied_a_hand_ends_within_its_range(index: int, replies: list[str]) -> None:
    table = Poker({"seats": 2 + index % 5, "opponents": "random,station,tight"}, 3, 64, 8)
    _, ended = talk(table, index, replies)
    low, high = table.reward_range
    assert low <= ended.reward <= high
    assert talk(table, index, replies)[1] == ended, "the same replies have another end"


def test_prompts_are_duplicate_deals_and_splits_share_none() -> None:
    table = Poker({}, 0, 8, 8)
    texts = [table.problem(split, index).text for split in ("train", "heldout") for index in range(8)]
    assert len(set(texts)) == 16
    first, second = (text.partition(",")[0] for text in texts[:2])
    assert first == second != texts[2].partition(",")[0]
    holes = table.deal(int(first.removeprefix("Hand "))).holes
    for seat in (0, 1):
        assert talk(table, seat, ["c"])[0][0].startswith(shown(holes[seat]))
    with pytest.raises(ConfigError, match="split 'other' is unknown"):
        table.problem("other", 0)


def test_what_is_not_legal_checks_or_folds_and_is_counted() -> None:
    table = Poker({"opponents": "station", "rules": False}, 0, 8, 8)
    said, ended = talk(table, 0, ["I think I will see", "r1", "fold", "", "r9999"])
    assert ended.parts["illegal"] == len(said) == 4 and ended.reason.startswith("played")
    _, folded = talk(table, 1, ["raise to 3"])  # of the small blind
    assert folded.parts == {"won": -0.5, "illegal": 1.0} and folded.reason == "folded"


def test_the_deck_begins_every_hand_and_luck_may_count() -> None:
    deck = "AhAdKsKc2c7d9hTs3c"
    table = Poker({"opponents": "station", "deck": deck, "expected": False}, 0, 8, 8)
    _, ended = talk(table, 0, ["r40"])
    assert ended.reward == ended.parts["won"] == 20.0
    fair = Poker({"opponents": "station", "deck": deck}, 0, 8, 8)
    assert 10.0 < talk(fair, 0, ["r40"])[1].reward < 14.0  # 82% of the pot, less what was put in


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"seats": 7}, "seats=7 is no number of seats from 2 to 6"),
        ({"seats": True}, "seats=True must be of type int"),
        ({"stack": 0}, "stack=0 is no number of big blinds from 2 to 1000"),
        ({"stack": "deep"}, "stack='deep' must be of type int"),
        ({"opponents": "random,bob"}, "opponents has 'bob'; opponents are random, station, tight, equity"),
        ({"deck": "AhK"}, "parameters.deck: 'K' in AhK is no card"),
        ({"deck": "AhAh"}, "parameters.deck: Ah is there twice"),
        ({"seat": 2}, "did you mean seats?"),
    ],
)
def test_what_cannot_be_played_is_one_sentence(parameters: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as found:
        make_environment("poker", parameters, 0, 4, 4)
    assert sentence in str(found.value)


def test_the_name_is_enough_to_train_on_it() -> None:
    assert "poker" in environment_names()
    found = describe("poker", {"seats": 6})
    assert found.reward_range == (-20.0, 100.0)
    assert "table of 6 seats" in found.opening[0].content
    environment = make_environment("poker", {}, 0, 4, 4)
    environment.try_out()  # type: ignore[attr-defined]  # it is one with turns

    async def story() -> None:
        conversations = InProcessConversations(environment)  # type: ignore[arg-type]
        turn = await conversations.answer("one", "train-0-0", 7, [Reply("c")])
        assert isinstance(turn, Ended) or isinstance(turn[-1], Message)  # type: ignore[index]

    asyncio.run(story())
