"""Launch: start the services of one run around the flow, and stop everything afterwards.

What is checked is checked before anything starts. Whatever happens then (an error, Ctrl-C, a
cancel from Prefect), every service this process started is gone when `open_run` is left.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import structlog

from antiphon.core.config import RunConfig
from antiphon.core.drafting.statistics import drafting_summary
from antiphon.core.errors import UnavailableError
from antiphon.core.reporting.run_display import RunDisplay, SilentDisplay, unscored_words
from antiphon.lineage.records import Records
from antiphon.lineage.run_figures import read_figures
from antiphon.lineage.starts import add_start
from antiphon.lineage.store.artifact_store import ArtifactStore, open_store
from antiphon.lineage.store.uploader import Uploader
from antiphon.lineage.tracking.pages import mlflow_links
from antiphon.models.codec import decoder
from antiphon.models.learning_rate import with_learning_rate
from antiphon.net.security.credentials import KEYS, VARIABLE, find_credentials
from antiphon.net.security.keys import LEARNER_KEY, ensure_key
from antiphon.net.security.local_run import ensure_local_credentials, local_bundle
from antiphon.report.cpu_section import write_cpu_seconds
from antiphon.runs import context as run_context
from antiphon.runs import directory as run_directory
from antiphon.runs.context import ClientLoop, CoordinatorLog, RunContext
from antiphon.runs.interrupt import Interrupt
from antiphon.runs.libraries import load_libraries
from antiphon.runs.outcome import RunOutcome, closing_lines, write_results
from antiphon.runs.preflight import preflight
from antiphon.runs.progress import show_progress
from antiphon.runs.provisioning.launcher import LocalLauncher
from antiphon.runs.provisioning.provisioner import provision
from antiphon.runs.samples import explainer
from antiphon.runs.servers.prefect_server import password_file, server_password
from antiphon.runs.supervisor import ServiceSpec, Supervisor, service_specs, worker_spec
from antiphon.services.coordinator.client import CoordinatorClient
from antiphon.services.learner.client import LearnerClient
from antiphon.services.rollout.engine.environment import child_environment
from antiphon.system.cpu_time import FamilyTimes
from antiphon.system.files import write_atomically
from antiphon.system.logs import configure_logs
from antiphon.system.ports import free_port
from antiphon.system.set_up import command
from antiphon.weights.payload_store import PAYLOADS, PayloadStore

_log = structlog.get_logger(__name__)

CLOSE_S = 5.0
"""Longest wait for a channel to close."""

UNFINISHED_RECORD_S = 15.0
"""Longest wait for the records of a run that failed or was cancelled."""

INTERRUPTED_RECORD_S = 1.0
"""The same while a person waits for the end; what is left follows when the run continues."""

SLOW_RECORD_S = 5.0
"""Records that take longer are said to be written."""

RECORD_TIMEOUT_S = 120.0
"""Longest wait for the records to be written once the last step is done."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a run is shown and where its results go; no part of the configuration."""

    fresh: bool = False
    """Start the configuration's next run even if an unfinished one exists."""
    results: Path | None = None
    """Folder for metrics.json, timings.json and final.json."""
    command: str = ""
    """The command line that asked for it; empty where none did."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the caller of a flow wants besides its parameters; the Prefect form has none of it."""

    view: RunDisplay = field(default_factory=SilentDisplay)
    options: RunOptions = field(default_factory=RunOptions)
    live: "LiveRun | None" = None
    """A run whose services the caller brought up already."""
    checked: bool = False
    """Whether the configuration passed `preflight` already."""
    interrupt: Interrupt | None = None
    """Takes Ctrl-C, where a person may give it."""

    def interrupted(self) -> bool:
        """Return whether there was a Ctrl-C."""
        return self.interrupt is not None and self.interrupt.asked


_surroundings: ContextVar[Surroundings | None] = ContextVar("surroundings", default=None)


