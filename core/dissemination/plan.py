"""Plan: from whom each worker fetches a payload, so that the last one has it soonest.

A payload of M bytes travels in C chunks of c bytes. A worker passes a chunk on once it has all of it. Who
sends to k others shares its uplink among them. With equal links of B bytes per second and a delay of a
seconds per hop, overhead included:

    star     n M / B
    chain    (M / B) (1 + (n - 1) / C) + n a

`tree_seconds` gives these for equal links and the like for any others, apart from the overhead of each chunk.
The formulas are derived in shared/papers.md 1.4 and checked there with a simulation by chunks; ECHO-2
publishes none.

There is one rule: a worker fetches from the one of whom it has everything soonest, its own seconds and those
counted that it costs the workers which fetch there already, and those not far below them. Workers are taken
by the slower of their two directions, fastest first, those that others cannot reach last. Equal links give a
chain, a fast origin or a small payload over long ways a star. Places never change, and whom a worker falls
back to holds or gets the same chunks earlier, so no two wait for each other.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from math import ceil

import numpy as np

from antiphon.core.errors import ContractError

ORIGIN = ""
"""Name of the payload's origin; no worker has it."""
FALLBACKS = 2
"""Ancestors that a worker may turn to between its parent and the origin."""
NEIGHBOURS = 8
"""Holders besides that a worker knows; they send what they hold of what it asks for."""
CHUNK_OVERHEAD_S = 0.0005
"""Seconds that a chunk costs a receiver besides its bytes: a request, a digest, a write."""
WEIGHED_HOPS = 32
"""Hops down to which those below a worker count when it would be slowed down."""


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


@dataclass(frozen=True, slots=True)
class Assignment:
    """Whom a worker fetches from."""

    parents: tuple[str, ...]
    """In this order, one at a time; each gets every chunk earlier than the worker. Ends with the origin."""
    others: tuple[str, ...]
    """Holders that are asked for what they hold, when no parent answers."""
    depth: int
    """Hops from the origin."""
    bytes_per_s: float
    """Predicted rate."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Whom a worker fetches a payload from, and where they are."""

    assignment: Assignment
    addresses: dict[str, str]
    """Worker that the assignment names -> host:port; the origin's stands in the manifest."""


@dataclass(slots=True)
class Tree:
    """Whom each worker fetches a payload from; it grows, and places in it never change."""

    size: Size
    parents: dict[str, str] = field(default_factory=dict)
    """Worker -> whom it fetches from; parents stand before their children."""
    arrives: dict[str, tuple[float, float]] = field(default_factory=lambda: {ORIGIN: (0.0, 0.0)})
    """Party -> seconds until its first chunk, and from one chunk to the next, as predicted when it came."""
    below: Counter[str] = field(default_factory=Counter)
    """Worker -> those at most `WEIGHED_HOPS` below it, which get all they get through it."""

    def add(self, names: Iterable[str], links: Mapping[str, Link], holders: Collection[str] = ()) -> None:
        """Give workers their places, one after the other.

        Args:
            names: the workers.
            links: of the workers, of the origin, and of those that they may be placed below.
            holders: workers that have the payload by now: they wait for nobody.
        """
        added = list(names)
        places = _Places(self, links, holders, len(self.arrives) + len(added))
        for name in added:
            places.add(name)

    def ancestors(self, name: str) -> Iterator[str]:
        """Yield those above a worker, its parent first and the origin last."""
        while name != ORIGIN:
            name = self.parents[name]
            yield name

    def rate(self, name: str) -> float:
        """Return the bytes per second that a worker was predicted to receive."""
        return min(self.size.chunk_bytes, self.size.payload_bytes) / self.arrives[name][1]

    def assignment(self, name: str, serving: Collection[str], holders: Collection[str] = ()) -> Assignment:
        """Return whom a worker is to ask, among those in `serving`; each gets a different few others."""
        above = list(self.ancestors(name))
        parents = (*[one for one in above[:-1] if one in serving][: 1 + FALLBACKS], ORIGIN)
        names = list(self.parents)
        place = names.index(name)
        around = [one for one in names[place:] + names[:place] if one in serving and one not in parents]
        around = [one for one in around if one != name]
        others = sorted(around, key=lambda one: one not in holders)[:NEIGHBOURS]
        return Assignment(parents, tuple(others), len(above), self.rate(name))


@dataclass(slots=True)
class _Place:
    """A party that workers may be placed below."""

    link: Link
    column: int
    fetching: int = 0
    """Workers that fetch there and wait for it."""
    unslowed: list[tuple[float, str]] = field(default_factory=list)
    """Seconds from one chunk to the next, and name, of those that one more would not slow down: a heap."""


