"""What runs leave behind changes nothing that git sees, and nothing that tests take of the tree."""

from pathlib import Path

import pytest

from antiphon.cli.app import execute
from tests.support.artifacts import RecordedRun
from tests.support.checkout import begin_history, changes, copy_checkout

ROOT = Path(__file__).parents[2]
RULES = (".gitignore", ".dvcignore", ".dvc/config", ".dvc/.gitignore", "ledger/.gitignore")


class CloneRun(RecordedRun):
    """A run in a clone: its home is the clone's `.antiphon`, its ledger the clone's."""

    def __init__(self, clone: Path) -> None:
        super().__init__(clone / ".antiphon", record={"mlflow": False})
        (self.home / ".dvc" / "config").unlink()
        (self.home / ".dvc").rmdir()


def clone_in(folder: Path) -> Path:
    for name in RULES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    begin_history(folder)
    return folder


def test_a_run_leaves_what_git_sees_as_it_was_until_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = clone_in(tmp_path / "clone")
    run = CloneRun(clone)
    run.complete(2)
    assert (clone / "ledger" / "demo-1" / "batches").is_dir() and changes(clone) == []
    assert execute(["keep", "demo-1"]) == 2, "the home is another one"
    monkeypatch.setenv("ANTIPHON_HOME", str(run.home))
    assert execute(["keep", "demo-1"]) == 0
    assert changes(clone) == ["?? ledger/demo-1.dvc"]
    run.complete(4)  # goes on, and stays kept
    assert changes(clone) == ["?? ledger/demo-1.dvc"]
    assert not (clone / "ledger" / "demo-1.pointer").exists()


def test_a_copy_of_the_checkout_has_none_of_it(tmp_path: Path) -> None:
    clone = clone_in(tmp_path / "clone")
    run = CloneRun(clone)
    run.complete(2)
    begun = sorted(path.relative_to(clone) for path in clone.rglob("*") if ".git" not in path.parts)
    assert len(begun) > 20
    (clone / "ledger" / "other.dvc").write_text("outs: []\n")
    copy_checkout(clone, tmp_path / "copy")
    found = sorted(
        str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()
    )
    assert found == sorted(RULES)


def test_what_cannot_be_kept_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clone = clone_in(tmp_path / "clone")
    run = CloneRun(clone)
    run.complete(1)
    monkeypatch.setenv("ANTIPHON_HOME", str(run.home))
    assert execute(["keep", "demo-2"]) == 2
    assert "there is no ledger demo-2 in" in (said := capsys.readouterr().err) and "there are: demo-1" in said
    (clone / "ledger" / "demo-1.pointer").unlink()
    assert execute(["keep"]) == 2
    assert "`./antiphon keep demo-1 --records` writes it" in capsys.readouterr().err
    run.complete(1)
    assert execute(["keep"]) == 0
