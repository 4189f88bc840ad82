"""Small Kuhn poker for verifiers 0.4: three cards, two seats, one bet of one chip; played against oneself.

A hand is a task. A seat is told its card and what was done, and says 0 (check, fold) or 1 (bet, call);
anything else counts as 0 and costs half a chip. What a seat wins is its reward, -3 to 2.
"""

import random
from collections.abc import Iterator
from itertools import count

import verifiers.v1 as vf

OVER = {"00", "010", "011", "10", "11"}
FINE = 0.5


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
    """One hand, in which the seats are asked in turn."""

    async def run(self, task: Hand, agents: vf.Agents) -> None:
        """Play a hand."""
        cards = random.Random(task.data.seed).sample([1, 2, 3], 2)
        silent = vf.Task(vf.TaskData(idx=task.data.idx, prompt=None))
        done, wrong = "", [0, 0]
        async with agents.first.interaction(silent) as first, agents.second.interaction(silent) as second:
            while done not in OVER:
                seat = len(done) % 2
                segment = await (first, second)[seat].turn(f"{cards[seat]} {done or '-'}: 0 or 1?")
                said = "" if segment.terminated else segment.last_reply.strip()
                wrong[seat] += said not in ("0", "1")
                done += "1" if said == "1" else "0"
        for seat, trace in enumerate((first.trace, second.trace)):
            trace.record_reward("chips", won(done, cards) * (-1) ** seat - FINE * wrong[seat])
            trace.record_metric("wrong", float(wrong[seat]))


def won(done: str, cards: list[int]) -> int:
    """Return the first seat's chips at a hand's end.

    >>> won("11", [3, 1]), won("011", [1, 3]), won("10", [1, 3]), won("010", [3, 1]), won("00", [2, 1])
    (2, -2, 1, -1, 1)
    """
    if done in ("10", "010"):  # a bet that was not called
        return 1 if done == "10" else -1
    return (2 if done.endswith("11") else 1) * (1 if cards[0] > cards[1] else -1)


__all__ = ["Hands", "Table"]
