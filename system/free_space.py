"""Free space: whether a disk has room for the next snapshot, asked before a byte of it is written."""

import shutil
from collections.abc import Callable
from pathlib import Path

from antiphon.core.errors import BlockedError
from antiphon.core.reporting.alarms import WAITS_FOR_SPACE

OPTIMIZER_BYTES = 16
"""Bytes of a checkpoint per trained parameter: weights, their float32 master copy and AdamW's two moments."""


def space_needed(payload_bytes: int, checkpoint_bytes: int) -> int:
    """Return the bytes that must be free before a snapshot is written.

    One snapshot is this one; another may be on its way to a worker or into the ledger; and a checkpoint may
    be due before anyone has made room.
    """
    return 2 * payload_bytes + checkpoint_bytes


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that a folder is on, or will be on once it is made."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


class SpaceFloor:
    """The least free space of the disk that a run's snapshots and checkpoints go to."""

    def __init__(
        self,
        folder: Path,
        least_bytes: int | None,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """Watch the disk of the run's `folder`, which holds `checkpoints/`.

        `least_bytes` is the configured floor; None takes what the next snapshot and checkpoint need. `free`
        returns a folder's free bytes.
        """
        self._folder, self._least_bytes, self._free = folder, least_bytes, free

    def check(self, version: int, payload_bytes: int, trained: int, extra_bytes: int = 0) -> None:
        """Check that a version may be written; ask again while it may not.

        Args:
            version: the version.
            payload_bytes: its tensors.
            trained: parameters that a checkpoint holds.
            extra_bytes: that are to be written besides, such as a patch's.

        Raises:
            BlockedError: with the sentence for people who can make room.
        """
        needed = self._least_bytes
        if needed is None:
            needed = space_needed(payload_bytes, self._checkpoint_bytes() or OPTIMIZER_BYTES * trained)
        needed += extra_bytes
        free = self._free(self._folder)
        if free < needed:
            raise BlockedError(
                f"{WAITS_FOR_SPACE} to publish version {version}: {free >> 20} MiB are free for "
                f"{self._folder}, and {-(-needed >> 20)} MiB must be (record.free_mib); free some with "
                "`antiphon gc` or otherwise, and the run goes on; another run needs less with "
                "record.weights=anchors or a lower record.free_mib"
            )

    def _checkpoint_bytes(self) -> int:
        """Return the size of the newest checkpoint; 0 before the first."""
        newest = max(self._folder.glob("checkpoints/v*/"), default=None)
        if newest is None:
            return 0
        try:
            return sum(path.stat().st_size for path in newest.rglob("*"))
        except OSError:
            return 0  # it has just left
