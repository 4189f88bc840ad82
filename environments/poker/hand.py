"""Hand: one hand of no-limit hold'em by pokerkit's rules, all its cards given beforehand.

Seats count from the small blind on, so that the last one is the button; of two seats the first is the big
blind and the button is the small one. Actions are written as in the annual computer poker competition: "f"
folds, "c" checks or calls, "r300" bets or raises to 300 chips on this street.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from pokerkit import Automation, Card, NoLimitTexasHoldem, StandardHighHand, State
from pokerkit import Hand as Made

from antiphon.core.errors import ContractError
from antiphon.environments.poker.cards import CARDS, draws, made, shown, strength

_CARDS = tuple(next(Card.parse(name)) for name in CARDS)
_OURS = (Automation.HOLE_DEALING, Automation.BOARD_DEALING, Automation.CARD_BURNING)
_AUTOMATED = tuple(one for one in Automation if one not in _OURS)
_NUMBERS = {card: number for number, card in enumerate(_CARDS)}
RUNOUTS = 100
"""Boards over which the chips of an all-in are averaged, where two cards or more are to come."""


class _Strength(Made):
    """Seven cards as pokerkit compares them, by the faster evaluation; fewer cards are no hand yet."""

    lookup, low = StandardHighHand.lookup, False

    def __init__(self, place: int) -> None:
        self.place = place

    @classmethod
    def from_game(cls, hole_cards: Sequence[Card], board_cards: Sequence[Card] = ()) -> "_Strength":  # type: ignore[override]
        if len(cards := (*hole_cards, *board_cards)) < 7:
            raise ValueError("a hand has seven cards")
        return cls(strength([_NUMBERS[card] for card in cards]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Strength) and self.place == other.place

    def __lt__(self, other: Made) -> bool:
        return isinstance(other, _Strength) and self.place > other.place

    def __hash__(self) -> int:
        return self.place


class _Game(NoLimitTexasHoldem):
    hand_types: ClassVar[tuple[type[Made], ...]] = (_Strength,)


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
        self.seats, self.stacks, self.big_blind = len(stacks), tuple(stacks), blinds[1]
        self.holes = [list(deck[2 * seat : 2 * seat + 2]) for seat in range(self.seats)]
        self.board: list[int] = []
        self._rest = list(deck[2 * self.seats :])
        self.bets = ""
        """All actions so far; "/" begins a street."""
        self._legal: Legal | None = None
        self._all_in: tuple[list[int], list[int], list[int]] | None = None
        self._state: State = _Game(_AUTOMATED, True, 0, tuple(blinds), blinds[1])(self.stacks, self.seats)
        for hole in self.holes:
            self._state.deal_hole([_CARDS[card] for card in hole])

    @property
    def actor(self) -> int | None:
        """The seat whose turn it is; None once the hand is over."""
        return self._state.actor_index

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
        state = self._state
        if self.actor is None or not self.legal().allows(action):
            raise ContractError(f"the action {action!r:.20} is not legal after {self.bets!r} of this hand")
        if action == "f":
            state.fold()
        elif action == "c":
            state.check_or_call()
        else:
            state.complete_bet_or_raise_to(int(action[1:]))
        self.bets += action
        self._legal = None
        if state.status and state.actor_index is None:
            self._deal()

    def _deal(self) -> None:
        """Deal the next street, or all that is left when nobody can bet any more."""
        put = [had - has for had, has in zip(self.stacks, self._state.stacks, strict=True)]
        before, live, rest = list(self.board), self.live, list(self._rest)
        while self._state.status and self.actor is None:
            count = 1 if self.board else 3
            new, self._rest = self._rest[:count], self._rest[count:]
            self.board += new
            self.bets += "/"
            self._state.burn_card("??")
            self._state.deal_board([_CARDS[card] for card in new])
        if self.actor is None:
            self._all_in = put, live, [*before, *rest]
            self._known = len(before)

    def won(self) -> list[float]:
        """Return the chips that each seat has won, less what it put in, once the hand is over."""
        return [float(has - had) for had, has in zip(self.stacks, self._state.stacks, strict=True)]

    def expected(self, random: np.random.Generator) -> list[float]:
        """Return the chips of each seat, those of an all-in averaged over the cards that were to come.

        That is what `won` is on average, given all that was dealt and done before: a hand that was all in
        counts without the luck of its last cards.
        """
        if self._all_in is None:
            return self.won()
        put, live, cards = self._all_in
        board, unseen = cards[: self._known], cards[self._known :]
        missing = 5 - len(board)
        drawn = [[card] for card in unseen] if missing == 1 else draws(unseen, missing, RUNOUTS, random)
        total, times = np.zeros(self.seats), 0
        for more in drawn:
            places = {seat: strength([*self.holes[seat], *board, *more]) for seat in live}
            total += paid(put, places)
            times += 1
        return [float(chips) for chips in total / times - np.array(put)]

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


def paid(put: Sequence[int], places: dict[int, int]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return what each seat is paid of the main pot and the side pots, fractions of chips included.

    Args:
        put: chips that each seat put in.
        places: strength of those that have not folded, by seat.

    >>> paid([10, 50, 50, 5], {0: 1, 1: 7, 2: 7}).tolist()  # 35 in the main pot
    [35.0, 40.0, 40.0, 0.0]
    """
    found, floor = np.zeros(len(put)), 0
    for level in sorted({put[seat] for seat in places}):
        pot = sum(min(chips, level) - min(chips, floor) for chips in put)
        inside = [seat for seat in places if put[seat] >= level]
        best = min(places[seat] for seat in inside)
        winners = [seat for seat in inside if places[seat] == best]
        found[winners] += pot / len(winners)
        floor = level
    return found
