"""What `antiphon deploy` offers on a real Prefect server: forms, one run at a time, and no orphans.

The commands are those of docs/guides/deployments.md and docs/guides/scheduled-benchmarks.md;
the last test compares.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from antiphon.cli import app as cli
from antiphon.core.errors import ConfigError, UnavailableError
from antiphon.flows import deployments
from antiphon.flows.deployments import DEPLOYMENTS, MACHINE_QUEUE, WATCH_NAME
from antiphon.runs.servers.prefect_server import PrefectServer, begin_prefect_server, server_password
from antiphon.system.ports import free_port

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "docs" / "guides" / name for name in ("deployments.md", "scheduled-benchmarks.md")]
GUIDE_RUN = '.venv/bin/prefect deployment run post_train/post-train --param \'config={"run": {"steps": 20}}\''
START_S = 170.0
WAIT_S = 240.0
"""Longest wait for anything a worker does."""
LOOK_S = 0.5
"""Between two looks, each of which has the server answer."""
SCRIPT = """\
import json, os
print("measuring")
print(json.dumps({"seconds_per_step": 2.0, "label": "tiny", "folder_exists": os.path.isdir("examples")}))
"""


@dataclass
class Site:
    """A home with a Prefect server, and a folder to deploy from."""

    home: Path
    project: Path
    server: PrefectServer
    ran: list[str] = field(default_factory=list)
    """Commands of the guides that were run, as the guides write them."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a person's shell there."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("PREFECT_", "MLFLOW_"))}
        return kept | {
            "ANTIPHON_HOME": str(self.home),
            "PREFECT_API_URL": self.server.url,
            "PREFECT_API_AUTH_STRING": server_password(self.home),
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "TMPDIR": str(
                self.project.parent
            ),  # a worker of another user has made /tmp/runner_storage its own
            "DO_NOT_TRACK": "1",
        }

    def begin(self, command: str, **others: Any) -> "subprocess.Popen[str]":
        """Start a command of a guide."""
        self.ran.append(command)
        words = shlex.split(command)
        modules = {"./antiphon": "antiphon.cli.app", ".venv/bin/prefect": "prefect"}
        arguments = [sys.executable, "-P", "-m", modules[words[0]], *words[1:]]
        return subprocess.Popen(
            arguments,
            cwd=self.project,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=others.pop("stdout", subprocess.PIPE),
            stderr=subprocess.STDOUT,
            text=True,
            **others,
        )

    def run(self, command: str) -> str:
        """Run a command of a guide to its end and return what it said."""
        process = self.begin(command)
        said, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, said
        return said


def until(look: Callable[[], Any], excuse: Callable[[], object], deadline_s: float = WAIT_S) -> Any:
    """Look until something true is seen and return it."""
    ends = time.perf_counter() + deadline_s
    while not (seen := look()):
        assert time.perf_counter() < ends, f"waited for {deadline_s:g} s: {excuse()}"
        time.sleep(LOOK_S)
    return seen


