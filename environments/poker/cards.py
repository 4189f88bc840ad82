"""Cards: numbers from 0 to 51, how strong seven of them are, and how often they win.

A card is 4 times its rank (0 is a two, 12 an ace) and its suit (clubs, diamonds, hearts, spades), as
phevaluator, which only this module knows, counts them. Chance comes from the generators that are handed in.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from phevaluator import evaluate_cards

from antiphon.core.errors import ConfigError

RANKS, SUITS = "23456789TJQKA", "cdhs"
CARDS = tuple(rank + suit for rank in RANKS for suit in SUITS)
"""The name of each card."""
MADE = (
    (10, "straight flush"),
    (166, "four of a kind"),
    (322, "full house"),
    (1599, "flush"),
    (1609, "straight"),
    (2467, "three of a kind"),
    (3325, "two pair"),
    (6185, "pair"),
    (7462, "high card"),
)
"""The weakest hand of each kind; 1 is the strongest of all."""
EVALUATIONS = 600
"""Hands that an equity is estimated from, one's own among them."""


def strength(cards: Sequence[int]) -> int:
    """Return the place of the best five of 5 to 7 cards among all hands, 1 being the strongest.

    >>> strength(parse("AhKhQhJhTh2c2d")), strength(parse("7c5d4h3s2c"))
    (1, 7462)
    """
    return int(evaluate_cards(*cards))


def made(cards: Sequence[int]) -> str:
    """Return what 5 to 7 cards make, such as "two pair"."""
    place = strength(cards)
    return next(name for weakest, name in MADE if place <= weakest)


def parse(text: str) -> list[int]:
    """Read cards such as "AhTd", the names one after the other.

    Raises:
        ConfigError: naming what is no card, or is there twice.
    """
    names = [text[place : place + 2] for place in range(0, len(text), 2)]
    for place, name in enumerate(names):
        if name not in CARDS:
            raise ConfigError(f"{name!r} in {text:.120} is no card; write rank and suit, as Ah or Tc")
        if name in names[:place]:
            raise ConfigError(f"{name} is there twice in {text:.120}; a deck has each card once")
    return [CARDS.index(name) for name in names]


def shown(cards: Sequence[int]) -> str:
    """Return cards as text, such as "AhTd"."""
    return "".join(CARDS[card] for card in cards)


def draws(cards: Sequence[int], count: int, times: int, random: np.random.Generator) -> Iterator[list[int]]:
    """Yield `count` of the cards, `times` times; those of one shuffle are used up before the next."""
    deck, at = list(cards), len(cards)
    for _ in range(times):
        if at + count > len(deck):
            deck, at = random.permutation(deck).tolist(), 0
        yield deck[at : at + count]
        at += count


def equity(hole: Sequence[int], board: Sequence[int], opponents: int, random: np.random.Generator) -> float:
    """Estimate the share of the pot that two cards win against this many unknown hands, if all stay."""
    known = {*hole, *board}
    unseen = [card for card in range(len(CARDS)) if card not in known]
    missing, times, won = 5 - len(board), EVALUATIONS // (opponents + 1), 0.0
    for drawn in draws(unseen, missing + 2 * opponents, times, random):
        table = (*board, *drawn[:missing])
        mine = evaluate_cards(*hole, *table)
        equal = 1
        for place in range(missing, len(drawn), 2):
            theirs = evaluate_cards(drawn[place], drawn[place + 1], *table)
            if theirs < mine:
                break
            equal += theirs == mine
        else:
            won += 1.0 / equal
    return won / times
