"""Local launcher: workers of a pool as processes of this machine, kept alive by the run's supervisor."""

from collections.abc import Callable

from antiphon.core.capacity.order_book import Instance, InstanceState
from antiphon.core.capacity.provisioning_config import PoolClass
from antiphon.runs.fleet.launcher import Order
from antiphon.runs.supervisor import ServiceSpec, Supervisor


class LocalLauncher:
    """Processes of one class; they end with the run's own process."""

    def __init__(self, one: PoolClass, supervisor: Supervisor, spec: Callable[[str], ServiceSpec]) -> None:
        """Launch with `spec`, which says how the worker of a name is started."""
        self._class, self._supervisor, self._spec = one, supervisor, spec

    async def start(self, order: Order) -> Instance:
        if not self._supervisor.keeps(order.worker):
            self._supervisor.start(self._spec(order.worker))
        return self._instance(order.worker)

    async def running(self) -> tuple[Instance, ...]:
        """Return the workers whose processes were not given up."""
        return tuple(self._instance(name) for name in self._class.workers if self._supervisor.keeps(name))

    async def stop(self, worker: str, grace_s: float) -> None:
        if self._supervisor.keeps(worker):
            self._supervisor.dismiss(worker)

    async def missing(self) -> list[str]:
        return []

    def render(self, order: Order) -> dict[str, str]:
        return {}

    def _instance(self, worker: str) -> Instance:
        return Instance(worker, "", InstanceState.UP)  # without a name: it is no instance of an engine
