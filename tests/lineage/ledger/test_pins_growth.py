"""The ledger after kills and releases: trees as DVC writes them, nothing lost, nothing shared."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from dvc.repo import Repo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError, IntegrityError, UnavailableError
from antiphon.lineage.layout import pointer_of, shard_directories
from antiphon.lineage.ledger.pins import Ledger
from tests.support.dvc import dvc


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A DVC project without git."""
    folder = tmp_path / "project"
    (folder / ".dvc").mkdir(parents=True)
    (folder / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.sets(
        st.text("abz019.é-", min_size=1, max_size=6).filter(lambda s: not set(s) <= {"."}),
        min_size=1,
        max_size=6,
    )
)
def test_the_pointer_is_what_dvc_add_writes(project: Path, names: set[str]) -> None:
    """Whatever entries are called, `dvc add` of the same folder finds the same tree."""
    with TemporaryDirectory(dir=project) as folder:
        place = Path(folder).relative_to(project)
        ledger = Ledger(project, str(place), "demo-1")
        for number, name in enumerate(sorted(names)):
            ledger.append(f"d/{name}", str(number).encode())
        ledger.close()
        pointer = project / place / "demo-1.dvc"
        ours = pointer.read_bytes()
        with Repo(str(project)) as repo:
            repo.add(str(project / place / "demo-1"))
        assert pointer.read_bytes() == ours


def test_a_ledger_of_an_earlier_release_goes_on(project: Path, tmp_path: Path) -> None:
    """Its full directories stay, each with a .dvc file; the last one is written on, journals are not read."""
    for name, numbers in (("demo-1", range(4)), ("demo-1.s001", range(4, 6))):
        shard = Ledger(project, "ledger", name)
        for number in numbers:
            shard.append(f"versions/v{number:06d}.json", json.dumps(number).encode())
        shard.close()
        (project / f"ledger/{name}.journal").write_text('{"rel": "a", "md5": "0", "size": 1}\n')
    ledger = Ledger(project, "ledger", "demo-1")
    for number in range(6, 8):
        ledger.append(f"versions/v{number:06d}.json", json.dumps(number).encode())
    assert ledger.append("versions/v000001.json", b"1") == ledger.md5("versions/v000001.json")
    with pytest.raises(IntegrityError, match="never change"):
        ledger.append("versions/v000001.json", b"2")
    ledger.remove(["versions/v000002.json"])
    ledger.close()
    shards = shard_directories(project / "ledger", "demo-1")
    assert [shard.name for shard in shards] == ["demo-1", "demo-1.s001"]
    outs = [yaml.safe_load(pointer_of(shard).read_text())["outs"][0] for shard in shards]
    assert [out["nfiles"] for out in outs] == [3, 4]
    content = {shard.name: files(shard) for shard in shards}
    again = Ledger(project, "ledger", "demo-1")
    assert len(again) == 7 and again.unpublished == 0
    assert again.path("versions/v000007.json") == shards[1] / "versions/v000007.json"
    again.close()

    pointers = [str(pointer_of(shard).relative_to(project)) for shard in shards]
    assert "up to date" in dvc(project, "status")
    (project / ".dvc/config.local").write_text(
        f"[core]\n    remote = disk\n['remote \"disk\"']\n    url = {tmp_path}/remote\n"
    )
    dvc(project, "push", *pointers)
    dvc(project, "gc", "--workspace", "--force")
    assert "up to date" in dvc(project, "status")
    shutil.rmtree(project / ".dvc/cache")
    for shard in shards:
        shutil.rmtree(shard)
    dvc(project, "pull", *pointers)
    assert {shard.name: files(shard) for shard in shards} == content


def test_two_runs_of_one_name_never_share_a_ledger(project: Path) -> None:
    first = Ledger(project, "ledger", "demo-1")
    first.append("a.json", b"{}")
    with pytest.raises(ConfigError, match=r"two runs of one name.*run\.name"):
        Ledger(project, "ledger", "demo-1")
    first.close()
    second = Ledger(project, "ledger", "demo-1")
    with pytest.raises(IntegrityError, match="never change"):
        second.append("a.json", b"[]")
    assert (second.directory / "a.json").read_bytes() == b"{}"
    second.close()


