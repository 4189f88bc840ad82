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

    def admits(self, oldest_version: int, step: int) -> bool:
        """Return whether a trajectory may train at `step`.

        >>> StalenessBound(max_staleness=2).admits(oldest_version=5, step=7)
        True
        """
        return self.steps_left(oldest_version, step) >= 0

    def steps_left(self, oldest_version: int, step: int) -> int:
        """Count the learner steps for which a trajectory stays trainable; negative when stale."""
        return oldest_version + self.max_staleness - step

    def admits_lease(self, held_version: int, issued: int, groups: int, prompts_per_step: int) -> bool:
        """Return whether a worker that holds `held_version` may be given `groups` more groups.

        The last of them would train at step ``floor((issued + groups - 1) / prompts_per_step)``;
        by then its tokens must still be within the bound.

        Args:
            held_version: version the asking worker samples with, not the learner's version.
            issued: reservations taken so far: groups of sealed batches and groups in flight.
                Lost, filtered and stale groups give theirs back.
            groups: how many more are asked for, at least 1.
            prompts_per_step: groups one step consumes.

        >>> StalenessBound(max_staleness=0).admits_lease(0, issued=3, groups=1, prompts_per_step=4)
        True
        >>> StalenessBound(max_staleness=0).admits_lease(0, issued=4, groups=1, prompts_per_step=4)
        False
        """
        return (issued + groups - 1) // prompts_per_step <= held_version + self.max_staleness

    def room(self, held_version: int, issued: int, prompts_per_step: int) -> int:
        """Count the groups that `admits_lease` would grant to a worker that holds `held_version`."""
        return max(0, (held_version + self.max_staleness + 1) * prompts_per_step - issued)


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
