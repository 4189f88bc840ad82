"""Reports: what a worker measures of its network and says of it, and what of that is well formed.

A worker may say anything: numbers, names and lists are bounded before anything is kept of them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from antiphon.core.checks import check_number
from antiphon.core.digests import check_digest
from antiphon.core.errors import ContractError
from antiphon.core.frozen import frozen

MOST_SOURCES = 16
"""Sources in one report; a worker is named fewer."""
MOST_HELD = 64
"""Payloads that a worker says it holds."""
MOST_DELIVERIES = 16
"""In one report; others follow with the next."""
MOST_WAITING = 64
"""Deliveries that wait to be told; the oldest are dropped."""
LONGEST_TEXT = 200
"""Characters of a name, or of what a source did."""
_V = TypeVar("_V")
_ADDRESS = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")


@frozen
class DeliveryRecord:
    """How one version came to one worker."""

    version: int
    worker_id: str
    seconds: float = 0.0
    """From the first request until the last chunk was here."""
    first_chunk_s: float = 0.0
    """From the first request until the first chunk was here."""
    bytes_from: dict[str, int] = field(default_factory=dict)
    """Source -> bytes that it sent; the origin is "". Empty where the origin's file was linked."""
    best_bytes_per_s: dict[str, float] = field(default_factory=dict)
    """Source -> highest rate at which it sent, bytes per second."""
    culprits: dict[str, str] = field(default_factory=dict)
    """Source -> what it sent wrong, as words that follow its name."""
    verify_s: float = 0.0
    """Until what had come was checked against the version's digest; 0 when the version was never loaded."""
    load_s: float = 0.0
    """Until the engine sampled with it, counted from there; 0 when the version was never loaded."""

    @property
    def bytes(self) -> int:
        """Return the bytes that came over the network."""
        return sum(self.bytes_from.values())


@frozen
class NetworkReport:
    """What a worker measured, and what it has to give."""

    round_trip_s: float = 0.0
    """To the origin and back, the least that was seen; 0 before a measurement."""
    down_bytes_per_s: float = 0.0
    """Highest rate of a whole transfer; 0 before a measurement."""
    held_payloads: tuple[str, ...] = ()
    """Digests of payloads that it holds whole."""
    deliveries: tuple[DeliveryRecord, ...] = ()
    """Those that the coordinator has not confirmed yet."""
    culprits: dict[str, str] = field(default_factory=dict)
    """Source -> what it sent wrong; it is asked for nothing more."""


def check_report(report: NetworkReport) -> None:
    """Look whether a report is well formed.

    Raises:
        ContractError: when it is not; names the field.
    """
    _number("round_trip_s", report.round_trip_s)
    _number("down_bytes_per_s", report.down_bytes_per_s)
    _short("culprits", report.culprits)
    if len(report.held_payloads) > MOST_HELD:
        raise _wrong("held_payloads", f"has {len(report.held_payloads)} digests; {MOST_HELD} are allowed")
    for digest in report.held_payloads:
        check_digest(digest)
    if len(report.deliveries) > MOST_DELIVERIES:
        raise _wrong("deliveries", f"has {len(report.deliveries)}; {MOST_DELIVERIES} are allowed")
    for delivery in report.deliveries:
        for name in ("version", "seconds", "first_chunk_s", "verify_s", "load_s"):
            _number(name, getattr(delivery, name))
        for name in ("bytes_from", "best_bytes_per_s", "culprits"):
            _short(name, getattr(delivery, name))


def check_address(address: str) -> None:
    """Look whether others could be sent to an address.

    Raises:
        ContractError: when it is not HOST:PORT.
    """
    if not _ADDRESS.fullmatch(address) or not 0 < int(address.rpartition(":")[2]) < 1 << 16:
        raise ContractError(f"relay address {address[:80]!r} is not HOST:PORT; give it as others dial it")


def _number(field_name: str, value: float) -> None:
    check_number(f"{field_name} of a worker's network report", value)


def _short(field_name: str, found: Mapping[str, object]) -> None:
    if len(found) > MOST_SOURCES:
        raise _wrong(field_name, f"names {len(found)} sources; {MOST_SOURCES} are allowed")
    for name, value in found.items():
        if isinstance(value, str):
            if len(value) > LONGEST_TEXT:
                raise _wrong(field_name, f"has a text of {len(value)} characters")
        elif isinstance(value, int | float):
            _number(field_name, value)
        if len(name) > LONGEST_TEXT:
            raise _wrong(field_name, f"has a name of {len(name)} characters")


def _wrong(field_name: str, what: str) -> ContractError:
    return ContractError(f"{field_name} of a worker's network report {what}; update this worker")


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
            bytes_from=_newest({**known.bytes_from, **sent}),
            best_bytes_per_s=_newest({**known.best_bytes_per_s, **rates}),
            culprits=_newest(_cut({**known.culprits, **told.culprits})),
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
            _newest(_cut(self.culprits)),
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


def _newest(found: dict[str, _V]) -> dict[str, _V]:
    """Return the newest of them, as many as a report may have."""
    return dict(list(found.items())[-MOST_SOURCES:])


def _cut(culprits: Mapping[str, str]) -> dict[str, str]:
    return {name: what[:LONGEST_TEXT] for name, what in culprits.items()}
