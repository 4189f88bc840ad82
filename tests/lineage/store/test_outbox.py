"""The outbox: what a store acknowledged is in the remote store or listed, whatever happens between."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cli.app import execute
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import AntiphonError, ConfigError, IntegrityError, UnavailableError
from antiphon.lineage.store import uploader as uploader_module
from antiphon.lineage.store.artifact_store import ArtifactStore, waiting_objects
from antiphon.lineage.store.remote_place import RemotePlace, RemoteStore
from antiphon.lineage.store.uploader import Uploader

LIMIT_S = 60.0


@pytest.fixture
def share(tmp_path: Path) -> Path:
    folder = tmp_path / "share"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader_module, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(uploader_module, "LONGEST_PAUSE_S", 0.01)


def open_at(root: Path, share: Path) -> ArtifactStore:
    return ArtifactStore(root / "store", RemoteStore(str(share)))


def upload(store: ArtifactStore) -> Uploader:
    uploader = Uploader(store)
    assert uploader.flush(LIMIT_S), uploader.report()
    uploader.close(LIMIT_S)
    return uploader


def names(share: Path) -> list[str]:
    return sorted(path.name for path in (share / "objects").rglob("*") if path.is_file())


def fill(store: ArtifactStore, count: int) -> list[str]:
    return sorted(store.put(b"object %d" % number) for number in range(count))


def test_what_was_put_is_sent_once(tmp_path: Path, share: Path) -> None:
    store = open_at(tmp_path, share)
    digests = fill(store, 130)
    assert waiting_objects(store.root) == set(digests)
    report = upload(store).report()
    assert names(share) == digests
    assert (report.uploaded, report.known, report.pending) == (130, 0, 0)
    fill(store, 130)
    again = upload(store).report()
    assert (again.uploaded, again.known, again.pending) == (0, 130, 0)
    assert names(share) == digests


def test_what_was_not_sent_is_known_to_the_next_process(tmp_path: Path, share: Path) -> None:
    digests = fill(open_at(tmp_path, share), 5)
    upload(open_at(tmp_path, share))
    assert names(share) == digests


def test_a_store_without_a_remote_has_no_outbox(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    store.put(b"payload")
    assert not (tmp_path / "outbox").exists()
    with pytest.raises(ConfigError, match=r"record\.artifact_url"):
        Uploader(store)


class Moody(RemoteStore):
    """A folder that fails as often as it is told to, and watches how many are inside."""

    def __init__(self, url: str, failures: int, error: type[AntiphonError] = UnavailableError) -> None:
        super().__init__(url)
        self.failures, self.error = failures, error
        self.inside = self.most = 0
        self._gate = threading.Lock()
        self.failed = threading.Event()

    def send(self, digest: str, path: Path) -> bool:
        with self._gate:
            self.inside += 1
            self.most = max(self.most, self.inside)
            fails, self.failures = self.failures > 0, self.failures - 1
        try:
            if fails:
                self.failed.set()
                raise self.error("record.artifact_url is away; wait")
            return super().send(digest, path)
        finally:
            with self._gate:
                self.inside -= 1


@pytest.mark.parametrize("error", [UnavailableError, ConfigError])
def test_an_outage_delays_and_loses_nothing(tmp_path: Path, share: Path, error: type[AntiphonError]) -> None:
    remote = Moody(str(share), failures=10**9, error=error)
    store = ArtifactStore(tmp_path / "store", remote)
    before = fill(store, 3)
    uploader = Uploader(store)
    assert remote.failed.wait(LIMIT_S)
    during = store.put(b"while it is away")
    assert not uploader.flush(0.0)
    assert uploader.report().pending == 4
    remote.failures = 0
    assert uploader.flush(LIMIT_S)
    report = uploader.close(LIMIT_S)
    assert names(share) == sorted([*before, during])
    assert report.retries >= 1
    assert report.uploaded == 4
    assert "away" in report.reason


def test_only_a_few_travel_at_a_time(tmp_path: Path, share: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader_module, "CONCURRENCY", 3)
    remote = Moody(str(share), failures=0)
    store = ArtifactStore(tmp_path / "store", remote)
    fill(store, 100)
    uploader = Uploader(store)
    assert uploader.flush(LIMIT_S)
    uploader.close(LIMIT_S)
    assert 1 <= remote.most <= 3
    assert store.outbox is not None
    fill(store, 100)
    assert len(store.outbox.pending(7)) == 7


def test_two_uploaders_share_the_work_and_double_nothing(tmp_path: Path, share: Path) -> None:
    digests = fill(open_at(tmp_path, share), 100)
    uploaders = [Uploader(open_at(tmp_path, share)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda u: u.flush(LIMIT_S), uploaders))
        reports = list(pool.map(lambda u: u.close(LIMIT_S), uploaders))
    assert sum(report.uploaded for report in reports) == 100
    assert names(share) == digests


def test_an_altered_object_is_put_aside_and_named(tmp_path: Path, share: Path) -> None:
    store = open_at(tmp_path, share)
    bad, good = store.put(b"to be altered"), store.put(b"sound")
    store.path(bad).chmod(0o644)
    store.path(bad).write_bytes(b"altered")
    report = upload(store).report()
    assert names(share) == [good]
    assert report.refused == 1
    assert bad in report.reason
    assert waiting_objects(store.root) == {bad}, "it must not be forgotten"
    assert store.put(b"to be altered") == bad, "made again from its source"
    upload(store)
    assert names(share) == sorted([bad, good])
    assert waiting_objects(store.root) == set()


def test_a_mark_whose_writer_died_goes(tmp_path: Path, share: Path) -> None:
    store = open_at(tmp_path, share)
    assert store.outbox is not None
    store.outbox.add(digest_bytes(b"never written"))
    upload(store)
    assert waiting_objects(store.root) == set()
    assert names(share) == []


def test_missing_objects_are_read_from_the_remote_store(tmp_path: Path, share: Path) -> None:
    here = open_at(tmp_path / "here", share)
    digest = here.put(b"made here")
    upload(here)
    there = open_at(tmp_path / "there", share)
    assert not there.has(digest)
    assert there.get(digest) == b"made here"
    assert there.has(digest)
    assert list(there.path(digest).parent.iterdir()) == [there.path(digest)]
    with pytest.raises(UnavailableError, match=f"in .*store or in {share}"):
        there.get(digest_bytes(b"nowhere"))


def test_an_altered_copy_in_the_remote_store_is_found_when_read(tmp_path: Path, share: Path) -> None:
    here = open_at(tmp_path / "here", share)
    digest = here.put(b"made here")
    upload(here)
    (share / "objects" / digest[:2] / digest).write_bytes(b"mAde here")
    there = open_at(tmp_path / "there", share)
    with pytest.raises(IntegrityError, match=digest):
        there.get(digest)
    assert not there.has(digest)
    assert [path for path in (there.root / "objects").rglob("*") if path.is_file()] == []


def test_a_share_that_is_not_mounted_is_never_made(tmp_path: Path) -> None:
    away = tmp_path / "away"
    store = open_at(tmp_path, away)
    digest = store.put(b"payload")
    with pytest.raises(ConfigError, match=r"record\.artifact_url=.*away is no folder"):
        RemoteStore(str(away)).check()
    uploader = Uploader(store)
    assert not uploader.flush(0.0)
    assert not away.exists()
    away.mkdir()
    assert uploader.flush(LIMIT_S)
    uploader.close(LIMIT_S)
    assert names(away) == [digest]


def test_a_full_share_is_one_sentence(tmp_path: Path, share: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_at(tmp_path, share)
    digest = store.put(b"payload")

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UnavailableError, match=r"no space is left in record\.artifact_url=.*free some"):
        RemoteStore(str(share)).send(digest, store.path(digest))


def test_a_wrong_clock_is_named() -> None:
    place = RemotePlace("s3://bucket/prefix", None, "record.artifact_url", "record.artifact_endpoint")
    with pytest.raises(ConfigError, match="this machine's clock"), place._explained():
        raise ClientError({"Error": {"Code": "RequestTimeTooSkewed", "Message": ""}}, "PutObject")


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from(["put", "die", "send", "lose"]), st.integers(0, 5)), max_size=20))
def test_acknowledged_is_there_or_listed(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[str, int]]
) -> None:
    root = tmp_path_factory.mktemp("story")
    share = root / "share"
    share.mkdir()
    acknowledged: set[str] = set()
    for act, number in story:
        store, payload = open_at(root, share), b"object %d" % number  # every act is a new process
        digest = digest_bytes(payload)
        assert store.outbox is not None and store.remote is not None
        if act == "put":
            acknowledged.add(store.put(payload))
        elif act == "die":  # between the mark and the object's name
            store.outbox.add(digest)
        elif act == "send":
            for name in store.outbox.pending(1):
                if store.has(name):
                    store.remote.send(name, store.path(name))
                store.outbox.remove(name)
        elif store.outbox.pending(1) and store.has(name := store.outbox.pending(1)[0]):
            store.remote.send(name, store.path(name))  # sent, and dead before it was struck off
        assert acknowledged <= set(names(share)) | waiting_objects(store.root)
    if acknowledged:
        upload(open_at(root, share))
    assert acknowledged <= set(names(share))


def test_push_sends_what_a_run_left(
    tmp_path: Path, share: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    assert execute(["keep", "--remote"]) == 0
    assert "nothing waits" in capsys.readouterr().out
    digests = fill(open_at(tmp_path, share), 3)
    share.rmdir()
    assert execute(["keep", "--remote"]) == 2
    assert f"record.artifact_url={share} is no folder" in capsys.readouterr().err
    share.mkdir()
    assert execute(["keep", "--remote"]) == 0
    assert f"{share}: 3 sent, 0 were there, 0 left" in capsys.readouterr().out
    assert names(share) == digests
    assert execute(["keep", "--remote"]) == 0
    assert "nothing waits" in capsys.readouterr().out
