"""up: serve the pages of what was recorded and, on demand, S3; stop exactly those."""

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
from cyclopts import Parameter

from antiphon.core.errors import ConfigError
from antiphon.lineage.tracking import login
from antiphon.lineage.tracking.mlflow_client import make_own_database
from antiphon.lineage.tracking.pages import mlflow_links
from antiphon.runs.directory import home_directory, list_runs, make_home
from antiphon.runs.servers import s3_server
from antiphon.runs.servers.prefect_server import (
    HOST,
    answers,
    begin_prefect_server,
    check_port,
    password_file,
    server_password,
    write_shell_file,
)
from antiphon.system.collecting import LOADING
from antiphon.system.files import sqlite_url, write_atomically
from antiphon.system.ports import free_port
from antiphon.system.processes import ChildProcess, stop_groups, wait_ready
from antiphon.system.set_up import command

START_TIMEOUT_S = 180.0
"""Longest wait for a page; the first start of each makes its database."""

SAY_S = 5.0
"""Longest silence while a page starts."""

STOP_GRACE_S = 10.0
"""Seconds a server gets between SIGTERM and SIGKILL."""


@dataclass(frozen=True, slots=True)
class Page:
    """A server that `up` left running."""

    name: str
    url: str
    pid: int
    created: float
    """The kernel's start time of the process; a later process with the same id differs in it."""

    def alive(self) -> bool:
        """Return whether this very process still runs."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def how_it_ended(self) -> str:
        """Return all that is known of the end of a process that an earlier command started."""
        return "ended at once"


def up(
    *,
    prefect_port: int | None = None,
    mlflow_port: int | None = None,
    s3: Annotated[bool, Parameter(negative="--no-s3")] = False,
    s3_port: int | None = None,
    stop: bool = False,
) -> None:
    """Serve the pages of what was recorded and, with --s3, a bucket; --stop ends them.

    The pages are Prefect's and MLflow's. Both ask for a password: the line in prefect/password in the home
    directory, whose first word is the user.

    Args:
        prefect_port: port of the Prefect pages, 4200 unless given; 0 picks a free one.
        mlflow_port: port of the MLflow pages, 5000 unless given; 0 picks a free one.
        s3: serve a bucket for artifacts too; its folder and keys lie in the home directory.
        s3_port: port of the S3 server, 8333 unless given; 0 picks a free one.
        stop: stop all that is served instead; recorded data stays.
    """
    home = home_directory()
    if stop:
        return _stop(home)
    pages = {name: page for name, page in read_pages(home).items() if page.alive()}
    ports = _ports({"prefect": prefect_port, "mlflow": mlflow_port, "s3": s3_port}, pages, s3)
    make_home(home)

    def keep(name: str, url: str, process: ChildProcess) -> None:
        pages[name] = Page(name, url, process.pid, psutil.Process(process.pid).create_time())
        # Written down before the wait, so that `--stop` finds it whatever happens meanwhile.
        write_pages(home, pages)

    if "prefect" not in pages:
        prefect = begin_prefect_server(home, ports["prefect"], _log(home, "prefect"), outlive=True)
        keep("prefect", prefect.page, prefect.process)
    if "mlflow" not in pages:
        keep("mlflow", *_begin_mlflow(home, ports["mlflow"]))
    if s3 and "s3" not in pages:
        bucket = s3_server.begin_s3(home / "s3", ports["s3"], outlive=True)
        keep("s3", bucket.endpoint_url, bucket.process)
        bucket.wait_ready(START_TIMEOUT_S)
    _wait(pages["prefect"], home)
    print(f"prefect: {pages['prefect'].url}")
    print(f"  its password is the line in {password_file(home)}")
    variables = write_shell_file(home, f"{pages['prefect'].url}/api")
    print(f"  the prefect command of a shell: . {shlex.quote(str(variables))}", flush=True)
    _wait(pages["mlflow"], home)
    print(f"mlflow: {pages['mlflow'].url}")
    user, _, _ = server_password(home).partition(":")
    print(f"  its user is {user}, its password what follows `{user}:` in that line")
    links = ((run.name, mlflow_links(run, home)) for run in reversed(list_runs(home)))
    if newest := next((f"{name}: {known['comparison']}" for name, known in links if known), ""):
        print(f"  runs beside {newest}", flush=True)
    if "s3" in pages:
        keys = s3_server.credentials_file(home / "s3")
        print(f"s3: {pages['s3'].url}, bucket antiphon; its keys: . {shlex.quote(str(keys))}")
    print(f"stop them with: {command()} up --stop")


def _ports(asked: Mapping[str, int | None], pages: Mapping[str, "Page"], s3: bool) -> dict[str, int]:
    """Return the port of each server; all are tried before any starts, so a wrong one leaves nothing behind.

    Raises:
        ConfigError: when a port is none, is taken, or is asked for while its pages are up at another one.
    """
    ports = {}
    for name, usual in {"prefect": 4200, "mlflow": 5000, "s3": 8333}.items():
        port, option, page = asked[name], f"--{name}-port", pages.get(name)
        ports[name] = usual if port is None else port
        if page is None and (s3 or name != "s3"):
            check_port(ports[name], option)
        elif page is not None and port and not page.url.endswith(f":{port}"):
            raise ConfigError(
                f"{option} {port} is not possible: {name} is up at {page.url} already; "
                "`antiphon up --stop` stops it, then give the same command again"
            )
        if same := [f"--{other}-port" for other in ports if other != name and port and ports[other] == port]:
            raise ConfigError(f"{option} {port} is that of {same[0]} too; give two ports")
    return ports


def _stop(home: Path) -> None:
    pages = read_pages(home)
    running = [page for page in pages.values() if page.alive()]
    stop_groups([page for page in running if page.name == "s3"], s3_server.STOP_GRACE_S)
    stop_groups([page for page in running if page.name != "s3"], STOP_GRACE_S)
    for page in running:
        if page.name == "s3":
            s3_server.remove_sockets(home / "s3")
        print(f"{page.name}: stopped")
    (home / "up.json").unlink(missing_ok=True)
    if not running:
        print("nothing was up")


def running_prefect(home: Path) -> str | None:
    """Return the API address of the Prefect server that `up` serves, or None."""
    page = read_pages(home).get("prefect")
    if page is None or not page.alive() or not answers(f"{page.url}/api/health"):
        return None
    return f"{page.url}/api"


def use_prefect(home: Path) -> str:
    """Let Prefect in this process talk to the server of PREFECT_API_URL, else to the one that `up` serves.

    Returns:
        the server's API address, or "" where there is none. Prefect reads its variables once, when it is
        imported.
    """
    served = running_prefect(home)
    url = (os.environ.get("PREFECT_API_URL") or served or "").rstrip("/")
    if url and url == served:  # a server of the user's own has a password of its own, or none
        os.environ["PREFECT_API_AUTH_STRING"] = server_password(home)
    if url:
        os.environ["PREFECT_API_URL"] = url
    return url


def read_pages(home: Path) -> dict[str, Page]:
    """Return what `up` wrote down, running or not.

    Raises:
        ConfigError: when the file is not its own.
    """
    path = home / "up.json"
    if not path.exists():
        return {}
    try:
        plain: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {name: Page(**values) for name, values in plain.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); remove it and run `antiphon up` again"
        ) from error


def write_pages(home: Path, pages: Mapping[str, Page]) -> None:
    """Write down which servers are up, whole or not at all."""
    plain = {name: asdict(page) for name, page in pages.items()}
    write_atomically(home / "up.json", (json.dumps(plain, indent=2) + "\n").encode())


def _begin_mlflow(home: Path, port: int) -> tuple[str, ChildProcess]:
    folder = home / "mlflow"
    (folder / "artifacts").mkdir(parents=True, exist_ok=True)
    if not (folder / "mlflow.db").exists():
        make_own_database(home)
    port = port or free_port()
    arguments = [*LOADING, "uvicorn", "--host", HOST, "--port", str(port)]
    # Its default would be the folder in which `up` is called.
    arguments += ["--app-dir", str(folder), "--factory", f"{login.__name__}:{login.application.__name__}"]
    hosts = [f"{name}:{port}" for name in (HOST, "localhost")]
    environment = os.environ | {
        login.PASSWORD: server_password(home),
        login.DATABASE: sqlite_url(folder / "mlflow.db"),
        login.ARTIFACTS: (folder / "artifacts").as_uri(),
        "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(hosts),
        "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{host}" for host in hosts),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    url = f"http://{HOST}:{port}"
    return url, ChildProcess(arguments, _log(home, "mlflow"), environment, outlive=True)


def _log(home: Path, name: str) -> Path:
    return home / name / "server.log"


def _wait(page: Page, home: Path) -> None:
    """Wait until a page answers, saying so now and then.

    Raises:
        UnavailableError: when its server ended or did not answer in time; it is stopped then.
    """
    health = f"{page.url}/api/health" if page.name == "prefect" else f"{page.url}/health"
    said_s = 0.0

    def report(waited_s: float) -> None:
        nonlocal said_s
        if waited_s - said_s > SAY_S:
            said_s = waited_s
            print(f"{page.name}: starting, {waited_s:.0f} s so far", file=sys.stderr, flush=True)

    name, log = f"the {page.name} server", _log(home, page.name)
    wait_ready(page, name, log, lambda: answers(health), START_TIMEOUT_S, report)
