"""Swap: which version a worker should sample with next, and when it may change over.

elastic: the newest complete snapshot, at the next step boundary; requests in flight continue under
it and their version spans say where. A version that is evaluated comes before newer ones: the coordinator
wants it, and its held-out prompts end under it. fixed: exactly the version that the coordinator wants, and
only once nothing in flight needs the one that is held.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Mode = Literal["elastic", "fixed"]


@dataclass(frozen=True, slots=True)
class WeightView:
    """What a worker knows when it decides."""

    held: int | None
    """Version that samples now."""
    complete: Collection[int]
    """Versions whose chunks are all here and checked."""
    newest: int | None
    """Newest announced version that the worker knows of."""
    wanted: int | None
    """Version the coordinator wants for the next group, where it wants one in particular."""
    pinned_groups: int
    """Groups in flight whose lease names the held version."""
    free_groups: int
    """Groups in flight that any version may continue."""


def version_to_load(view: WeightView, mode: Mode, in_flight: bool = True) -> int | None:
    """Return the version to load now, or None to keep the one that is held.

    Args:
        view: what the worker knows.
        mode: loop.mode of the run.
        in_flight: elastic mode: swap under running requests, instead of between groups.

    >>> view = WeightView(held=3, complete={3, 4}, newest=4, wanted=None, pinned_groups=0, free_groups=5)
    >>> version_to_load(view, "elastic"), version_to_load(view, "fixed")
    (4, None)
    """
    target = _target(view, mode)
    if target is None or target == view.held or view.pinned_groups:
        return None
    # Along a completion versions never fall.
    may_swap_in_flight = mode == "elastic" and in_flight and (view.held is None or target > view.held)
    if view.free_groups and not may_swap_in_flight:
        return None
    return target


def version_to_fetch(view: WeightView) -> int | None:
    """Return the next version to fetch: the wanted one first, then the newest; None when all are here.

    A wanted version that was not announced yet cannot be had.
    """
    if view.newest is None:
        return None
    for version in (view.wanted, view.newest):
        if version is not None and version <= view.newest and version not in view.complete:
            return version
    return None


def leases_wait(view: WeightView, mode: Mode) -> bool:
    """Return whether asking for leases should wait for a swap, which another lease would put off."""
    if view.wanted is None or view.newest is None:
        return False
    if mode == "elastic":  # going back ends what is in flight first
        return view.held is not None and view.wanted < min(view.held, view.newest + 1)
    if view.pinned_groups or view.free_groups:
        return False
    return view.wanted != view.held and view.wanted <= view.newest


def _target(view: WeightView, mode: Mode) -> int | None:
    if mode == "fixed" or view.wanted is not None:
        return view.wanted if view.wanted in view.complete else None
    newest = max(view.complete, default=None)
    if newest is None or (view.held is not None and newest < view.held):
        return None
    return newest
