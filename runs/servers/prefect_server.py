"""Prefect server: a real one, light enough to share two cores with the loop it watches.

Anyone who can write to it runs code: flow runs name commands, which a process worker executes. So it
asks for a password, which lies in the home directory for its owner alone and is handed to every client
started here, and takes no request that a page of another origin makes in the owner's browser.

Its database lies in the home directory and outlasts the server, so the pages of a run can be
served again later. Never the ephemeral in-process server: that gives up after 20 seconds.
"""

import contextlib
import os
import secrets
import shlex
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from antiphon.core.errors import ConfigError
from antiphon.net.security.keys import check_private, make_private_folder, write_private
from antiphon.system.collecting import LOADING
from antiphon.system.files import sqlite_url
from antiphon.system.ports import free_port, is_free
from antiphon.system.processes import ChildProcess, tied_command, wait_ready
from antiphon.system.set_up import empty_database

_log = structlog.get_logger(__name__)

HOST = "127.0.0.1"

APPLICATION = ("--factory", "prefect.server.api.server:create_app")
"""What `prefect server start` has uvicorn serve, without the half CPU second that its command line takes."""

_NOT_PASSED_ON = ("PREFECT_", "UVICORN_", "WEB_CONCURRENCY", "FORWARDED_ALLOW_IPS")
"""Beginnings of variables that are about other servers."""

STOP_GRACE_S = 10.0
"""Seconds a server gets between SIGTERM and SIGKILL."""

HURRIED_GRACE_S = 1.0
"""The same when a person waits for the end; its database takes no harm."""

_DATABASES = ("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL")
"""Variables that name another database than the one in the home."""

_SCHEDULING = ("SCHEDULER", "LATE_RUNS", "TRIGGERS", "PAUSE_EXPIRATIONS", "EVENT_PERSISTER")
"""Background services that only deployments and automations need. The last one keeps each event, which takes
a third of the CPU seconds for a task; what became of a task is kept all the same."""

KEEP_S = 0.5
"""Pause between two looks at a server that is kept."""

_CATALOGUE = ("API_BLOCKS_REGISTER_ON_START", "MEMOIZE_BLOCK_AUTO_REGISTRATION")
"""The list of block types, which only deployments and automations need: writing it into the database takes a
fifth of the CPU seconds of a start. Without the second one the next server would take it for written."""

_IN_BATCHES = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "5",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "100",
}
"""States of tasks are written together, up to five seconds late, and before a server ends in order; one that
is killed loses those of its last five seconds, which only its pages show. A transaction for each, as by
default, took three times the CPU seconds for a task."""

STATEMENTS_KEPT = 16
"""Prepared statements that each connection to the database keeps. A batch of states is another statement for
each number of them, and not small: with Python's own 128 a server grew by 20 KiB more in a step."""

RESTARTS = 5
"""Times a kept server is started again."""

