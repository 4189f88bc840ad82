"""The pages that `antiphon up` serves come up and go again, and answer their owner alone.

No other page in the owner's browser reaches them.
"""

import base64
import json
import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from antiphon.cli import app as cli
from antiphon.cli.up import Page, read_pages, running_prefect
from antiphon.core.errors import ConfigError
from antiphon.runs.servers.prefect_server import password_file, server_password, write_shell_file
from antiphon.runs.servers.s3_server import credentials_file

EVIL = "http://evil.example"
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Site:
    home: Path
    prefect: Page
    mlflow: Page
    said: str

    @property
    def password(self) -> dict[str, str]:
        return basic(server_password(self.home))


def basic(password: str) -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("home")
    home.chmod(0o755)

    def command(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "antiphon.cli.app", *words],
            env={**os.environ, "ANTIPHON_HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        assert running_prefect(home) is None
        said = command("up", "--prefect-port", "0", "--mlflow-port", "0", "--s3", "--s3-port", "0")
        pages = read_pages(home)
        yield Site(home, pages["prefect"], pages["mlflow"], said)
    finally:
        command("up", "--stop")


def asks(
    url: str, headers: Mapping[str, str], body: object = None, method: str | None = None
) -> tuple[int, Mapping[str, str], str]:
    """Return status, headers and body of what a server answers; a body is posted as JSON."""
    data = None if body is None else json.dumps(body).encode()
    content = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data, {**content, **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return reply.status, reply.headers, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def csrf_token(site: Site) -> dict[str, str]:
    """Return the headers that the owner's own client adds to what it changes."""
    status, _, said = asks(f"{site.prefect.url}/api/csrf-token?client=me", site.password)
    assert status == 200
    return {"Prefect-Csrf-Token": json.loads(said)["token"], "Prefect-Csrf-Client": "me"}


@pytest.mark.timeout(300)
def test_without_the_password_prefect_answers_nothing(site: Site) -> None:
    api = f"{site.prefect.url}/api"
    token = csrf_token(site)
    for headers in ({}, basic("antiphon:guess"), basic(""), {"Authorization": "Bearer x"}):
        assert asks(f"{api}/flow_runs/filter", {**headers, **token}, {})[0] == 401
        assert asks(f"{api}/deployments/", {**headers, **token}, {"name": "x"})[0] == 401
        assert asks(f"{api}/flow_runs/filter", headers, {})[0] in (401, 403)
        assert asks(f"{api}/csrf-token?client=x", headers)[0] == 401
        assert asks(f"{api}/admin/settings", headers)[0] == 401
    assert asks(f"{api}/health", {})[0] == 200
    assert asks(f"{api}/admin/version", site.password)[0] == 200


def test_an_event_without_the_password_is_not_taken(site: Site) -> None:
    address = site.prefect.url.replace("http", "ws", 1) + "/api/events/in"
    refused = pytest.raises((ConnectionClosed, InvalidStatus))
    with refused, connect(address, open_timeout=TIMEOUT_S) as socket:
        socket.send(json.dumps({"event": "x", "resource": {"prefect.resource.id": "x"}}))
        socket.recv(TIMEOUT_S)
    with connect(address, subprotocols=["prefect"], open_timeout=TIMEOUT_S) as socket:  # type: ignore[list-item]
        socket.send(json.dumps({"type": "auth", "token": "antiphon:guess"}))
        with pytest.raises(ConnectionClosed):
            socket.recv(TIMEOUT_S)


def test_another_origins_page_reaches_prefect_neither_with_nor_without_the_password(site: Site) -> None:
    url = f"{site.prefect.url}/api/flow_runs/filter"
    asked = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
    status, headers, _ = asks(
        url, {**asked, "Access-Control-Request-Headers": "authorization"}, None, "OPTIONS"
    )
    assert status == 400 and "access-control-allow-origin" not in headers
    neighbour = f"http://127.0.0.1:{int(site.prefect.url.rpartition(':')[2]) + 1}"
    for origin in (EVIL, neighbour, "null"):
        status, headers, _ = asks(url, {**site.password, "Origin": origin}, {})
        assert status == 403 and "access-control-allow-origin" not in headers
    own = {"Origin": site.prefect.url, "Access-Control-Request-Method": "POST"}
    status, headers, _ = asks(url, own, None, "OPTIONS")
    assert status == 200 and headers["access-control-allow-origin"] == site.prefect.url


def test_a_forged_request_lacks_the_token_that_clients_fetch(site: Site) -> None:
    url = f"{site.prefect.url}/api/flow_runs/filter"
    status, _, said = asks(url, site.password, {})
    assert status == 403 and "CSRF" in said
    assert asks(url, {**site.password, **csrf_token(site)}, {})[0] == 200
    settings = {
        PREFECT_API_URL: f"{site.prefect.url}/api",
        PREFECT_API_AUTH_STRING: server_password(site.home),
    }
    with temporary_settings(settings), get_client(sync_client=True) as client:
        assert client.read_flow_runs() == []


def test_the_password_is_the_owners_and_up_says_where_it_lies(site: Site, tmp_path: Path) -> None:
    path = password_file(site.home)
    shell = write_shell_file(site.home, f"{site.prefect.url}/api")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(shell.stat().st_mode) == 0o600
    assert f"its password is the line in {path}" in site.said and f". {shell}" in site.said
    password = server_password(site.home)
    assert len(password) > 30 and password not in site.said
    for process in (
        psutil.Process(site.prefect.pid),
        *psutil.Process(site.prefect.pid).children(recursive=True),
    ):
        assert password not in " ".join(process.cmdline())
    command = f'. "{shell}"; printf %s "$PREFECT_API_URL $PREFECT_API_AUTH_STRING"'
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == f"{site.prefect.url}/api {password}"
    assert server_password(tmp_path) != password
    password_file(tmp_path).chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        server_password(tmp_path)


def test_mlflow_answers_its_owner_alone(site: Site) -> None:
    """A local user could have it list, delete, and write files as its owner."""
    api = f"{site.mlflow.url}/api/2.0/mlflow/experiments"
    for headers in (
        {},
        basic("antiphon:guess"),
        basic(""),
        {"Authorization": "Basic ="},
        {"Authorization": "x"},
    ):
        for url in (
            f"{api}/create",
            f"{site.mlflow.url}/ajax-api/2.0/mlflow/upload-artifact?run_uuid=1&path=x",
        ):
            status, said, _ = asks(url, headers, {"name": "stranger", "artifact_location": "/tmp"})
            assert status == 401 and said["www-authenticate"].startswith("Basic ")
        for path in ("/", "/get-artifact?run_uuid=1&path=x", "/health/../version", "/version", "/v1/traces"):
            assert asks(f"{site.mlflow.url}{path}", headers)[0] == 401
    assert asks(f"{site.mlflow.url}/health", {})[::2] == (200, "OK")
    assert asks(f"{site.mlflow.url}/version", site.password)[0] == 200
    found = asks(f"{api}/search", site.password, {"max_results": 10})
    assert found[0] == 200 and "stranger" not in found[2]


def test_mlflow_takes_no_request_of_another_origin_or_name(site: Site) -> None:
    url, password = f"{site.mlflow.url}/api/2.0/mlflow/experiments/create", site.password
    neighbour = f"http://127.0.0.1:{int(site.mlflow.url.rpartition(':')[2]) + 1}"
    for origin in (EVIL, f"{EVIL}:5000", neighbour, "null"):
        assert asks(url, {**password, "Origin": origin}, {"name": "forged"})[0] == 403
    assert asks(url, {**password, "Host": "evil.example"}, {"name": "forged"})[0] == 403
    assert asks(url, {**password, "Origin": site.mlflow.url}, {"name": "own"})[0] == 200
    found = asks(f"{site.mlflow.url}/api/2.0/mlflow/experiments/search", password, {"max_results": 10})
    assert "own" in found[2] and "forged" not in found[2]


def test_the_home_is_its_owners(site: Site) -> None:
    """Also one that an earlier version made for all: it is closed at the next start."""
    assert stat.S_IMODE(site.home.stat().st_mode) == 0o700
    for path in (site.home / "mlflow").rglob("*"):
        with suppress(FileNotFoundError):  # the server writes, and its database's journal comes and goes
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    for pid in (site.prefect.pid, site.mlflow.pid):
        status = Path(f"/proc/{pid}/status").read_text()
        assert "Umask:\t0077" in status


def test_the_secret_of_the_bucket_is_in_a_file_of_the_owners_and_not_on_the_screen(site: Site) -> None:
    keys = credentials_file(site.home / "s3")
    assert stat.S_IMODE(keys.stat().st_mode) == 0o600 and str(keys) in site.said
    (identity, *_) = json.loads((site.home / "s3/identities.json").read_bytes())["identities"]
    assert identity["credentials"][0]["secretKey"] not in site.said


def test_the_page_of_runs_draws_itself_in_a_browser(
    site: Site, needs_system: Callable[[str], str], tmp_path: Path
) -> None:
    browser = needs_system("chromium")
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    quiet += ["--disable-background-networking", "--disable-component-update"]
    shown = ["--virtual-time-budget=20000", "--dump-dom", f"{site.prefect.url}/runs"]
    done = subprocess.run(
        [browser, *quiet, f"--user-data-dir={tmp_path}", *shown],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "Can't connect" not in done.stdout and "Runs" in done.stdout


def test_up_again_starts_nothing_and_down_stops_exactly_what_is_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(site.home))
    pages = read_pages(site.home)
    assert set(pages) == {"prefect", "mlflow", "s3"}
    family = [psutil.Process(page.pid) for page in pages.values()]
    family += [child for parent in family for child in parent.children(recursive=True)]
    assert running_prefect(site.home) == f"{site.prefect.url}/api"
    assert cli.execute(["up"]) == 0
    assert read_pages(site.home) == pages
    assert cli.execute(["up", "--stop"]) == 0
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert not (site.home / "up.json").exists()
    assert (site.home / "prefect" / "prefect.db").exists()
    assert (site.home / "mlflow" / "mlflow.db").exists()
