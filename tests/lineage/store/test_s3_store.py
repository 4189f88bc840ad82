"""The real S3 server: objects arrive whatever goes away in between, and DVC's own commands agree."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from antiphon.core.config import load_config
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.core.records import BatchRef
from antiphon.lineage.ledger.pins import Ledger
from antiphon.lineage.store import uploader as uploader_module
from antiphon.lineage.store.artifact_store import ArtifactStore, open_store, waiting_objects
from antiphon.lineage.store.remote_place import RemoteStore
from antiphon.lineage.store.uploader import Uploader
from antiphon.runs.preflight import preflight
from antiphon.runs.servers.s3_server import S3Server, begin_s3, remove_sockets
from tests.support.dvc import dvc
from tests.support.light_parties import run_parties, served
from tests.support.loop_model import make_config
from tests.support.s3 import remote_objects, s3_server

ROOT = Path(__file__).parents[3]
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as started:
        yield started


def place(server: S3Server, prefix: str) -> RemoteStore:
    return RemoteStore(f"s3://{server.bucket}/{prefix}", server.endpoint_url)


def names(server: S3Server, prefix: str) -> list[str]:
    return [key.rpartition("/")[2] for key in remote_objects(server, f"{prefix}/objects/")]


def test_objects_go_there_and_come_back(server: S3Server, tmp_path: Path) -> None:
    place(server, "round").check()
    here = ArtifactStore(tmp_path / "here", place(server, "round"))
    payloads = [b"", b"small", os.urandom(6 << 20)]
    digests = sorted(here.put(payload) for payload in payloads)
    uploader = Uploader(here)
    assert uploader.flush(LIMIT_S), uploader.report()
    assert uploader.close(LIMIT_S).uploaded == 3
    assert names(server, "round") == digests
    there = ArtifactStore(tmp_path / "there", place(server, "round"))
    assert [digest_bytes(there.get(digest)) for digest in digests] == digests
    with pytest.raises(UnavailableError, match="there is no object"):
        there.get(digest_bytes(b"never put"))


def test_an_object_that_was_altered_there_is_not_believed(server: S3Server, tmp_path: Path) -> None:
    remote = place(server, "altered")
    (tmp_path / "false").write_bytes(b"something else")
    digest = digest_bytes(b"payload")
    remote._filesystem().put_file(
        str(tmp_path / "false"), f"{server.bucket}/altered/objects/{digest[:2]}/{digest}"
    )
    with pytest.raises(IntegrityError, match=digest):
        ArtifactStore(tmp_path / "store", remote).get(digest)


@pytest.mark.parametrize(
    ("change", "bucket", "error", "said"),
    [
        ({}, "nowhere", ConfigError, r"record\.artifact_url=s3://nowhere/x: there is no bucket.*make it"),
        ({"AWS_SECRET_ACCESS_KEY": "hidden"}, "", ConfigError, "correct AWS_ACCESS_KEY_ID and AWS_SECRET"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "", ConfigError, "correct AWS_ACCESS_KEY_ID and AWS_SECRET"),
        ({"AWS_ACCESS_KEY_ID": None}, "", ConfigError, "needs keys, and the environment has none"),
    ],
)
def test_what_people_get_wrong_is_one_sentence(
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, str | None],
    bucket: str,
    error: type[Exception],
    said: str,
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(error, match=said) as caught:
        RemoteStore(f"s3://{bucket or server.bucket}/x", server.endpoint_url).check()
    text = str(caught.value)
    assert "hidden" not in text
    assert server.secret_key not in text
    assert "\n" not in text
    assert server.secret_key not in repr(server)


def test_a_run_is_refused_before_anything_starts(server: S3Server, tmp_path: Path) -> None:
    plain = load_config(ROOT / "examples/quickstart.yaml", ["record.dvc=false"])
    for store, endpoint, error, said in (
        ("s3://nowhere/x", server.endpoint_url, ConfigError, "there is no bucket"),
        (
            f"s3://{server.bucket}/x",
            "http://127.0.0.1:9",
            UnavailableError,
            "does not answer at record.artifact_endpoint",
        ),
    ):
        record = plain.record.model_copy(update={"artifact_url": store, "artifact_endpoint": endpoint})
        with pytest.raises(error, match=said):
            preflight(plain.model_copy(update={"record": record}), tmp_path)
    assert list(tmp_path.iterdir()) == []


UPLOADER = """
import sys
from pathlib import Path
from antiphon.lineage.store import uploader as module
from antiphon.lineage.store.remote_place import RemoteStore
from antiphon.lineage.store.artifact_store import ArtifactStore, open_store

module.CONCURRENCY = 1
store = ArtifactStore(Path(sys.argv[1]), RemoteStore(sys.argv[2], sys.argv[3]))
uploader = module.Uploader(store)
while not uploader.report().uploaded:
    uploader.flush(0.01)
