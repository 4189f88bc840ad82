"""Launcher: how workers of a pool are started and stopped, and the launcher of this machine.

Orders are named by their worker, so that repeating one changes nothing, and who starts again finds out by
`running` what was ordered before.
"""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from antiphon.core.capacity.cover import WorkerOffer
from antiphon.core.capacity.provisioning_config import PoolClass
from antiphon.runs.supervisor import ServiceSpec, Supervisor
from antiphon.system.clock import wall_clock
from antiphon.system.files import write_atomically

UNKNOWN_TOKENS_PER_S = 1.0
"""Stands for a rate that nothing is known of: the decision takes what others give."""


class Launcher(Protocol):
    """Starts and stops the workers of a pool."""

    def offers(self) -> Sequence[WorkerOffer]:
        """Return every worker that runs or could, at today's price.

        Rates are in tokens per second; `UNKNOWN_TOKENS_PER_S` where nothing is known of one.
        """

    def running(self) -> Collection[str]:
        """Return the workers that were ordered and have not ended, by whatever process."""

    def start(self, name: str) -> None:
        """Order a worker to run; one that runs is left as it is.

        Raises:
            UnavailableError: when it cannot be had at the moment.
        """

    def stop(self, name: str) -> None:
        """Take a worker's order back and end it; one that does not run is left as it is."""


class LocalLauncher:
    """Workers as processes of this machine, kept alive by the run's supervisor.

    They end with the run's process. Their orders stand in a file; what was ordered before is started again.
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
        """Return the pool at the prices of this moment."""
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
