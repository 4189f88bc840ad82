"""Activation: which workers are started and which are drained, as rates, prices and losses change.

Supply is smoothed before anything is decided of it, and what it has to lack, or to exceed, must last: workers
are added after `add_after_s` of shortage, one is drained after `hold_s` in which it was not needed, and no
sooner than `hold_s` after any other order. So noise moves no worker back and forth.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from antiphon.core.capacity.cover import Fleet, Redundancy, WorkerOffer, cover
from antiphon.core.errors import InfeasibleError

_SECONDS_PER_HOUR = 3600.0


SHORTAGE = 0.05
"""Share of the need that the supply must lack."""
SURPLUS = 0.15
"""Share of the need that must be left over without the worker that is drained."""
SMOOTHING_S = 120.0
"""Time constant of the moving average of measured rates."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What shall change."""

    activate: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    reason: str = ""
    """A sentence; empty when nothing changes."""


class Activator:
    """Decides from what is offered and measured; keeps the averages and the times of its last orders.

    Times are on the clock of the caller that passes `now`.
    """

    def __init__(self, redundancy: Redundancy, add_after_s: float = 30.0, hold_s: float = 600.0) -> None:
        """Begin without a measured rate; the seconds are those of the `provisioning` section."""
        self._redundancy, self._add_after_s, self._hold_s = redundancy, add_after_s, hold_s
        self._rates: dict[str, tuple[float, float]] = {}
        """Worker -> its smoothed rate, and when it was last measured."""
        self._short_since = self._spare_since = math.inf
        self._ordered_at = -math.inf

    def measured(self, name: str, rate: float, now: float) -> None:
        """Take in the rate of a worker; what is no rate is refused and changes nothing.

        Raises:
            InfeasibleError: for a rate that is negative or no number.
        """
        if not 0.0 <= rate < math.inf:
            raise InfeasibleError(f"worker {name} reports a rate of {rate:g}; it is not counted")
        smoothed, at_s = self._rates.get(name, (rate, now))
        weight = -math.expm1(-max(0.0, now - at_s) / SMOOTHING_S)
        self._rates[name] = smoothed + weight * (rate - smoothed), now

    def decide(
        self,
        now: float,
        offers: Sequence[WorkerOffer],
        active: Collection[str],
        need: float,
        *,
        left_s: float = math.inf,
        join_s: float = 0.0,
        relays: Collection[str] = (),
    ) -> Orders:
        """Return what shall change now.

        Args:
            now: seconds.
            offers: every worker that runs or could, at today's price; measured rates replace its own.
            active: names of those that run or were ordered to.
            need: supply wanted, in the unit of the rates.
            left_s: seconds until the run ends, as far as known.
            join_s: seconds from an order until a worker samples.
            relays: workers that pass a broadcast on at the moment; none of them is drained.
        """
        # A worker that samples nothing keeps a trace of a rate: it is the last one to be wanted.
        known = [
            replace(one, rate=max(self._rates[one.name][0], 1e-9 * one.rate))
            if one.name in self._rates
            else one
            for one in offers
        ]
        mine = [one for one in known if one.name in active]
        lacking = not self._is_enough(mine, need * (1.0 - SHORTAGE))
        self._short_since = min(self._short_since, now) if lacking else math.inf
        if known and now - self._short_since >= self._add_after_s:
            # Those that run are paid for already: beside them, others are chosen by their price.
            free = [replace(one, usd_per_hour=0.0) if one.name in active else one for one in known]
            chosen = cover(free, need, self._redundancy)
            added = tuple(name for name in chosen.names if name not in active)
            if not added:
                return Orders()
            self._short_since, self._spare_since, self._ordered_at = math.inf, math.inf, now
            supply = sum(one.rate * one.availability for one in mine)
            rest = "" if chosen.enough else "; that is all there is, and not enough"
            return Orders(added, (), f"{supply:.4g} are sampled where {need:.4g} are needed{rest}")
        for spare in sorted(mine, key=lambda one: (-one.usd_per_hour, one.rate, one.name)):
            left = [one for one in mine if one is not spare]
            if spare.name not in relays and self._is_enough(left, need * (1.0 + SURPLUS)):
                break
        else:
            self._spare_since = math.inf
            return Orders()
        self._spare_since = min(self._spare_since, now)
        held = now - max(self._spare_since, self._ordered_at) < self._hold_s
        # To fetch it back would cost its start; where less time is left than that, it may as well stay.
        if held or left_s <= join_s:
            return Orders()
        self._spare_since, self._ordered_at = math.inf, now
        usd = spare.usd_per_hour * left_s / _SECONDS_PER_HOUR
        saved = "" if math.isinf(left_s) else f", which saves ${usd:.2f}"
        return Orders((), (spare.name,), f"{need:.4g} are sampled without {spare.name} as well{saved}")

    def _is_enough(self, workers: Sequence[WorkerOffer], need: float) -> bool:
        everyone = np.ones(len(workers), dtype=np.bool_)
        return bool(workers) and Fleet(workers, need, self._redundancy).is_enough(everyone)
