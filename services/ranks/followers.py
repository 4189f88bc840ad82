"""Followers: the other ranks of a group whose rank 0 is this process, as processes on this host.

When one of them ends, or answers no more, `end` ends all of them and says why.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from antiphon.core.errors import UnavailableError
from antiphon.system.collecting import LOADING
from antiphon.system.processes import LEFT_GROUP, POLL_S, ChildProcess, ending, kill_groups, stop_groups
from antiphon.system.rank_places import rank_environment

GRACE_S = 10.0
"""Longest wait for the ranks to end in order."""
DYING_S = 2.0
"""Longest time from the end of a connection to that of the process."""


class Followers:
    """Gone with `close`, or with the thread that started them."""

    def __init__(self, world: int, whose: str) -> None:
        """Prepare ranks 1 to `world` - 1 of somebody, whose `folder` goes with `close`."""
        self._world, self._whose = world, whose
        self.folder = Path(tempfile.mkdtemp(prefix="antiphon-ranks-"))
        self.processes: list[ChildProcess] = []
        self.status = LEFT_GROUP
        """Exit status of the one that refused to go on, after `end`; it may well come up again otherwise."""
        self._before: dict[str, str | None] = {}

    def start(self, module: str, arguments: Sequence[str], patience_s: float) -> None:
        """Start them, and make this process rank 0.

        Args:
            module: that each of them runs; it makes a file `arrived-RANK` in `folder` when nothing is left
                but to meet this process.
            arguments: of the module.
            patience_s: longest wait for that, seconds.

        Raises:
            UnavailableError: with what one of them said, when it does not come.
        """
        command = [*LOADING, module, *arguments]
        places = [rank_environment(rank, self._world, self.folder / "meeting") for rank in range(self._world)]
        self.processes = [
            ChildProcess(command, self.folder / f"rank-{rank}.log", {**os.environ, **place})
            for rank, place in enumerate(places)
            if rank
        ]
        self._before = {name: os.environ.get(name) for name in places[0]}
        os.environ.update(places[0])
        try:
            self._wait(patience_s)
        except BaseException:
            self.close()
            raise

    def _wait(self, patience_s: float) -> None:
        """Wait until all of them are about to meet this process."""
        deadline = time.monotonic() + patience_s
        for rank, process in enumerate(self.processes, 1):
            while not (self.folder / f"arrived-{rank}").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise UnavailableError(self.end(f"rank {rank} was not there within {patience_s:g} s"))
                time.sleep(POLL_S)

    def end(self, reason: str) -> str:
        """End them all, so that nobody waits for one that is gone; return why one ended, or `reason`."""
        deadline = time.monotonic() + DYING_S
        while time.monotonic() < deadline:
            for rank, process in enumerate(self.processes, 1):
                if process.poll() not in (None, 0, LEFT_GROUP):
                    reason = (
                        f"rank {rank} of the {self._whose} {ending(process.returncode)}: "
                        f"{process.last_words()}"
                    )
                    self.status = process.returncode if process.returncode > 0 else LEFT_GROUP
                    deadline = 0.0
            time.sleep(POLL_S)
        kill_groups(self.processes)
        return reason

    def close(self) -> None:
        """End them; rank 0 has ordered them to stop before."""
        stop_groups(self.processes, GRACE_S)
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(self.folder, ignore_errors=True)
