"""Patience: a call to a peer that may be away is repeated until it answers or patience ends.

Only `UnavailableError` is worth a repetition. The pauses grow from a tenth of a second to two,
so a peer that restarts is met quickly and one that is gone for long is not pestered.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from antiphon.core.errors import UnavailableError

FIRST_PAUSE_S = 0.1
MOST_PAUSE_S = 2.0
_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


async def keep_trying(what: str, attempt: Callable[[], Awaitable[_T]], patience_s: float) -> _T:
    """Return the answer of `attempt`, repeating it while the peer is unavailable.

    Args:
        what: the call in words, for the log and the error.
        attempt: makes one call, with its own deadline.
        patience_s: seconds after the first failure until it is given up.

    Raises:
        UnavailableError: when the peer did not answer within `patience_s`; other errors at once.
    """
    loop = asyncio.get_running_loop()
    pause_s = FIRST_PAUSE_S
    failing_since: float | None = None
    while True:
        try:
            return await attempt()
        except UnavailableError as error:
            now = loop.time()
            if failing_since is None:
                failing_since = now
                _log.info("peer.unavailable", call=what, error=str(error))
            if now - failing_since >= patience_s:
                raise UnavailableError(
                    f"{what} had no answer for {patience_s:g} s ({error}); look at the peer's log, "
                    "or raise services.stall_timeout_s"
                ) from error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MOST_PAUSE_S)