def identity(said: str) -> UUID:
    """Return the flow run that `prefect deployment run` says it made."""
    found = re.search(r"UUID: ([0-9a-f-]{36})", said)
    assert found, said
    return UUID(found.group(1))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("deployments")
    home, project = folder / "home", folder / "project"
    for place in (home, project):
        (place / ".dvc").mkdir(parents=True)
        (place / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    (project / "examples").symlink_to(ROOT / "examples")
    (project / "benchmarks").mkdir()
    (project / "benchmarks" / "published_costs.py").write_text(SCRIPT)
    made = Site(home, project, begin_prefect_server(home, 0, folder / "server.log", outlive=True))
    try:
        made.server.wait_healthy(START_S)
        yield made
    finally:
        made.server.stop()  # which may be another one by then


@pytest.fixture
def client(site: Site) -> Iterator[SyncPrefectClient]:
    settings = {PREFECT_API_URL: site.server.url, PREFECT_API_AUTH_STRING: server_password(site.home)}
    with temporary_settings(settings), get_client(sync_client=True) as found:
        yield found


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[psutil.Process]:
    log = site.home / "worker.log"
    with log.open("w") as output:
        process = site.begin(
            ".venv/bin/prefect worker start --pool antiphon", stdout=output, start_new_session=True
        )
    known = psutil.Process(process.pid)
    yield known
    # Asked to end, it would wait for a server that a test took away; nothing here depends on how it ends.
    for one in [known, *known.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait(20)


def test_deploying_offers_every_flow_with_its_form(site: Site, client: SyncPrefectClient) -> None:
    said = site.run("./antiphon deploy")
    assert said.count("created") == len(DEPLOYMENTS)
    commands = [shlex.split(line) for line in said.splitlines() if line.startswith("  ")]
    (start,) = [words for words in commands if words[1:] == ["worker", "start", "--pool", "antiphon"]]
    assert start[0].endswith("/bin/prefect")
    found = {f"{d.name}": d for d in client.read_deployments()}
    assert set(found) == {planned["name"] for planned in DEPLOYMENTS}
    form = found["post-train"].parameter_openapi_schema
    assert form is not None
    bound = form["definitions"]["usual_loop"]["properties"]["max_staleness"]
    assert bound["title"] == "Staleness bound S, versions"
    assert bound["description"].startswith("Staleness bound S") and bound["default"] == 2
    loss = form["definitions"]["change_algorithm"]["properties"]["objective"]
    assert "gspo" in loss["description"]
    plan = found["benchmark"].parameter_openapi_schema
    assert plan is not None
    seeds = plan["definitions"]["BenchmarkPlan"]["properties"]["seeds"]
    assert "paired" in seeds["description"] and seeds["default"] == [0, 1, 2]
    assert found["evaluate"].work_queue_name == "default"
    assert {found[n].work_queue_name for n in ("post-train", "benchmark", "replay")} == {MACHINE_QUEUE}
    queue = client.read_work_queue_by_name(MACHINE_QUEUE, work_pool_name="antiphon")
    assert queue.concurrency_limit == 1
    assert len(client.read_automations_by_name(WATCH_NAME)) == 1


def test_deploying_again_changes_only_what_changed(site: Site, client: SyncPrefectClient) -> None:
    before = {d.name: d.identity for d in deployments.deploy(site.project, site.home)}
    assert all(s.active is False for d in client.read_deployments() for s in d.schedules)
    deployments.deploy(site.project, site.home, schedules=True)
    again = deployments.deploy(site.project, site.home)  # a switch that was set stays
    assert {d.name: d.identity for d in again} == before and not any(d.created for d in again)
    by_name = {d.name: d for d in client.read_deployments()}
    assert [(s.slug, s.active) for s in by_name["benchmark"].schedules] == [("nightly", True)]
    assert [(s.slug, s.active) for s in by_name["replay"].schedules] == [("weekly", True)]
    deployments.deploy(site.project, site.home, limit=2, schedules=False)
    assert client.read_work_queue_by_name(MACHINE_QUEUE, work_pool_name="antiphon").concurrency_limit == 2
    deployments.deploy(site.project, site.home)
    assert len(client.read_deployments()) == len(DEPLOYMENTS)
    assert len(client.read_automations_by_name(WATCH_NAME)) == 1


def test_a_form_out_of_bounds_is_refused(client: SyncPrefectClient) -> None:
    known = client.read_deployment_by_name("post_train/post-train")
    with pytest.raises(Exception, match=r"max_staleness|maximum|65"):
        client.create_flow_run_from_deployment(
            known.id, parameters={"config": {"loop": {"max_staleness": 65}}}
        )


def test_a_second_run_waits_and_a_cancelled_one_leaves_nothing(
    site: Site, client: SyncPrefectClient, worker: psutil.Process
) -> None:
    def state(run: UUID) -> str:
        found = client.read_flow_run(run).state
        return found.name if found else ""

    def notes_of(run: UUID) -> list[Any]:
        return [a for a in client.read_artifacts() if a.flow_run_id == run and a.type == "markdown"]

    def excuse() -> object:
        return (state(first), state(second), (site.home / "worker.log").read_text()[-3000:])

    # An engine takes long to start, for nothing: tests/e2e/test_user_path.py cancels a run that has one.
    said = site.run(f'{GUIDE_RUN[:-2]}, "rollout": {{"workers": 0}}}}\'')
    site.ran.pop()  # no guide shows it so
    first = second = identity(said)
    services = until(lambda: sorted(site.home.glob("runs/*/services/coordinator.json")), excuse)
    (plan,) = until(lambda: notes_of(first), excuse)  # while the learner starts
    assert "the services are starting" in str(plan.data) and "| run.steps | 20 |" in str(plan.data)
    second = identity(
        site.run(
            ".venv/bin/prefect deployment run benchmark/benchmark "
            '--param \'plan={"configs": [], "scripts": ["benchmarks/published_costs.py"]}\''
        )
    )
    until(lambda: len(worker.children(recursive=True)) >= 4, excuse)  # flow, coordinator, learner, reward
    assert state(first) == "Running" and state(second) in {"Scheduled", "Late"}
    run_dir = services[0].parents[1]
    assert client.read_flow_run(first).name == run_dir.name  # from its start, whatever becomes of it
    family = worker.children(recursive=True)
    site.run(f".venv/bin/prefect flow-run cancel {first}")
    site.ran[-1] = ".venv/bin/prefect flow-run cancel ID"
    until(lambda: state(first) == "Cancelled", excuse)
    _, alive = psutil.wait_procs(family, timeout=90)
    assert not alive
    assert client.read_flow_run(first).name == run_dir.name
    said = [(log.name, log.message) for log in client.read_logs(_of_flow_run(first))]
    assert ("antiphon", f"starting run {run_dir.name}") in said
    assert json.loads((run_dir / "prefect.json").read_text()) == {"flow_run_id": str(first)}
    assert any(f"--resume {run_dir.name}" in str(a.data) for a in notes_of(first))
    until(lambda: state(second) in {"Completed", "Failed", "Crashed"}, excuse)
    assert state(second) == "Completed", excuse()
    assert client.read_flow_run(second).name == "published_costs.py at unversioned"
    results = site.project / "results" / "benchmarks"
    table = json.loads((results / "unversioned.json").read_text())
    assert set(table["cases"]) == {f"benchmarks/published_costs.py #{n}" for n in (1, 2, 3)}
    assert table["cases"]["benchmarks/published_costs.py #1"]["seconds_per_step"] == 2.0
    assert (results / "index.html").is_file()
    assert list((site.project / "ledger").glob("benchmarks*.pointer")) or list(
        (site.home / "ledger").glob("benchmarks*.pointer")
    )


def _of_flow_run(run: UUID) -> LogFilter:
    return LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run]))