QUIET = {"PREFECT_LOGGING_LEVEL": "WARNING", "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}
"""Variables under which Prefect writes nothing to the terminal of a run, which is the view's, whatever
server it talks to. A line for every task state would cost more than the task."""

_UNUSED = ("FOREMAN", "REPOSSESSOR", "CLEANUP_RECONCILER")
"""Background services for remote work pools and concurrency leases, which no flow here uses."""


def check_port(port: int, option: str, host: str = HOST) -> None:
    """Check that a server could listen on `port`.

    Raises:
        ConfigError: when it is no port, or something listens there already; `option` is what to change.
    """
    if not 0 <= port < 65536:
        raise ConfigError(f"{option} {port} is no port; give one from 1 to 65535, or 0 for a free one")
    if not is_free(port, host):
        raise ConfigError(f"port {port} on {host} is taken; give another one with {option}")


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """Return whether an HTTP GET of `url` succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@dataclass(frozen=True, slots=True)
class PrefectServer:
    """A server process that this process started."""

    url: str
    """What PREFECT_API_URL should be."""
    process: ChildProcess

    @property
    def page(self) -> str:
        """Address of the page for people."""
        return self.url.removesuffix("/api")

    def wait_healthy(self, timeout_s: float) -> None:
        """Wait until the server answers.

        Raises:
            UnavailableError: when the server ended, or did not answer in time; it is gone then.
        """
        health, log = f"{self.url}/health", self.process.log
        wait_ready(self.process, "the Prefect server", log, lambda: answers(health), timeout_s)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stop the server and everything it started; it writes its database first."""
        self.process.stop(grace_s)


@contextmanager
def kept_running(server: PrefectServer, home: Path, grace_s: Callable[[], float]) -> Iterator[None]:
    """Start the server of a home again, on the same port and database, when it ends before the block does.

    It answers already. At the end of the block it is stopped, with `grace_s()` seconds to end in order.
    """
    over, port = threading.Event(), int(server.page.rpartition(":")[2])

    def watch() -> None:
        kept, restarts = server, 0
        while not over.wait(KEEP_S):
            status, log = kept.process.poll(), kept.process.log
            if status is None or restarts >= RESTARTS:
                continue
            restarts += 1
            _log.warning("prefect.restarted", status=status, start=restarts + 1, log=str(log))
            try:
                kept = begin_prefect_server(home, port, log)
            except ConfigError as error:  # the port was given away; it may become free again
                _log.warning("prefect.unstarted", reason=str(error))
        kept.stop(grace_s())

    # The thread outlives every server it starts, as they are tied to it.
    thread = threading.Thread(target=watch, name="prefect", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * STOP_GRACE_S)


def begin_prefect_server(home: Path, port: int, log: Path, outlive: bool = False) -> PrefectServer:
    """Start a server without waiting for it; `wait_healthy` does that.

    Args:
        home: the home directory; the database is `home/prefect/prefect.db`.
        port: port to listen on; 0 picks a free one.
        log: file the server's output is appended to.
        outlive: keep the server when this process ends, with everything that deployments and
            schedules need; otherwise it dies with the thread that called this.

    Raises:
        ConfigError: when the port is taken.
    """
    home = home.absolute()
    if port:
        check_port(port, "--prefect-port")
    port = port or free_port()
    url = f"http://{HOST}:{port}/api"
    environment = server_environment(home, url, schedules=outlive)
    if not any(name in environment for name in _DATABASES):
        begin_with_empty_database(home / "prefect")
        # Prefect's own default puts the path into a URL as it is.
        database = sqlite_url(home / "prefect" / "prefect.db", "sqlite+aiosqlite")
        environment[_DATABASES[1]] = f"{database}?cached_statements={STATEMENTS_KEPT}"
    arguments = [*LOADING, "uvicorn", *APPLICATION]
    arguments += ["--host", HOST, "--port", str(port), "--log-level", "warning", "--workers", "1"]
    arguments = arguments if outlive else tied_command(arguments)
    # uvicorn and alembic import from the folder that they are started in, which is not the user's.
    folder = home / "prefect"
    server = PrefectServer(url, ChildProcess(arguments, log, environment, outlive=outlive, folder=folder))
    server.process.come_last()  # worker and learner, which start beside it, are what a run waits for
    return server


def begin_with_empty_database(folder: Path) -> None:
    """Give a server that has no database yet a copy of the empty one: its migrations take seconds."""
    database, kept = folder / "prefect.db", empty_database("prefect")
    if database.exists() or not kept.exists():
        return
    copy = folder / f"prefect.db.{os.getpid()}"
    shutil.copyfile(kept, copy)
    with contextlib.suppress(OSError):  # another server began meanwhile, or there are no links here
        os.link(copy, database)
    copy.unlink()


def password_file(home: Path) -> Path:
    """Return where the password of a home's Prefect server lies; its one line is what the page asks for."""
    return home / "prefect" / "password"


def server_password(home: Path) -> str:
    """Return the password of a home's Prefect server, `USER:SECRET`; it is made on first use.

    Raises:
        ConfigError: when its file can be read by others.
    """
    path = password_file(home)
    if not path.exists():
        make_private_folder(path.parent)  # the database, which lies there too, is nobody else's either
        write_private(path, f"antiphon:{secrets.token_urlsafe(24)}\n".encode())
    check_private(path)
    return path.read_text(encoding="ascii").strip()


def page_links(home: Path) -> dict[str, str]:
    """Return where the pages of the server of PREFECT_API_URL are, and their password if the home has it."""
    api, password = os.environ.get("PREFECT_API_URL", ""), password_file(home)
    links = {"prefect": api.removesuffix("/api").rstrip("/")} if api else {}
    if api and password.exists() and os.environ.get("PREFECT_API_AUTH_STRING") == server_password(home):
        links["password of that page"] = f"the line in {password}"
    return links


def write_shell_file(home: Path, url: str) -> Path:
    """Write what a shell reads so that `prefect` talks to the server at `url`; return the file."""
    path = home / "prefect" / "client.env"
    variables = {"PREFECT_API_URL": url, "PREFECT_API_AUTH_STRING": server_password(home)}
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
    write_private(path, "".join(lines).encode())
    return path


def server_environment(home: Path, url: str, schedules: bool) -> dict[str, str]:
    """Return the variables a server runs with: own database and password, no reports, little noise.

    Raises:
        ConfigError: when the file with the password can be read by others.
    """
    folder = home / "prefect"
    folder.mkdir(parents=True, exist_ok=True)
    page = url.removesuffix("/api")
    origins = (page, page.replace(HOST, "localhost"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
    environment |= {name: os.environ[name] for name in _DATABASES if name in os.environ}
    environment |= {
        "PREFECT_HOME": str(folder),
        "PREFECT_SERVER_UI_API_URL": url,
        "PREFECT_SERVER_API_AUTH_STRING": server_password(home),
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(origins),
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        "PREFECT__SERVER_FINAL": "1",  # as Prefect sets it: no second application is made in the process
        "DO_NOT_TRACK": "1",
        # A heap for each thread that talks to the database would keep what the batches of states took there.
        "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "2"),
        **_IN_BATCHES,
    }
    idle = [
        f"SERVER_SERVICES_{name}_ENABLED" for name in (_UNUSED if schedules else (*_UNUSED, *_SCHEDULING))
    ]
    return environment | {f"PREFECT_{name}": "false" for name in (*idle, *(() if schedules else _CATALOGUE))}


def client_environment(url: str, home: Path) -> dict[str, str]:
    """Return the variables under which a flow in this process talks to the server at `url`.

    Task states travel as events; log lines stay in the services' own files, because sending
    each one costs more than the task it is about. Prefect's own account of a failed stage is
    kept off the terminal: the command says the reason once, and the run's page has the rest.
    """
    return {
        "PREFECT_API_URL": url,
        "PREFECT_API_AUTH_STRING": server_password(home),
        "PREFECT_CLIENT_CSRF_SUPPORT_ENABLED": "true",
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        **QUIET,
    }
