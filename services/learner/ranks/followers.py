"""Followers: the other ranks of a learner whose rank 0 is this process, as processes on this host.

Where a run's services are started, each rank is one of the supervisor's processes instead. This process may
be a notebook or a flow, so the group does not end it: when one of them ends, or answers no more, all of them
are ended, and what rank 0 does in the group raises.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

from antiphon.core.config import RunConfig, dump_config
from antiphon.core.errors import UnavailableError
from antiphon.services.learner.ranks import group
from antiphon.system.collecting import LOADING
from antiphon.system.processes import LEFT_GROUP, POLL_S, ChildProcess, ending, kill_groups, stop_groups
from antiphon.system.rank_places import rank_environment

GRACE_S = 10.0
"""Longest wait for the ranks to end in order."""
DYING_S = 2.0
"""Longest time from the end of a connection to that of the process."""


class Followers:
    """Started with it, and gone with `close` or with the thread that made it."""

    def __init__(
        self, config: RunConfig, checkpoints: Path, store: Path, moved: RunConfig | None = None
    ) -> None:
        """Start ranks 1 to `learner.ranks` - 1, and make this process rank 0; arguments as for `follow`.

        Raises:
            UnavailableError: with what one of them said, when it does not come to meet this process.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="antiphon-ranks-"))
        (self._folder / "config.yaml").write_text(dump_config(config))
        (self._folder / "engine.yaml").write_text(dump_config(moved or config))
        paths = [self._folder / "config.yaml", checkpoints, store, self._folder / "engine.yaml"]
        command = [*LOADING, f"{__package__}.follower", *map(str, paths)]
        places = [
            rank_environment(rank, config.learner.ranks, self._folder / "meeting")
            for rank in range(config.learner.ranks)
        ]
        self.processes = [
            ChildProcess(command, self._folder / f"rank-{rank}.log", {**os.environ, **place})
            for rank, place in enumerate(places)
            if rank
        ]
        self._before = {name: os.environ.get(name) for name in places[0]}
        os.environ.update(places[0])
        group.broken = self._end
        try:
            self._wait(config.services.start_timeout_s)
        except BaseException:
            self.close()
            raise

    def _wait(self, patience_s: float) -> None:
        """Wait until all of them are about to meet this process."""
        deadline = time.monotonic() + patience_s
        for rank, process in enumerate(self.processes, 1):
            while not (self._folder / f"arrived-{rank}").exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise UnavailableError(self._end(f"rank {rank} was not there within {patience_s:g} s"))
                time.sleep(POLL_S)

    def _end(self, reason: str) -> str:
        """End them all, so that nobody waits for one that is gone; return why one ended, or `reason`."""
        deadline = time.monotonic() + DYING_S
        while time.monotonic() < deadline:
            for rank, process in enumerate(self.processes, 1):
                if process.poll() not in (None, 0, LEFT_GROUP):
                    reason = (
                        f"rank {rank} of the learner {ending(process.returncode)}: {process.last_words()}"
                    )
                    deadline = 0.0
            time.sleep(POLL_S)
        kill_groups(self.processes)
        return reason

    def close(self) -> None:
        """End them; rank 0 has ordered them to stop before."""
        stop_groups(self.processes, GRACE_S)
        group.broken = None
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(self._folder, ignore_errors=True)
