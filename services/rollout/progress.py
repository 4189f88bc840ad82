"""Progress: what a worker's unfinished groups have, in pieces that the coordinator does not keep yet.

Between two heartbeats only the difference travels. Where the engine is in the middle of a long step,
or one heartbeat would grow too large, the rest follows with the next.
"""

from collections.abc import Sequence

import structlog

from antiphon.core.records import Lease, LeaseProgress, PartialTrajectory
from antiphon.services.rollout.engine.driver import EngineDriver
from antiphon.services.rollout.group import GroupInFlight

MOST_HEARTBEAT_TOKENS = 1 << 18
"""Tokens after which a heartbeat takes no further group: 2 MiB, far below the largest message."""
OLD_RATE_SHARE = 0.8
"""Share of the measured rate that stays with each new completion."""

_log = structlog.get_logger(__name__)


class TokenRate:
    """Seconds per token of one completion, as this worker measured them lately."""

    def __init__(self) -> None:
        self.seconds_per_token: float | None = None
        """None before the first completion."""

    def measure(self, seconds: float, tokens: int) -> None:
        if tokens < 1:
            return
        new, old = seconds / tokens, self.seconds_per_token
        self.seconds_per_token = new if old is None else OLD_RATE_SHARE * old + (1 - OLD_RATE_SHARE) * new


async def gather(
    groups: Sequence[GroupInFlight], engine: EngineDriver, timeout_s: float, *, stop: bool = False
) -> tuple[LeaseProgress, ...]:
    """Return what was sampled of some groups and is not kept by the coordinator.

    Args:
        groups: groups in flight, the most urgent first.
        engine: samples them.
        timeout_s: longest wait for the engine's step.
        stop: end sampling them in the same moment.
    """
    known = {request_id: count for group in groups for request_id, count in group.known().items()}
    reported = await engine.progress(known, timeout_s, stop) if known else []
    if reported is None:
        return ()
    by_request = {progress.request_id: progress for progress in reported}
    found: list[LeaseProgress] = []
    tokens = 0
    for group in groups:
        pieces = group.pieces(by_request)
        size = sum(int(piece.token_ids.size) for piece in pieces)
        if not pieces or (found and tokens + size > MOST_HEARTBEAT_TOKENS):
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


def usable_prefix(lease: Lease, engine: EngineDriver) -> dict[int, PartialTrajectory]:
    """Return what a lease came with, by sample; nothing where this engine cannot continue it.

    Another worker wrote it, and no one has verified it: what no engine can have sampled is left
    aside, and the group starts again.
    """
    prefix = {piece.sample_index: piece for piece in lease.prefix}
    possible = all(
        piece.start == 0
        and 0 <= piece.sample_index < len(lease.seeds)
        and piece.token_ids.size > 0
        and int(piece.token_ids.min()) >= 0
        and int(piece.token_ids.max()) < engine.vocabulary_size
        and (piece.finish_reason is not None or piece.stop < lease.sampling.max_tokens)
        for piece in lease.prefix
    )
    if prefix and not (possible and engine.continues):
        reason = "the engine does not continue bit for bit" if possible else "no engine can have written it"
        _log.warning("prefix.left", lease=lease.lease_id, group=lease.group_id, reason=reason)
        return {}
    return prefix
