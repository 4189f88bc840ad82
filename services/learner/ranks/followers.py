"""Followers: the other ranks of a learner whose rank 0 is this process, as processes on this host.

Where a run's services are started, each rank is one of the supervisor's processes instead.
"""

import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from antiphon.core.config import RunConfig, dump_config
from antiphon.services.learner.ranks.group import leave
from antiphon.system.processes import LEFT_GROUP, POLL_S, ChildProcess, stop_groups
from antiphon.system.rank_places import rank_environment

GRACE_S = 10.0
"""Longest wait for the ranks to end in order."""


class Followers:
    """Started with it, and gone with `close` or with the thread that made it."""

    def __init__(
        self, config: RunConfig, checkpoints: Path, store: Path, moved: RunConfig | None = None
    ) -> None:
        """Start ranks 1 to `learner.ranks` - 1, and make this process rank 0; arguments as for `follow`."""
        self._folder = Path(tempfile.mkdtemp(prefix="antiphon-ranks-"))
        (self._folder / "config.yaml").write_text(dump_config(config))
        (self._folder / "engine.yaml").write_text(dump_config(moved or config))
        paths = [self._folder / "config.yaml", checkpoints, store, self._folder / "engine.yaml"]
        command = [sys.executable, "-P", "-m", f"{__package__}.follower", *map(str, paths)]
        places = [
            rank_environment(rank, config.learner.ranks, self._folder / "meeting")
            for rank in range(config.learner.ranks)
        ]
        self.processes = [
            ChildProcess(command, self._folder / f"rank-{rank}.log", {**os.environ, **place})
            for rank, place in enumerate(places)
            if rank
        ]
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="followers", daemon=True).start()
        self._before = {name: os.environ.get(name) for name in places[0]}
        os.environ.update(places[0])

    def _watch(self) -> None:
        """End this process when a rank fails, with what that one said: it may wait for it in a meeting."""
        while not self._closing.wait(POLL_S):
            for rank, process in enumerate(self.processes, 1):
                if process.poll() not in (None, 0, LEFT_GROUP):
                    said = f"rank {rank} of the learner: {process.last_words()}"
                    shutil.rmtree(self._folder, ignore_errors=True)
                    leave(said, 1)

    def close(self) -> None:
        """End them; rank 0 has ordered them to stop before."""
        self._closing.set()
        stop_groups(self.processes, GRACE_S)
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        shutil.rmtree(self._folder, ignore_errors=True)
