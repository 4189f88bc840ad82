"""The store keeps bytes under their digest and says so in words when it cannot."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ContractError, IntegrityError, UnavailableError
from antiphon.lineage.store.artifact_store import ArtifactStore


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.binary(max_size=4096))
def test_what_is_read_is_what_was_written(tmp_path: Path, payload: bytes) -> None:
    store = ArtifactStore(tmp_path / "store")
    digest = store.put(payload)
    assert digest == digest_bytes(payload)
    assert store.put(payload) == digest
    assert store.has(digest) and store.get(digest) == payload
    assert store.path(digest) == tmp_path / "store" / "objects" / digest[:2] / digest


def test_a_missing_object_is_unavailable(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    assert not store.has("0" * 64)
    with pytest.raises(UnavailableError, match="no object 0000"):
        store.get("0" * 64)


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "A" * 64, "0" * 63])
def test_a_name_that_is_no_digest_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ContractError, match="not a digest"):
        ArtifactStore(tmp_path).path(name)


def test_altered_bytes_are_noticed_and_healed_by_the_next_put(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    digest = store.put(b"weights")
    place = store.path(digest)
    place.unlink()
    place.write_bytes(b"weighty")
    with pytest.raises(IntegrityError, match="does not match its digest"):
        store.get(digest)
    assert store.put(b"weights") == digest
    assert store.get(digest) == b"weights"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_no_space_left_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = ArtifactStore(tmp_path / "store")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(UnavailableError, match=r"no space is left in .*store"):
        store.put(b"payload")
    monkeypatch.undo()
    assert [path for path in (tmp_path / "store" / "objects").rglob("*") if path.is_file()] == []


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("in the way")
    with pytest.raises(UnavailableError, match=r"cannot use .*store: .*check that it exists"):
        ArtifactStore(tmp_path / "store").put(b"payload")


def test_writers_of_the_same_object_do_not_disturb_each_other(tmp_path: Path) -> None:
    payload = bytes(range(256)) * 64
    with ThreadPoolExecutor(8) as pool:
        digests = set(pool.map(lambda _: ArtifactStore(tmp_path).put(payload), range(32)))
    (digest,) = digests
    assert ArtifactStore(tmp_path).get(digest) == payload
    assert len([path for path in (tmp_path / "objects").rglob("*") if path.is_file()]) == 1
