"""The page of rollouts answers its owner's browser alone, in JSON, and says what the report says."""

import asyncio
import html
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest
from structlog.testing import capture_logs

from antiphon.cli.app import execute
from antiphon.lineage.rollout_index import RolloutIndex
from antiphon.lineage.run_overview import read_figures
from antiphon.report import browse
from antiphon.report.browse import RolloutPages, serve
from antiphon.report.page import samples_section
from antiphon.runs.samples import files_of
from tests.support.browsed_run import GROUP, MARKUP, BrowsedRun

STEPS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> BrowsedRun:
    made = BrowsedRun(tmp_path_factory.mktemp("home"), record={"mlflow": False, "samples": 2})
    made.complete(STEPS)
    return made


@pytest.fixture(scope="module")
def pages(run: BrowsedRun) -> RolloutPages:
    index = RolloutIndex(files_of(run.run_dir, run.home))
    index.read_texts()
    return RolloutPages(index, read_figures(run.run_dir), lambda key, answer, reward: f"because {MARKUP}")


@contextmanager
def served(pages: RolloutPages) -> Iterator[int]:
    """Serve on a free port, which is given, from a thread."""
    loop, address = asyncio.new_event_loop(), Future[str]()
    serving = loop.create_task(serve(pages, 0, address.set_result))
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([serving])))
    thread.start()
    try:
        yield int(address.result(30.0).rstrip("/").rpartition(":")[2])
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(30.0)
        loop.close()


@pytest.fixture(scope="module")
def port(pages: RolloutPages) -> Iterator[int]:
    with served(pages) as found:
        yield found


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30.0)
    connection.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


def told(port: int, path: str) -> Any:
    status, headers, body = ask(port, path)
    assert status == 200 and headers["content-type"].startswith("application/json"), body
    return json.loads(body)


def test_the_figures_are_the_reports(port: int, run: BrowsedRun) -> None:
    said = told(port, "/api/run")
    assert said["run"] == run.run_id
    assert [tuple(row) for row in said["figures"]] == read_figures(run.run_dir).rows()
    assert said["lacks"] == ["which tokens were drafted: drafts are counted by group"]


def test_rewards_and_reasons_are_those_of_the_reports_samples(pages: RolloutPages, run: BrowsedRun) -> None:
    section = html.unescape(str(samples_section(run.run_dir, run.store, lambda *_: f"because {MARKUP}")))
    (best,) = pages.rows({"part": "held-out", "version": "0", "sort": "-reward"})["rows"][:1]
    (whole,) = pages.trajectories(best["name"])["shown"]
    finish, _, reason = whole["reason"].partition("; ")
    assert finish == "length" and f"best, reward {best['reward']}</b> {reason}" in section


def test_the_samples_of_the_report_link_to_their_trajectories(pages: RolloutPages, run: BrowsedRun) -> None:
    section = html.unescape(str(samples_section(run.run_dir, run.store)))
    links = re.findall(
        r'<small>([^<,\s]+).*?href="http://127\.0\.0\.1:7780/\?run=demo-1#([^"]*)"', section, re.S
    )
    assert {name[0] for _, name in links} == {"t", "f", "v"}
    for prompt, name in links:
        assert pages.trajectories(name)["shown"][0]["prompt"] == prompt


def test_a_list_is_cut_at_its_offset(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browse, "ROWS", 2)
    first, rest = (told(port, f"/api/rows?step=1..2&part=trained&offset={offset}") for offset in (0, 7))
    assert first["found"] == rest["found"] == 2 * GROUP
    assert [row["name"] for row in first["rows"]] == ["t1.0", "t1.1"]
    assert [row["name"] for row in rest["rows"]] == ["t2.3"]


def test_a_trajectory_has_every_token_with_what_is_known_of_it(port: int) -> None:
    ((one),) = told(port, "/api/one/t1.1")["shown"]
    assert [len(one[name]) for name in ("pieces", "ids", "logprobs")] == [one["tokens"]] * 3
    assert one["observed"] == [[2, 5], [6, 7]] and one["breaks"] == [6] and len(one["context"]) == 2
    assert one["drafts"] == [34, 30, 9] and {version for version, _, _ in one["spans"]} == {1}


def test_groups_stand_side_by_side_and_versions_are_compared(port: int) -> None:
    group = told(port, "/api/group/t2.1")["shown"]
    assert [one["name"] for one in group] == [f"t2.{i}" for i in range(GROUP)]
    assert not any(one["marked"] for one in group)
    versions = told(port, "/api/versions/t2.3")["shown"]
    assert [(one["name"], one["version"]) for one in versions] == [("t0.3", 0), ("t2.3", 1), ("t2.1", 2)]
    assert [one["marked"] for one in versions[:2]] == [[], [[7, 9]]], "the last two tokens are new in step 2"