def test_a_server_that_goes_away_loses_nothing(site: Site, client: SyncPrefectClient) -> None:
    each = 40
    program = ROOT / "tests" / "support" / "outage_flow.py"
    flow = subprocess.Popen(
        [sys.executable, "-P", str(program), str(each)],
        env=site.environment | {"PREFECT_LOGGING_LEVEL": "CRITICAL"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert flow.stdin is not None and flow.stdout is not None
    try:
        run = UUID(json.loads(flow.stdout.readline())["flow_run"])
        until(lambda: _completed(client, run) == each, lambda: _completed(client, run))
        site.server.process.kill()
        site.server.process.wait(20)
        flow.stdin.write("down\n")
        flow.stdin.flush()
        during = json.loads(flow.stdout.readline())  # nothing waited for the server
        assert during["done"] == 2 * each
        port = int(site.server.page.rpartition(":")[2])
        again = begin_prefect_server(site.home, port, site.home / "again.log", outlive=True)
        site.server = again
        flow.stdin.write("starting\n")
        flow.stdin.flush()
        after = json.loads(flow.stdout.readline())
        assert after["done"] == 3 * each
        assert after["kept"] <= each  # of tasks that ended nothing is left
        again.wait_healthy(START_S)
        assert json.loads(flow.stdout.readline()) == {"part": "ended"}
        assert flow.wait(WAIT_S) == 0
    finally:
        flow.kill()
        flow.wait(20)
    final = client.read_flow_run(run).state
    assert final is not None and final.name == "Completed"
    until(lambda: _completed(client, run) == 3 * each, lambda: _completed(client, run))
    names = [row["name"] for row in _tasks_of(client, run)]
    assert sorted(names) == sorted(f"stage {n}" for n in range(3 * each))  # none lost, none doubled


def _completed(client: SyncPrefectClient, run: UUID) -> int:
    return sum((row.get("state") or {}).get("type") == "COMPLETED" for row in _tasks_of(client, run))


def _tasks_of(client: SyncPrefectClient, run: UUID) -> list[dict[str, Any]]:
    answer = client.request(
        "POST", "/task_runs/filter", json={"flow_runs": {"id": {"any_": [str(run)]}}, "limit": 200}
    )
    return list(answer.json())


def test_a_pool_of_another_type_is_left_alone(site: Site, client: SyncPrefectClient) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate

    client.create_work_pool(WorkPoolCreate(name="cloud", type="kubernetes"))
    with pytest.raises(ConfigError, match="work pool cloud is of type kubernetes; give --pool"):
        deployments.deploy(site.project, site.home, pool="cloud")
    with pytest.raises(ConfigError, match="--limit 0"):
        deployments.deploy(site.project, site.home, limit=0)


def test_without_a_server_the_sentence_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert cli.execute(["deploy"]) == 1
    assert "start one with `./antiphon up`" in capsys.readouterr().err
    nobody = f"http://127.0.0.1:{free_port()}/api"
    with (
        temporary_settings({PREFECT_API_URL: nobody}),
        pytest.raises(UnavailableError, match="no Prefect server answers at http"),
    ):
        deployments.deploy(tmp_path, tmp_path)


def test_the_guides_hold_what_was_run(site: Site) -> None:
    said = "\n".join(page.read_text(encoding="utf-8") for page in GUIDES)
    blocks = re.findall(r"^```sh\n(.*?)^```$", said, re.MULTILINE | re.DOTALL)
    shown = {line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()}
    # test_pages.py runs the first two; the last has run with other parameters.
    elsewhere = {"./antiphon up", "./antiphon up --stop", GUIDE_RUN}
    commands = {line for line in shown if line.startswith(("./antiphon", ".venv/bin/prefect"))} - elsewhere
    assert commands == set(site.ran), "a guide shows a command that no test runs, or the other way round"
