"""Transfers: whom each worker of a run fetches a payload from, decided from what the workers reported.

A payload's plan is made when the first worker asks, for all who will probably want it too, and stays: who
comes later hangs below those who are there, so that no two ever wait for each other. Who left, or sent
something wrong, is left out of every answer.

What one worker says moves little. A rate is the second highest that was reported. An
accusation counts for the accuser alone until another worker says the same, and not at all against someone
whom the accuser was never told to ask.
"""

from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median_low

from antiphon.core.dissemination.plan import ORIGIN, Assignment, Link, Size, TransferPlan, Tree, fastest_first
from antiphon.core.dissemination.reports import DeliveryRecord, NetworkReport
from antiphon.core.records import Payload
from antiphon.core.trust.worker_names import name_of_worker

UNMEASURED_UP_BYTES_PER_S = 12.5e6
"""Taken for an uplink while no one reported one, bytes per second."""
FROM_ORIGIN = TransferPlan(Assignment((ORIGIN,), (), 1, UNMEASURED_UP_BYTES_PER_S), {})
"""The plan of a worker that no one else serves."""
UNMEASURED_DOWN_BYTES_PER_S = 125e6
SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S = 1e4, 1e11
"""Between these lies what is believed of a link."""
LONGEST_ROUND_TRIP_S = 10.0
SMOOTHING = 0.3
"""Share of a lower rate than before that counts at once; a higher one counts whole."""
SHORTEST_S = 0.5
"""A lower rate counts when the link would be busy for so long at the rate known: patches take little more
than round trips, which say nothing of an uplink."""
WITNESSES = 2
"""Workers that must say the same before someone is left out for all."""
PLANS_KEPT = 16
"""Payloads whose plan is remembered; all others come from the origin once their plan is forgotten."""
DELIVERIES_KEPT = 128
VERSIONS_KEPT = 64
"""Per worker: up to the newest one, those whose delivery is noted once; older ones never."""


@dataclass(slots=True)
class _Known:
    """What is known of one worker."""

    down_bytes_per_s: float = UNMEASURED_DOWN_BYTES_PER_S
    round_trip_s: float = 0.0
    held: frozenset[str] = frozenset()
    named: set[str] = field(default_factory=set)
    """Workers that it was told to ask."""


@dataclass(slots=True)
class _Told:
    """Which deliveries the workers of one name told of."""

    delivered: set[int] = field(default_factory=set)
    """Versions above `settled` whose delivery was noted."""
    settled: int = -1

    def is_news(self, version: int) -> bool:
        """Note the delivery of a version; False for one that was noted, or is too old to be remembered."""
        if version <= self.settled or version in self.delivered:
            return False
        self.delivered.add(version)
        self.settled = max(self.settled, max(self.delivered) - VERSIONS_KEPT)
        self.delivered = {one for one in self.delivered if one > self.settled}
        return True


@dataclass(slots=True)
class _PayloadPlan:
    asker: str
    """Name of the worker for which it was made."""
    tree: Tree


