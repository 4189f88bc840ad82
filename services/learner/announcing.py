"""Announcing: what the coordinator says of snapshots names the learner that lives.

A learner that ended may have announced a snapshot in words that reach the coordinator only after those of its
successor. Workers would then look for chunks where nobody is, until the next version.
"""

import asyncio

import structlog

from antiphon.api.coordinator import Coordinator
from antiphon.core.errors import AntiphonError
from antiphon.services.learner.service import LearnerService

LOOK_S = 30.0
"""Seconds between two looks at what is announced."""

_log = structlog.get_logger(__name__)


async def keep_announced(learner: LearnerService, coordinator: Coordinator) -> None:
    """Announce every snapshot again whenever the newest is said to come from elsewhere, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            manifest = await coordinator.latest_manifest(None)
            if manifest is not None and manifest.origin != learner.origin:
                _log.warning("learner.announces_again", version=manifest.version, said=manifest.origin)
                await learner.publish_again(all_of_them=True)
        except AntiphonError as error:
            _log.warning("learner.not_announced", reason=str(error))
