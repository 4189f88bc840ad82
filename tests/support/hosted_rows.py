"""Rows of hosted trajectories at workers that sample on whatever they are told, and a coordinator that asks
about their turns."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from antiphon.core.records import TurnAnswer, TurnLimits, TurnToAnswer, VersionSpan
from antiphon.core.seeds import derive_seed
from antiphon.system.wakeup import Wakeup

LIMITS = TurnLimits(turns=8, tokens=6000, context=3000)


@dataclass
class Row:
    """A trajectory at its worker, which samples on whatever it is told."""

    name: str
    policy: Callable[[str, Sequence[int]], list[int]]
    tokens: list[int] = field(default_factory=list)
    observed: list[tuple[int, int]] = field(default_factory=list)
    breaks: list[int] = field(default_factory=list)
    over: TurnAnswer | None = None
    sampled: list[tuple[int, ...]] = field(default_factory=list)
    """The context of each turn."""

    def question(self) -> TurnToAnswer:
        group_id, _, sample = self.name.rpartition("/")
        sampled = np.ones(len(self.tokens), dtype=bool)
        for start, stop in self.observed:
            sampled[start:stop] = False
        bounds = [*(b for a, b in self.observed), len(self.tokens)]
        stops = [*(a for a, b in self.observed[1:]), len(self.tokens)]
        return TurnToAnswer(
            group_id,
            int(sample),
            f"{derive_seed(*self.tokens, 'at', *(x for one in self.observed for x in one)):032x}",
            f"train-0-{group_id.removeprefix('g')}",
            (),
            np.array(self.tokens, dtype=np.int32),
            tuple(self.observed),
            LIMITS,
            logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32),
            spans=tuple(VersionSpan(3, a, b) for a, b in zip(bounds, stops, strict=False) if a < b),
            breaks=tuple(self.breaks),
        )

    def hear(self, answer: TurnAnswer) -> None:
        if answer.finish_reason is not None:
            self.over = answer
            return
        start = len(self.tokens)
        if answer.fresh:
            self.breaks.append(start)
        self.tokens += answer.token_ids
        self.observed.append((start, len(self.tokens)))
        context = tuple(self.tokens[self.breaks[-1] if self.breaks else 0 :])
        self.sampled.append(context)
        self.tokens += self.policy(self.name, context)


class AskingCoordinator:
    """Asks about the turns of groups until each trajectory is over; some questions come twice."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = {row.name: row for row in rows}
        self._out: set[str] = set()
        """Names and digests of questions that were handed out once."""
        self._changed = Wakeup()
        self.over = asyncio.Event()

    async def pull_turns(self, client_id: str, limit: int, wait_s: float) -> Sequence[TurnToAnswer]:
        asked = [row.question() for row in self.rows.values() if row.over is None]
        new = [one for one in asked if f"{one.sample_index}{one.row_digest}{one.group_id}" not in self._out]
        if not new:
            await self._changed.wait(wait_s)
            return []
        self._out |= {f"{one.sample_index}{one.row_digest}{one.group_id}" for one in new}
        return [*new, *new[:1]]

    async def submit_turns(self, answers: Sequence[TurnAnswer]) -> None:
        for answer in answers:
            row = self.rows[f"{answer.group_id}/{answer.sample_index}"]
            if row.over is None and row.question().row_digest == answer.row_digest:
                row.hear(answer)
        self._changed.notify()
        if all(row.over is not None for row in self.rows.values()):
            self.over.set()

    def forget(self) -> None:
        """Hand everything out again, as when the deadlines have passed."""
        self._out.clear()
        self._changed.notify()
