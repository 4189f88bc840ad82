"""Prediction: seconds until each worker has a payload that is passed on from worker to worker.

A payload of M bytes travels in C chunks of c bytes. A worker passes a chunk on once it has all of it. Who
sends to k others shares its uplink among them. With equal links of B bytes per second and a delay of a
seconds per hop, overhead included:

    star     n M / B
    chain    (M / B) (1 + (n - 1) / C) + n a
    tree     (M / B) k (1 + (d - 1) / C) + d a      k children each, depth d

`tree_seconds` gives these for equal links and the like for any others (a chain is a tree with one child, a
star one with n), apart from the overhead of each chunk. The formulas are derived in shared/papers.md 1.4 and
checked there with a simulation by chunks; ECHO-2 publishes none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from antiphon.core.errors import ContractError

CHUNK_OVERHEAD_S = 0.0005
"""Seconds that a chunk costs a receiver besides its bytes: a request, a digest, a write."""


@dataclass(frozen=True, slots=True)
class Link:
    """The network of one party, as measured."""

    up_bytes_per_s: float
    down_bytes_per_s: float
    round_trip_s: float = 0.0
    """To the origin and back."""
    reachable: bool = True
    """Whether others can connect to it; who cannot be reached receives only."""

    def __post_init__(self) -> None:
        for name in ("up_bytes_per_s", "down_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ContractError(
                    f"{name}={getattr(self, name)} of a link is not above 0; measure it again"
                )
        if not self.round_trip_s >= 0:
            raise ContractError(f"round_trip_s={self.round_trip_s} of a link is below 0; measure it again")


@dataclass(frozen=True, slots=True)
class Size:
    """A payload and the chunks it travels in, bytes."""

    payload_bytes: int
    chunk_bytes: int

    @property
    def chunks(self) -> int:
        return max(1, ceil(self.payload_bytes / self.chunk_bytes))


def tree_seconds(
    size: Size,
    parents: Mapping[str, str],
    links: Mapping[str, Link],
    overhead_s: float = CHUNK_OVERHEAD_S,
) -> dict[str, tuple[float, float]]:
    """Predict when each worker of a tree has everything.

    Args:
        size: of payload and chunks.
        parents: worker -> whom it fetches from; parents stand before their children, and who stands
            under no key is the origin.
        links: of the workers and the origin, by name.
        overhead_s: of a chunk at each hop.

    Returns:
        Worker -> (seconds until the last chunk, bytes per second that it receives on the way).
    """
    children: dict[str, int] = {}
    for parent in parents.values():
        children[parent] = children.get(parent, 0) + 1
    chunk = min(size.chunk_bytes, size.payload_bytes)
    # Of each party: seconds until its first chunk, and seconds from one chunk to the next.
    first: dict[str, float] = {}
    pace: dict[str, float] = {}
    found: dict[str, tuple[float, float]] = {}
    for worker, parent in parents.items():
        here, above = links[worker], links[parent]
        rate = min(above.up_bytes_per_s / children[parent], here.down_bytes_per_s)
        hop_s = chunk / rate + overhead_s
        first[worker] = first.get(parent, 0.0) + hop_s + delay_s(above, here, parent not in parents)
        pace[worker] = max(pace.get(parent, 0.0), hop_s)
        whole_s = first[worker] + (size.payload_bytes / chunk - 1) * pace[worker]
        found[worker] = (whole_s, chunk / pace[worker])
    return found


def delay_s(above: Link, here: Link, from_origin: bool) -> float:
    """Return the seconds that a byte travels between two parties; between workers at most over the origin."""
    return here.round_trip_s / 2 if from_origin else (above.round_trip_s + here.round_trip_s) / 2
