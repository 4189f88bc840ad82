"""Small Kuhn poker for verifiers 0.4: three cards, two seats, one bet of one chip; played against oneself.

A hand is a task. Each seat hears its card and what was done, and answers 0 (check, fold) or 1 (bet, call).
Chips won or lost are the rewards, -2 to 2; an answer that is neither loses the ante.
"""

import random
from collections.abc import Iterator
from itertools import count

import verifiers.v1 as vf

OVER = {"00": 1, "010": 1, "011": 2, "10": 1, "11": 2}
"""What was done, at a hand's end -> chips at stake for each."""


class HandData(vf.TaskData):
    """A hand; its cards follow from `seed`."""

    seed: int


class Hand(vf.Task[HandData]):
    """A hand."""


class Hands(vf.Taskset[Hand, vf.TasksetConfig]):
    """Hands without end."""

    INFINITE = True

    def load(self) -> Iterator[Hand]:
        """Deal."""
        for number in count():
            yield Hand(HandData(seed=number, prompt=None))


class TableConfig(vf.EnvConfig):
    """Two seats."""

    first: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    second: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})


class Table(vf.Env[TableConfig]):
    """One hand, in which both seats are asked in turn."""

    async def run(self, task: Hand, agents: vf.Agents) -> None:
        """Play a hand."""
        cards = random.Random(task.data.seed).sample([1, 2, 3], 2)
        silent = vf.Task(vf.TaskData(idx=task.data.idx, prompt=None))
        done, wrong = "", None
        async with agents.first.interaction(silent) as first, agents.second.interaction(silent) as second:
            while done not in OVER and wrong is None:
                seat = len(done) % 2
                told = f"Card {cards[seat]}. Done {done or '-'}. 0 or 1?"
                segment = await (first, second)[seat].turn(told)
                said = "" if segment.terminated else segment.last_reply.strip()
                if said in ("0", "1"):
                    done += said
                else:
                    wrong = seat
        for seat, trace in enumerate((first.trace, second.trace)):
            trace.record_reward("chips", float(won(done, cards, wrong) * (-1) ** seat))
            trace.record_metric("wrong", float(wrong == seat))


def won(done: str, cards: list[int], wrong: int | None) -> int:
    """Return the first seat's chips at a hand's end.

    >>> won("11", [3, 1], None), won("10", [1, 3], None), won("", [3, 1], 0)
    (2, 1, -1)
    """
    if wrong is not None:
        return -1 if wrong == 0 else 1
    if done in ("10", "010"):  # a bet that was not called
        return 1 if done == "10" else -1
    return OVER[done] * (1 if cards[0] > cards[1] else -1)


__all__ = ["Hands", "Table"]
