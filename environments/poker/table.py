"""Poker: a seat at a table of no-limit hold'em, for the policy to play one hand.

environment.name: poker    (examples/poker.yaml)

A hand is dealt from the prompt's number, each number once to every seat: so prompts come in duplicate deals,
the same cards with the seats exchanged, but where a hand ended before the policy acted and was dealt again.
The reward is what the seat won, in big blinds.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from antiphon.core.errors import ConfigError
from antiphon.core.messages import Ended, Message, Reply, Tool
from antiphon.core.seeds import derive_seed, generator
from antiphon.environments.conversation import user
from antiphon.environments.environment import Problem, SplitEnvironment, checked, key_of
from antiphon.environments.poker.cards import CARDS, parse
from antiphon.environments.poker.hand import Hand, Legal
from antiphon.environments.poker.opponents import OPPONENTS, Opponent

BLINDS = (1, 2)
SEATS, STACKS = (2, 6), (2, 1000)
"""Fewest and most."""
DEALS = 64
"""Hands that are dealt until there is one in which the policy has something to decide."""
_ACTION = re.compile(
    r"\s*(?:(f|fold)|(c|check|call)|(?:r|bet|raise)(?: to)? ?(\d{1,9})|(all.?in))[\s.]*", re.I
)
_RULES = (
    "You play no-limit Texas hold'em at a table of {seats} seats, which are listed from the {first} blind to "
    "the button. Blinds are 1 and 2 chips, each seat begins with {stack}. You are told your cards, the board "
    "and what you hold, all actions so far (f is a fold, c a check or call, rN a bet or raise to N chips on "
    "this street, / begins a street), the pot, what each seat has left (* is you, - has folded), and at last "
    "what you may do. Answer with f, c or rN alone. Anything else is a check, or a fold where there is a bet."
)


class Poker(SplitEnvironment):
    """No-limit hold'em of two to six seats; the policy plays one of them, scripted opponents the others."""

    name = "poker"
    only_compares = True
    rebuildable = True
    tools: tuple[Tool, ...] = ()
    defaults: ClassVar[Mapping[str, Any]] = {
        "seats": 2,
        "stack": 20,
        "opponents": "random",
        "expected": True,
        "rules": True,
        "deck": "",
    }
    """Seats; big blinds that each begins with; names of `OPPONENTS` with commas between, of which each seat
    draws one; whether an all-in earns its average over the cards to come; whether the rules are told; cards
    that each hand begins with, two for each seat and then the board."""

    def __init__(self, parameters: Mapping[str, Any], seed: int, train_size: int, heldout_size: int) -> None:
        """Check the parameters.

        Raises:
            ConfigError: naming the parameter that cannot be played with.
        """
        super().__init__(seed, train_size, heldout_size)
        chosen = checked(parameters, self.defaults)
        self.seats, self.stack = chosen["seats"], chosen["stack"]
        for name, value, (least, most) in (("seats", self.seats, SEATS), ("stack", self.stack, STACKS)):
            if not least <= value <= most:
                unit = "big blinds" if name == "stack" else "seats"
                raise ConfigError(
                    f"environment.parameters.{name}={value} is no number of {unit} from {least} to {most}; "
                    "set one of these"
                )
        self.opponents = [self.opponent(name.strip()) for name in chosen["opponents"].split(",")]
        try:
            self.first_cards = parse(chosen["deck"])
        except ConfigError as error:
            raise ConfigError(f"environment.parameters.deck: {error}") from error
        self.expected, self.tells_rules = chosen["expected"], chosen["rules"]
        self.reward_range = (-float(self.stack), float(self.stack * (self.seats - 1)))

    def opponent(self, name: str) -> Opponent:
        """Return who plays under a name; a subclass may know more of them.

        Raises:
            ConfigError: when nobody does.
        """
        if name not in OPPONENTS:
            raise ConfigError(
                f"environment.parameters.opponents has {name!r:.40}; opponents are {', '.join(OPPONENTS)}"
            )
        return OPPONENTS[name]

    def make(self, split: str, index: int) -> Problem:
        number = derive_seed("poker", split, self.seed, index // self.seats)
        text = f"Hand {number}, seat {index % self.seats + 1} of {self.seats}"
        return Problem(key_of(split, self.seed, index), text, "c")

    def conversation(self) -> "Playing":
        return Playing(self)

    def deal(self, number: int, again: int = 0) -> Hand:
        """Deal a hand by its number; `again` counts those before it that nobody had to play."""
        random = generator("poker-deck", number, again)
        rest = [card for card in range(len(CARDS)) if card not in self.first_cards]
        stacks = [self.stack * BLINDS[1]] * self.seats
        return Hand([*self.first_cards, *random.permutation(rest).tolist()], stacks, BLINDS)

    def rules(self) -> str:
        """Return the rules, as the policy is told them."""
        first = "big" if self.seats == 2 else "small"
        return _RULES.format(seats=self.seats, first=first, stack=self.stack * BLINDS[1])


class Playing:
    """One hand of the policy."""

    def __init__(self, table: Poker) -> None:
        self._table, self._illegal = table, 0

    def begin(self, problem: Problem, seed: int) -> Sequence[Message]:
        number, seat, _ = map(int, re.findall(r"\d+", problem.text))
        self._seat, self._random = seat - 1, generator("poker-opponents", seed)
        known = self._table.opponents
        drawn = self._random.integers(len(known), size=self._table.seats)
        self._others = [known[place] for place in drawn]
        for again in range(DEALS):
            self._hand = self._table.deal(number, again)
            self._play()
            if self._hand.actor is not None:
                break
        else:
            raise ConfigError(
                f"environment.parameters.deck leaves seat {seat} nothing to decide; name fewer cards"
            )
        told = [Message("system", self._table.rules())] if self._table.tells_rules else []
        return [*told, user(self._hand.seen_by(self._seat))]

    def answer(self, reply: Reply) -> Sequence[Message] | Ended:
        legal = self._hand.legal()
        understood = read_action(reply.text, legal)
        self._illegal += understood is None
        action = understood or legal.passive
        self._hand.act(action)
        self._play()
        if self._hand.actor is not None:
            return [user(self._hand.seen_by(self._seat))]
        won = self._hand.won()[self._seat] / BLINDS[1]
        earned = self._hand.expected(self._random)[self._seat] / BLINDS[1] if self._table.expected else won
        parts = {"won": won, "illegal": float(self._illegal)}
        return Ended(earned, parts, "folded" if action == "f" else f"played, {won:+g}")

    def _play(self) -> None:
        """Let the others act until it is the policy's turn or the hand is over."""
        while self._hand.actor not in (None, self._seat):
            self._hand.act(self._others[self._hand.actor or 0](self._hand, self._random))


def read_action(text: str, legal: Legal) -> str | None:
    """Return the action that a reply stands for; None where it is none, or not a legal one.

    >>> legal = Legal(call=2, lowest=4, highest=40)
    >>> [read_action(text, legal) for text in ("f", "Call.", "raise to 12", "all in", "r3", "I fold")]
    ['f', 'c', 'r12', 'r40', None, None]
    """
    found = _ACTION.fullmatch(text)
    if found is None:
        return None
    folded, called, amount, all_in = found.groups()
    raised = f"r{int(amount)}" if amount else f"r{legal.highest}" if all_in and legal.highest else ""
    action = "f" if folded else "c" if called or not raised else raised
    return action if legal.allows(action) else None