@dataclass
class LiveRun:
    """A run whose services are up."""

    context: RunContext
    supervisor: Supervisor
    committed: int
    """Steps committed before this process took over."""
    opened_s: float
    view: RunDisplay
    options: RunOptions
    outcome: RunOutcome | None = None
    """What came of it, once it is finished."""

    def finish(self) -> RunOutcome:
        """Close a run whose last step is done: records, report, outcome."""
        run = self.context
        status = run.call(lambda: run.coordinator.status())
        run.call(run.read_journal, None)
        commits = [step.commit for step in run.view.steps]
        records: dict[str, Any] = {}
        if run.records is not None:
            where = os.environ.get("MLFLOW_TRACKING_URI") or run.store_root.parent
            said = f"records are being written to {where}, for at most {RECORD_TIMEOUT_S:g} s"
            late = threading.Timer(SLOW_RECORD_S, self.view.message, [said])
            late.daemon = True
            late.start()
            records = asdict(run.records.flush(RECORD_TIMEOUT_S))
            late.cancel()
        if run.uploader is not None:
            run.uploader.flush(RECORD_TIMEOUT_S)
            records["uploads"] = asdict(run.uploader.report())
        cpu_s = FamilyTimes(psutil.Process()).look()
        write_cpu_seconds(run.run_dir, cpu_s)
        outcome = RunOutcome(
            run_id=run.run_id,
            run_dir=str(run.run_dir),
            weights_digest=commits[-1].weights_digest if commits else "",
            figures=read_figures(run.run_dir),
            total_s=time.perf_counter() - self.opened_s,
            restarts=self.supervisor.restarts(),
            records=records,
            cpu_s=cpu_s,
            drafting=drafting_summary(run.view.drafting_by_epoch),
            unscored=unscored_words(status),
            no_signal=closing_lines(
                run.view.alarms, run.run_dir, run.store_root.parent, run.config.sampling.max_tokens
            ),
        )
        from antiphon.report.page import build_report  # with matplotlib: see `load_libraries`

        report = run.run_dir / "report.html"
        plots = build_report(
            run.run_dir,
            ArtifactStore(run.store_root),
            run.view,
            status,
            report,
            explainer(run.config),
        )
        for name, text in plots.items():
            write_atomically(run.run_dir / "plots" / name, text.encode())
        if run.records is not None:
            run.records.attach(report, plots, run.view.deliveries.in_order())
        for folder in (run.run_dir, self.options.results):
            if folder is not None:
                write_results(outcome, folder, commits, status, run.spans)
        run_directory.write_outcome(run.run_dir, outcome.summary())
        # Last, so that a run which is interrupted in its records finds its services ready to continue.
        self.supervisor.expect_end()
        run.call(lambda: run.coordinator.finish())
        if run.records is not None and run.config.record.dvc:
            run.records.finish(run.call(run.packed_journal, None))
        pages = mlflow_links(run.run_dir, run.run_dir.parents[1])
        side_by_side = [f"beside other runs: {pages['comparison']}"] if pages else []
        self.view.finished([*outcome.lines(report), *side_by_side])
        self.outcome = outcome
        return outcome


def current_surroundings() -> Surroundings:
    """Return what the caller of the current flow handed to it."""
    return _surroundings.get() or Surroundings()


def upcoming_run(config: RunConfig, run_id: str | None, home: Path) -> str:
    """Return the id of the run that `open_run` would open now.

    Raises:
        ConfigError: as `open_run` does, for a `run_id` that cannot be continued.
    """
    surroundings = current_surroundings()
    if surroundings.live is not None:
        return surroundings.live.context.run_id
    resolved = with_learning_rate(config)
    return run_directory.choose_run(resolved, run_id, home, surroundings.options.fresh).run_id


