"""A checkpoint is opened only when the learner signed the list of its files: pickles run what they hold."""

import json
import os
import pickle
import shutil
import stat
from pathlib import Path

import pytest

from antiphon.core.digests import digest_file
from antiphon.core.errors import ConfigError
from antiphon.net.security.keys import LEARNER_KEY, ensure_key, load_key, verifies, write_private
from antiphon.services.learner.checkpoints import CheckpointStore


class Trap:
    """Executed by the one that unpickles it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return (os.mkdir, (str(self.mark),))


def save(folder: Path) -> None:
    (folder / "state").mkdir()
    (folder / "state" / "model.pt").write_bytes(pickle.dumps({"weights": [1, 2, 3]}))


def plant(checkpoints: Path, version: int, mark: Path) -> None:
    """Put a trap where a checkpoint was, with a list that fits it."""
    folder = checkpoints / f"v{version:08d}"
    (folder / "state" / "model.pt").write_bytes(pickle.dumps(Trap(mark)))
    listed = {"state/model.pt": digest_file(folder / "state" / "model.pt")}
    (folder / "contents.json").write_text(json.dumps(listed))


def test_a_planted_pickle_is_refused_unexecuted(tmp_path: Path) -> None:
    key = ensure_key(tmp_path / "keys", LEARNER_KEY)
    checkpoints = CheckpointStore(tmp_path / "checkpoints", 2, key)
    for version in (1, 2):
        checkpoints.write(version, save)
    assert checkpoints.newest_sound(9) == 2
    plant(tmp_path / "checkpoints", 2, tmp_path / "sprung")
    assert checkpoints.newest_sound(9) == 1  # the one before is used instead
    assert checkpoints.problem(2) == "was not signed by this run's learner"
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("how", ["moved", "unsigned", "another key"])
def test_a_signature_holds_for_one_list_and_one_version(tmp_path: Path, how: str) -> None:
    key = ensure_key(tmp_path / "keys", LEARNER_KEY)
    checkpoints = CheckpointStore(tmp_path / "checkpoints", 2, key)
    checkpoints.write(3, save)
    signature = tmp_path / "checkpoints" / "v00000003.sig"
    match how:
        case "moved":
            (tmp_path / "checkpoints" / "v00000003").rename(tmp_path / "checkpoints" / "v00000004")
            signature.rename(tmp_path / "checkpoints" / "v00000004.sig")
        case "unsigned":
            signature.unlink()
        case _:
            other = ensure_key(tmp_path / "other", LEARNER_KEY)
            checkpoints = CheckpointStore(tmp_path / "checkpoints", 2, other)
    assert checkpoints.newest_sound(9) is None


def test_checkpoints_and_keys_are_private(tmp_path: Path) -> None:
    key = ensure_key(tmp_path / "keys", LEARNER_KEY)
    assert ensure_key(tmp_path / "keys", LEARNER_KEY).public == key.public
    CheckpointStore(tmp_path / "checkpoints", 2, key).write(1, save)
    for path in [tmp_path / "checkpoints", *(tmp_path / "checkpoints").rglob("*")]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    (tmp_path / "keys" / "learner.key").chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others"):
        load_key(tmp_path / "keys", LEARNER_KEY)


def test_signatures_bind_key_and_message(tmp_path: Path) -> None:
    key, other = ensure_key(tmp_path / "a", "x"), ensure_key(tmp_path / "b", "x")
    signature = key.sign(b"words")
    assert verifies(key.public, b"words", signature)
    assert not verifies(key.public, b"other words", signature)
    assert not verifies(other.public, b"words", signature)
    assert not verifies(key.public, b"words", signature[:-1]) and not verifies(b"short", b"words", signature)
    write_private(tmp_path / "a" / "x.key", b"no key")
    with pytest.raises(ConfigError, match="is no private key"):
        load_key(tmp_path / "a", "x")


def test_a_checkpoint_is_on_the_disk_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power may be lost at any moment: the name appears after the bytes, and nothing goes before that."""
    key = ensure_key(tmp_path / "keys", LEARNER_KEY)
    root = tmp_path / "checkpoints"
    checkpoints = CheckpointStore(root, 1, key)
    checkpoints.write(1, save)
    happened: list[tuple[str, str]] = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def noted_fsync(descriptor: int) -> None:
        happened.append(("flush", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def noted_rename(source: Path, target: Path) -> None:
        happened.append(("rename", str(target)))
        rename(source, target)

    def noted_rmtree(folder: Path, **options: bool) -> None:
        if folder.is_dir():
            happened.append(("remove", str(folder)))
        rmtree(folder, **options)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    monkeypatch.setattr(shutil, "rmtree", noted_rmtree)
    checkpoints.write(2, save)
    named, removed = (
        happened.index(("rename", str(root / "v00000002"))),
        happened.index(("remove", str(root / "v00000001"))),
    )
    incoming = root / ".incoming-2"
    for path in (incoming, incoming / "state", incoming / "state" / "model.pt"):
        assert happened.index(("flush", str(path))) < named, path
    assert ("flush", str(root)) in happened[named:removed]
    assert checkpoints.newest_sound(9) == 2


def test_what_a_killed_learner_left_is_removed(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, 2)
    (tmp_path / ".incoming-7").mkdir()
    (tmp_path / ".incoming-7" / "half").write_bytes(b"0" * 99)
    checkpoints.write(1, save)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000001"]