def test_a_lost_tree_comes_back_from_the_files(project: Path) -> None:
    ledger = Ledger(project, "ledger", "demo-1")
    for number in range(3):
        ledger.append(f"e{number}", str(number).encode())
    ledger.close()
    pointer = project / "ledger/demo-1.dvc"
    tree = yaml.safe_load(pointer.read_text())["outs"][0]["md5"]
    place, before = project / ".dvc/cache/files/md5" / tree[:2] / tree[2:], pointer.read_bytes()
    place.unlink()
    again = Ledger(project, "ledger", "demo-1")
    assert len(again) == again.unpublished == 3
    again.close()
    assert pointer.read_bytes() == before and place.is_file()
    place.unlink()
    (project / "ledger/demo-1/e1").unlink()
    with pytest.raises(UnavailableError, match="dvc pull"):
        Ledger(project, "ledger", "demo-1")


def test_a_pointer_that_was_altered_is_named_with_its_mend(project: Path) -> None:
    ledger = Ledger(project, "ledger", "demo-1")
    ledger.append("a.json", b"{}")
    ledger.close()
    place = project / "ledger/demo-1.dvc"
    place.write_bytes(place.read_bytes().replace(b"md5", b"mD5"))
    with pytest.raises(IntegrityError, match=r"demo-1\.dvc: .*git has the file"):
        Ledger(project, "ledger", "demo-1")


KILLED = """
import os, sys
from pathlib import Path

from antiphon.lineage.ledger.pins import Ledger
from antiphon.lineage.ledger.verify import RunCheck
from antiphon.lineage.store.artifact_store import ArtifactStore

WATCHED = {"open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.chmod", "os.truncate"}


def work(project):
    # Names that lead to the same bytes, files and bytes, several publications.
    store = ArtifactStore(project / "store")
    ledger = Ledger(project, "ledger", "demo-1")
    for step in range(2):
        ledger.append(f"batches/t{step:06d}.parquet", store.path(store.put(b"batch %d" % step)))
        ledger.append(f"versions/v{step:06d}.json", b"{}")
        ledger.publish()
    ledger.close()


def killed_after(project, calls):
    left = [calls]

    def watch(event, arguments):
        if event in WATCHED and str(project) in str(arguments[:2]) and "/.dvc/tmp" not in str(arguments[0]):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)

    sys.addaudithook(watch)
    work(project)
    os._exit(0)


def check(project):
    cache = project / ".dvc/cache/files/md5"
    check = RunCheck(project / "runs/demo-1", project / "store")
    return check.check(project / "ledger", lambda md5: cache / md5[:2] / md5[2:]).findings


def main(root):
    calls = 0
    while True:
        project = root / f"p{calls}"
        (project / ".dvc").mkdir(parents=True)
        (project / ".dvc" / "config").write_text("[core]\\n    no_scm = true\\n    analytics = false\\n")
        child = os.fork()
        if child == 0:
            killed_after(project, calls)
        _, status = os.waitpid(child, 0)
        assert not check(project), (project.name, check(project))
        work(project)  # the next process tells the same again
        assert not check(project), (project.name, check(project))
        if os.waitstatus_to_exitcode(status) == 0:
            return
        assert os.waitstatus_to_exitcode(status) == 9, status
        calls += int(sys.argv[2])


main(Path(sys.argv[1]))
"""


def test_a_kill_at_any_point_loses_nothing(tmp_path: Path) -> None:
    """Killed before its n-th call of the system, for every few n: it verifies, and the next one goes on."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    root = tmp_path / "projects"
    command = [sys.executable, str(script), str(root), "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = sorted(root.iterdir(), key=lambda path: int(path.name[1:]))
    assert len(seen) > 8
    whole = files(seen[-1] / "ledger")
    assert {p for p in whole if p.endswith(".dvc")} == {"demo-1.dvc"}
    for project in seen:
        found = files(project / "ledger")
        assert {p: b for p, b in found.items() if not p.startswith(".incoming-")} == whole, project.name


def test_a_ledger_that_nobody_keeps_has_one_tree_in_the_cache(project: Path) -> None:
    """Publishing now and then leaves nothing behind, and what left before it was published costs no tree."""
    ledger, pointer = Ledger(project, "ledger", "demo-1", kept=False), project / "ledger/demo-1.pointer"
    for number in range(4):
        ledger.append(f"e{number}", str(number).encode())
        ledger.publish()
    before = pointer.read_bytes()
    ledger.append("e4", b"4")
    ledger.remove(["e4"])
    assert pointer.read_bytes() == before and ledger.unpublished == 0
    ledger.remove(["e3"])
    assert pointer.read_bytes() != before
    ledger.close()
    assert len(list((project / ".dvc/cache").rglob("*.dir"))) == 1
    assert set(files(project / "ledger/demo-1")) == {"e0", "e1", "e2"}
