"""Plan: from whom each worker fetches a payload, so that the last one has it soonest.

Workers are taken by the slower of their two directions, fastest first, so that a slow one is at the end,
where it holds up no one. Star, chains and trees are made from the same links, and the one with the least
predicted time is taken. Whom a worker falls back to holds or gets the same chunks earlier, so no two
wait for each other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from antiphon.core.dissemination.predict import Link, Size, tree_seconds
from antiphon.core.errors import ContractError

ORIGIN = ""
"""Name of the payload's origin; no worker has it."""
TOPOLOGIES = ("star", "chain", "tree")
Topology = Literal["star", "chain", "tree"]
CHAINS = (1, 2, 4)
"""Chains that are tried beside each other."""
ARITIES = (2, 4)
FALLBACKS = 2
"""Ancestors that a worker may turn to between its parent and the origin."""
NEIGHBOURS = 8
"""Holders besides that a worker knows; it asks them for what they say they hold."""
_CUTS = 8
"""Places in the order of workers where a chain may end and slower workers hang below it as leaves."""


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Whom everyone fetches from, and how long that will take."""

    topology: Topology
    seconds: float
    """Until the last worker has everything."""
    assignments: Mapping[str, Assignment]


def plan_topology(
    size: Size, origin: Link, workers: Mapping[str, Link], topology: Topology | None = None
) -> Plan:
    """Return the plan with the least predicted time: of the last worker, plus the mean over all of them.

    The mean counts because a worker that is slow anyway would hide what happens to the others. Equal
    input gives an equal plan.

    Args:
        size: of the payload and its chunks.
        origin: link of the payload's origin.
        workers: links of the workers that want it, by name.
        topology: take the best plan of this kind instead of the best of all.

    Raises:
        ContractError: when a worker has the origin's name, which is empty.
    """
    if ORIGIN in workers:
        raise ContractError("a worker has an empty name, which stands for the origin; name it")
    if not workers:
        return Plan(topology or "star", 0.0, {})
    links = {**workers, ORIGIN: origin}
    best: tuple[float, Topology, dict[str, str], dict[str, tuple[float, float]]] | None = None
    for kind, parents in _trees(workers, origin):
        if topology in (None, kind):
            times = tree_seconds(size, parents, links)
            cost = _cost([seconds for seconds, _ in times.values()])
            if best is None or cost < best[0]:
                best = (cost, kind, parents, times)
    if best is None:  # too few workers that others can reach for a chain or tree
        return plan_topology(size, origin, workers)
    _, kind, parents, times = best
    reachable = [name for name in _fastest_first(workers) if workers[name].reachable]
    assignments: dict[str, Assignment] = {}
    for place, worker in enumerate(parents):
        above = _ancestors(worker, parents)
        kept = (*above[: 1 + FALLBACKS], ORIGIN) if len(above) > 1 + FALLBACKS else tuple(above)
        others = _neighbours(reachable, place, {worker, *kept})
        assignments[worker] = Assignment(kept, others, len(above), times[worker][1])
    return Plan(kind, max(seconds for seconds, _ in times.values()), assignments)


def _cost(seconds: list[float]) -> float:
    return max(seconds) + fmean(seconds)


def _fastest_first(workers: Mapping[str, Link]) -> list[str]:
    return sorted(workers, key=lambda name: (-_through(workers[name]), name))


def _through(link: Link) -> float:
    """Return the most that a worker can pass on, bytes per second."""
    return min(link.up_bytes_per_s, link.down_bytes_per_s)


def _trees(workers: Mapping[str, Link], origin: Link) -> Iterator[tuple[Topology, dict[str, str]]]:
    """Yield each tree to be considered, worker -> parent, parents first."""
    ordered = _fastest_first(workers)
    yield "star", dict.fromkeys(ordered, ORIGIN)
    relays = [name for name in ordered if workers[name].reachable]
    for length in _lengths([_through(workers[name]) for name in relays]):
        spine = relays[:length]
        leaves = [name for name in ordered if name not in set(spine)]
        for chains in CHAINS:
            if chains <= length:
                above = {
                    name: spine[at - chains] if at >= chains else ORIGIN for at, name in enumerate(spine)
                }
                yield "chain", _with_leaves(above, leaves, workers, origin)
        for arity in ARITIES:
            if arity < length:
                above = {
                    name: spine[at // arity - 1] if at >= arity else ORIGIN for at, name in enumerate(spine)
                }
                yield "tree", _with_leaves(above, leaves, workers, origin)


def _lengths(rates: list[float]) -> list[int]:
    """Return after how many workers a chain may end: at the end, and where rates drop the most."""
    drops = sorted(range(1, len(rates)), key=lambda at: (rates[at] / rates[at - 1], at))
    cuts = [at for at in drops[:_CUTS] if rates[at] < rates[at - 1]]
    return [len(rates), *sorted(cuts, reverse=True)] if rates else []


def _with_leaves(
    above: dict[str, str], leaves: list[str], workers: Mapping[str, Link], origin: Link
) -> dict[str, str]:
    """Hang each leaf below the one that can give it the most of an uplink."""
    room = {ORIGIN: origin.up_bytes_per_s} | {name: workers[name].up_bytes_per_s for name in above}
    children = dict.fromkeys(room, 0)
    for parent in above.values():
        children[parent] += 1
    found = dict(above)
    for leaf in leaves:
        parent = max(room, key=lambda name: (room[name] / (children[name] + 1), name))
        children[parent] += 1
        found[leaf] = parent
    return found


def _ancestors(worker: str, parents: Mapping[str, str]) -> list[str]:
    found = [parents[worker]]
    while found[-1] != ORIGIN:
        found.append(parents[found[-1]])
    return found


def _neighbours(reachable: list[str], place: int, left_out: set[str]) -> tuple[str, ...]:
    """Return a few others, a different few for each worker."""
    start = place % max(1, len(reachable))
    around = reachable[start:] + reachable[:start]
    return tuple(name for name in around if name not in left_out)[:NEIGHBOURS]
