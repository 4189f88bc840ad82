"""Poker: recorded hands, and what a decision and an opponent cost.

`--hands` names files of hands, JSON lines, also gzipped. Hands in PHH notation are replayed: no-limit
hold'em with all cards known by `environments/poker`, each recorded action being legal there, other variants
by pokerkit itself; `replayed` counts those that end with the recorded stacks. Hands with an `acpc` line are
a reference engine's: returns and every decision's legal actions are compared (`reference`, `returns_equal`,
`legal`, `legal_equal`). `decisions_per_s` are decisions per CPU-second of those played by ours, each with its
observation rendered and its legal actions made; `equity_ms` is the CPU time of one decision of the opponent
that plays by equity, heads-up before the flop, the dearest one. Without hands it deals some itself. The last
line is JSON.

    .venv/bin/python benchmarks/poker.py --hands FILE... [--record]
"""

import re
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pokerkit import HandHistory

from antiphon.benchmarks.parts.poker_hands import Row, ours, recorded, rows_of, whole_deck
from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.core.errors import AntiphonError
from antiphon.core.seeds import generator
from antiphon.environments.poker.cards import CARDS, parse
from antiphon.environments.poker.hand import Hand
from antiphon.environments.poker.opponents import by_equity, tight

NOT_REPLAYED = frozenset({"wsop/2023/43/5/03-50-24"})
"""Ids of recorded hands that pokerkit cannot replay: an action in it is not legal, and it says so."""
LEAST_DECISIONS_PER_S, MOST_EQUITY_MS = 2500.0, 5.0
FIELDS = (
    *("variant", "ante_trimming_status", "antes", "blinds_or_straddles", "min_bet", "small_bet", "big_bet"),
    *("bring_in", "starting_stacks", "actions", "players", "finishing_stacks"),
)
"""Of a recorded hand, what pokerkit takes."""


def replay(hand: Hand, actions: Sequence[str]) -> list[list[int]]:
    """Play actions as a policy would, seeing each line; return what was legal at each of them.

    That is, as the reference engine writes it: whether to fold, whether to call, lowest and highest raise.
    """
    legal = []
    for action in actions:
        now, seat = hand.legal(), hand.actor or 0
        hand.seen_by(seat)
        legal.append([int(now.call > 0), 1, now.lowest, now.highest])
        hand.act(action)
    return legal


def reference(row: Row) -> tuple[bool, list[list[int | None]]]:
    """Play a hand of the reference engine; return whether the returns agree, and what was legal."""
    _, _, bets, dealt = row["acpc"].split(":")
    holes, *board = dealt.split("/")
    hand = Hand(whole_deck(parse(holes.replace("|", "") + "".join(board))), [20000, 20000], (50, 100))
    legal: list[list[int | None]] = []
    for street in bets.split("/"):
        before = [20000 - hand.left(seat) for seat in (0, 1)] if hand.board else [0, 0]
        for action in re.findall(r"[fc]|r\d+", street):
            put = before[hand.actor or 0]  # the engine's amounts are of the hand, ours of the street
            mine = f"r{int(action[1:]) - put}" if action[0] == "r" else action
            *can, lowest, highest = replay(hand, [mine])[0]
            legal.append([*can, *([lowest + put, highest + put] if lowest else [None, None])])
    return hand.won() == row["returns"], legal


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, measure, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--hands", type=Path, nargs="*", default=[], help="files of recorded hands")
    parser.add_argument("--data", type=Path, help="a folder with such files, or with a folder poker of them")
    options = parser.parse_args(arguments)
    files = list(options.hands)
    if options.data is not None:
        files += sorted(options.data.glob("poker/*.jsonl*")) or sorted(options.data.glob("*.jsonl*"))
    result: dict[str, Any] = dict.fromkeys(
        ("hands", "replayed", "reference", "returns_equal", "legal", "legal_equal"), 0
    )
    decisions, spent, violated = 0, 0.0, list[str]()
    warnings.simplefilter("ignore")  # of pokerkit, about unknown cards of recorded hands
    for row in (row for path in files for row in rows_of(path)):
        begun = time.process_time()
        if "acpc" in row:
            equal, legal = reference(row)
            count = len(legal)
            right = sum(mine == theirs for mine, theirs in zip(legal, row["legal"], strict=True))
            result["reference"] += 1
            result["returns_equal"] += equal
            result["legal"] += count
            result["legal_equal"] += right
            if not equal or right != count:
                violated.append(f"{row['id']}: returns or legal actions differ from the reference's")
        elif ours(row):
            result["hands"] += 1
            dealt, actions = recorded(row)
            count = len(actions)
            try:
                hand = Hand(whole_deck(dealt), row["starting_stacks"], row["blinds_or_straddles"])
                replay(hand, actions)
                ended = [a + b for a, b in zip(row["starting_stacks"], hand.won(), strict=True)]
                found = "" if ended == row["final_stacks"] else f"ends with {ended}"
            except AntiphonError as error:
                found = str(error)
            result["replayed"] += not found
            if found:
                violated.append(f"{row['id']}: {found}")
        else:
            result["hands"] += 1
            replayed = by_pokerkit(row)
            result["replayed"] += replayed
            if not replayed and row["id"] not in NOT_REPLAYED:
                violated.append(f"{row['id']} does not end with the recorded stacks")
            continue
        spent += time.process_time() - begun
        decisions += count
    if not decisions:
        decisions, spent = played(200)
    result |= {"decisions_per_s": round(decisions / spent, 1), "equity_ms": round(equity_ms(200), 3)}
    slow = [f"decisions_per_s is {result['decisions_per_s']}, below {LEAST_DECISIONS_PER_S}"]
    dear = [f"equity_ms is {result['equity_ms']}, above {MOST_EQUITY_MS}"]
    at_size = (slow if result["decisions_per_s"] < LEAST_DECISIONS_PER_S else []) + (
        dear if result["equity_ms"] > MOST_EQUITY_MS else []
    )
    return finish(result, record=options.record, violated=violated, at_size=at_size)


def by_pokerkit(row: Row) -> bool:
    """Replay a hand of any variant by pokerkit's own notation; tell whether it ends as recorded."""
    try:
        *_, state = HandHistory(**{name: row[name] for name in FIELDS if row.get(name) is not None})
    except (ValueError, KeyError):
        return False
    return [float(chips) for chips in state.stacks] == [float(chips) for chips in row["final_stacks"]]


def deal(number: int) -> Hand:
    """Deal a hand of two seats with 100 big blinds."""
    return Hand(generator("benchmark-poker", number).permutation(len(CARDS)).tolist(), [200, 200], (1, 2))


def played(hands: int) -> tuple[int, float]:
    """Return decisions and CPU-seconds of replaying hands that a scripted player has played before."""
    decisions, spent, random = 0, 0.0, generator("benchmark-poker")
    for number in range(hands):
        hand, actions = deal(number), list[str]()
        while hand.actor is not None:
            actions.append(tight(hand, random))
            hand.act(actions[-1])
        begun = time.process_time()
        replay(deal(number), actions)
        spent, decisions = spent + time.process_time() - begun, decisions + len(actions)
    return decisions, spent


def equity_ms(decisions: int) -> float:
    """Return the CPU time in ms of a decision by equity."""
    random, spent = generator("benchmark-equity"), 0.0
    for number in range(decisions):
        hand = deal(number)
        begun = time.process_time()
        by_equity(hand, random)
        spent += time.process_time() - begun
    return 1000.0 * spent / decisions


if __name__ == "__main__":
    execute(main)