print("begun", flush=True)
uploader.flush(100)
"""


def test_a_killed_uploader_loses_nothing(server: S3Server, tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store", place(server, "killed"))
    digests = sorted(store.put(b"object %d" % number) for number in range(100))
    url = f"s3://{server.bucket}/killed"
    command = [sys.executable, "-c", UPLOADER, str(store.root), url, server.endpoint_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        child.kill()
    left = waiting_objects(store.root)
    sent = names(server, "killed")
    assert sent, "it was killed too early for this test"
    assert left, "it was killed too late for this test"
    assert set(sent) | left == set(digests)
    uploader = Uploader(ArtifactStore(store.root, place(server, "killed")))
    assert uploader.flush(LIMIT_S)
    report = uploader.close(LIMIT_S)
    assert names(server, "killed") == digests
    assert report.uploaded == len(digests) - len(sent), "nothing is sent twice"


def test_dvc_pushes_the_ledger_and_pulls_it_elsewhere(server: S3Server, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / ".dvc").mkdir(parents=True)
    remote = f"['remote \"team\"']\n url = s3://{server.bucket}/dvc\n endpointurl = {server.endpoint_url}\n"
    core = "[core]\n no_scm = true\n analytics = false\n remote = team\n"
    (project / ".dvc/config").write_text(core + remote)  # the keys come from the environment
    ledger = Ledger(project, "ledger", "demo-1")
    for step in range(20):
        ledger.append(f"batches/t{step:06d}.parquet", b"batch %d" % step)
    ledger.close()

    dvc(project, "push")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(project, elsewhere, ignore=shutil.ignore_patterns("cache", "tmp", "demo-1", "*.journal"))
    dvc(elsewhere, "pull")
    for step in range(20):
        copies = list(elsewhere.rglob(f"t{step:06d}.parquet"))
        assert [copy.read_bytes() for copy in copies] == [b"batch %d" % step]


def test_a_run_goes_on_while_the_server_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops the server and starts it again on the same folder: the address and the objects stay."""
    with s3_server(tmp_path / "s3") as server:
        plain = make_config(steps=5, max_staleness=2)
        place_ = {"artifact_url": f"s3://{server.bucket}/outage", "artifact_endpoint": server.endpoint_url}
        config = plain.model_copy(update={"record": plain.record.model_copy(update=place_)})
        store = open_store(tmp_path / "store", config.record)
        before = store.put(b"before the outage")
        monkeypatch.setattr(uploader_module, "FIRST_PAUSE_S", 0.01)
        monkeypatch.setattr(uploader_module, "LONGEST_PAUSE_S", 0.1)
        uploader = Uploader(store)
        assert uploader.flush(LIMIT_S)
        server.stop()

        async def run() -> list[BatchRef]:
            async with served(config, tmp_path) as site:
                refs, _ = await run_parties(site.client(), config, seed=1, store=site.store)
                return refs

        batches = asyncio.run(run())
        assert len(batches) == config.run.steps, "training needs no server"
        deadline = time.perf_counter() + LIMIT_S
        while not (report := uploader.report()).retries:
            assert time.perf_counter() < deadline, report
            uploader.flush(0.1)
        # Batches that nothing was left of are one and the same object.
        files = [(batch.digest, batch.timings_digest, batch.samples_digest) for batch in batches]
        written = {digest for found in files for digest in found if digest}
        assert report.pending == len(written)
        assert report.retries >= 1
        assert "does not answer" in report.reason
        again = begin_s3(tmp_path / "s3")
        try:
            assert again.endpoint_url == server.endpoint_url
            again.wait_ready()
            assert uploader.flush(LIMIT_S), uploader.report()
            made = sorted(written)
            assert names(again, "outage") == sorted([before, *made])
            assert uploader.close(LIMIT_S).uploaded == 1 + len(made), "nothing is sent twice"
            elsewhere = open_store(tmp_path / "elsewhere", config.record)
            assert [digest_bytes(elsewhere.get(name)) for name in made] == made
        finally:
            again.stop()
    assert not psutil.pid_exists(again.process.pid)


STARTER = """
import sys
from pathlib import Path
from antiphon.runs.servers.s3_server import begin_s3

print(begin_s3(Path(sys.argv[1])).process.pid, flush=True)
sys.stdin.read()
"""


def test_the_server_dies_with_whoever_started_it(tmp_path: Path, server: S3Server) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "s3")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        served = psutil.Process(int(starter.stdout.readline()))
        os.kill(starter.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs([served], timeout=30)
    remove_sockets(tmp_path / "s3")  # nobody was left to do it
    assert not alive or alive[0].status() == psutil.STATUS_ZOMBIE


class SaysYes(BaseHTTPRequestHandler):
    """Answers 200 and a page to everything, as a login page or a proxy does."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.send_header("Content-Length", "13")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"<html></html>")

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Stay silent."""


def test_a_server_that_says_yes_to_everything_is_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    payload = tmp_path / "payload"
    payload.write_bytes(b"more bytes than the page has")
    with ThreadingHTTPServer(("127.0.0.1", 0), SaysYes) as answering:
        threading.Thread(target=answering.serve_forever, daemon=True).start()
        store = RemoteStore("s3://team/x", f"http://127.0.0.1:{answering.server_address[1]}")
        with pytest.raises(
            ConfigError, match=r"record\.artifact_url=s3://team/x took an object and gives back"
        ):
            store.check()
        with pytest.raises(UnavailableError, match="of 28 bytes and has 13; what answers there is no store"):
            store.send(digest_bytes(payload.read_bytes()), payload)
        answering.shutdown()
