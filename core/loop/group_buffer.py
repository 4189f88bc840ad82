"""Group buffer: a rewarded group leaves once, oldest first, never beyond the bound.

It holds groups whose rewards are known until a step takes them. What a step takes depends on
the filter for groups without reward variance: `none` trains on them, `drop` lets them use up
their place in the step but leaves them out of the file, `refill` has further prompts take
their place (they never enter the buffer).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from antiphon.core.errors import IntegrityError
from antiphon.core.loop.staleness import StalenessBound

Filter = Literal["none", "drop", "refill"]


class Verdict(StrEnum):
    """What became of a group that was offered."""

    KEPT = "kept"
    STALE = "stale"
    """No step from now on may train on it."""
    FILTERED = "filtered"
    """Without variance under filter=refill: another prompt takes its place."""


@dataclass(frozen=True, slots=True)
class BufferedGroup:
    """What the choice of a batch must know about a rewarded group."""

    group_id: str
    number: int
    """Order in which the groups were opened."""
    oldest_version: int
    varied: bool
    """Whether its rewards differ."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The groups that one step uses up, each list in the order of the file."""

    used: tuple[str, ...]
    filtered: tuple[str, ...]


class GroupBuffer:
    """Rewarded groups of elastic mode, waiting for a step."""

    def __init__(self, bound: StalenessBound, filter_: Filter) -> None:
        self._bound = bound
        self._filter = filter_
        self._groups: dict[str, BufferedGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def verdict(self, group: BufferedGroup, next_step: int) -> Verdict:
        """Tell what offering `group` would do while `next_step` is the oldest unsealed step."""
        if not self._bound.admits(group.oldest_version, next_step):
            return Verdict.STALE
        if self._filter == "refill" and not group.varied:
            return Verdict.FILTERED
        return Verdict.KEPT

    def offer(self, group: BufferedGroup) -> None:
        """Keep a group until it is selected or found stale.

        Raises:
            IntegrityError: when the group is already here.
        """
        if group.group_id in self._groups:
            raise IntegrityError(f"group {group.group_id} was offered to the group buffer twice")
        self._groups[group.group_id] = group

    def remove(self, group_ids: Iterable[str]) -> None:
        """Let groups leave; ids that are not here are ignored."""
        for group_id in group_ids:
            self._groups.pop(group_id, None)

    def stale(self, next_step: int) -> list[str]:
        """Return the groups that no step from `next_step` on may train on."""
        return [
            group.group_id
            for group in self._groups.values()
            if not self._bound.admits(group.oldest_version, next_step)
        ]

    def select(self, step: int, places: int) -> Selection | None:
        """Choose the groups of `step`: the `places` oldest fresh ones, or None while there are fewer.

        Oldest means oldest version first, then the order in which the groups were opened; within
        the file they stand in the order in which they were opened.
        """
        fresh = [g for g in self._groups.values() if self._bound.admits(g.oldest_version, step)]
        if len(fresh) < places:
            return None
        fresh.sort(key=lambda group: (group.oldest_version, group.number))
        taken = sorted(fresh[:places], key=lambda group: group.number)
        keeps_all = self._filter == "none"
        return Selection(
            used=tuple(g.group_id for g in taken if keeps_all or g.varied),
            filtered=tuple(g.group_id for g in taken if not (keeps_all or g.varied)),
        )
