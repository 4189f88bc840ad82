"""Poker hands: files of recorded ones, and how those in PHH notation were played, decision by decision."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from antiphon.environments.poker.cards import CARDS, parse
from antiphon.environments.poker.hand import Hand
from antiphon.environments.poker.table import BLINDS

COMPARED = 5
"""Of as many recorded hands one is kept for comparisons; models may imitate the others."""
Row = dict[str, Any]


def rows_of(path: Path) -> Iterator[Row]:
    """Yield the hands of a file of JSON lines, which may be gzipped.

    Raises:
        SystemExit: when it cannot be read, or a line is no hand; it is named.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                row = json.loads(line)
                if not {"acpc", "variant"} & row.keys():
                    raise SystemExit(f"line {number} of {path} is no hand: it has no acpc and no variant")
                yield row
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(f"{path} cannot be read as hands, one JSON object a line: {error}") from error


def ours(row: Row) -> bool:
    """Tell whether a recorded hand is of the game that `environments/poker` plays."""
    blinds = row.get("blinds_or_straddles", ())  # games with a bring-in have none
    return (
        row.get("variant") == "NT"
        and not any([*row["antes"], *blinds[2:]])
        and row["min_bet"] == blinds[1]
        and all(isinstance(chips, int) for chips in row["starting_stacks"])
        and not any("." in action for action in row["actions"])
        and 2 <= len(row["starting_stacks"]) <= 6
        and not any("?" in action for action in row["actions"] if action.startswith("d "))
    )


def of_players(paths: Sequence[Path], compared: bool) -> list[Row]:
    """Return the hands of our game, those to compare with or all others."""
    rows = [row for path in paths for row in rows_of(path) if ours(row)]
    return [row for place, row in enumerate(rows) if (place % COMPARED == 0) == compared]


def whole_deck(dealt: Sequence[int]) -> list[int]:
    """Return cards that were dealt and behind them all others."""
    return [*dealt, *(card for card in range(len(CARDS)) if card not in dealt)]


def recorded(row: Row) -> tuple[list[int], list[str]]:
    """Return the cards of a hand in PHH notation as they were dealt, holes by seat, and the actions."""
    holes, board, actions = dict[int, list[int]](), list[int](), list[str]()
    for action in row["actions"]:
        words = action.split()
        if words[:2] == ["d", "dh"]:
            holes[int(words[2][1:])] = parse(words[3])
        elif words[:2] == ["d", "db"]:
            board += parse(words[2])
        elif words[1] in ("f", "cc", "cbr"):
            actions.append(f"r{words[2]}" if words[1] == "cbr" else words[1][0])
    return [card for seat in sorted(holes) for card in holes[seat]] + board, actions


def retold(row: Row) -> Iterator[tuple[Hand, str]]:
    """Yield a recorded hand before each of its actions, and the action.

    Chips are scaled to the blinds that models know, and rounded; a hand ends where an action is not legal
    then.
    """
    cards, actions = recorded(row)
    scale = BLINDS[1] / row["blinds_or_straddles"][1]
    stacks = [max(BLINDS[1], round(chips * scale)) for chips in row["starting_stacks"]]
    hand = Hand(whole_deck(cards), stacks, BLINDS)
    for action in actions:
        if hand.actor is None:
            return
        legal = hand.legal()
        if action[0] == "r" and legal.lowest:
            action = f"r{min(max(round(int(action[1:]) * scale), legal.lowest), legal.highest)}"
        if not legal.allows(action):
            return
        yield hand, action
        hand.act(action)
