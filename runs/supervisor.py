"""Supervisor: start, watch, restart and stop the services of a run on this machine.

One thread owns every child process, because the kernel ties a child's life to the thread that
started it: when this process dies, however it dies, its services die with it.
"""

import contextlib
import json
import math
import os
import queue
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from antiphon.core.config import RunConfig
from antiphon.core.devices import Devices, assign_devices
from antiphon.core.errors import AntiphonError, UnavailableError
from antiphon.core.patience import Patience
from antiphon.lineage.hosts import HOST_TOKEN
from antiphon.net.security.credentials import VARIABLE, read_token
from antiphon.services.rollout.engine.environment import device
from antiphon.system.files import write_atomically
from antiphon.system.gpus import gpu_names
from antiphon.system.memory import keep_memory
from antiphon.system.ports import free_port
from antiphon.system.processes import (
    KILL_S,
    LEFT_GROUP,
    ChildGroup,
    ChildProcess,
    ending,
    kill_groups,
    quote,
    starting_file,
    stop_groups,
)
from antiphon.system.rank_places import rank_environment

_log = structlog.get_logger(__name__)

WATCH_S = 0.2
"""Pause between two looks at the children."""

STOP_GRACE_S = 20.0
"""Seconds a service gets between SIGTERM and SIGKILL."""

HURRIED_GRACE_S = 1.5
"""The same when a person waits for the end: one that starts its engine does not listen before."""

FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0
WORKED_S = 10.0
"""A service that was ready for so long is no longer taken for one that cannot work."""


class RestartRule:
    """Decides whether a service that ended is started again, and after which pause.

    Restarts are counted within a window, so that a run of a week may lose a service now and then. One that
    ends again and again right after its start gets longer and longer pauses, because what it lacks may come
    back by itself; one that had worked for a while is started again at once.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        """Allow `limit` restarts within any `window_s` seconds."""
        self._limit = limit
        self._window_s = window_s
        self._restarts: deque[float] = deque()
        self._in_a_row = 0
        """Ends since the service last worked for a while."""

    def begin_again(self) -> None:
        """Forget the restarts so far: what made the service end was taken away."""
        self._restarts.clear()
        self._in_a_row = 0

    def after_end(self, now: float, ready_s: float) -> float | None:
        """Return the seconds to wait before a service that ended is started again; None gives it up.

        Args:
            now: seconds of the caller's clock, never less than before.
            ready_s: how long it was ready; 0 when it never was.
        """
        while self._restarts and now - self._restarts[0] > self._window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self._limit:
            return None
        self._restarts.append(now)
        self._in_a_row = 0 if ready_s >= WORKED_S else self._in_a_row + 1
        if self._in_a_row <= 1:
            return 0.0
        return float(min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._in_a_row - 2, 16)))


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """How one service is started."""

    name: str
    """coordinator, learner, reward, scorer, or a worker's name; also the name of its log."""
    arguments: tuple[str, ...]
    """Arguments of the antiphon command."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of this process's own."""
    port: int = 0
    """Port to listen on; 0 lets it pick a free one."""
    restart_arguments: tuple[str, ...] = ()
    """Further arguments when it is started again after it was ready once: what a killed first start did not
    make is no loss."""
    ranks: int = 1
    """Processes that it consists of, each told its place (`system.rank_places`): of one that ends, all are
    started again."""
    needed: bool = True
    """The run ends when it cannot be kept alive."""
    command: tuple[str, ...] = ()
    """A whole command line in place of the antiphon command's: of a program that is not ours, ready once it
    runs."""


@dataclass
class _Child:
    spec: ServiceSpec
    port: int
    """Kept over restarts, so that addresses stay valid."""
    rule: RestartRule
    process: ChildProcess | None = None
    starts: int = 0
    leaving: bool = False
    ready: threading.Event = field(default_factory=threading.Event)
    ready_at_s: float = 0.0
    """The last time; 0 before the first."""
    restart_at_s: float | None = None
    """When it is started again, while it waits for that."""
    kill_at_s: float = math.inf
    """When it is killed, after it was asked to leave."""