def test_of_many_the_nearest_are_shown(pages: RolloutPages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browse, "BESIDE", 2)
    found = pages.trajectories("t2.3", "group")
    assert [one["name"] for one in found["shown"]] == ["t2.2", "t2.3"] and found["of"] == GROUP


def test_what_others_wrote_is_never_markup(port: int) -> None:
    status, headers, body = ask(port, "/api/one/t1.2")
    assert status == 200 and headers["x-content-type-options"] == "nosniff"
    assert MARKUP in json.loads(body)["shown"][0]["reason"]
    for path in ("/", "/browse.js", "/browse.css", "/api/run", "/nowhere", "/api/one/t9.9"):
        policy = ask(port, path)[1]["content-security-policy"]
        assert (
            policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            and "unsafe" not in policy
        )
    page, script = ask(port, "/")[2], ask(port, "/browse.js")[2]
    assert not re.search(r"<script[^>]*>[^<]|<style|\son\w+=|\sstyle=", page)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/api/one/t9.0", 400, "run demo-1 has no trajectory 't9.0'"),
        ("/api/rows?step=x", 400, "step='x' means nothing here"),
        ("/api/rows?stp=1", 400, "there are run, part, step"),
        ("/api/rows?run=other", 400, "this is run demo-1; start `antiphon browse other`"),
        ("/api/one/t1.0?run=other", 400, "this is run demo-1; start `antiphon browse other`"),
        ("/api/one/../../etc/passwd", 404, "Not Found"),
        ("/style.css", 404, "Not Found"),
        ("/%2e%2e/page.py", 404, "Not Found"),
    ],
)
def test_what_means_nothing_is_a_sentence(port: int, path: str, status: int, words: str) -> None:
    found, _, body = ask(port, path)
    assert found == status and words in json.loads(body)["error"]


def test_a_fault_is_a_sentence_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RolloutPages, "_whole", lambda self, place: [][1])
    with capture_logs() as logs:
        status, _, body = ask(port, "/api/one/t1.1")
    assert status == 500 and "what failed stands where `antiphon browse` runs" in json.loads(body)["error"]
    (line,) = logs
    assert (line["event"], line["path"], line["exc_info"]) == ("rollouts.failed", "/api/one/t1.1", True)


def test_nothing_can_be_sent(port: int) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(port, "/api/rows", method)[0] == 405


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7780", "127.0.0.1.evil.example", "localhost@evil", ""]
)
def test_a_name_that_was_bound_to_this_machine_is_refused(port: int, host: str) -> None:
    for path in ("/", "/api/run"):
        status, _, body = ask(port, path, Host=host)
        assert status in (400, 403) and "demo-1" not in body


def test_the_machines_own_names_are_answered_and_its_other_pages_read_nothing(port: int) -> None:
    for host in ("localhost", f"127.0.0.1:{port}", "[::1]:9000"):
        assert ask(port, "/api/run", Host=host)[0] == 200
    assert ask(port, "/", Sec_Fetch_Site="cross-site")[0] == 200, "a report links here"
    assert ask(port, "/api/run", Sec_Fetch_Site="cross-site")[0] == 403
    assert "access-control-allow-origin" not in ask(port, "/api/run", Origin="http://evil.example")[1]


def test_another_user_of_the_machine_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    monkeypatch.setattr(browse.os, "getuid", lambda: uid + 1)
    status, _, body = ask(port, "/api/run")
    assert status == 403 and "another user of this machine" in json.loads(body)["error"]


def test_without_a_log_and_a_tokenizer_the_rest_is_shown(run: BrowsedRun) -> None:
    index = RolloutIndex(files_of(run.run_dir, run.home))
    index.codec = None
    pages = RolloutPages(index, None)
    assert (
        pages.run()["figures"] == [] and "the run's log, so that there are no figures" in pages.run()["lacks"]
    )
    (one,) = pages.trajectories("t0.0")["shown"]
    assert one["pieces"] == [f"{i} " for i in one["ids"]] and one["reason"] == "stop"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["demo-9"], "there is no run demo-9"),
        (["."], "the artifacts of one run are not in"),
        ([".."], "the artifacts of one run are not in"),
        (["../../demo"], "the artifacts of one run are not in"),
        (["--port", "70000"], "--port 70000 is no port"),
        (["demo-1", "--port", "TAKEN"], "cannot be used (Address already in use); give --port another"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    run: BrowsedRun,
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(run.home))
    (run.home / "a" / "b").mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(run.home / "a" / "b")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert execute(["browse", *(word.replace("TAKEN", port) for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
