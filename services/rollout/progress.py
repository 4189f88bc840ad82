"""Progress: what a worker's unfinished groups have, in pieces that the coordinator does not keep yet.

Between two heartbeats only the difference travels. Where the engine is in the middle of a long step,
or one beat would grow too large, the rest simply goes with the next.
"""

from collections.abc import Sequence

from antiphon.core.records import LeaseProgress
from antiphon.services.rollout.engine_thread import EngineThread
from antiphon.services.rollout.group import GroupInFlight

MOST_BEAT_TOKENS = 1 << 18
"""Tokens after which a beat takes no further group: 2 MiB, far below the largest message."""
PACE_MEMORY = 0.8
"""Share of its past that the measured pace keeps with each new completion."""


class Pace:
    """Seconds per token of one completion, as this worker measured them lately."""

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None
        """None before the first completion."""

    def measure(self, seconds: float, tokens: int) -> None:
        """Take in a completion that needed `seconds` for `tokens` tokens."""
        if tokens < 1:
            return
        new, old = seconds / tokens, self.seconds_per_token
        self.seconds_per_token = new if old is None else PACE_MEMORY * old + (1 - PACE_MEMORY) * new


async def gather(
    groups: Sequence[GroupInFlight], engine: EngineThread, timeout_s: float, *, stop: bool = False
) -> tuple[LeaseProgress, ...]:
    """Return what was sampled of some groups and is not kept by the coordinator.

    Args:
        groups: groups in flight, the most urgent first.
        engine: samples them.
        timeout_s: longest wait for the engine's step.
        stop: end sampling them in the same moment.
    """
    known = {request_id: count for group in groups for request_id, count in group.known().items()}
    told = await engine.progress(known, timeout_s, stop) if known else []
    if told is None:
        return ()
    by_request = {progress.request_id: progress for progress in told}
    found: list[LeaseProgress] = []
    tokens = 0
    for group in groups:
        pieces = group.pieces(by_request)
        size = sum(int(piece.token_ids.size) for piece in pieces)
        if not pieces or (found and tokens + size > MOST_BEAT_TOKENS):
            continue
        found.append(LeaseProgress(group.lease.lease_id, tuple(pieces)))
        tokens += size
    return tuple(found)


def tokens_left(group: GroupInFlight, progress: Sequence[LeaseProgress]) -> int:
    """Return the most tokens that the slowest completion of a group can still get."""
    reached = dict(group.kept)
    for lease in progress:
        if lease.lease_id == group.lease.lease_id:
            reached |= {piece.sample_index: piece.stop for piece in lease.pieces}
    most = group.lease.sampling.max_tokens
    return max((most - reached.get(index, 0) for index in group.unfinished()), default=0)
