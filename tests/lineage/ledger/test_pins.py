"""The ledger: appended in process, and the real dvc commands agree with it."""

import gc
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.lineage.layout import GITIGNORE
from antiphon.lineage.ledger.pins import Ledger
from antiphon.lineage.store.artifact_store import ArtifactStore
from tests.support.dvc import dvc

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A git repository with the DVC settings that this project ships."""
    folder = tmp_path / "project"
    (folder / ".dvc").mkdir(parents=True)
    for name in (".dvc/config", ".dvc/.gitignore", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q", str(folder)], check=True, timeout=60)
    return folder


def fill(ledger: Ledger, store: ArtifactStore, steps: int) -> dict[str, bytes]:
    content = {}
    for step in range(steps):
        batch = f"batch {step}".encode() * 100
        pointer = json.dumps({"version": step + 1}).encode()
        ledger.append(f"batches/t{step:06d}.parquet", store.path(store.put(batch)))
        ledger.append(f"versions/v{step + 1:06d}.json", pointer)
        content[f"batches/t{step:06d}.parquet"] = batch
        content[f"versions/v{step + 1:06d}.json"] = pointer
    return content


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_real_commands_agree(project: Path, tmp_path: Path) -> None:
    """Status is clean; after push, loss of everything and pull, all files are back."""
    ledger = Ledger(project, "ledger", "demo-1")
    content = fill(ledger, ArtifactStore(project / ".antiphon/store"), 5)
    ledger.publish()
    ledger.close()
    assert files(project / "ledger/demo-1") == content
    assert "up to date" in dvc(project, "status")
    (project / ".dvc/config.local").write_text(
        f"[core]\n    remote = disk\n['remote \"disk\"']\n    url = {tmp_path}/remote\n"
    )
    dvc(project, "push", "ledger/demo-1.dvc")
    shutil.rmtree(project / ".dvc/cache")
    shutil.rmtree(project / "ledger/demo-1")
    dvc(project, "pull", "ledger/demo-1.dvc")
    assert files(project / "ledger/demo-1") == content
    shutil.rmtree(project / "ledger/demo-1/batches")
    dvc(project, "checkout", "ledger/demo-1.dvc")
    assert files(project / "ledger/demo-1") == content
    again = Ledger(project, "ledger", "demo-1")
    assert len(again) == len(content) and again.unpublished == 0
    pointer = yaml.safe_load((project / "ledger/demo-1.dvc").read_text())["outs"][0]
    assert pointer.pop("md5").endswith(".dir")
    assert pointer == {
        "size": sum(map(len, content.values())),
        "nfiles": len(content),
        "hash": "md5",
        "path": "demo-1",
    }
    again.close()


def test_git_sees_the_pointer_and_nothing_else(project: Path) -> None:
    ledger = Ledger(project, "ledger", "demo-1")
    fill(ledger, ArtifactStore(project / ".antiphon/store"), 1)
    ledger.close()
    command = ["git", "-C", str(project), "status", "--porcelain", "--untracked-files=all", "ledger"]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert seen.stdout.split() == ["??", "ledger/.gitignore", "??", "ledger/demo-1.dvc"]
    assert (ROOT / "ledger/.gitignore").read_text() == GITIGNORE


def test_a_crash_before_publishing_loses_nothing(project: Path) -> None:
    store = ArtifactStore(project / ".antiphon/store")
    first = Ledger(project, "ledger", "demo-1")
    fill(first, store, 2)
    first.publish()
    fill(first, store, 4)
    del first
    gc.collect()  # its lock goes with it
    # The process died here, within a write and without publishing.
    (project / "ledger/demo-1/batches/.incoming-7").write_bytes(b"batc")
    second = Ledger(project, "ledger", "demo-1")
    assert len(second) == 8 and second.unpublished == 4
    content = fill(second, store, 5)
    assert second.unpublished == 6
    second.close()
    assert files(project / "ledger/demo-1") == content
    third = Ledger(project, "ledger", "demo-1")
    assert len(third) == 10 and third.unpublished == 0
    third.close()


def test_what_the_cache_has_not_got_yet_is_entered_again(project: Path) -> None:
    first = Ledger(project, "ledger", "demo-1")
    md5 = first.append("a.json", b"{}")
    first.release()  # as a process that ends lets go of it
    cached = project / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    cached.unlink()
    second = Ledger(project, "ledger", "demo-1")
    assert second.md5("a.json") == md5 and second.unpublished == 1 and cached.is_file()
    assert second.append("a.json", b"{}") == md5 and len(second) == 1
    second.close()


def test_entries_never_change(project: Path, tmp_path: Path) -> None:
    ledger = Ledger(project, "ledger", "demo-1")
    md5 = ledger.append("versions/v000001.json", b"{}")
    assert ledger.append("versions/v000001.json", b"{}") == md5 and ledger.unpublished == 1
    with pytest.raises(IntegrityError, match="never change"):
        ledger.append("versions/v000001.json", b"[]")
    other = tmp_path / "other"
    other.write_bytes(b"other")
    with pytest.raises(IntegrityError, match="never change"):
        ledger.append("versions/v000001.json", other)
    ledger.close()


def test_pinning_an_object_of_the_store_takes_no_space(project: Path) -> None:
    store = ArtifactStore(project / ".antiphon/store")
    digest = store.put(b"weights" * 1000)
    ledger = Ledger(project, "ledger", "demo-1")
    ledger.append("versions/v000001.safetensors", store.path(digest))
    ledger.close()
    linked = os.stat(project / "ledger/demo-1/versions/v000001.safetensors")
    assert linked.st_ino == os.stat(store.path(digest)).st_ino
    assert linked.st_mode & 0o222 == 0


@pytest.mark.parametrize("rel", ["../x", "/x", "", "a/../../x"])
def test_no_entry_leaves_the_ledger(project: Path, rel: str) -> None:
    ledger = Ledger(project, "ledger", "demo-1")
    with pytest.raises(IntegrityError, match="no path inside a ledger"):
        ledger.append(rel, b"x")
    ledger.close()


def test_outside_a_dvc_project_the_mend_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dvc init.*record\.dvc=false"):
        Ledger(tmp_path, "ledger", "demo-1")


def test_a_missing_file_is_unavailable(project: Path) -> None:
    ledger = Ledger(project, "ledger", "demo-1")
    with pytest.raises(UnavailableError, match="cannot write the ledger"):
        ledger.append("a", project / "nowhere")
    ledger.close()


def test_a_source_tree_without_git_can_pin_too(project: Path) -> None:
    shutil.rmtree(project / ".git")
    ledger = Ledger(project, "ledger", "demo-1")
    ledger.append("a.json", b"{}")
    ledger.close()
    assert (project / "ledger/demo-1.dvc").is_file()