class _Places:
    """Where workers may be placed while some are added: a worker compares all places at once.

    They are columns of a table: seconds until the first chunk, from one to the next, and of a byte on its way
    but for the worker's half of a round trip; seconds of a chunk when one more fetches there; those whom that
    slows down, each with those below it, and their seconds from one chunk to the next, all together.
    """

    def __init__(self, tree: Tree, links: Mapping[str, Link], holders: Collection[str], most: int) -> None:
        self._tree, self._links, self._holders = tree, links, holders
        self._chunk = min(tree.size.chunk_bytes, tree.size.payload_bytes)
        self._chunks = tree.size.payload_bytes / self._chunk
        self._open: dict[str, _Place] = {}
        self._names: list[str] = []
        self._slowed: set[str] = set()
        self._table = np.zeros((6, most))
        for name in tree.arrives:
            self._offer(name)

    def add(self, name: str) -> None:
        """Place a worker where it has everything soonest, counting what that costs others."""
        tree, here = self._tree, self._links[name]
        own_s, way_s = self._chunk / here.down_bytes_per_s + CHUNK_OVERHEAD_S, here.round_trip_s / 2
        first_s, pace_s, delays_s, shared_s, slowed, slowed_s = self._table[:, : len(self._names)]
        hops_s = np.maximum(shared_s, own_s)
        first_s, pace_s = first_s + hops_s + delays_s + way_s, np.maximum(pace_s, hops_s)
        costs_s = self._chunks * (shared_s * slowed - slowed_s)
        whole_s = costs_s + (first_s + (self._chunks - 1) * pace_s)
        best = min(np.flatnonzero(whole_s == whole_s.min()), key=self._names.__getitem__)
        tree.parents[name] = self._names[best]
        tree.arrives[name] = float(first_s[best]), float(pace_s[best])
        above = set(islice(tree.ancestors(name), WEIGHED_HOPS)) - {ORIGIN}
        tree.below.update(above)
        for one in above & self._slowed:
            self._table[4:, self._open[tree.parents[one]].column] += 1, tree.arrives[one][1]
        self._offer(name)

    def _offer(self, name: str) -> None:
        """Take in a party that has its place: it slows others down, and others may be placed below it."""
        above = self._open.get(self._tree.parents.get(name, name))
        if above is not None and name not in self._holders:
            above.fetching += 1
            heappush(above.unslowed, (self._tree.arrives[name][1], name))
            self._weigh(above)
        if (link := self._links.get(name)) is not None and link.reachable:
            arrives = (0.0, 0.0) if name in self._holders else self._tree.arrives[name]
            place = self._open[name] = _Place(link, len(self._names))
            self._names.append(name)
            self._table[:3, place.column] = *arrives, 0.0 if name == ORIGIN else link.round_trip_s / 2
            self._weigh(place)

    def _weigh(self, place: _Place) -> None:
        """Note the seconds of a chunk when one more fetches there, and whom that slows down."""
        shared_s = self._chunk * (place.fetching + 1) / place.link.up_bytes_per_s + CHUNK_OVERHEAD_S
        self._table[3, place.column] = shared_s
        while place.unslowed and place.unslowed[0][0] < shared_s:
            pace_s, name = heappop(place.unslowed)
            self._slowed.add(name)
            self._table[4:, place.column] += (1 + self._tree.below[name]) * np.array([1.0, pace_s])


@dataclass(frozen=True, slots=True)
class Plan:
    """Whom everyone fetches from, and how long that will take."""

    seconds: float
    """Until the last worker has everything."""
    assignments: Mapping[str, Assignment]


def plan_tree(size: Size, origin: Link, workers: Mapping[str, Link]) -> Plan:
    """Return whom each of some workers fetches a payload from. Equal input gives an equal plan.

    Raises:
        ContractError: when a worker has the origin's name, which is empty.
    """
    if ORIGIN in workers:
        raise ContractError("a worker has an empty name, which stands for the origin; name it")
    tree, links = Tree(size), {**workers, ORIGIN: origin}
    tree.add(fastest_first(workers), links)
    times = tree_seconds(size, tree.parents, links)
    serving = {name for name, link in workers.items() if link.reachable}
    found = {name: tree.assignment(name, serving) for name in tree.parents}
    return Plan(max((seconds for seconds, _ in times.values()), default=0.0), found)


def fastest_first(workers: Mapping[str, Link]) -> Sequence[str]:
    """Return workers in the order in which they get their places."""

    def key(name: str) -> tuple[bool, float, str]:
        link = workers[name]
        return not link.reachable, -min(link.up_bytes_per_s, link.down_bytes_per_s), name

    return sorted(workers, key=key)


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
    children = Counter(parents.values())
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
