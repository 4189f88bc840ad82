"""Retry: a call to a peer that may be away is repeated until it answers or the caller gives up.

Only `UnavailableError` is worth a repetition. A peer that answers that it is blocked is not away: how
long an outage of its disk or its database may last is the peer's to say, and it ends by itself then.
Pauses grow from a tenth of a second to two, so a peer that restarts is found quickly and one that is
away for long gets few calls; each is shortened at random, so that the workers of a lost coordinator do
not all come back at once. The random part is drawn from the caller's name: a simulation repeats it. The
clock is the event loop's.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from antiphon.core.errors import BlockedError, UnavailableError
from antiphon.core.seeds import derive_seed

FIRST_PAUSE_S = 0.1
MOST_PAUSE_S = 2.0
OUTAGE_S = 86_400.0
"""Longest wait for a peer that says it is blocked, the most that services.outage_timeout_s can be."""
JITTER = 0.5
"""Largest part of a pause that is taken away at random."""
_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


async def retry_unavailable(
    what: str, attempt: Callable[[], Awaitable[_T]], limit_s: float, who: str = "", outage_s: float = OUTAGE_S
) -> _T:
    """Return the answer of `attempt`, repeating it while the peer is unavailable.

    Args:
        what: name of the call, peer first, for the log and the error.
        attempt: makes one call, with its own deadline.
        limit_s: seconds after the first failure until it is given up.
        who: the caller's name, which its pauses are drawn from.
        outage_s: seconds for which the peer may say that it is blocked; they do not count as absence.

    Raises:
        UnavailableError: when the peer did not answer within `limit_s`; other errors at once.
        BlockedError: when it was blocked for longer than `outage_s`.
    """
    clock = asyncio.get_running_loop().time
    failing_since: float | None = None
    blocked_since: float | None = None
    number = 0
    while True:
        try:
            return await attempt()
        except BlockedError as error:
            failing_since = None
            if blocked_since is None:
                blocked_since = clock()
                _log.warning("peer.blocked", call=what, error=str(error))
            if clock() - blocked_since >= outage_s:
                raise
        except UnavailableError as error:
            if failing_since is None:
                failing_since = clock()
                _log.info("peer.unavailable", call=what, error=str(error))
            if clock() - failing_since >= limit_s:
                raise UnavailableError(
                    f"{what} had no answer for {limit_s:g} s ({error}); look at the peer's log, "
                    "or raise services.stall_timeout_s"
                ) from error
        number += 1
        await asyncio.sleep(pause_s(who, what, number))


def pause_s(who: str, what: str, attempt: int) -> float:
    """Return the seconds to wait after the `attempt`-th failure, 1 for the first.

    >>> 0.05 <= pause_s("w0", "coordinator.heartbeat", 1) <= 0.1
    True
    >>> 1.0 <= pause_s("w0", "coordinator.heartbeat", 30) <= 2.0
    True
    """
    longest = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 16))
    drawn = derive_seed("pause", who, what, attempt) / 2**64
    return float(longest * (1.0 - JITTER * drawn))
