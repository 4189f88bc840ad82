"""Network log: what a worker measured of its network, until the coordinator has it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from antiphon.core.dissemination.reports import (
    LONGEST_TEXT,
    MOST_DELIVERIES,
    MOST_HELD,
    MOST_SOURCES,
    DeliveryRecord,
    NetworkReport,
)

_V = TypeVar("_V")
MOST_WAITING = 64
"""Deliveries that wait to be told; the oldest are dropped."""


@dataclass(slots=True)
class NetworkLog:
    """One worker's log; transports and those who load weights write, the worker's heartbeats read."""

    culprits: dict[str, str] = field(default_factory=dict)
    """Source -> what it sent wrong; it is asked for nothing more in this run."""
    held: tuple[str, ...] = ()
    """Digests of payloads that are here whole, newest last."""
    _round_trip_s: float = 0.0
    _down_bytes_per_s: float = 0.0
    _deliveries: dict[int, DeliveryRecord] = field(default_factory=dict)
    """By version, oldest fetch first."""
    _ended: set[int] = field(default_factory=set)
    """Versions whose delivery is complete: they were loaded, or will never be."""
    _told: NetworkReport | None = None

    def holds(self, digest: str, has: Callable[[str], bool]) -> None:
        """Note that a payload is here whole, and forget those that no longer are, as `has` says."""
        self.held = (*tuple(one for one in (*self.held, digest) if one != digest and has(one)), digest)

    def round_trip(self, seconds: float) -> None:
        """Note how long the origin took for a short answer."""
        if seconds > 0:
            self._round_trip_s = min(self._round_trip_s or seconds, seconds)

    def delivered(self, told: DeliveryRecord) -> None:
        """Note that a payload of a version is here; several make one delivery."""
        version, came = told.version, told.bytes
        if told.seconds > 0 and came:
            self._down_bytes_per_s = max(self._down_bytes_per_s, came / told.seconds)
        known = self._deliveries.pop(version, None) or replace(told, seconds=0.0, bytes_from={})
        sent = {name: known.bytes_from.get(name, 0) + count for name, count in told.bytes_from.items()}
        rates = {
            name: max(known.best_bytes_per_s.get(name, 0.0), rate)
            for name, rate in told.best_bytes_per_s.items()
        }
        self._deliveries[version] = replace(
            known,
            seconds=known.seconds + told.seconds,
            bytes_from=_few({**known.bytes_from, **sent}),
            best_bytes_per_s=_few({**known.best_bytes_per_s, **rates}),
            culprits=_few(_short({**known.culprits, **told.culprits})),
        )
        for old in list(self._deliveries)[:-MOST_WAITING]:
            del self._deliveries[old]

    def loaded(self, version: int, verify_s: float, load_s: float) -> None:
        """Note that a version samples: its delivery is complete, and so are those of older ones."""
        if (known := self._deliveries.get(version)) is not None:
            self._deliveries[version] = replace(known, verify_s=verify_s, load_s=load_s)
        self._ended |= {one for one in self._deliveries if one <= version}

    def report(self) -> NetworkReport | None:
        """Return what the coordinator does not know yet, or None when it knows everything."""
        complete = [known for version, known in self._deliveries.items() if version in self._ended]
        told = NetworkReport(
            self._round_trip_s,
            self._down_bytes_per_s,
            self.held[-MOST_HELD:],
            tuple(complete[:MOST_DELIVERIES]),
            _few(_short(self.culprits)),
        )
        return None if told == self._told else told

    def confirmed(self, told: NetworkReport | None) -> None:
        """Note that the coordinator has a report."""
        if told is not None:
            for delivery in told.deliveries:
                self._deliveries.pop(delivery.version, None)
                self._ended.discard(delivery.version)
            self._told = replace(told, deliveries=())

    def forgotten(self) -> None:
        """Note that the coordinator knows nothing of this worker any more."""
        self._told = None


def _few(found: dict[str, _V]) -> dict[str, _V]:
    """Return the newest of them, as many as a report may have."""
    return dict(list(found.items())[-MOST_SOURCES:])


def _short(culprits: Mapping[str, str]) -> dict[str, str]:
    return {name: what[:LONGEST_TEXT] for name, what in culprits.items()}