class Supervisor:
    """Keeps the services of one run alive until it is closed."""

    def __init__(
        self,
        run_dir: Path,
        restart_limit: int,
        restart_window_s: float,
        on_failure: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start each service again up to `restart_limit` times within `restart_window_s` seconds.

        `on_failure` gets the reason after that. Logs and ready files go to `run_dir`.
        """
        self._run_dir = run_dir
        self._new_rule = partial(RestartRule, restart_limit, restart_window_s)
        self._clock = clock
        self._on_failure = on_failure
        self._children: dict[str, _Child] = {}
        self._orders: queue.Queue[Callable[[], None]] = queue.Queue()
        self._closing = threading.Event()
        self._ending = threading.Event()
        self._grace_s = STOP_GRACE_S
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        (run_dir / "services").mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()

    def start(self, spec: ServiceSpec) -> None:
        """Start a service; `wait_ready` returns when it can work."""
        child = _Child(spec, spec.port, self._new_rule())
        self._children[spec.name] = child
        self._orders.put(lambda: self._spawn(child))

    def wait_ready(self, name: str, timeout_s: float, tell: Callable[[str], None] = lambda said: None) -> int:
        """Wait until a service can work and return its port (0 for workers).

        One that reports what it does meanwhile, as a learner that restores does, may take any time as long
        as it moves; `tell` gets each new report.

        Raises:
            AntiphonError: when it failed, or nothing moved for `timeout_s`, with its last words.
        """
        child = self._children[name]
        patience, told = Patience(time.perf_counter()), ""
        while not child.ready.wait(WATCH_S):
            if self._closing.is_set():
                raise UnavailableError(f"the run is stopping; {name} was not started")
            doing, counter = self._starting(name)
            if doing and doing != told:
                told = doing
                tell(f"{name}: {doing}")
            if patience.still_s(counter, time.perf_counter()) > timeout_s:
                still = f"has stood still at `{doing}`" if doing else "was not ready"
                raise UnavailableError(
                    f"{name} {still} for {timeout_s:g} s; raise services.start_timeout_s or "
                    f"see {self.log_path(name)}: {self._last_words(name)}"
                )
            if child.leaving:
                status = None if child.process is None else child.process.poll()
                killed = f"it {ending(status)}: " if status is not None and status < 0 else ""
                raise AntiphonError(f"{name} did not start: {killed}{self._last_words(name)}")
        return child.port

    def keeps(self, name: str) -> bool:
        """Return whether a service was started and neither left, nor was given up."""
        child = self._children.get(name)
        return child is not None and not child.leaving

    def dismiss(self, name: str) -> None:
        """Ask a service to end in order and do not start it again; it is killed after STOP_GRACE_S."""
        child = self._children[name]

        def ask() -> None:
            child.leaving, child.kill_at_s = True, self._clock() + STOP_GRACE_S
            if child.process is not None and child.process.alive():
                child.process.terminate()

        self._orders.put(ask)

    def log_path(self, name: str) -> Path:
        """Return where a service's output goes."""
        return self._run_dir / "logs" / f"{name}.log"

    def restarts(self) -> dict[str, int]:
        """Return how often each service was started again."""
        return {name: max(0, child.starts - 1) for name, child in self._children.items()}

    def begin_again(self) -> None:
        """Forget the restarts so far, and start at once what waits for its next one."""

        def forget() -> None:
            for child in self._children.values():
                child.rule.begin_again()
                if child.restart_at_s is not None:
                    child.restart_at_s = self._clock()

        self._orders.put(forget)

    def expect_end(self) -> None:
        """Accept from now on that a service ends by itself."""
        self._ending.set()

    def doing(self) -> str:
        """Return the services that were started, and what those that are not ready do, as words."""
        starting, children = [], list(self._children.values())
        for child in children:
            if not child.ready.is_set():
                usual = "starting its engine" if child.spec.arguments[0] == "worker" else "starting"
                starting.append(f"{child.spec.name} is {self._starting(child.spec.name)[0] or usual}")
        names = ", ".join(child.spec.name for child in children)
        return f"{names} ({', '.join(starting)})" if starting else names

    def hurry(self) -> None:
        """Begin to stop every service, with HURRIED_GRACE_S in place of STOP_GRACE_S; returns at once."""
        self._grace_s = HURRIED_GRACE_S
        self._closing.set()

    def kill(self) -> None:
        """End every service and all that it started, at once."""
        kill_groups([child.process for child in self._children.values() if child.process is not None])

    def close(self) -> None:
        """Stop every service, politely first; returns when none is left."""
        self._closing.set()
        self._thread.join(2 * STOP_GRACE_S + 5.0)

    def _watch(self) -> None:
        try:
            while not self._closing.is_set():
                with contextlib.suppress(queue.Empty):  # nothing to start: look at the children again
                    self._orders.get(timeout=WATCH_S)()
                for child in list(self._children.values()):  # others add to it meanwhile
                    self._look_at(child)
        except (OSError, ValueError) as error:
            # Without this thread the kernel ends every service: say why before that.
            self._closing.set()
            self._on_failure(f"the services can no longer be watched ({error}); look at {self._run_dir}")
        finally:
            self._stop_all()

    def _spawn(self, child: _Child) -> None:
        spec = child.spec
        ready_file = self._ready_file(spec.name)
        ready_file.unlink(missing_ok=True)
        starting_file(ready_file).unlink(missing_ok=True)
        child.ready.clear()
        arguments = list(spec.command)
        if not arguments:
            arguments = [sys.executable, "-P", "-m", "antiphon.cli.app", *spec.arguments]
            arguments += ["--ready-file", str(ready_file)]
            arguments += spec.restart_arguments if child.ready_at_s else ()
        if spec.arguments[0] == "serve":
            arguments += ["--port", str(child.port)]
        # Services never talk to Prefect, and what runs in a judge must not find its password.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_API_")}
        environment = {**inherited, **spec.environment}
        child.process = self._start(spec, arguments, environment)
        child.starts += 1
        if spec.command:
            child.ready_at_s = self._clock()
            child.ready.set()
        _log.debug("service.started", name=spec.name, pid=child.process.pid, start=child.starts)

    def _start(
        self, spec: ServiceSpec, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> ChildProcess:
        log = self.log_path(spec.name)
        if spec.ranks == 1:
            return ChildProcess(arguments, log, environment)
        meeting = self._ready_file(spec.name).with_suffix(".meeting")
        meeting.unlink(missing_ok=True)  # of the start before, of which nobody is left
        places = [rank_environment(rank, spec.ranks, meeting) for rank in range(spec.ranks)]
        return ChildGroup(arguments, log, [{**environment, **place} for place in places])

    def _look_at(self, child: _Child) -> None:
        if child.process is None or child.leaving:
            if child.process is not None and self._clock() >= child.kill_at_s:
                child.kill_at_s = math.inf
                kill_groups([child.process])
            return
        if child.restart_at_s is not None:
            if self._clock() >= child.restart_at_s:
                child.restart_at_s = None
                self._spawn(child)
            return
        status = child.process.poll()
        if status is None:
            if not child.ready.is_set():
                self._read_ready_file(child)
            return
        name = child.spec.name
        # A worker may be drained; the others must not leave before the run does.
        may_leave = self._ending.is_set() or child.spec.arguments[0] == "worker"
        if status == 0 and child.ready.is_set() and may_leave:
            child.leaving = True
            return
        # What refuses to start says why. One that was killed said nothing, and may start the next time.
        refused = status >= 0 and status != LEFT_GROUP
        first_start_failed = child.starts == 1 and not child.ready.is_set() and refused
        now = self._clock()
        ready_s = now - child.ready_at_s if child.ready.is_set() else 0.0
        pause_s = None if first_start_failed else child.rule.after_end(now, ready_s)
        if pause_s is None:
            child.leaving = True
            reason = f"{name} {ending(status)}: {self._last_words(name)}"
            if child.spec.needed:
                self._on_failure(reason)
            else:
                _log.warning("service.given_up", name=name, reason=reason)
            return
        _log.warning("service.restarted", name=name, status=status, start=child.starts + 1, pause_s=pause_s)
        child.restart_at_s = now + pause_s

    def _read_ready_file(self, child: _Child) -> None:
        path = self._ready_file(child.spec.name)
        try:
            ready = json.loads(path.read_text())
        except FileNotFoundError:
            return
        child.port = int(ready.get("port") or 0)
        child.ready_at_s = self._clock()
        child.ready.set()

    def _starting(self, name: str) -> tuple[str, int]:
        """Return what a service that is not ready says it does, and its counter; ("", 0) for nothing."""
        try:
            said = json.loads(starting_file(self._ready_file(name)).read_text())
        except FileNotFoundError:
            return "", 0
        return str(said["doing"]), int(said["counter"])

    def _ready_file(self, name: str) -> Path:
        return self._run_dir / "services" / f"{name}.json"

    def _last_words(self, name: str) -> str:
        process = self._children[name].process
        return quote([]) if process is None else process.last_words()

    def _stop_all(self) -> None:
        processes = []
        for child in list(self._children.values()):
            child.leaving = True
            if child.process is not None:
                processes.append(child.process)
        hurried = self._grace_s == HURRIED_GRACE_S
        for killed in stop_groups(processes, self._grace_s):
            (_log.info if hurried else _log.warning)("service.killed", log=str(killed.log))
        for process in processes:
            process.wait(KILL_S)


def service_spec(
    run_id: str,
    run_dir: Path,
    store_root: Path,
    host: str,
    role: str,
    coordinator: str = "",
    port: int = 0,
    scorer: str = "",
) -> ServiceSpec:
    """Return how the coordinator, the learner, the reward service or the scorer of a run is started.

    It listens at `port` of `host`; 0 lets it pick a free one. `coordinator` and `scorer` are HOST:PORT, ""
    for who needs none.
    """
    arguments = ["serve", role, "--config", str(run_dir / "config.yaml"), "--run-id", run_id]
    arguments += ["--run-dir", str(run_dir), "--store", str(store_root), "--host", host]
    arguments += ["--coordinator", coordinator] if coordinator else []
    arguments += ["--scorer", scorer] if scorer else []
    waits = ("--wait-for-journal",) if role == "coordinator" else ()
    # A bundle that the configuration does not name is none of this run's.
    environment = {VARIABLE: ""} | (learner_environment() if role == "learner" else {})
    return ServiceSpec(role, tuple(arguments), environment, port, waits)


def host_spec(run_dir: Path, gateway: str, command: Sequence[str], authority: bytes = b"") -> ServiceSpec:
    """Return how the program that holds a run's environment is started.

    `gateway` is the URL it asks. With TLS it believes the run's `authority` beside those of this machine.
    """
    told = {"ANTIPHON_GATEWAY": gateway, "ANTIPHON_TOKEN": read_token(run_dir / HOST_TOKEN), VARIABLE: ""}
    if gateway.startswith("https:"):
        usual = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
        believed = run_dir / "host-authorities.pem"
        write_atomically(believed, (Path(usual).read_bytes() if usual else b"") + b"\n" + authority)
        told["SSL_CERT_FILE"] = str(believed)
    return ServiceSpec("host", ("host",), told, command=tuple(command))


def devices_of(config: RunConfig) -> tuple[Devices, list[str]]:
    """Return which GPUs learner and workers of this machine take, and the names of those that there are.

    Raises:
        ConfigError: as `assign_devices` does.
    """
    names = gpu_names() if device() == "gpu" else []
    return assign_devices(config.learner, config.rollout, len(names)), names


def learner_environment() -> dict[str, str]:
    """Return the variables with which a learner is started; what this process has already stays."""
    # Threads that wait for each other sleep: workers have work for the cores they would spin on.
    wanted = keep_memory({"OMP_WAIT_POLICY": "PASSIVE"})
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def worker_spec(
    run_id: str,
    run_dir: Path,
    coordinator: str,
    environment: Mapping[str, str],
    relay_host: str,
    name: str,
) -> ServiceSpec:
    """Return how a rollout worker is started on this machine.

    With a `relay_host` it hands weights on at a free port of that name; with "" it hands none on.
    """
    work_dir = run_dir / "workers" / name
    arguments = ("worker", "--coordinator", coordinator, "--run", run_id, "--name", name)
    # At every address of IPv4, where it listens unless the host is this machine's own loopback.
    relays = ("--relay-address", f"{relay_host}:{free_port('0.0.0.0')}") if relay_host else ()
    return ServiceSpec(name, (*arguments, *relays, "--work-dir", str(work_dir)), environment)
