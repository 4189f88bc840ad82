"""Metrics page: the run's metrics for Prometheus, read from the coordinator when they are asked for.

Nothing is counted twice: the page has no counters of its own, it shows the state that the journal
made, and reads of the commits only new ones. It is served on loopback only, since it has neither
encryption nor a password.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager

import structlog
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from antiphon.api.coordinator import Coordinator
from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.reporting.alarms import ALARMS, StepAlarms, status_alarms
from antiphon.core.status import RunStatus, WorkerState

HOST = "127.0.0.1"
ANSWER_S = 5.0
"""Longest wait for the coordinator's loop while Prometheus asks."""

_log = structlog.get_logger("coordinator")


@asynccontextmanager
async def metrics_page(coordinator: Coordinator, config: RunConfig) -> AsyncIterator[int | None]:
    """Serve the page while the block lasts and yield its port; None when none is configured.

    Raises:
        ConfigError: when the port is taken.
    """
    port = config.services.metrics_port
    if port is None:
        yield None
        return
    registry = CollectorRegistry()
    registry.register(_RunCollector(coordinator, config, asyncio.get_running_loop()))
    try:
        server, thread = start_http_server(port, addr=HOST, registry=registry)
    except OSError as error:
        raise ConfigError(
            f"services.metrics_port={port} cannot be used ({error.strerror}); choose another one, or 0 for "
            "any free one"
        ) from error
    bound = int(server.server_port)
    _log.info("metrics.served", address=f"http://{HOST}:{bound}/metrics")
    try:
        yield bound
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        await asyncio.to_thread(thread.join, ANSWER_S)


class _RunCollector(Collector):
    """Asks the coordinator, in its own loop, whenever the page is read."""

    def __init__(self, coordinator: Coordinator, config: RunConfig, loop: asyncio.AbstractEventLoop) -> None:
        self._coordinator, self._config, self._loop = coordinator, config, loop
        self._shown = StepAlarms()

    def describe(self) -> Sequence[Metric]:
        """Name nothing in advance: registering must not wait for the loop that registers."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the families of one look at the run."""
        asked = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
        try:
            families = asked.result(ANSWER_S)
        except (AntiphonError, TimeoutError) as error:
            asked.cancel()
            _log.warning("metrics.failed", error=str(error))
            yield GaugeMetricFamily("antiphon_up", "Whether the coordinator answers.", 0.0)
            return
        yield GaugeMetricFamily("antiphon_up", "Whether the coordinator answers.", 1.0)
        yield from families

    async def _ask(self) -> list[Metric]:
        status = await self._coordinator.status()
        self._shown.reward_range = status.reward_range
        for commit in await self._coordinator.commits(self._shown.count - 1):
            if commit.step == self._shown.count:  # another scrape at the same time may have added it
                self._shown.add(commit)
        return [*run_families(status, self._shown, self._config)]


def run_families(status: RunStatus, shown: StepAlarms, config: RunConfig) -> Iterator[Metric]:
    """Yield what one look at a run says, as Prometheus families; label `run` is the run's id.

    `shown` is what the commits so far show.
    """
    run = status.run_id

    def family(count: bool, name: str, description: str, value: float) -> Metric:
        made = (CounterMetricFamily if count else GaugeMetricFamily)(
            f"antiphon_{name}", description, labels=("run",)
        )
        made.add_metric((run,), value)
        return made

    def split(name: str, description: str, label: str, values: Mapping[str, float]) -> Metric:
        made = GaugeMetricFamily(f"antiphon_{name}", description, labels=("run", label))
        for key, value in values.items():
            made.add_metric((run, key), value)
        return made

    for name, description, value in (
        ("steps", "Learner steps committed.", status.committed_steps),
        ("groups_dropped_stale", "Groups dropped beyond the bound.", status.groups_dropped_stale),
        ("groups_filtered", "Groups without reward variance.", status.groups_filtered),
        ("trajectories_failed", "Answers that could not be scored.", status.trajectories_failed),
        ("groups_requeued", "Groups taken back from workers.", status.groups_requeued),
    ):
        yield family(True, name, description, value)
    correlation = "Rank correlation of remembered and sampled lengths; 0 while it is not known."
    for name, description, level in (
        ("steps_planned", "Learner steps of the run.", status.steps_total),
        ("finished", "Whether the run is finished.", status.finished),
        ("paused", "Whether the run is paused.", bool(status.paused_reason)),
        ("newest_version", "Newest announced policy version.", status.newest_version or 0),
        ("length_correlation", correlation, status.length_correlation),
    ):
        yield family(False, name, description, float(level))
    phases = ("open", "leased", "to_reward", "ready")
    groups = {phase: getattr(status, f"groups_{phase}") for phase in phases}
    yield split("groups", "Groups by phase.", "phase", groups)
    yield split("work_seconds", "Worker seconds by what became of them.", "use", status.worker_seconds)
    yield split("work_tokens", "Completion tokens by what became of them.", "use", status.tokens_by_use)
    yield split("work_dollars", "US dollars by what became of the work.", "use", status.dollars_by_use)
    trained = {str(staleness): count for staleness, count in status.staleness_histogram.items()}
    yield split("trajectories_trained", "Trajectories trained on, by staleness.", "staleness", trained)
    for name, description in (
        ("tokens_generated", "Completion tokens sampled."),
        ("stands_still_s", "Seconds without a token of an engine that was found to hang; 0 for others."),
        ("open_leases", "Groups being sampled."),
        ("busy_share", "Share of its time in which its engine had work."),
        ("seconds_since_heartbeat", "Seconds since its last heartbeat."),
        ("tokens_per_s", "Completion tokens over the seconds since it was ready."),
    ):
        values = {worker.worker_id: float(getattr(worker, name)) for worker in status.workers}
        yield split(f"worker_{name}", description, "worker", values)
    active = {worker.worker_id: float(worker.state is WorkerState.ACTIVE) for worker in status.workers}
    yield split("worker_active", "Whether a worker counts as active.", "worker", active)
    last = {} if shown.last is None else shown.last.metrics
    finite = {name: value for name, value in last.items() if math.isfinite(value)}
    yield split("step_metric", "Metrics of the last step, as in the catalogue.", "metric", finite)
    by_steps = shown.find(config.loop.max_staleness, steps=config.run.steps)
    raised = {alarm.name for alarm in (*by_steps, *status_alarms(status))}
    watched = {kind.name: float(kind.name in raised) for kind in ALARMS}
    yield split("alarm", "Alarms about the metrics; see operations.", "alarm", watched)
