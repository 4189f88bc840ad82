"""Token scores: what an audit found about each token of one completion, summed up by who sampled it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon.core.records import Completion
from antiphon.core.spans import kept_cache_tokens
from antiphon.core.trust.audit import AuthoredSpan, SampleStatistics

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """What an audit found about each token of one completion; arrays [T]."""

    scored: Flags
    missed: Flags
    near: Flags
    gross: Flags
    cut: Flags
    """Top-k or top-p leave the token no probability."""
    difference: npt.NDArray[np.float64]
    """|auditor - worker| logprob, nats; 0 where it was cut off."""
    kept_cache: Flags
    """Sampled over a kept cache: never scored."""

    @classmethod
    def of(cls, completion: Completion) -> "TokenScores":
        """Return the scores of a whole completion of which nothing was scored yet."""
        none = np.zeros(completion.token_ids.size, dtype=bool)
        flags = (none, none.copy(), none.copy(), none.copy(), none.copy())
        return cls(*flags, np.zeros(none.size), kept_cache_tokens(completion))

    def by_author(self, sample_index: int, authors: Sequence[AuthoredSpan]) -> list[SampleStatistics]:
        """Return the statistics of a sample, those of the worker that handed it in first."""
        rest, found = np.ones_like(self.scored), []
        for span in authors:
            if span.sample_index == sample_index:
                tokens = np.zeros_like(rest)
                tokens[span.start : span.stop] = True
                found.append(self._statistics(sample_index, rest & tokens, span.worker_id))
                rest &= ~tokens
        return [self._statistics(sample_index, rest, ""), *found]

    def _statistics(self, sample_index: int, of: Flags, author: str) -> SampleStatistics:
        tokens, missed, near, gross, cut = (
            int((flags & of).sum()) for flags in (self.scored, self.missed, self.near, self.gross, self.cut)
        )
        drift = float(self.difference[of].sum()) / (tokens - cut) if tokens > cut else 0.0
        kept = int((self.kept_cache & of).sum())
        return SampleStatistics(sample_index, tokens, missed, cut, drift, near, gross, author, kept)
