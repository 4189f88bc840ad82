"""Hand: one hand of no-limit hold'em, all its cards given beforehand; pokerkit rules the betting.

Seats count from the small blind on, so that the last one is the button; of two seats the first is the big
blind and the button is the small one. Actions are written as in the annual computer poker competition: "f"
folds, "c" checks or calls, "r300" bets or raises to 300 chips on this street.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from pokerkit import Automation, NoLimitTexasHoldem

from antiphon.core.errors import ContractError
from antiphon.environments.poker.cards import draws, made, shown, strength

_AUTOMATED = (
    *(Automation.ANTE_POSTING, Automation.BLIND_OR_STRADDLE_POSTING, Automation.BET_COLLECTION),
    *(Automation.CARD_BURNING, Automation.HOLE_DEALING, Automation.BOARD_DEALING),
)
"""So pokerkit deals cards that nobody looks at, and stops where hands would be shown or the pot be paid."""
RUNOUTS = 100
"""Boards over which the chips of an all-in are averaged, where two cards or more are to come."""


@dataclass(frozen=True, slots=True)
class Legal:
    """What the player whose turn it is may do; checking or calling is always possible."""

    call: int
    """Chips that a call costs; 0 means a check, and then nobody folds."""
    lowest: int
    """The least that may be bet or raised to on this street; 0 where none may be."""
    highest: int
    """The most: all that the player has."""

    def allows(self, action: str) -> bool:
        """Tell whether an action, in the notation of this module, is legal."""
        if action[:1] == "r" and action[1:].isdecimal():
            return 0 < self.lowest <= int(action[1:]) <= self.highest
        return action == "c" or (action == "f" and self.call > 0)

    @property
    def passive(self) -> str:
        """The action that costs nothing: a check, or a fold where there is a bet."""
        return "f" if self.call else "c"

    def __str__(self) -> str:
        raises = "" if not self.lowest else f" r{self.lowest}-{self.highest}"
        return (f"f c{self.call}" if self.call else "c") + raises


class Hand:
    """A hand that is being played; `act` moves it on until `actor` is None."""

    def __init__(self, deck: Sequence[int], stacks: Sequence[int], blinds: Sequence[int]) -> None:
        """Post the blinds and deal.

        Args:
            deck: numbers of cards: two for each seat in turn, then the board.
            stacks: chips of each seat, blinds not yet posted.
            blinds: small blind, big blind and what else is posted, from the small blind on.
        """
        self.seats, self.stacks = len(stacks), tuple(stacks)
        self.holes = [list(deck[2 * seat : 2 * seat + 2]) for seat in range(self.seats)]
        self.bets = ""
        """All actions so far; "/" begins a street."""
        self._undealt = list(deck[2 * self.seats :])
        self._legal: Legal | None = None
        self._state = NoLimitTexasHoldem(_AUTOMATED, True, 0, tuple(blinds), blinds[1])(stacks, self.seats)

    @property
    def actor(self) -> int | None:
        """The seat whose turn it is; None once the hand is over."""
        return self._state.actor_index

    @property
    def board(self) -> list[int]:
        """The cards that were dealt when somebody could still bet."""
        return self._undealt[: len(self._state.board_cards)]

    @property
    def pot(self) -> int:
        """Chips that are in the middle, bets of this street included."""
        return sum(self.stacks) - sum(self._state.stacks)

    @property
    def live(self) -> list[int]:
        """Seats that have not folded."""
        return [seat for seat in range(self.seats) if self._state.statuses[seat]]

    def left(self, seat: int) -> int:
        """Return the chips that a seat has in front of it, bets not counted."""
        return int(self._state.stacks[seat])

    def legal(self) -> Legal:
        """Return what the actor may do."""
        if self._legal is None:
            state, lowest, highest = self._state, None, None
            if state.can_complete_bet_or_raise_to():
                lowest = state.min_completion_betting_or_raising_to_amount
                highest = state.max_completion_betting_or_raising_to_amount
            self._legal = Legal(state.checking_or_calling_amount or 0, lowest or 0, highest or 0)
        return self._legal

    def act(self, action: str) -> None:
        """Do what the actor chose, and deal what follows.

        Raises:
            ContractError: when it is no action that is legal here.
        """
        state, street = self._state, self._state.street_index
        if self.actor is None or not self.legal().allows(action):
            raise ContractError(f"the action {action!r:.20} is not legal after {self.bets!r} of this hand")
        if action == "f":
            state.fold()
        elif action == "c":
            state.check_or_call()
        else:
            state.complete_bet_or_raise_to(int(action[1:]))
        self.bets += action
        if self.actor is not None and state.street_index != street:
            self.bets += "/"
        self._legal = None

    def won(self) -> list[float]:
        """Return the chips that each seat has won, less what it put in, once the hand is over."""
        return self._gained(self._undealt[:5], whole=True)

    def expected(self, random: np.random.Generator) -> list[float]:
        """Return the chips of each seat, those of an all-in averaged over the cards that were to come.

        That is what `won` is on average, given all that was dealt and done before: a hand that was all in
        counts without the luck of its last cards.
        """
        board, missing = self.board, 5 - len(self.board)
        if len(self.live) == 1 or not missing:
            return self.won()
        unseen = self._undealt[len(board) :]
        drawn = [[card] for card in unseen] if missing == 1 else draws(unseen, missing, RUNOUTS, random)
        return [
            fmean(chips) for chips in zip(*(self._gained([*board, *more]) for more in drawn), strict=True)
        ]

    def _gained(self, board: Sequence[int], whole: bool = False) -> list[float]:
        put = [int(had - has) for had, has in zip(self.stacks, self._state.stacks, strict=True)]
        places = {seat: strength([*self.holes[seat], *board]) for seat in self.live}
        return [chips - cost for chips, cost in zip(paid(put, places, whole), put, strict=True)]

    def seen_by(self, seat: int) -> str:
        """Return what a seat sees, in one line.

        Those are its cards, the board and what they make, all actions, the pot, what each seat has left (a
        star is at one's own, a dash at one that folded), and what may be done now.
        """
        hole, live = self.holes[seat], self.live
        board = f"{shown(self.board)} {made([*hole, *self.board])}, " if self.board else ""
        left = " ".join(
            "-" if one not in live else f"{chips}*" if one == seat else str(chips)
            for one, chips in enumerate(self._state.stacks)
        )
        bets = f"{self.bets}, " if self.bets else ""
        return f"{shown(hole)} {board}{bets}pot {self.pot}, {left}, {self.legal()}"


def paid(put: Sequence[int], places: Mapping[int, int], whole: bool = False) -> list[float]:
    """Return what each seat is paid of the main pot and the side pots, as fractions of chips or whole ones.

    Args:
        put: chips that each seat put in.
        places: strength of those that have not folded, by seat.
        whole: the first winner gets the odd chips, as pokerkit has it.

    >>> paid([10, 50, 50, 5], {0: 1, 1: 7, 2: 7})  # 35 in the main pot
    [35.0, 40.0, 40.0, 0.0]
    """
    found, floor = [0.0] * len(put), 0
    for level in sorted({put[seat] for seat in places}):
        pot = sum(min(chips, level) - min(chips, floor) for chips in put)
        inside = [seat for seat in places if put[seat] >= level]
        best = min(places[seat] for seat in inside)
        winners = [seat for seat in inside if places[seat] == best]
        share, odd = divmod(pot, len(winners)) if whole else (pot / len(winners), 0)
        for seat in winners:
            found[seat] += share
        found[winners[0]] += odd
        floor = level
    return found
