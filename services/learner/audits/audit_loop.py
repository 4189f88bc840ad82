"""Audit loop: takes groups from the coordinator one after the other and tells it what an auditor found."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.core.records import GroupToAudit
from antiphon.core.trust.audit import SampleStatistics
from antiphon.net.rpc.retry import MOST_PAUSE_S

PULL_S = 20.0
"""How long one question for groups stays open at the coordinator."""
GROUPS_PER_PULL = 4

_log = structlog.get_logger(__name__)


class Examiner(Protocol):
    """Scores groups again; for one thread."""

    def examine(self, group: GroupToAudit) -> Sequence[SampleStatistics]:
        """Return what the scores say, for each sample and each worker that sampled some of it.

        Raises:
            UnavailableError: when no version of the group is kept any more.
        """

    def forget(self) -> None:
        """Begin anew with the next group, whatever state the last one left."""


async def audit_forever(coordinator: Coordinator, auditor: Examiner, client_id: str) -> None:
    """Examine what the coordinator hands out, until cancelled; it may come and go meanwhile.

    Whatever goes wrong with a group, the coordinator is told why it was not audited, and the next follows.
    """
    with ThreadPoolExecutor(1, "audit") as thread:
        while True:
            try:
                for group in await coordinator.pull_for_audit(client_id, GROUPS_PER_PULL, PULL_S):
                    samples, reason = await _examined(auditor, group, thread)
                    await coordinator.submit_audit(group.submission.group_id, samples, reason=reason)
            except Exception as error:  # noqa: BLE001 - that audits end for good is what a liar hopes for
                _log.warning(
                    "audit.failed", reason=repr(error), exc_info=not isinstance(error, AntiphonError)
                )
                await asyncio.sleep(MOST_PAUSE_S)


async def _examined(
    auditor: Examiner, group: GroupToAudit, thread: ThreadPoolExecutor
) -> tuple[Sequence[SampleStatistics], str]:
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, auditor.examine, group), ""
    except UnavailableError as error:
        return (), str(error)
    except Exception as error:  # noqa: BLE001 - it is told to the coordinator, which counts it
        auditor.forget()
        _log.error("audit.broke", group=group.submission.group_id, exc_info=error)
        return (), f"the auditor failed: {error!r}"
