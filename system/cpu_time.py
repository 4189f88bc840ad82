"""CPU time: what the processes of a run on this machine have taken, by what they are for.

The kernel counts for each process (`/proc`); nothing is measured inside of one. A process that ended keeps
what it had when it was last looked at, so that one that is started again is not forgotten.
"""

from collections.abc import Sequence
from itertools import pairwise

import psutil

KINDS = ("workers", "learner", "coordinator", "reward", "prefect", "flow")
"""What a process is for; what it starts counts with it. The flow writes to MLflow and the ledger."""
_BY_WORDS = (
    (("serve", "learner"), "learner"),
    (("serve", "coordinator"), "coordinator"),
    (("serve", "reward"), "reward"),
    (("serve", "scorer"), "reward"),
    (("--factory", "prefect.server.api.server:create_app"), "prefect"),
    (("antiphon.cli.app", "worker"), "workers"),
)


def kind_of(words: Sequence[str], inherited: str = "flow") -> str:
    """Return what a process is for, by its command line; `inherited` is its parent's kind.

    >>> kind_of(["python", "-P", "-m", "antiphon.cli.app", "serve", "learner"])
    'learner'
    >>> kind_of(["/bin/judge"], inherited="reward")
    'reward'
    """
    pairs = set(pairwise(words))
    return next((kind for pair, kind in _BY_WORDS if pair in pairs), inherited)


class FamilyTimes:
    """The CPU seconds of a process and of all that it started."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._seconds: dict[tuple[int, float], tuple[str, float]] = {}
        self.kinds: dict[int, str] = {}
        """Process number -> what it is for, when they were last looked at."""

    def look(self) -> dict[str, float]:
        """Return the user and system seconds of each of `KINDS` until now."""
        kinds = self.kinds = {}
        try:
            family = [self._root, *self._root.children(recursive=True)]  # parents come before their children
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            try:
                key = (process.pid, process.create_time())
                inherited = kinds.get(process.ppid(), "flow")
                words = process.cmdline()
                if not words and key in self._seconds:  # it is ending, and its memory is gone
                    inherited = self._seconds[key][0]
                # Read each time: between fork and exec a child has its parent's words.
                kinds[process.pid] = kind = kind_of(words, inherited)
                times = process.cpu_times()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it ended while it was looked at
            self._seconds[key] = (kind, times.user + times.system)
        found = dict.fromkeys(KINDS, 0.0)
        for kind, seconds in self._seconds.values():
            found[kind] += seconds
        return found
