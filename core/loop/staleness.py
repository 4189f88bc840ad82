"""Staleness: how far behind the learner the policy that wrote a trajectory may be.

The staleness of a trajectory at learner step t is ``t - v``, where v is the oldest policy
version that sampled any of its tokens. Its unit is policy versions; a learner step makes one.
The bound S is kept twice: when a lease is granted, with the version that the asking worker
holds, and when a batch is assembled, by the oldest token of each trajectory.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The user's promise to the learner: nothing older than this trains."""

    max_staleness: int
    """Largest staleness at the step that trains on a trajectory, in policy versions."""

    def room(self, held_version: int, issued: int, prompts_per_step: int) -> int:
        """Count the groups that may be opened for a worker so that each can train when its place says.

        Args:
            held_version: version the asking worker samples with, not the learner's version.
            issued: reservations taken so far: groups of sealed batches and groups in flight.
                Lost, filtered and stale groups give theirs back.
            prompts_per_step: groups one step consumes.

        >>> [StalenessBound(max_staleness=0).room(0, issued, prompts_per_step=4) for issued in (3, 4)]
        [1, 0]
        """
        return max(0, (held_version + self.max_staleness + 1) * prompts_per_step - issued)


@dataclass(frozen=True, slots=True)
class VersionWindow:
    """The policy versions that may sample a group, so that nothing stale trains."""

    oldest: int
    newest: int | None = None
    """None: however new."""

    def admits(self, version: int) -> bool:
        """Return whether a version may sample the group, or its tokens be continued from.

        >>> VersionWindow(5).admits(7), VersionWindow(5, 5).admits(7), VersionWindow(5).admits(4)
        (True, False, False)
        """
        return self.oldest <= version and (self.newest is None or version <= self.newest)


def oldest_allowed_version(step: int, max_staleness: int, publish_interval: int) -> int:
    """Return the version that samples the groups of `step` in fixed mode.

    It is the oldest published version that is at least ``step - max_staleness``, so that the
    learner may run as far ahead as the bound allows, and always the same far.

    >>> [oldest_allowed_version(t, max_staleness=2, publish_interval=2) for t in range(6)]
    [0, 0, 0, 2, 2, 4]
    """
    return publish_interval * -(-max(0, step - max_staleness) // publish_interval)


def is_published(version: int, publish_interval: int, steps: int) -> bool:
    """Return whether a version gets a snapshot: every publish_interval-th one, and the run's last.

    >>> [v for v in range(6) if is_published(v, publish_interval=2, steps=5)]
    [0, 2, 4, 5]
    """
    return version % publish_interval == 0 or version == steps