class TransferPlans:
    """The measured network of a run, and the plans that were made from it."""

    def __init__(self, uplink_bytes_per_s: float | None = None) -> None:
        """`uplink_bytes_per_s` is the cap of the origin, if it has one."""
        self._cap = FASTEST_BYTES_PER_S if uplink_bytes_per_s is None else uplink_bytes_per_s
        self._known: dict[str, _Known] = {}
        self._up: dict[str, dict[str, float]] = {}
        """Source -> name of who reported -> bytes per second that the source sends."""
        self._accused: dict[str, dict[str, str]] = {}
        """Name of a worker -> name of its accuser -> what it did."""
        self._plans: dict[str, _PayloadPlan] = {}
        """By payload, oldest first."""
        self._retired: set[str] = set()
        """Payloads whose plan is forgotten: with another one, two workers might wait for each other."""
        self._told: dict[str, _Told] = {}
        """By name, which outlasts a registration."""
        self.deliveries: deque[DeliveryRecord] = deque(maxlen=DELIVERIES_KEPT)
        """The newest ones, newest last."""

    def take(self, worker_id: str, report: NetworkReport) -> tuple[DeliveryRecord, ...]:
        """Note a report that `check_report` passed, and return the deliveries in it that are news."""
        name, known = name_of_worker(worker_id), self._known.setdefault(worker_id, _Known())
        known.held = frozenset(report.held_payloads)
        if report.down_bytes_per_s:
            known.down_bytes_per_s = _believed(report.down_bytes_per_s)
        known.round_trip_s = min(report.round_trip_s, LONGEST_ROUND_TRIP_S)
        for source, what in report.culprits.items():
            if source in known.named:
                self._accused.setdefault(name_of_worker(source), {}).setdefault(name, what)
        news = []
        for told in report.deliveries:
            if not self._told.setdefault(name, _Told()).is_news(told.version):
                continue
            delivery = replace(told, worker_id=worker_id)
            for source, rate in told.best_bytes_per_s.items():
                if source == ORIGIN or source in known.named:
                    rates = self._up.setdefault(source, {})
                    rate = _believed(rate)
                    before = rates.get(name, 0.0)
                    if rate >= before:
                        rates[name] = rate
                    elif told.bytes_from.get(source, 0) >= SHORTEST_S * before:
                        rates[name] = before + SMOOTHING * (rate - before)
            self.deliveries.append(delivery)
            news.append(delivery)
        return tuple(news)

    def forget(self, worker_id: str) -> None:
        """Note that a worker left; what its name did stays."""
        self._known.pop(worker_id, None)
        self._up.pop(worker_id, None)

    def excluded(self) -> dict[str, str]:
        """Return the names that are left out of all plans, and what each did."""
        return {
            name: next(iter(said.values())) for name, said in self._accused.items() if len(said) >= WITNESSES
        }

    def plan(
        self, worker_id: str, payload: Payload, peers: Mapping[str, str], likely: Collection[str]
    ) -> TransferPlan:
        """Return whom a worker fetches a payload from; the names in it are workers of `peers` or the origin.

        Args:
            worker_id: who asks; one of `peers`.
            payload: what it wants.
            peers: the workers that take part now: id -> host:port at which others reach it, or "".
            likely: those of them that will probably want the payload too.
        """
        digest = payload.digest
        for one in peers:
            self._known.setdefault(one, _Known())
        if digest in self._retired:
            return FROM_ORIGIN
        holders = {one for one in peers if digest in self._known[one].held}
        links = self._links(peers)
        if digest not in self._plans:
            tree = Tree(Size(payload.payload_bytes, payload.chunk_bytes))
            self._plans[digest] = _PayloadPlan(name_of_worker(worker_id), tree)
            first = {one: links[one] for one in {worker_id, *likely, *holders} & peers.keys()}
            tree.add(fastest_first(first), links, holders)
            if len(self._plans) > PLANS_KEPT:
                self._retire()
            if digest in self._retired:
                return FROM_ORIGIN
        tree, shunned = self._plans[digest].tree, self._shunned(worker_id)
        serving = {one for one in peers if peers[one] and name_of_worker(one) not in shunned}
        if worker_id not in tree.parents:
            near = {one: link for one, link in links.items() if one in {*serving, worker_id, ORIGIN}}
            tree.add([worker_id], near, holders | (tree.parents.keys() - peers.keys()))
        found = tree.assignment(worker_id, serving, holders)
        named = (*found.parents[:-1], *found.others)
        self._known[worker_id].named.update(named)
        return TransferPlan(found, {one: peers[one] for one in named})

    def _retire(self) -> None:
        """Forget the oldest plan of the worker that caused the most: none drives out those of the others."""
        made = Counter(one.asker for one in self._plans.values())
        most = max(made.values())
        old = next(digest for digest, one in self._plans.items() if made[one.asker] == most)
        del self._plans[old]
        self._retired.add(old)

    def _shunned(self, worker_id: str) -> set[str]:
        """Return the names that a worker should not be sent to."""
        name = name_of_worker(worker_id)
        own = {accused for accused, said in self._accused.items() if name in said}
        return own | self.excluded().keys() | {name}

    def _links(self, peers: Mapping[str, str]) -> dict[str, Link]:
        """Return the links of the workers and of the origin; where no one reported a rate, the usual one."""
        # The second highest of the reports: each says what it got at least, and one may be a lie.
        rates = {
            one: sorted(said.values())[-min(len(said), WITNESSES)] for one, said in self._up.items() if said
        }
        origin = rates.pop(ORIGIN, UNMEASURED_UP_BYTES_PER_S)
        reporters = {name for one, said in self._up.items() if one != ORIGIN for name in said}
        usual = median_low(rates.values()) if len(reporters) >= WITNESSES else UNMEASURED_UP_BYTES_PER_S
        excluded = self.excluded()
        links = {ORIGIN: Link(min(self._cap, origin), FASTEST_BYTES_PER_S)}
        for one, address in peers.items():
            known, reachable = self._known[one], bool(address) and name_of_worker(one) not in excluded
            links[one] = Link(rates.get(one, usual), known.down_bytes_per_s, known.round_trip_s, reachable)
        return links


def _believed(bytes_per_s: float) -> float:
    return min(max(bytes_per_s, SLOWEST_BYTES_PER_S), FASTEST_BYTES_PER_S)