@contextmanager
def open_run(
    config: RunConfig, run_id: str | None, home: Path, claimed: Callable[[Path], None] = lambda _: None
) -> Iterator[LiveRun]:
    """Start (or continue) a run's services and yield it; stop everything at the end.

    Args:
        config: the resolved configuration.
        run_id: a run to continue; None means the configuration's own.
        home: the home directory.
        claimed: called with the run's directory once this process has its lock, before anything starts.

    Raises:
        ConfigError: before anything is started, for what is invalid.
        AntiphonError: when a service does not start; its own sentence is quoted.
    """
    opened = time.perf_counter()
    config = with_learning_rate(config)
    if not structlog.is_configured():
        configure_logs("warning")  # a Prefect worker started this process, not our command
    surroundings = current_surroundings()
    if surroundings.live is not None:
        claimed(surroundings.live.context.run_dir)
        yield surroundings.live
        return
    view, options = surroundings.view, surroundings.options
    if not surroundings.checked:
        for note in preflight(config, home, options.results):
            view.message(f"note: {note}")
    place = run_directory.choose_run(config, run_id, home, options.fresh)
    run_directory.create(place, config)
    with ExitStack() as stack:
        stack.enter_context(run_directory.lock(place.directory))
        claimed(place.directory)
        add_start(place.directory, options.command)
        view.message(f"{'continuing' if place.resumed else 'starting'} run {place.run_id}")
        for sentence in config.idle_keys():
            view.message(f"note: {sentence}")
            _log.warning("config.idle", reason=sentence)
        failure: list[str] = []
        services = config.services
        supervisor = Supervisor(
            place.directory, services.restart_limit, services.restart_window_s, failure.append
        )
        stack.callback(supervisor.close)
        if surroundings.interrupt is not None:
            surroundings.interrupt.tell(supervisor.doing, supervisor.hurry, supervisor.kill)
        clients = ClientLoop()
        stack.callback(clients.close)
        context, pool_worker = _start_services(config, place, home, supervisor, clients, view)
        stack.callback(_close_clients, context)
        supervisor_failed = _stop_on(context, failure)
        stack.callback(supervisor_failed.set)
        stack.callback(lambda: context.stop("the run was closed"))
        run_context.register(context)
        stack.callback(lambda: run_context.unregister(place.run_id))
        if config.record.artifact_url is not None:
            context.uploader = Uploader(open_store(context.store_root, config.record))
            stack.callback(_close_queue, context.uploader, place.directory, surroundings)
        payloads = PayloadStore(place.directory / PAYLOADS)
        context.records = Records(
            place.run_id,
            config,
            place.directory,
            home,
            context.store_root,
            CoordinatorLog(clients, context.coordinator),
            weights_file=lambda version: payloads.checked(payloads.manifest(version)),
            decode=decoder(config.model.path),
            held=not place.resumed,
        )
        stack.callback(_close_queue, context.records, place.directory, surroundings)
        committed = context.call(lambda: context.coordinator.status()).committed_steps
        if config.provisioning.pool:
            stack.callback(provision(context, LocalLauncher.of(context, supervisor, pool_worker)))
        live = LiveRun(context, supervisor, committed, opened, view, options)
        stack.callback(show_progress(context, view, supervisor.begin_again))
        view.started(place.run_id, _links(place.directory))
        yield live


