"""Provisioner: looks at a run now and then, and starts and drains workers of its pool.

A worker is on standby until it is ordered, then active, and once it is drained it hands its groups over:
the coordinator tells it to leave with the answer to its next heartbeat and gives it no further group. Its
order is taken back when it has left, or has not within its grace. Nothing that fails here ends the run, nor
does the run wait for any of it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from antiphon.core.capacity.activation import Activator, Orders
from antiphon.core.capacity.cover import WorkerOffer
from antiphon.core.capacity.provisioning_config import PoolClass, ProvisioningSection
from antiphon.core.status import RunStatus, WorkerRecord, WorkerState
from antiphon.core.trust.worker_names import name_of_worker
from antiphon.runs.supervisor import ServiceSpec, Supervisor
from antiphon.system.clock import wall_clock
from antiphon.system.files import write_atomically

LOOK_S = 2.0
"""Seconds between two looks at the run."""
UNKNOWN_TOKENS_PER_S = 1.0
"""Stands for a rate that nothing is known of: the decision takes what others give."""
MOST_TOKENS_PER_S = 1e9
"""A worker that says more is not believed, and counts as one of its class."""
_log = structlog.get_logger(__name__)


class LocalLauncher:
    """Workers of a pool as processes of this machine, kept alive by the run's supervisor.

    They end with the run's process. Orders are named by their worker, so that repeating one changes nothing,
    and lie in a file; what was ordered before is started again.
    """

    def __init__(
        self,
        pool: Sequence[PoolClass],
        supervisor: Supervisor,
        spec: Callable[[str], ServiceSpec],
        orders: Path,
    ) -> None:
        """Launch with `spec`, which says how the worker of a name is started; `orders` is the file."""
        self._pool, self._supervisor, self._spec, self._file = pool, supervisor, spec, orders
        names = {name for one in pool for name in one.workers}
        kept = json.loads(orders.read_text(encoding="utf-8")) if orders.exists() else []
        self._ordered = [name for name in kept if name in names]
        for name in self._ordered:
            supervisor.start(spec(name))

    def offers(self) -> list[WorkerOffer]:
        """Return the pool at the prices of this moment; rates are in tokens per second."""
        now = wall_clock()
        return [
            WorkerOffer(
                name,
                one.usd_at(now),
                one.tokens_per_s or UNKNOWN_TOKENS_PER_S,
                one.availability,
                one.zone or name,
            )
            for one in self._pool
            for name in one.workers
        ]

    def running(self) -> set[str]:
        """Return the workers whose processes were not given up."""
        return {name for name in self._ordered if self._supervisor.keeps(name)}

    def start(self, name: str) -> None:
        """Start a worker's process."""
        if name not in self.running():
            self._note([*(n for n in self._ordered if n != name), name])
            self._supervisor.start(self._spec(name))

    def stop(self, name: str) -> None:
        """Ask a worker to hand over and leave; its process is killed when it does not."""
        if name in self._ordered:
            self._note([n for n in self._ordered if n != name])
            self._supervisor.dismiss(name)

    def _note(self, ordered: list[str]) -> None:
        self._ordered = ordered
        write_atomically(self._file, json.dumps(ordered).encode())


class Provisioner:
    """Decides and orders; times are on the clock of the caller that passes `now`."""

    def __init__(
        self,
        section: ProvisioningSection,
        launcher: LocalLauncher,
        drain: Callable[[str], None],
        grace_s: float,
    ) -> None:
        """Provision with a launcher.

        Args:
            section: the pool and when it is changed.
            launcher: starts and stops its workers.
            drain: asks the coordinator to let a worker of that name leave.
            grace_s: seconds that it gets for that.
        """
        self._section, self._launcher, self._drain, self._grace_s = section, launcher, drain, grace_s
        self._activator = Activator(section.redundancy, section.add_after_s, section.hold_s)
        self._draining: dict[str, float] = {}

    def look(self, status: RunStatus, now: float) -> Orders:
        """Take in a look at the run, give the orders that follow from it, and return them."""
        here = {
            name_of_worker(worker.worker_id): worker
            for worker in status.workers
            if worker.state is not WorkerState.LOST
        }
        self._end_drained(set(here), now)
        if status.finished or status.paused_reason:
            return Orders()
        offers, running = self._launcher.offers(), self._launcher.running()
        pool = {one.name for one in offers}
        rates = {
            name: rate for name, worker in here.items() if 0.0 < (rate := rate_of(worker)) < MOST_TOKENS_PER_S
        }
        for name in rates.keys() & pool:
            self._activator.measured(name, rates[name], now)
        known = [_guessed(one, rates) for one in offers if one.name not in self._draining]
        # Workers that came by themselves give what they give: they cost nothing here and are never drained.
        others = {name: WorkerOffer(name, 0.0, rate) for name, rate in rates.items() if name not in pool}
        mine = (running & {one.name for one in known}) | others.keys()
        orders = self._decide(status, [*known, *others.values()], mine, set(others), now)
        for name in orders.activate:
            self._launcher.start(name)
        for name in orders.drain:
            self._draining[name] = now + self._grace_s
            self._drain(name)
        if orders.reason:
            _log.info("workers.ordered", start=orders.activate, drain=orders.drain, reason=orders.reason)
        return orders

    def _decide(
        self, status: RunStatus, offers: list[WorkerOffer], mine: set[str], others: set[str], now: float
    ) -> Orders:
        plan = status.capacity
        if plan is None:  # nothing is measured yet, which takes a worker
            free: Sequence[WorkerOffer] = () if mine or status.workers else offers
            cheapest = min(free, key=lambda one: (one.usd_per_hour / one.rate, one.name), default=None)
            return Orders((cheapest.name,), (), "no worker is there") if cheapest else Orders()
        joined = [worker for worker in status.workers if worker.state is WorkerState.ACTIVE]
        holders = {name_of_worker(w.worker_id) for w in joined if w.held_version == status.newest_version}
        under_way = len(holders) < len(joined)
        return self._activator.decide(
            now,
            offers,
            mine,
            plan.need_tokens_per_s,
            left_s=max(0, status.steps_total - status.committed_steps) * plan.step_s,
            join_s=self._section.join_s,
            relays=others | (holders if under_way else set()),
        )

    def _end_drained(self, here: set[str], now: float) -> None:
        for name, until_s in list(self._draining.items()):
            if name not in here or now >= until_s:
                self._launcher.stop(name)
                del self._draining[name]
            else:
                self._drain(name)  # a coordinator that was restarted in between forgot it


def _guessed(offer: WorkerOffer, rates: Mapping[str, float]) -> WorkerOffer:
    """Return an offer with the mean rate of its class, or of all workers, where nothing is known of it."""
    if offer.rate != UNKNOWN_TOKENS_PER_S or not rates:
        return offer
    own = offer.name.rpartition("-")[0]
    alike = [rate for name, rate in rates.items() if name.rpartition("-")[0] == own] or [*rates.values()]
    return replace(offer, rate=sum(alike) / len(alike))


def rate_of(worker: WorkerRecord) -> float:
    """Return the tokens per second of a worker while its engine runs; 0 while that is not known."""
    return worker.tokens_per_s / worker.busy_share if worker.busy_share > 0.0 else 0.0
