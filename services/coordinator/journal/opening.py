"""Opening a journal: a coordinator that is started again waits for a place that can take nothing yet.

A disk that is full or a database that is away ends no run: the process stays and tries again, and
callers meanwhile hear why. A coordinator that is started for the first time says at once
what is wrong, since that is most often a mistake in its configuration.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import structlog

from antiphon.core.errors import AntiphonError, BlockedError, UnavailableError
from antiphon.services.coordinator.journal.databases import HUNG_S, open_sql_store
from antiphon.services.coordinator.journal.journal import RETRY_S, Journal
from antiphon.system.wakeup import end_tasks

BEAT_S = 5.0
"""Pause between two signs of life; a successor waits for several times as long."""

Refusing = Callable[[Callable[[], AntiphonError]], AbstractAsyncContextManager[None]]
"""Answers every call with an error for as long as it is entered."""

_log = structlog.get_logger("coordinator")


async def open_journal(
    place: Path | str,
    run_id: str,
    outage_s: float,
    refusing: Refusing | None = None,
    hung_s: float | None = HUNG_S,
    retry_s: float = RETRY_S,
) -> Journal:
    """Open the journal of a run for its coordinator.

    Args:
        place: path of an SQLite file, or a URL postgresql://...
        run_id: the run that it must belong to.
        outage_s: how long the opened journal waits for its place to take something.
        refusing: answers calls while the place cannot be opened, which is tried for `outage_s`; None:
            it is tried once.
        hung_s: take the place from a holder that leaves no sign of life for this many seconds.
        retry_s: pause between two attempts.

    Raises:
        ConfigError: when another process that works has it open, or it belongs to another run.
        IntegrityError: when it is no journal, or another version wrote it.
        UnavailableError: when it cannot be reached or written.
    """

    async def attempt() -> Journal:
        store = await asyncio.to_thread(open_sql_store, place, run_id, hung_s)
        return await asyncio.to_thread(Journal, store, run_id, longest_wait_s=outage_s)

    try:
        return await attempt()
    except UnavailableError as error:
        if refusing is None:
            raise
        problem = error
    clock = asyncio.get_running_loop().time
    since = clock()
    _log.error("journal.blocked", reason=str(problem))
    async with refusing(lambda: BlockedError(str(problem))):
        while True:
            await asyncio.sleep(retry_s)
            try:
                journal = await attempt()
            except UnavailableError as error:
                if clock() - since >= outage_s:
                    raise
                problem = error
            else:
                _log.info("journal.unblocked", blocked_s=round(clock() - since, 1))
                return journal


@asynccontextmanager
async def showing_life(journal: Journal, lost: Callable[[AntiphonError], None]) -> AsyncIterator[None]:
    """Use the journal every few seconds, so that no successor takes it for one whose holder hangs.

    `lost` is told when another process has it by now.
    """

    async def beat() -> None:
        while True:
            try:
                if not await journal.beat():
                    lost(journal.overtaken())
                    return
            except UnavailableError:
                pass  # the next write says so, and waits
            except AntiphonError as error:
                lost(error)
                return
            await asyncio.sleep(BEAT_S)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        await end_tasks(beating)
