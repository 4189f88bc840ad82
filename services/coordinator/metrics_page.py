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
from antiphon.core.reporting.alarms import ALARMS, StepAlarms, heldout_alarm
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
        for commit in await self._coordinator.commits(self._shown.count - 1):
            if commit.step == self._shown.count:  # another scrape at the same time may have added it
                self._shown.add(commit)
        return [*run_families(status, self._shown, self._config)]


def run_families(status: RunStatus, shown: StepAlarms, config: RunConfig) -> Iterator[Metric]:
    """Yield what one look at a run says, as Prometheus families; label `run` is the run's id.

    `shown` is what the commits so far show.
    """
    run = status.run_id

    def gauge(name: str, description: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"antiphon_{name}", description, labels=("run",))
        family.add_metric((run,), value)
        return family

    def count(name: str, description: str, value: float) -> Metric:
        family = CounterMetricFamily(f"antiphon_{name}", description, labels=("run",))
        family.add_metric((run,), value)
        return family

    yield count("steps", "Learner steps committed.", status.committed_steps)
    yield gauge("steps_planned", "Learner steps of the run.", status.steps_total)
    yield gauge("finished", "Whether the run is finished.", float(status.finished))
    yield gauge("paused", "Whether the run is paused.", float(bool(status.paused_reason)))
    yield gauge("newest_version", "Newest announced policy version.", status.newest_version or 0)
    yield count("groups_dropped_stale", "Groups dropped beyond the bound.", status.groups_dropped_stale)
    yield count("groups_filtered", "Groups without reward variance.", status.groups_filtered)
    yield count("trajectories_failed", "Answers that could not be scored.", status.trajectories_failed)
    yield count("groups_requeued", "Groups taken back from workers.", status.groups_requeued)
    yield gauge(
        "length_correlation",
        "Rank correlation of remembered and sampled lengths; 0 while it is not known.",
        status.length_correlation,
    )
    yield _labelled(
        "groups",
        "Groups by phase.",
        "phase",
        run,
        {
            "open": status.groups_open,
            "leased": status.groups_leased,
            "to_reward": status.groups_to_reward,
            "ready": status.groups_ready,
        },
    )
    yield _labelled(
        "work_seconds", "Worker seconds by what became of them.", "use", run, status.worker_seconds
    )
    yield _labelled(
        "work_tokens", "Completion tokens by what became of them.", "use", run, status.tokens_by_use
    )
    yield _labelled(
        "work_dollars", "US dollars by what became of the work.", "use", run, status.dollars_by_use
    )
    trained = {str(staleness): found for staleness, found in status.staleness_histogram.items()}
    yield _labelled(
        "trajectories_trained", "Trajectories trained on, by staleness.", "staleness", run, trained
    )
    for name, description in (
        ("tokens_generated", "Completion tokens sampled."),
        ("stands_still_s", "Seconds without a token of an engine that was found to hang; 0 for others."),
        ("open_leases", "Groups being sampled."),
        ("busy_share", "Share of its time in which its engine had work."),
        ("seconds_since_heartbeat", "Seconds since its last heartbeat."),
        ("tokens_per_s", "Completion tokens over the seconds since it was ready."),
    ):
        values = {worker.worker_id: float(getattr(worker, name)) for worker in status.workers}
        yield _labelled(f"worker_{name}", description, "worker", run, values)
    active = {worker.worker_id: float(worker.state is WorkerState.ACTIVE) for worker in status.workers}
    yield _labelled("worker_active", "Whether a worker counts as active.", "worker", run, active)
    last = {} if shown.last is None else shown.last.metrics
    finite = {name: value for name, value in last.items() if math.isfinite(value)}
    yield _labelled("step_metric", "Metrics of the last step, as in the catalogue.", "metric", run, finite)
    raised = {alarm.name for alarm in shown.find(config.loop.max_staleness, steps=config.run.steps)}
    raised |= {alarm.name for alarm in (heldout_alarm(status),) if alarm is not None}
    watched = {kind.name: float(kind.name in raised) for kind in ALARMS}
    yield _labelled("alarm", "Alarms about the metrics; see operations.", "alarm", run, watched)


def _labelled(name: str, description: str, label: str, run: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"antiphon_{name}", description, labels=("run", label))
    for key, value in values.items():
        family.add_metric((run, key), value)
    return family
