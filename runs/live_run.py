"""Live run: one run on this machine, claimed, entered and left; what the stages share is its attributes.

What is checked is checked before anything starts. Entering starts the services; whatever happens then (an
error, Ctrl-C, a cancel from Prefect), every service that this process started is gone when the run is left.
Tasks receive a run id and numbers, never objects, so that their parameters stay readable in the Prefect UI;
they find the run by its context, which Prefect hands from the flow to its tasks.
"""

import asyncio
import os
import shlex
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil
import structlog

from antiphon.core.config import RunConfig
from antiphon.core.config_sections import HOST, RecordSection
from antiphon.core.devices import visible
from antiphon.core.drafting.statistics import drafting_summary
from antiphon.core.errors import UnavailableError
from antiphon.core.reporting.run_display import RunDisplay, TokenRates, planes_of, unscored_words
from antiphon.core.reporting.run_view import RunView
from antiphon.core.status import LearnerProgress, RunStatus
from antiphon.environments.registry import with_sizes
from antiphon.lineage.hosts import HOST_TOKEN, read_gateway, waiting_for_host
from antiphon.lineage.records import Records
from antiphon.lineage.run_events import EventPacker
from antiphon.lineage.run_overview import read_figures
from antiphon.lineage.starts import add_start
from antiphon.lineage.store.artifact_store import ArtifactStore, open_store
from antiphon.lineage.store.uploader import Uploader
from antiphon.lineage.tracking.mlflow_client import load_mlflow
from antiphon.lineage.tracking.pages import mlflow_links
from antiphon.models.codec import decoder
from antiphon.models.learning_rate import with_learning_rate
from antiphon.net.security.credentials import KEYS, VARIABLE, find_credentials
from antiphon.net.security.keys import LEARNER_KEY, ensure_key
from antiphon.net.security.local_run import ensure_local_credentials, local_bundle
from antiphon.report.cpu_section import write_cpu_seconds
from antiphon.runs import directory as run_directory
from antiphon.runs.alarm_watch import AlarmWatch
from antiphon.runs.attach import read_events
from antiphon.runs.clients import ANSWER_S, ClientLoop, CoordinatorLog, ServiceCalls, repeated
from antiphon.runs.directory import RunPlace
from antiphon.runs.fleet.engines import make_launcher
from antiphon.runs.fleet.launcher import Launcher, Order, elsewhere, launch_site
from antiphon.runs.fleet.local import LocalLauncher
from antiphon.runs.fleet.provisioner import LOOK_S, Provisioner
from antiphon.runs.interrupt import LIMIT_S, Interrupt
from antiphon.runs.outcome import RunOutcome, StageSpan, closing_lines, write_results
from antiphon.runs.preflight import preflight
from antiphon.runs.samples import explainer
from antiphon.runs.servers.prefect_server import page_links
from antiphon.runs.supervisor import ServiceSpec, Supervisor, devices_of, host_spec, service_spec, worker_spec
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.learner.client import LearnerClient
from antiphon.services.rollout.engine.environment import child_environment
from antiphon.services.stages import LoopStages
from antiphon.system.cpu_time import FamilyTimes
from antiphon.system.files import write_atomically
from antiphon.system.logs import configure_logs
from antiphon.system.ports import free_ports
from antiphon.system.set_up import command
from antiphon.weights.payload_store import PAYLOADS, PayloadStore

_T = TypeVar("_T")
_log = structlog.get_logger(__name__)

STATUS_S = 1.0
"""Seconds between two looks at a run."""

CLOSE_S = 5.0
"""Longest wait for a channel to close."""

UNFINISHED_RECORD_S = 15.0
"""Longest wait for the records of a run that failed or was cancelled."""

INTERRUPTED_RECORD_S = 1.0
"""The same while a person waits for the end; what is left follows when the run continues."""

SLOW_RECORD_S = 5.0
"""Records that take longer are said to be written."""

ENDING_S = 15.0
"""What engines have beyond the grace time to end the workers that would outlive a run."""

