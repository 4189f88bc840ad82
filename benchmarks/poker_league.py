"""Poker league: what an agent wins from each opponent, heads-up, over duplicate deals.

Every deal is played twice with the seats exchanged and the same cards, and the cards that were to come
after an all-in count by their average, so that little luck is left. `--agent` is a scripted opponent's name
or a model's folder, such as one that `antiphon export` wrote; so earlier versions of a policy are opponents
too, by `--opponents`. A model sees what `examples/poker.yaml` shows it and answers by sampling. For each
opponent the last line, JSON, has `mbb_per_hand` (thousandths of a big blind), `low` and `high` (the 95%
interval of the mean of deals, normal) and `hands`; `illegal_share` is the share of a model's decisions that
were not legal. With `--recorded` files of hands `agreement` is the share of decisions (folds, checks or
calls, raises) in which the agent does what the recorded player did. The script fails when the agent does
not win from the random opponent and the calling station by more than its interval.

    .venv/bin/python benchmarks/poker_league.py [--agent NAME_OR_FOLDER] [--recorded FILE...] [--record]
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from antiphon.benchmarks.parts.results import benchmark_parser, execute, finish
from antiphon.benchmarks.poker import ours, recorded, rows_of, whole_deck
from antiphon.core.config import RunConfig
from antiphon.core.seeds import generator
from antiphon.environments.conversation import user
from antiphon.environments.poker.cards import CARDS
from antiphon.environments.poker.hand import Hand
from antiphon.environments.poker.opponents import OPPONENTS
from antiphon.environments.poker.table import BLINDS, read_action
from antiphon.models.rendering import Renderer

BEATEN = ("random", "station")
"""Whom an agent must win from."""
CHUNK = 128
"""Deals that are played side by side."""
REPLY_TOKENS = 6
Agent = Callable[[Sequence[Hand], np.random.Generator], list[str]]
"""Acts for the seats whose turn it is."""


class ModelAgent:
    """A model that plays hands as conversations."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        settings = {"path": folder, "renderer": "qwen3", "template_arguments": {"thinking_retention": "all"}}
        self._renderer = Renderer.load(RunConfig.model_validate({"model": settings}), turns=True)
        self._model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self._told = WeakKeyDictionary[Hand, dict[int, tuple[tuple[int, ...], tuple[int, ...]]]]()
        self.decisions = self.illegal = 0

    def __call__(self, hands: Sequence[Hand], random: np.random.Generator) -> list[str]:
        import torch

        rows = []
        for hand in hands:
            seat, told = hand.actor or 0, self._told.setdefault(hand, {})
            said = user(hand.seen_by(seat))
            if seat in told:
                context, reply = told[seat]
                rows.append((*context, *reply, *self._renderer.following(context, reply, [said], ())))
            else:
                rows.append(tuple(self._renderer.opening([said], ())))
        longest = max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        torch.manual_seed(int(random.integers(2**62)))
        with torch.inference_mode():
            made = self._model.generate(ids, attention_mask=mask, max_new_tokens=REPLY_TOKENS, do_sample=True)
        actions = []
        for hand, row, new in zip(hands, rows, made[:, longest:].tolist(), strict=True):
            end = self._renderer.codec.end_token_id
            reply = new[: new.index(end)] if end in new else new
            self._told[hand][hand.actor or 0] = row, (*reply, end)
            action = read_action(self._renderer.codec.decode(reply), hand.legal())
            self.decisions, self.illegal = self.decisions + 1, self.illegal + (action is None)
            actions.append(action or hand.legal().passive)
        return actions

    def correct(self, hand: Hand, action: str) -> None:
        """Let the last reply of the seat whose turn it is have been another one."""
        codec, told, seat = self._renderer.codec, self._told[hand], hand.actor or 0
        told[seat] = told[seat][0], (*codec.encode(action, add_special_tokens=False), codec.end_token_id)


@cache
def agent_of(name: str) -> Agent:
    """Return an agent by an opponent's name, or a model's folder."""
    if name not in OPPONENTS:
        return ModelAgent(name)
    return lambda hands, random: [OPPONENTS[name](hand, random) for hand in hands]


