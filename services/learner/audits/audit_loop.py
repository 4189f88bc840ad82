"""Audit loop: takes groups from the coordinator one after the other and tells it what an auditor found."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.core.records import Completion, GroupToAudit
from antiphon.core.spans import kept_cache_tokens
from antiphon.core.trust.audit import AuthoredSpan, SampleStatistics
from antiphon.net.rpc.retry import MOST_PAUSE_S

PULL_S = 20.0
"""How long one question for groups stays open at the coordinator."""
GROUPS_PER_PULL = 4

_NOTHING: Sequence[SampleStatistics] = ()
_log = structlog.get_logger(__name__)


Examine = Callable[[GroupToAudit], Sequence[SampleStatistics]]
"""Scores a group again, on one thread, and returns what the scores say for each sample and each worker that
sampled some of it; raises UnavailableError when no version of the group is kept any more."""


async def audit_forever(coordinator: Coordinator, examine: Examine, client_id: str) -> None:
    """Examine what the coordinator hands out, until cancelled; it may come and go meanwhile.

    Whatever goes wrong with a group, the coordinator is told why it was not audited, and the next follows.
    """
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "audit") as thread:
        while True:
            try:
                for group in await coordinator.pull_for_audit(client_id, GROUPS_PER_PULL, PULL_S):
                    group_id, samples, reason = group.submission.group_id, _NOTHING, ""
                    try:
                        samples = await loop.run_in_executor(thread, examine, group)
                    except UnavailableError as error:
                        reason = str(error)
                    except Exception as error:  # noqa: BLE001 - it is told to the coordinator, which counts it
                        _log.error("audit.broke", group=group_id, exc_info=error)
                        reason = f"the auditor failed: {error!r}"
                    await coordinator.submit_audit(group_id, samples, reason=reason)
            except Exception as error:  # noqa: BLE001 - that audits end for good is what a liar hopes for
                _log.warning(
                    "audit.failed", reason=repr(error), exc_info=not isinstance(error, AntiphonError)
                )
                await asyncio.sleep(MOST_PAUSE_S)


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