def _start_services(
    config: RunConfig,
    place: run_directory.RunPlace,
    home: Path,
    supervisor: Supervisor,
    clients: ClientLoop,
    view: RunDisplay,
) -> tuple[RunContext, Callable[[str], ServiceSpec]]:
    """Start the services; return the run, and how a worker of its pool is started on this machine."""
    timeout_s = config.services.start_timeout_s
    store_root = run_directory.store_directory(home)
    store_root.mkdir(parents=True, exist_ok=True)
    host, dialled = config.services.host, config.services.reached_at
    bundle = config.services.credentials
    credentials = find_credentials(bundle)
    if bundle is None or credentials is None:
        bundle, credentials = (
            str(local_bundle(place.directory)),
            ensure_local_credentials(place.directory, [host]),
        )
        ensure_key(place.directory / KEYS, LEARNER_KEY)  # so that the coordinator can name it from the start
    # All start at once: the others load their libraries while the coordinator opens its journal, and
    # call it until it answers. Engines take longest, so they come first.
    port = config.services.coordinator_port or free_port("0.0.0.0")  # free at every address of IPv4
    address = f"{dialled}:{port}"
    specs = service_specs(place.run_id, place.directory, store_root, host, port)
    shown = {VARIABLE: str(Path(bundle).expanduser().absolute())}
    environment = child_environment(config.rollout.threads, {}) | shown
    # Workers that link the origin's files have nothing to fetch from each other.
    relay_host = dialled if config.broadcast.relay == "auto" and not config.broadcast.links else ""
    spec = partial(worker_spec, place.run_id, place.directory, address, environment, relay_host)
    names = [f"worker-{i}" for i in range(config.rollout.workers)]
    supervisor.start(specs["coordinator"](""))
    for name in names:
        supervisor.start(spec(name))
    supervisor.start(specs["learner"](address))
    supervisor.start(specs["reward"](address))
    view.message("services are starting: coordinator, learner, reward and workers")
    supervisor.wait_ready("coordinator", timeout_s)
    if not names and not config.provisioning.pool:
        waits_s = config.services.empty_fleet_timeout_s
        view.message(f"rollout.workers=0: the run waits up to {waits_s:g} s for a worker to join, by")
        for line in ways_to_join(config, address, place.run_id):
            view.message(f"  {line}")
    learner_address = f"{dialled}:{supervisor.wait_ready('learner', timeout_s, view.message)}"
    load_libraries(config.record)  # a core is free now: engines take longest
    for name in ["reward", *names]:
        supervisor.wait_ready(name, timeout_s)
    run = RunContext(
        run_id=place.run_id,
        config=config,
        run_dir=place.directory,
        store_root=store_root,
        clients=clients,
        coordinator=clients.construct(lambda: CoordinatorClient(address, credentials=credentials)),
        learner=clients.construct(lambda: LearnerClient(learner_address, credentials=credentials)),
    )
    return run, lambda name: replace(spec(name), needed=False)


def _close_queue(queue: Records | Uploader, directory: Path, surroundings: Surroundings) -> None:
    """Write or send what is queued; what is left of an unfinished run follows when it continues."""
    unfinished_s = INTERRUPTED_RECORD_S if surroundings.interrupted() else UNFINISHED_RECORD_S
    queue.close(RECORD_TIMEOUT_S if run_directory.is_finished(directory) else unfinished_s)


def _close_clients(context: RunContext) -> None:
    for close in (context.coordinator.close, context.learner.close):
        try:
            context.clients.run(close(), CLOSE_S)
        except UnavailableError as error:
            _log.warning("client.unclosed", error=str(error))


def _stop_on(context: RunContext, failure: list[str]) -> threading.Event:
    """Stop the run when the supervisor gives up on a service."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            if failure:
                context.stop(failure[0])
                return

    threading.Thread(target=watch, name="failures", daemon=True).start()
    return over


def _links(run_dir: Path) -> dict[str, str]:
    api = os.environ.get("PREFECT_API_URL", "")
    links = {"run": str(run_dir)} | ({"prefect": api.removesuffix("/api").rstrip("/")} if api else {})
    password = password_file(run_dir.parents[1])
    if (
        api
        and password.exists()
        and os.environ.get("PREFECT_API_AUTH_STRING") == server_password(run_dir.parents[1])
    ):
        links["password of that page"] = f"the line in {password}"
    return links


@contextmanager
def surrounded(surroundings: Surroundings) -> Iterator[None]:
    """Hand `surroundings` to the flows that are called inside."""
    token = _surroundings.set(surroundings)
    try:
        yield
    finally:
        _surroundings.reset(token)


def ways_to_join(config: RunConfig, address: str, run_id: str) -> tuple[str, ...]:
    """Return how a worker joins; a run that was given credentials lets in who has a bundle."""
    joining = f"{command()} worker --coordinator {address}"
    if config.services.credentials is None:
        return (f"{joining} --run {run_id}",)
    return (
        f"{joining} --name NAME --credentials FOLDER",
        f"where FOLDER is keys/workers/NAME of this home, after `{command()} invite NAME --run {run_id}`",
    )
