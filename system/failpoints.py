"""Fail-points: named places where a test may kill this very process, as `kill -9` would.

Off by default: a place then costs one look at an empty table. `ANTIPHON_FAILPOINTS` arms some,
such as `coordinator.commit.before:3,learner.forward:1`: the process dies when it comes to that
place for the third or first time. Nothing is flushed, said or cleaned up first.
"""

import os
import signal
from collections.abc import Mapping

from antiphon.core.errors import ConfigError

VARIABLE = "ANTIPHON_FAILPOINTS"
"""Names the armed places; meant for tests alone."""

NAMES = (
    "coordinator.enqueue.before",
    "coordinator.enqueue.after",
    "coordinator.commit.before",
    "coordinator.commit.inside",
    "coordinator.commit.after",
    "coordinator.seal.before",
    "coordinator.reply.before",
    "learner.forward",
    "learner.backward",
    "learner.optimizer",
    "learner.gather",
    "learner.save",
    "learner.idle",
    "learner.commit.before",
    "learner.commit.after",
    "learner.checkpoint.inside",
    "learner.publish.before",
    "learner.announce.before",
    "worker.generate",
    "worker.upload.before",
    "worker.upload.after",
    "worker.apply",
    "reward.score",
    "reward.submit.after",
)
"""Every place there is, by process."""


def parse(text: str) -> dict[str, int]:
    """Return place -> visits that are left before the process dies.

    >>> parse("worker.apply:2")
    {'worker.apply': 2}

    Raises:
        ConfigError: for a place that does not exist or a number below 1.
    """
    armed = {}
    for item in filter(None, text.split(",")):
        name, _, visits = item.strip().partition(":")
        if name not in NAMES or not (visits or "1").isdigit() or int(visits or "1") < 1:
            raise ConfigError(
                f"{VARIABLE} has {item.strip()!r}; write PLACE:VISITS with one of {', '.join(NAMES)}"
            )
        armed[name] = int(visits or "1")
    return armed


def arm(environment: Mapping[str, str]) -> None:
    """Arm the places that `environment` names; called once by what starts a service."""
    _armed.update(parse(environment.get(VARIABLE, "")))


def reach(name: str) -> None:
    """Die here if this place is armed and its visits are used up."""
    if _armed and name in _armed:
        _armed[name] -= 1
        if _armed[name] == 0:
            os.kill(os.getpid(), signal.SIGKILL)


_armed: dict[str, int] = {}
arm(os.environ)
