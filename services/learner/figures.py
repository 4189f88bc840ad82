"""Figures: what an update saw of the tokens of a micro-batch, kept for the metrics of its step.

Legend: R sequences of the micro-batch, K of their tokens that the policy sampled, sequence by sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from antiphon.services.learner.objective import TokenMetrics
from antiphon.services.learner.packing import MicroBatch, Packing
from antiphon.services.learner.ranks.group import Ranks

COLUMNS = ("learner_logprobs", "behaviour_logprobs", "applied", "altered", "clipped", "staleness")
"""Of `TokenMetrics` or `MicroBatch`; what is true or false is 1 or 0."""
REFERRED = (*COLUMNS, "reference_logprobs")
"""The same where a reference model scored the tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """What is kept of one micro-batch."""

    rows: Sequence[tuple[str, int]]
    """[R] group id and sample index."""
    counts: Sequence[int]
    """[R] sampled tokens of each sequence; their sum is K."""
    sums: npt.NDArray[np.float64]
    """[3]: its share of the update's loss, the slots of its attention, and how many of these are no
    padding."""
    tokens: npt.NDArray[np.float32]
    """[6, K], one row for each of COLUMNS, or [7, K] of REFERRED."""

    @classmethod
    def of(cls, batch: MicroBatch, loss: float, found: TokenMetrics) -> "Figures":
        """Take the figures of a micro-batch from its loss."""
        real = batch.mask.numpy() > 0
        names = COLUMNS if batch.reference_logprobs is None else REFERRED
        columns = [getattr(found if hasattr(found, name) else batch, name) for name in names]
        tokens = np.stack([column.numpy()[real].astype(np.float32) for column in columns])
        sums = np.array([loss, len(batch.shared.slots.index), batch.shared.real_slots], np.float64)
        return cls(batch.rows, real.sum(1).tolist(), sums, tokens)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one of REFERRED, [K]; the last one only where it is there."""
        found: npt.NDArray[Any] = self.tokens[REFERRED.index(name)]
        return found


def gather_figures(ranks: Ranks, packing: Packing, own: Sequence[Figures]) -> list[Figures]:
    """Return the figures of all micro-batches of an update in their order, on rank 0; elsewhere one's own.

    Each rank calls it with the figures of its micro-batches, dummies left out.
    """
    width = len(REFERRED if packing.referred else COLUMNS)
    listed = [packing.listed(number) for number in range(len(packing.plan.micro_batches))]
    numbers = [[number for number in part if number is not None] for part in packing.plan.ranks]
    flat = np.concatenate([np.zeros(0, np.float32), *(one.tokens.reshape(-1) for one in own)])
    sizes = [sum(width * sum(listed[number][1]) for number in part) for part in numbers]
    sums = ranks.collect(
        np.concatenate([np.zeros(0), *(one.sums for one in own)]), [3 * len(x) for x in numbers]
    )
    columns = ranks.collect(flat, sizes)
    found: dict[int, Figures] = {}
    for part, theirs, tokens in zip(numbers, sums, columns, strict=False):
        at = 0
        for number, three in zip(part, theirs.reshape(-1, 3), strict=True):
            rows, counts = listed[number]
            end = at + width * sum(counts)
            found[number] = Figures(rows, counts, three, tokens[at:end].reshape(width, -1))
            at = end
    return [found[number] for number in sorted(found)] if found else list(own)
