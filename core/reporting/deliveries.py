"""Deliveries: how versions came to the workers, summed up version by version."""

from collections import deque
from dataclasses import dataclass, field

from antiphon.core.dissemination.plan import ORIGIN
from antiphon.core.dissemination.reports import DeliveryRecord

NEWEST = 200
"""Deliveries that are kept one by one; of all others the sums of their version remain."""


@dataclass(slots=True)
class VersionDeliveries:
    """What it took to bring one version to all workers that fetched it."""

    version: int
    at: float = 0.0
    """When the last of them was reported, Unix seconds."""
    workers: int = 0
    seconds_to_last: float = 0.0
    """From a worker's first request until its last chunk was there, for the slowest worker."""
    bytes: int = 0
    """That came over the network, to all workers together."""
    relayed_bytes: int = 0
    """Of these, not from the origin."""

    @property
    def relayed_share(self) -> float:
        """Return the share of the bytes that did not come from the origin, 0..1."""
        return self.relayed_bytes / self.bytes if self.bytes else 0.0


@dataclass(slots=True)
class Deliveries:
    """All deliveries of a run, in bounded space per version."""

    versions: dict[int, VersionDeliveries] = field(default_factory=dict)
    newest: deque[DeliveryRecord] = field(default_factory=lambda: deque(maxlen=NEWEST))
    """In the order of their reports."""

    def add(self, delivery: DeliveryRecord, at: float) -> None:
        """Count one that was reported `at` these Unix seconds."""
        version = self.versions.setdefault(delivery.version, VersionDeliveries(delivery.version))
        version.at = max(version.at, at)
        version.workers += 1
        version.seconds_to_last = max(version.seconds_to_last, delivery.seconds)
        version.bytes += delivery.bytes
        version.relayed_bytes += delivery.bytes - delivery.bytes_from.get(ORIGIN, 0)
        self.newest.append(delivery)

    def in_order(self) -> list[VersionDeliveries]:
        """Return the versions' sums, the oldest version first."""
        return [self.versions[version] for version in sorted(self.versions)]