RECORD_TIMEOUT_S = 120.0
"""Longest wait for the records to be written once the last step is done."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where a run's results go and how it began; no part of the configuration."""

    fresh: bool = False
    """Start the configuration's next run even if an unfinished one exists."""
    results: Path | None = None
    """Folder for metrics.json, timings.json and final.json."""
    command: str = ""
    """The command line that asked for it; empty where none did."""


_current: ContextVar["LiveRun | None"] = ContextVar("run", default=None)


def current_run() -> "LiveRun | None":
    """Return the run that is entered in this context, so by the caller of a flow, if there is one."""
    return _current.get()


def find_live_run(run_id: str) -> "LiveRun":
    """Return the run that is entered in this context.

    Raises:
        UnavailableError: when the run belongs to another process.
    """
    run = _current.get()
    if run is None or run.run_id != run_id:
        raise UnavailableError(f"run {run_id} belongs to another process; start it again")
    return run


def claim_run(
    config: RunConfig,
    run_id: str | None,
    home: Path,
    display: RunDisplay | None = None,
    options: RunOptions | None = None,
    interrupt: Interrupt | None = None,
) -> "LiveRun":
    """Check a run and take its lock; its services start when it is entered.

    Args:
        config: the resolved configuration.
        run_id: a run to continue; None means the configuration's own.
        home: the home directory.
        display: where it is shown.
        options: how it begins and where its results go.
        interrupt: takes Ctrl-C, where a person may give it.

    Raises:
        ConfigError: for what is invalid, or when another process runs it.
        UnavailableError: when a store does not answer.
    """
    if not structlog.is_configured():
        configure_logs("warning")  # a Prefect worker started this process, not our command
    display, options = display or RunDisplay(), options or RunOptions()
    config = with_sizes(with_learning_rate(config))
    for note in preflight(config, home, options.results):
        display.message(f"note: {note}")
    place = run_directory.choose_run(config, run_id, home, options.fresh)
    run_directory.create(place, config)
    return claim_place(place, config, home, display, options, interrupt)


def claim_place(
    place: RunPlace,
    config: RunConfig,
    home: Path,
    display: RunDisplay | None = None,
    options: RunOptions | None = None,
    interrupt: Interrupt | None = None,
) -> "LiveRun":
    """Take the lock of a run whose folder is there and whose configuration was checked.

    Raises:
        ConfigError: when another process runs it.
    """
    run = LiveRun(place, config, home, display or RunDisplay(), options or RunOptions(), interrupt)
    run._leaving.enter_context(run_directory.lock(place.directory))
    return run