def play(names: tuple[str, str], stack: int, seed: int, deals: range) -> tuple[list[float], int, int]:
    """Play deals with both seatings.

    Returns:
        What the first agent won in each deal, in mbb per hand; its decisions as a model, and illegal ones.
    """
    hands: list[tuple[Hand, int]] = []
    for deal in deals:
        cards = generator("league", seed, deal).permutation(len(CARDS)).tolist()
        hands += [(Hand(cards, [stack * BLINDS[1]] * 2, BLINDS), seat) for seat in (0, 1)]
    random = generator("league-chance", seed, deals.start, *names)
    if isinstance(first := agent_of(names[0]), ModelAgent):
        first.decisions = first.illegal = 0
    while any(hand.actor is not None for hand, _ in hands):
        for name, mine in zip(names, (True, False), strict=True):
            asked = [hand for hand, seat in hands if hand.actor is not None and (hand.actor == seat) == mine]
            if asked:
                for hand, action in zip(asked, agent_of(name)(asked, random), strict=True):
                    hand.act(action)
    won = [hand.expected(random)[seat] * 1000.0 / BLINDS[1] for hand, seat in hands]
    pairs = [(a + b) / 2 for a, b in zip(won[::2], won[1::2], strict=True)]
    return pairs, getattr(first, "decisions", 0), getattr(first, "illegal", 0)


def match(agent: str, opponent: str, hands: int, stack: int, seed: int) -> dict[str, float]:
    """Return the figures of one match."""
    deals = max(2, hands // 2)
    chunks = [range(at, min(deals, at + CHUNK)) for at in range(0, deals, CHUNK)]
    with ProcessPoolExecutor(min(len(chunks), os.cpu_count() or 1)) as pool:
        found = list(pool.map(partial(play, (agent, opponent), stack, seed), chunks))
    won = np.array([one for pairs, _, _ in found for one in pairs])
    margin = 1.96 * won.std(ddof=1) / np.sqrt(len(won))
    mean, decisions = float(won.mean()), sum(count for _, count, _ in found)
    figures = {"mbb_per_hand": mean, "low": mean - margin, "high": mean + margin, "hands": 2.0 * len(won)}
    if decisions:
        figures["illegal_share"] = sum(illegal for _, _, illegal in found) / decisions
    return {name: round(float(value), 4) for name, value in figures.items()}


def agreement(agent: str, files: Sequence[Path], decisions: int) -> dict[str, float]:
    """Return how often an agent does what recorded players did, and of how many decisions.

    Each seat is a conversation of its own, in which the recorded player has answered. Chips are scaled to the
    blinds that models know, and rounded; a hand ends here where an action is not legal then.
    """
    random, same, count, player = generator("agreement"), 0, 0, agent_of(agent)
    for row in (row for path in files for row in rows_of(path) if "variant" in row and ours(row)):
        cards, actions = recorded(row)
        scale = BLINDS[1] / row["blinds_or_straddles"][1]
        stacks = [max(BLINDS[1], round(chips * scale)) for chips in row["starting_stacks"]]
        hand = Hand(whole_deck(cards), stacks, BLINDS)
        for action in actions:
            if hand.actor is None:
                break
            legal = hand.legal()
            if action[0] == "r" and legal.lowest:
                action = f"r{min(max(round(int(action[1:]) * scale), legal.lowest), legal.highest)}"
            if not legal.allows(action):
                break
            same += player([hand], random)[0][0] == action[0]
            count += 1
            if isinstance(player, ModelAgent):
                player.correct(hand, action)
            hand.act(action)
        if count >= decisions:
            break
    return {"share": round(same / max(1, count), 4), "decisions": count}


def main(arguments: Sequence[str] | None = None) -> int:
    """Play, check and print; return the exit status."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--agent", default="equity", help="an opponent's name or a model's folder")
    parser.add_argument("--opponents", nargs="+", default=[*OPPONENTS], help="the same, of the others")
    parser.add_argument("--hands", type=int, default=20_000, help="hands of each match")
    parser.add_argument("--stack", type=int, default=20, help="big blinds")
    parser.add_argument("--seed", type=int, default=0, help="names the deals")
    parser.add_argument("--recorded", type=Path, nargs="*", default=[], help="files of recorded hands")
    parser.add_argument("--decisions", type=int, default=5_000, help="of recorded hands that are compared")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"agent": options.agent}
    for opponent in options.opponents:
        if opponent != options.agent:
            result[opponent] = match(options.agent, opponent, options.hands, options.stack, options.seed)
            print(f"{options.agent} against {opponent}: {result[opponent]}", flush=True)
    if options.recorded:
        result["agreement"] = agreement(options.agent, options.recorded, options.decisions)
    lost = [
        f"{options.agent} wins {result[name]['mbb_per_hand']:.0f} mbb/hand from {name}, not surely above 0"
        for name in BEATEN
        if name in result and result[name]["low"] <= 0
    ]
    return finish(result, record=options.record, at_size=lost)


if __name__ == "__main__":
    execute(main)
