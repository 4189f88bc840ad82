"""Poker: a base model that plays hands of no-limit hold'em, the same bytes on every repetition.

It imitates scripted players of `environments/poker`: the tight one in some of the hands and the one that
plays at random in most, so that reinforcement has something to find. Shape and steps may be set, for a larger
model that imitates the better one alone, or recorded players in every other hand.

    scripts/warmstart poker --out DIR [--careful 1 --hidden 416 --layers 4 --steps N --recorded FILE...]
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from antiphon.benchmarks.parts.poker_hands import of_players, retold
from antiphon.benchmarks.parts.warmstart.turns import (
    Demonstration,
    Shown,
    Stage,
    TurnsRecipe,
    show_progress,
    warmstart_turns,
)
from antiphon.core.messages import Message
from antiphon.environments.poker.opponents import OPPONENTS
from antiphon.environments.poker.table import Poker

MOST_ACTIONS = 4
"""Of the player who is imitated; longer hands are cut."""


def playing(teacher: str) -> Shown:
    """Return what shows a hand of two seats: played by a teacher when careful, else at random."""
    table = Poker({"rules": False}, 0, 1, 1)

    def show(care: str, rng: np.random.Generator) -> Demonstration:
        player = OPPONENTS[teacher if care == "careful" else "random"]
        seat = int(rng.integers(2))
        hand, turns = table.deal(int(rng.integers(2**62))), list[tuple[str, str]]()
        other = OPPONENTS[("random", "station", "tight")[rng.integers(3)]]
        while hand.actor is not None and len(turns) < MOST_ACTIONS:
            if hand.actor != seat:
                hand.act(other(hand, rng))
                continue
            turns.append((hand.seen_by(seat), action := player(hand, rng)))
            hand.act(action)
        return shown(turns) if turns else show(care, rng)

    return show


def recorded(files: Sequence[Path]) -> Shown:
    """Return what shows a seat of a recorded hand."""
    rows = of_players(files, compared=False)

    def show(care: str, rng: np.random.Generator) -> Demonstration:
        row = rows[rng.integers(len(rows))]
        seat = int(rng.integers(len(row["starting_stacks"])))
        turns = [(hand.seen_by(seat), action) for hand, action in retold(row) if hand.actor == seat]
        turns = turns[:MOST_ACTIONS]
        return shown(turns) if turns else show(care, rng)

    return show


def shown(turns: Sequence[tuple[str, str]]) -> Demonstration:
    """Return the conversation of a seat from what it saw and did."""
    answers = [Message("user", line) for line, _ in turns[1:]]
    replies = [action for _, action in turns]
    return Demonstration(turns[0][0], (), tuple(zip(replies, [*answers, None], strict=True)))


def main() -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="scripts/warmstart poker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="model directory to write")
    parser.add_argument("--teacher", choices=sorted(OPPONENTS), default="tight", help="whom it imitates")
    parser.add_argument("--careful", type=float, default=0.4, help="share of hands that it plays")
    parser.add_argument("--hidden", type=int, default=128, help="size of the hidden states")
    parser.add_argument("--layers", type=int, default=3, help="number of layers")
    parser.add_argument("--steps", type=int, default=120, help="of training")
    parser.add_argument("--batch", type=int, default=32, help="hands of a step")
    parser.add_argument("--recorded", type=Path, nargs="*", default=[], help="files of recorded hands")
    options = parser.parse_args()
    stages = (Stage(options.steps, 6e-3, careful=options.careful, hasty=1.0 - options.careful),)
    recipe = TurnsRecipe()
    shape = replace(
        recipe.shape, hidden_size=options.hidden, layers=options.layers, mlp_size=2 * options.hidden
    )
    recipe = replace(recipe, stages=stages, shape=shape, batch=options.batch)
    tasks = (playing(options.teacher), *([recorded(options.recorded)] if options.recorded else []))
    digest = warmstart_turns(recipe, options.out, show_progress, tasks)
    print(f"{options.out} has weights of digest {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
