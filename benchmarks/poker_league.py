"""Poker league: what an agent wins from each opponent.

Every deal is played from each seat with the same cards, and the cards that were to come after an all-in count
by their average, so that little luck is left. `--agent` and `--opponents` are names of scripted opponents or
folders of models, such as those that `antiphon export` writes. A model sees what `examples/poker.yaml` shows
it and answers by sampling. With `--models DIR` the agent is DIR/trained: what a run of `examples/poker.yaml`
made of its base. It meets the scripted opponents, that base, DIR/earlier, the run's version after half of the
steps, and DIR/imitator, which has ten times its parameters and imitates a scripted player and, with
`--recorded`, recorded ones. What is not there is trained first, and a match that DIR/matches.jsonl has is not
played again.

For each opponent, heads-up and, of the scripted, in `six_handed` with one kind at the other seats, there are
`mbb_per_hand` (thousandths of a big blind), `low` and `high` (the 95% interval of the mean of deals, normal)
and `hands`; `illegal_share` is the share of a model's decisions that were not legal. With `--recorded` files
of hands, of which models imitate four in five, `agreement` is the share of decisions in the others (folds,
checks or calls, raises) in which a player does what the recorded one did. The script fails when the agent
does not win from the random opponent and the calling station by more than its interval.

    .venv/bin/python benchmarks/poker_league.py [--models DIR] [--recorded FILE...] [--record]
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.benchmarks.parts.poker_hands import of_players, retold
from antiphon.benchmarks.parts.results import PROJECT, benchmark_parser, execute, finish
from antiphon.core.digests import digest_file
from antiphon.core.seeds import generator
from antiphon.environments.poker.cards import CARDS
from antiphon.environments.poker.hand import Hand
from antiphon.environments.poker.opponents import OPPONENTS
from antiphon.environments.poker.table import BLINDS

BEATEN = ("random", "station")
"""Whom an agent must win from."""
CONFIG, BASE = PROJECT / "examples" / "poker.yaml", PROJECT / "examples" / "models" / "poker"
LARGER = ("--careful", "1", "--hidden", "416", "--layers", "4", "--steps", "150", "--batch", "12")
"""Of `scripts/warmstart poker`, a model of 4.8 million parameters; the base has 0.46."""
CHUNK = 64
"""Deals that are played side by side."""
Agent = Callable[[Sequence[Hand], np.random.Generator], list[str]]
"""Acts for the seats whose turn it is."""


@cache
def agent_of(name: str) -> Agent:
    """Return an agent by an opponent's name, or a model's folder."""
    if name in OPPONENTS:
        return lambda hands, random: [OPPONENTS[name](hand, random) for hand in hands]
    import torch

    from antiphon.benchmarks.parts.poker_model import PokerModel

    torch.set_num_threads(1)
    return PokerModel(name)


def play(
    names: tuple[str, str], seats: int, stack: int, seed: int, deals: range
) -> tuple[list[float], int, int]:
    """Play deals from every seat, the second agent at all others.

    Returns:
        What the first agent won in each deal, in mbb per hand; its decisions as a model, and illegal ones.
    """
    hands: list[tuple[Hand, int]] = []
    for deal in deals:
        cards = generator("league", seed, deal).permutation(len(CARDS)).tolist()
        hands += [(Hand(cards, [stack * BLINDS[1]] * seats, BLINDS), seat) for seat in range(seats)]
    random, first = generator("league-chance", seed, deals.start), agent_of(names[0])
    before = [getattr(first, count, 0) for count in ("decisions", "illegal")]
    while any(hand.actor is not None for hand, _ in hands):
        for name, mine in zip(names, (True, False), strict=True):
            asked = [hand for hand, seat in hands if hand.actor is not None and (hand.actor == seat) == mine]
            if asked:
                for hand, action in zip(asked, agent_of(name)(asked, random), strict=True):
                    hand.act(action)
    won = [hand.expected(random)[seat] * 1000.0 / BLINDS[1] for hand, seat in hands]
    decisions, illegal = (getattr(first, count, 0) for count in ("decisions", "illegal"))
    means = np.reshape(won, (-1, seats)).mean(axis=1)
    return means.tolist(), decisions - before[0], illegal - before[1]


def match(
    pool: Executor, names: tuple[str, str], seats: int, hands: int, stack: int, seed: int
) -> dict[str, float]:
    """Return the figures of one match."""
    deals = max(2, hands // seats)
    chunks = [range(at, min(deals, at + CHUNK)) for at in range(0, deals, CHUNK)]
    found = list(pool.map(partial(play, names, seats, stack, seed), chunks))
    won = np.array([one for means, _, _ in found for one in means])
    margin = 1.96 * won.std(ddof=1) / np.sqrt(len(won))
    mean, decisions = float(won.mean()), sum(count for _, count, _ in found)
    figures = {"mbb_per_hand": mean, "low": mean - margin, "high": mean + margin, "hands": seats * len(won)}
    if decisions:
        figures["illegal_share"] = sum(illegal for _, _, illegal in found) / decisions
    return {name: round(float(value), 4) for name, value in figures.items()}


def once(kept: Path | None, played: Callable[[], dict[str, float]], key: Sequence[Any]) -> dict[str, float]:
    """Return what is kept under a key, or play and keep it: a league that was stopped goes on."""
    players = [one if one in OPPONENTS else digest_file(Path(one) / "model.safetensors") for one in key[0]]
    name, known = json.dumps([players, *key[1:]]), dict[str, dict[str, float]]()
    if kept and kept.exists():
        known = dict(json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines())
    if name in known:
        return known[name]
    found = played()
    if kept:
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, found]) + "\n")
    return found


def agreement(agent: str, files: Sequence[Path], most: int) -> dict[str, float]:
    """Return how often an agent does what recorded players did, and of how many decisions.

    Each seat is a conversation of its own, in which the recorded player has answered.
    """
    random, same, count, player = generator("agreement"), 0, 0, agent_of(agent)
    rows = of_players(files, compared=True)
    for at in range(0, len(rows), CHUNK):
        stories = [retold(row) for row in rows[at : at + CHUNK]]
        while asked := [(story, *told) for story in stories if (told := next(story, None))]:
            stories, hands, actions = map(list, zip(*asked, strict=True))
            for hand, mine, action in zip(hands, player(hands, random), actions, strict=True):
                same, count = same + (mine[0] == action[0]), count + 1
                if correct := getattr(player, "correct", None):
                    correct(hand, action)
        if count >= most:
            break
    return {"share": round(same / max(1, count), 4), "decisions": count}


def table(result: Mapping[str, Any]) -> str:
    """Return a league as the rows of a page: mbb per hand with its interval, and agreement."""
    rows = ["|player|two seats|six seats|as recorded|", "|---|---:|---:|---:|"]
    played = {name: found for name, found in result.items() if isinstance(found, dict) and "low" in found}
    for name in dict.fromkeys((result["agent"], *played, *result["agreement"])):
        cells = [
            f"{found['mbb_per_hand']:+,.0f} ({found['low']:+,.0f}..{found['high']:+,.0f})" if found else ""
            for found in (played.get(name), result["six_handed"].get(name))
        ]
        same = result["agreement"].get(name)
        rows.append(f"|{name}|{'|'.join(cells)}|{format(same['share'], '.0%') if same else ''}|")
    return "\n".join(rows)


def train(folder: Path, files: Sequence[Path]) -> None:
    """Make what a table compares, unless it is there."""
    import antiphon

    if not (folder / "imitator").exists():
        words = [str(PROJECT / "scripts" / "warmstart"), "poker", "--out", str(folder / "imitator"), *LARGER]
        words += ["--recorded", *map(str, files)] if files else []
        subprocess.run(words, env={**os.environ, "PYTHON": sys.executable}, check=True)
    if not (folder / "trained").exists():
        run = antiphon.run(str(CONFIG), home=folder / "home")
        run.export(folder / "earlier", f"v{run.config.run.steps // 2}")
        run.export(folder / "trained", f"v{run.config.run.steps}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--agent", default="equity", help="an opponent's name or a model's folder")
    parser.add_argument("--opponents", nargs="+", default=[*OPPONENTS], help="the same, of the others")
    parser.add_argument("--models", type=Path, help="folder of the models that are compared")
    parser.add_argument("--hands", type=int, default=20_000, help="hands of each match of two seats")
    parser.add_argument("--six", type=int, default=0, help="hands of each match of six seats")
    parser.add_argument("--stack", type=int, default=20, help="big blinds")
    parser.add_argument("--seed", type=int, default=0, help="names the deals")
    parser.add_argument("--recorded", type=Path, nargs="*", default=[], help="files of recorded hands")
    parser.add_argument("--decisions", type=int, default=1_000, help="of recorded hands that are compared")
    options = parser.parse_args(arguments)
    kept = options.models and options.models / "matches.jsonl"
    if options.models:
        train(options.models, options.recorded)
        options.agent = str(options.models / "trained")
        options.opponents = [
            *options.opponents,
            str(BASE),
            *(str(options.models / name) for name in ("earlier", "imitator")),
        ]
    players = dict.fromkeys([options.agent, *options.opponents])
    agent, names = options.agent, {one: "base" if one == str(BASE) else Path(one).name for one in players}
    result: dict[str, Any] = {"agent": names[agent], "six_handed": {}, "agreement": {}}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for seats, hands, found in ((2, options.hands, result), (6, options.six, result["six_handed"])):
            for other in (
                one for one in players if one != agent and hands and (seats == 2 or one in OPPONENTS)
            ):
                settings = (agent, other), seats, hands, options.stack, options.seed
                named = found[names[other]] = once(kept, partial(match, pool, *settings), settings)
                print(f"{seats} seats, against {names[other]}: {named}", flush=True)
    for one in players if options.recorded else ():
        share = partial(agreement, one, options.recorded, options.decisions)
        files = [digest_file(file) for file in options.recorded]
        named = result["agreement"][names[one]] = once(kept, share, ((one,), files, options.decisions))
        print(f"{names[one]} does what recorded players did: {named}", flush=True)
    print(table(result), flush=True)
    lost = [
        f"{names[agent]} wins {result[name]['mbb_per_hand']:.0f} mbb/hand from {name}, not surely above 0"
        for name in BEATEN
        if name in result and result[name]["low"] <= 0
    ]
    return finish(result, record=options.record, at_size=lost)


if __name__ == "__main__":
    execute(main)