class LiveRun(ServiceCalls):
    """One run of this machine. Its services are up while it is entered."""

    coordinator: CoordinatorClient
    learner: LearnerClient
    stages: LoopStages
    supervisor: Supervisor
    committed: int
    """Steps committed before this process took over."""

    def __init__(
        self,
        place: RunPlace,
        config: RunConfig,
        home: Path,
        display: RunDisplay,
        options: RunOptions,
        interrupt: Interrupt | None = None,
    ) -> None:
        """Hold what is known before anything starts; `claim_run` takes the lock too."""
        super().__init__(config.services)
        self.run_id, self.run_dir, self.resumed = place.run_id, place.directory, place.resumed
        self.config, self.home, self.store_root = config, home, run_directory.store_directory(home)
        self.display, self.options, self.interrupt = display, options, interrupt
        self.records: Records | None = None
        self.uploader: Uploader | None = None
        self.spans: list[StageSpan] = []
        self.status: RunStatus | None = None
        """The newest look at it; None before its services were up."""
        self.view = RunView()
        """What the journal says, up to the last `read_journal`."""
        self.packer = EventPacker()
        """The same events as the ledger keeps them."""
        self.outcome: RunOutcome | None = None
        """What came of it, once it is finished."""
        self._rates = TokenRates()
        self._end_fleet: Callable[[], None] | None = None
        self._provisions = False
        self._opened_s = time.perf_counter()
        self._leaving = ExitStack()
        self._reading = asyncio.Lock()

    def __enter__(self) -> Self:
        """Start (or continue) the run's services.

        Raises:
            AntiphonError: when a service does not start; its own sentence is quoted.
        """
        with self._leaving.pop_all() as stack:
            self._opened_s = time.perf_counter()
            add_start(self.run_dir, self.options.command)
            self.display.message(f"{'continuing' if self.resumed else 'starting'} run {self.run_id}")
            for sentence in self.config.idle_keys():
                self.display.message(f"note: {sentence}")
                _log.warning("config.idle", reason=sentence)
            services = self.config.services
            self.supervisor = Supervisor(
                self.run_dir, services.restart_limit, services.restart_window_s, self.stop
            )
            stack.callback(self.supervisor.close)
            if self.interrupt is not None:
                self.interrupt.tell(self.supervisor.doing, self.supervisor.hurry, self.supervisor.kill)
            self.clients = ClientLoop()
            stack.callback(self.clients.close)
            if self.resumed and elsewhere(self.config):
                stack.callback(self._name_left)
            pool_worker = self._start_services()
            stack.callback(self._close_channels)
            stack.callback(self.stop, "the run was closed")
            stack.callback(_current.reset, _current.set(self))
            self._start_records(stack)
            self._alarms = AlarmWatch(self.config, self.run_dir, self.view.alarms, time.perf_counter())
            self.committed = self.call(lambda: self.coordinator.status()).committed_steps
            if self.config.provisioning.pool:
                self._provision(stack, pool_worker)
            stack.enter_context(repeated("view", STATUS_S, self._look))
            self.display.started(self.run_id, {"run": str(self.run_dir)} | page_links(self.home))
            self._leaving = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the services and let go of the run's lock; also of one that was claimed and never entered."""
        self._leaving.close()

    def interrupted(self) -> bool:
        """Return whether there was a Ctrl-C."""
        return self.interrupt is not None and self.interrupt.asked

    def timed(self, stage: str, number: int, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a stage as `wait` does, and remember when it ran."""
        started = time.perf_counter()
        try:
            return self.wait(work)
        finally:
            self.spans.append(StageSpan(stage, number, started, time.perf_counter()))

    async def read_journal(self) -> None:
        """Bring `view` up to the end of the journal.

        Raises:
            UnavailableError: when no page of it came in time; what came is kept.
        """
        async with self._reading:
            await read_events(self.coordinator, self.view, self.packer)

    async def packed_journal(self) -> bytes:
        """Return the journal's events so far as the ledger keeps them, and bring `view` up to the last one.

        Raises:
            UnavailableError: as `read_journal` does.
        """
        await self.read_journal()
        return self.packer.finish()

    def _look(self) -> None:
        """Show the run as it is now."""

        async def ask() -> tuple[RunStatus, LearnerProgress | None]:
            status = await self.coordinator.status()
            try:
                learner = (await self.learner.status()).progress
            except UnavailableError:
                learner = None  # it does not answer
            await self.read_journal()
            return status, learner

        with suppress(UnavailableError):  # the stages notice and say so; the display just waits
            self._show(*self.clients.run(ask(), ANSWER_S))

    def _show(self, status: RunStatus, learner: LearnerProgress | None) -> None:
        """Show a look; `learner` says what the learner does, None where it did not answer."""
        status = waiting_for_host(status, self.run_dir, self.config.gateway.host_timeout_s)
        now, before, self.status = time.perf_counter(), self.status, status
        if before is not None and len(status.voided) > len(before.voided):
            self.supervisor.begin_again()  # services that could not work on the batch may now
            batch = status.voided[-1]
            self.display.message(f"batch {batch.digest[:12]} was voided: {batch.reason}")
        self.display.status(status, planes_of(status, self._rates.take(status, now), learner))
        # The journal of a long run that is continued takes several looks, and its old steps are no alarm.
        if self.view.alarms.count >= status.committed_steps:
            late = [] if self.records is None else self.records.standing()
            for line in self._alarms.look(status, now, learner, late):
                self.display.message(line)

    def finish(self) -> RunOutcome:
        """Close a run whose last step is done: records, report, outcome."""
        status = self.status = self.call(lambda: self.coordinator.status())
        self.call(self.read_journal, None)
        commits = [step.commit for step in self.view.steps]
        records = self._flush_records()
        cpu_s = FamilyTimes(psutil.Process()).look()
        write_cpu_seconds(self.run_dir, cpu_s)
        outcome = RunOutcome(
            run_id=self.run_id,
            run_dir=str(self.run_dir),
            weights_digest=commits[-1].weights_digest if commits else "",
            figures=read_figures(self.run_dir),
            total_s=time.perf_counter() - self._opened_s,
            restarts=self.supervisor.restarts(),
            records=records,
            cpu_s=cpu_s,
            drafting=drafting_summary(self.view.drafting_by_epoch),
            unscored=unscored_words(status),
            no_signal=closing_lines(
                self.view.alarms, self.run_dir, self.home, self.config.sampling.max_tokens
            ),
        )
        from antiphon.report.page import build_report

        report, store = self.run_dir / "report.html", ArtifactStore(self.store_root)
        plots = build_report(self.run_dir, store, self.view, status, report, explainer(self.config))
        for name, text in plots.items():
            write_atomically(self.run_dir / "plots" / name, text.encode())
        if self.records is not None:
            self.records.attach(report, plots, self.view.deliveries.in_order())
        for folder in filter(None, (self.run_dir, self.options.results)):
            write_results(outcome, folder, commits, status, self.spans)
        run_directory.write_outcome(self.run_dir, outcome.summary())
        # Last, so that a run which is interrupted in its records finds its services ready to continue.
        self.supervisor.expect_end()
        self._stop_fleet()
        self.call(lambda: self.coordinator.finish())
        if self.records is not None and self.config.record.dvc:
            self.records.finish(self.call(self.packed_journal, None))
        pages = mlflow_links(self.run_dir, self.home)
        side_by_side = [f"beside other runs: {pages['comparison']}"] if pages else []
        self.display.finished([*outcome.lines(report), *side_by_side])
        self.outcome = outcome
        return outcome

    def _flush_records(self) -> dict[str, Any]:
        """Wait for the records of all steps; return how far each sink is."""
        records: dict[str, Any] = {}
        if self.records is not None:
            where = os.environ.get("MLFLOW_TRACKING_URI") or self.home
            said = f"records are being written to {where}, for at most {RECORD_TIMEOUT_S:g} s"
            late = threading.Timer(SLOW_RECORD_S, self.display.message, [said])
            late.daemon = True
            late.start()
            records = asdict(self.records.flush(RECORD_TIMEOUT_S))
            late.cancel()
        if self.uploader is not None:
            self.uploader.flush(RECORD_TIMEOUT_S)
            records["uploads"] = asdict(self.uploader.report())
        return records

    def _start_services(self) -> Callable[[str], ServiceSpec]:
        """Start the services and wait for them; return how a worker of the pool is started."""
        config, say, services = self.config, self.display.message, self.config.services
        self.store_root.mkdir(parents=True, exist_ok=True)
        host, dialled, bundle = services.host, services.reached_at, services.credentials
        credentials = find_credentials(bundle)
        if bundle is None or credentials is None:
            bundle = str(local_bundle(self.run_dir))
            credentials = ensure_local_credentials(self.run_dir, [host])
            ensure_key(self.run_dir / KEYS, LEARNER_KEY)  # so that the coordinator can name it from the start
        # Free at every address of IPv4; chosen together, since neither listens yet.
        scorer_port, port = free_ports(2, "0.0.0.0")
        port = services.coordinator_port or port
        address = f"{dialled}:{port}"
        self._site = launch_site(config, self.run_id, self.run_dir, address)
        shown = {VARIABLE: str(Path(bundle).expanduser().absolute())}
        environment = child_environment(config.rollout.threads, {}) | shown
        # Workers that link the origin's files have nothing to fetch from each other.
        relay_host = dialled if config.broadcast.relay == "auto" and not config.broadcast.links else ""

        worker = partial(worker_spec, self.run_id, self.run_dir, address, environment, relay_host)
        service = partial(service_spec, self.run_id, self.run_dir, self.store_root, host)
        devices, gpus = devices_of(config)
        workers = [worker(f"worker-{i}") for i in range(config.rollout.workers)]
        for place, taken in enumerate(devices.workers):
            shown_alone = {**workers[place].environment, **visible(taken, gpus)}
            workers[place] = replace(workers[place], environment=shown_alone)
        scorers, scorer_address = list[ServiceSpec](), ""
        if config.reference.own_process:
            scorers, scorer_address = [service("scorer", "", scorer_port)], f"{dialled}:{scorer_port}"
        driven = config.client_driven  # by a client, which gives its own rewards
        rewards = () if driven else (service("reward", address, scorer=scorer_address),)
        # All start at once: the others load their libraries while the coordinator opens its journal, and
        # call it until it answers. Engines take longest, so they come first.
        learner = service("learner", address)
        shown_alone = {**learner.environment, **visible(devices.learner, gpus)}
        learner = replace(learner, ranks=config.learner.ranks, environment=shown_alone)
        for spec in (service("coordinator", "", port), *workers, learner, *scorers, *rewards):
            self.supervisor.start(spec)
        say(f"services are starting: coordinator, learner, {'' if driven else 'reward '}and workers")
        self.supervisor.wait_ready("coordinator", services.start_timeout_s)
        if not workers and not config.provisioning.pool:
            waits_s = services.empty_fleet_timeout_s
            say(f"rollout.workers=0: the run waits up to {waits_s:g} s for a worker to join, by")
            for line in ways_to_join(config, address, self.run_id):
                say(f"  {line}")
        learner_port = self.supervisor.wait_ready("learner", services.start_timeout_s, say)
        load_libraries(config.record)  # a core is free now: engines take longest
        for spec in (*scorers, *rewards, *workers):
            self.supervisor.wait_ready(spec.name, services.start_timeout_s)
            if spec in rewards and config.environment.name == HOST:
                self._start_host(credentials.authority if credentials else b"")

        async def connect() -> None:  # on the loop, as channels want it
            self.coordinator = CoordinatorClient(address, credentials=credentials)
            self.learner = LearnerClient(f"{dialled}:{learner_port}", credentials=credentials)

        self.clients.run(connect(), ANSWER_S)
        self.stages = LoopStages(config, self.coordinator, self.learner)
        return lambda name: replace(worker(name), needed=False)

    def _start_host(self, authority: bytes) -> None:
        """Start the program that holds the environment, or say how one is started."""
        url, token = read_gateway(self.run_dir).url, shlex.quote(str(self.run_dir / HOST_TOKEN))
        if command := self.config.environment.host_command:
            self.supervisor.start(host_spec(self.run_dir, url, command, authority))
            return
        self.display.message(f"hosts of the environment ask {url}; one is started by")
        self.display.message(f"  antiphon-env-host --gateway {url} --token-file {token} verifiers MODULE")

    def _provision(self, stack: ExitStack, worker: Callable[[str], ServiceSpec]) -> None:
        """Look at the run now and then and order its workers, until the stack is closed.

        `worker` says how a process of this machine becomes one.
        """
        config, section = self.config, self.config.provisioning
        away = {one.name for one in elsewhere(config)}
        launchers: dict[str, Launcher] = {}
        for one in section.pool:
            local = partial(LocalLauncher, one, self.supervisor, worker)
            launchers[one.name] = make_launcher(one, self._site) if one.name in away else local()
        grace_s, heartbeat_s = config.rollout.grace_s + 5.0, config.coordinator.heartbeat_s
        provisioner = Provisioner(section, launchers, self._order, self.coordinator, grace_s, heartbeat_s)

        def look() -> None:
            async def take() -> None:
                await provisioner.look(await self.coordinator.status(), time.monotonic())

            self.clients.run(take(), ANSWER_S)

        def end() -> None:
            limit_s = grace_s + ENDING_S
            left = self.clients.run(provisioner.end(time.monotonic, limit_s), limit_s + ANSWER_S)
            if left:
                self.display.message(
                    f"workers that do not end: {', '.join(left)}; `{command()} fleet stop {self.run_id}`"
                )

        if away:
            self._end_fleet = end
            stack.callback(self._stop_fleet)
            if self.interrupt is not None:  # its services live on until the workers elsewhere have ended
                limit_s = grace_s + ENDING_S + LIMIT_S
                self.interrupt.tell(self.supervisor.doing, lambda: None, self.supervisor.kill, limit_s)
        stack.enter_context(repeated("provisioning", LOOK_S, look))
        self._provisions = True

    def _order(self, name: str) -> Order:
        """Return what is asked of an engine for a worker; processes of this machine need no more than it."""
        one = self.config.provisioning.class_of(name)
        if one is None or one.launcher.kind == "local":
            return Order(name, (), self.run_dir)
        return self._site.order(name)

    def _name_left(self) -> None:
        if not self._provisions:  # it was interrupted, or could not start
            self.display.message(
                f"workers that were started elsewhere may still run, for services.orphan_s="
                f"{self.config.services.orphan_s:g} at most; `{command()} fleet stop {self.run_id}` ends them"
            )

    def _stop_fleet(self) -> None:
        """Stop what would outlive the run, once."""
        end, self._end_fleet = self._end_fleet, None
        if end is not None:
            self.display.message("workers elsewhere are asked to hand over and leave")
            end()
            if self.interrupted():
                self.supervisor.hurry()

    def _start_records(self, stack: ExitStack) -> None:
        """Start what follows the log and what sends artifacts away; the stack closes them."""
        if self.config.record.artifact_url is not None:
            self.uploader = Uploader(open_store(self.store_root, self.config.record))
            stack.callback(self._close_queue, self.uploader)
        payloads = PayloadStore(self.run_dir / PAYLOADS)
        self.records = Records(
            self.run_id,
            self.config,
            self.run_dir,
            self.home,
            self.store_root,
            CoordinatorLog(self.clients, self.coordinator),
            weights_file=lambda version: payloads.checked(payloads.manifest(version)),
            adapter_file=payloads.adapter,
            decode=decoder(self.config.model.path),
            held=not self.resumed,
        )
        stack.callback(self._close_queue, self.records)

    def _close_queue(self, queue: Records | Uploader) -> None:
        """Write or send what is queued; what is left of an unfinished run follows when it continues."""
        unfinished_s = INTERRUPTED_RECORD_S if self.interrupted() else UNFINISHED_RECORD_S
        queue.close(RECORD_TIMEOUT_S if run_directory.is_finished(self.run_dir) else unfinished_s)

    def _close_channels(self) -> None:
        for close in (self.coordinator.close, self.learner.close):
            try:
                self.clients.run(close(), CLOSE_S)
            except UnavailableError as error:
                _log.warning("client.unclosed", error=str(error))


def ways_to_join(config: RunConfig, address: str, run_id: str) -> tuple[str, ...]:
    """Return how a worker joins; a run that was given credentials lets in who has a bundle."""
    joining = f"{command()} worker --coordinator {address}"
    if config.services.credentials is None:
        return (f"{joining} --run {run_id}",)
    return (
        f"{joining} --name NAME --credentials FOLDER",
        f"where FOLDER is keys/workers/NAME of this home, after `{command()} invite NAME --run {run_id}`",
    )


def load_libraries(record: RecordSection) -> threading.Thread:
    """Begin to import what the writers of a run's records need; return the thread that does.

    Nothing is written. The writer that needs a library that cannot be loaded says so.
    """
    thread = threading.Thread(target=_load, args=(record,), name="antiphon-libraries", daemon=True)
    thread.start()
    return thread


def _load(record: RecordSection) -> None:
    if record.mlflow:
        load_mlflow()
    if record.dvc:
        import antiphon.lineage.ledger.pins  # noqa: F401 - it loads DVC
