"""Opponents: who sits at the other seats; each chooses a legal action from what its seat may know."""

from collections.abc import Callable, Mapping

import numpy as np

from antiphon.environments.poker.cards import equity
from antiphon.environments.poker.hand import Hand

Opponent = Callable[[Hand, np.random.Generator], str]
"""Returns the action of the seat whose turn it is."""
_POINTS = (*[rank / 2 + 1 for rank in range(9)], 6.0, 7.0, 8.0, 10.0)
_GAPS = (0, 0, 1, 2, 4, 5)
"""What Chen's formula takes off by the distance of two ranks."""


def at_random(hand: Hand, random: np.random.Generator) -> str:
    """Fold, call or raise alike often; raise to the least, to about the pot, or all in."""
    legal = hand.legal()
    choices = ["c", *(["f"] if legal.call else []), *(["r"] if legal.lowest else [])]
    chosen = choices[random.integers(len(choices))]
    return chosen if chosen != "r" else raise_to(hand, (0.0, 1.0, 1e6)[random.integers(3)])


def station(hand: Hand, random: np.random.Generator) -> str:
    """Check or call, whatever happens."""
    return "c"


def by_equity(hand: Hand, random: np.random.Generator) -> str:
    """Raise the pot with a clear favourite, call while the pot pays for it, by equity against any cards."""
    legal, seat, others = hand.legal(), hand.actor or 0, len(hand.live) - 1
    wins = equity(hand.holes[seat], hand.board, others, random)
    raises = hand.bets.rpartition("/")[2].count("r")
    if legal.lowest and wins * (others + 1) > 1.25 + 0.25 * raises:
        return raise_to(hand, 1.0)
    return "c" if wins * (hand.pot + legal.call) >= legal.call else legal.passive


def tight(hand: Hand, random: np.random.Generator) -> str:
    """Play few hands, by Chen's formula, and those for bets and raises; give up most others."""
    legal, seat, others = hand.legal(), hand.actor or 0, len(hand.live) - 1
    raises = hand.bets.rpartition("/")[2].count("r")
    if not hand.board:
        worth = chen(*hand.holes[seat]) + (5 if hand.seats == 2 else 0)
        if worth >= 8 + 3 * raises and legal.lowest:
            return raise_to(hand, 1.0)
        return "c" if worth >= 6 + 3 * raises else legal.passive
    wins = equity(hand.holes[seat], hand.board, others, random) * (others + 1)
    if wins > 1.3 + 0.2 * raises and legal.lowest:
        return raise_to(hand, 0.67)
    return "c" if wins > 1.0 + 0.15 * raises else legal.passive


OPPONENTS: Mapping[str, Opponent] = {
    "random": at_random,
    "station": station,
    "tight": tight,
    "equity": by_equity,
}


def raise_to(hand: Hand, share: float) -> str:
    """Return the raise by a share of the pot with the call in it, or the nearest legal one; else a call."""
    legal = hand.legal()
    if not legal.lowest:
        return "c"
    called = legal.highest - hand.left(hand.actor or 0) + legal.call
    return f"r{int(min(max(called + share * (hand.pot + legal.call), legal.lowest), legal.highest))}"


def chen(first: int, second: int) -> float:
    """Return the points of two cards by Bill Chen's formula (Krieger, Hold'em Excellence), not rounded.

    >>> chen(51, 50), chen(51, 47), chen(20, 1)  # two aces; ace and king suited; seven and two
    (20.0, 12.0, -1.5)
    """
    low, high = sorted((first // 4, second // 4))
    if low == high:
        return max(5.0, 2 * _POINTS[high])
    apart = high - low
    suited = 2 if first % 4 == second % 4 else 0
    straight = 1 if apart <= 2 and high < 10 else 0
    return _POINTS[high] + suited - _GAPS[min(apart, 5)] + straight
