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
counted that it costs the workers which fetch there already. Workers are taken by the slower of their two
directions, fastest first, those that others cannot reach last. Equal links give a chain, a fast origin or a
small payload over long ways a star. Places never change, and whom a worker falls back to holds or
gets the same chunks earlier, so no two wait for each other.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from antiphon.core.errors import ContractError

ORIGIN = ""
"""Name of the payload's origin; no worker has it."""
FALLBACKS = 2
"""Ancestors that a worker may turn to between its parent and the origin."""
NEIGHBOURS = 8
"""Holders besides that a worker knows; they send what they hold of what it asks for."""
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
    _arrives: dict[str, tuple[float, float]] = field(default_factory=lambda: {ORIGIN: (0.0, 0.0)})
    """Party -> seconds until its first chunk, and from one chunk to the next, as predicted when it came."""
    _children: dict[str, list[str]] = field(default_factory=dict)
    _below: Counter[str] = field(default_factory=Counter)
    """Party -> workers that get all they get through it."""

    def add(self, name: str, links: Mapping[str, Link], holders: Collection[str] = ()) -> None:
        """Give a worker its place.

        Args:
            name: the worker.
            links: of the worker, of the origin, and of those that it may be placed below.
            holders: workers that have the payload by now: they wait for nobody.
        """
        here, chunk = links[name], min(self.size.chunk_bytes, self.size.payload_bytes)
        chunks = self.size.payload_bytes / chunk
        best: tuple[float, str, tuple[float, float]] | None = None
        for above in (ORIGIN, *self.parents):
            if above not in links or not links[above].reachable:
                continue
            busy = [one for one in self._children.get(above, ()) if one not in holders]
            shared_s = chunk * (len(busy) + 1) / links[above].up_bytes_per_s + CHUNK_OVERHEAD_S
            first_s, pace_s = (0.0, 0.0) if above in holders else self._arrives[above]
            hop_s = max(shared_s, chunk / here.down_bytes_per_s + CHUNK_OVERHEAD_S)
            first_s += hop_s + delay_s(links[above], here, above == ORIGIN)
            pace_s = max(pace_s, hop_s)
            costs_s = first_s + (chunks - 1) * pace_s
            for one in busy:
                slower_s = max(0.0, shared_s - self._arrives[one][1])
                costs_s += chunks * slower_s * (1 + self._below[one])
            if best is None or (costs_s, above) < best[:2]:
                best = (costs_s, above, (first_s, pace_s))
        assert best is not None  # the origin can always be asked
        _, self.parents[name], self._arrives[name] = best
        self._children.setdefault(self.parents[name], []).append(name)
        self._below.update(self.ancestors(name))

    def ancestors(self, name: str) -> list[str]:
        """Return those above a worker, its parent first and the origin last."""
        found = [self.parents[name]]
        while found[-1] != ORIGIN:
            found.append(self.parents[found[-1]])
        return found

    def rate(self, name: str) -> float:
        """Return the bytes per second that a worker was predicted to receive."""
        return min(self.size.chunk_bytes, self.size.payload_bytes) / self._arrives[name][1]

    def assignment(self, name: str, serving: Collection[str], holders: Collection[str] = ()) -> Assignment:
        """Return whom a worker is to ask, among those in `serving`; each gets a different few others."""
        above = self.ancestors(name)
        parents = (*[one for one in above[:-1] if one in serving][: 1 + FALLBACKS], ORIGIN)
        names = list(self.parents)
        place = names.index(name)
        around = [one for one in names[place:] + names[:place] if one in serving and one not in parents]
        around = [one for one in around if one != name]
        others = sorted(around, key=lambda one: one not in holders)[:NEIGHBOURS]
        return Assignment(parents, tuple(others), len(above), self.rate(name))


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
    for name in fastest_first(workers):
        tree.add(name, links)
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
