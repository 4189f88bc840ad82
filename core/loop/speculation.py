"""Speculation: the last groups that an awaited batch lacks may be sampled twice.

A duplicate is given only to a worker that has nothing else to do, only for the last
``ceil(share * P)`` groups of the batch that is waited for, and only when a lease is older than most
leases ever get, or that worker should end the group well before its holder (`core.lengths.running`):
so a straggler moves, with its prefix, before it is late. The first complete submission wins; the other
lease is cancelled and billed as waste.

It cannot choose between outcomes. Seeds belong to the group, so under one version two engines of the
same numerics sample the same tokens; a duplicate is given only to a worker that has both from the first.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping

from antiphon.core.config import RunConfig
from antiphon.core.loop.group_state import GroupPhase, GroupState
from antiphon.core.loop.places import groups_of_step
from antiphon.core.loop.run_state import RunState

LEASES_REMEMBERED = 256
"""Leases whose durations say what is usual."""
LEASES_NEEDED = 20
"""Fewer than these say nothing about the slowest twentieth."""
SLOW_SHARE = 0.95
"""A lease is slow when it is older than this share of the remembered ones got."""


class LeaseTimes:
    """How long whole groups took lately, on the coordinator's clock."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=LEASES_REMEMBERED)

    def add(self, seconds: float) -> None:
        """Add a lease that was handed in and had nothing to continue from."""
        self._seconds.append(seconds)

    @property
    def slow_s(self) -> float | None:
        """Return the age from which a lease is slow, or None while too few are known."""
        if len(self._seconds) < LEASES_NEEDED:
            return None
        return sorted(self._seconds)[math.ceil(SLOW_SHARE * len(self._seconds)) - 1]


def missing_groups(state: RunState, config: RunConfig) -> int:
    """Return how many groups the awaited batch lacks; 0 while these are too many to be duplicated."""
    step, places = state.next_seal, config.loop.prompts_per_step
    if config.client_driven:
        missing = len(_awaited(state, config))
    elif step >= state.opened_steps:
        return 0
    else:
        groups = _awaited(state, config)
        ready = sum(group.phase in (GroupPhase.SUBMITTED, GroupPhase.REWARDED) for group in groups)
        missing = max(places, len(groups)) - ready
    return missing if 0 < missing <= math.ceil(config.coordinator.speculation * places) else 0


def _awaited(state: RunState, config: RunConfig) -> list[GroupState]:
    """Return the groups of the awaited batch; of a run that a client drives, what it asked for and lacks."""
    if config.client_driven:
        return [group for group in state.groups.values() if group.request is not None]
    return groups_of_step(state, config.loop, state.next_seal)


def group_to_duplicate(
    state: RunState,
    config: RunConfig,
    *,
    worker_id: str,
    held_version: int | None,
    holders: Mapping[str, int | None],
    numerics: Mapping[str, str],
    ages_s: Mapping[str, float],
    slow_s: float | None,
    sooner: Callable[[GroupState], bool] = lambda _: False,
) -> str | None:
    """Return the group that an idle worker should sample a second time, or None.

    Args:
        state: the run.
        config: its configuration.
        worker_id: who asks; it never duplicates its own group.
        held_version: version that the asking worker holds.
        holders: worker id -> version that it holds.
        numerics: worker id -> what decides its engine's bits; "" or none: nobody samples the same.
        ages_s: lease id -> seconds since it was granted.
        slow_s: the age from which a lease is slow; None: not known yet.
        sooner: whether the asking worker should end a group well before its holder.
    """
    if not config.coordinator.speculation or held_version is None or state.finished or state.paused_reason:
        return None
    if config.sampling.sampler != "keyed" or not missing_groups(state, config):
        return None
    own_numerics = numerics.get(worker_id, "")
    if not own_numerics:
        return None  # its answer might be another one, and the shorter of two would win
    groups = _awaited(state, config)
    if any(group.phase is GroupPhase.OPEN for group in groups):
        return None  # the asking worker can have that one

    def slow(group: GroupState) -> bool:
        return (
            group.phase is GroupPhase.LEASED
            and not group.twin_lease_id
            and group.worker_id != worker_id
            and holders.get(group.worker_id, held_version) == held_version
            and numerics.get(group.worker_id, "") == own_numerics
            and (group.version is None or group.version == held_version)
            and ((slow_s is not None and ages_s.get(group.lease_id, 0.0) > slow_s) or sooner(group))
        )

    candidates = [group for group in groups if slow(group)]
    candidates.sort(key=lambda group: (-ages_s.get(group.lease_id, 0.0), group.number))
    return candidates[0].group_id if candidates else None
