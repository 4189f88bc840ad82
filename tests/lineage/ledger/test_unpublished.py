"""What a ledger has not published yet: recorded before it lies there, and verified as what was recorded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.core.errors import UnavailableError
from antiphon.lineage.layout import files_in
from antiphon.lineage.ledger.pins import Ledger
from antiphon.lineage.ledger.verify import RunCheck

WEIGHTS = "versions/v{:06d}.safetensors"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A DVC project without git, and the folder of a run that goes on."""
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_text("[core]\n    no_scm = true\n    analytics = false\n")
    (tmp_path / "runs" / "demo-1").mkdir(parents=True)
    return tmp_path


def cached(project: Path, md5: str) -> Path:
    return project / ".dvc/cache/files/md5" / md5[:2] / md5[2:]


def problems(project: Path, look: Callable[[str], object] = lambda md5: None) -> list[str]:
    """Verify the ledger; `look` is called before an md5 is looked up in the cache."""

    def place(md5: str) -> Path:
        look(md5)
        return cached(project, md5)

    check = RunCheck(project / "runs" / "demo-1", project / "store")
    return [found.sentence for found in check.check(project / "ledger", place).findings]


def replaced(path: Path, payload: bytes) -> None:
    """Put other bytes under a name; what links to the old ones keeps them."""
    path.unlink()
    path.write_bytes(payload)


@pytest.mark.parametrize("published", [False, True])
def test_what_was_altered_before_it_was_published_is_named_before_and_after_a_restart(
    project: Path, published: bool
) -> None:
    ledger = Ledger(project, "ledger", "demo-1")
    if published:
        ledger.append("first", b"first")
        ledger.publish()
    md5 = ledger.append("second", b"second")
    ledger.append("third", b"third")
    replaced(ledger.directory / "second", b"SECOND")
    (ledger.directory / "stranger").write_bytes(b"of nobody")
    ledger.release()  # as a process that ends lets go of it

    def named() -> bool:
        altered, stranger = sorted(problems(project))
        return "second was altered" in altered and md5 in altered and "stranger is no entry" in stranger

    assert named()
    again = Ledger(project, "ledger", "demo-1")
    assert again.md5("second") == md5 and again.md5("stranger") is None and named()
    assert again.append("second", b"second") == md5
    again.close()
    assert named()
    replaced(ledger.directory / "second", cached(project, md5).read_bytes())
    (ledger.directory / "stranger").unlink()
    assert problems(project) == []


def test_a_first_write_of_many_files_is_sound_before_it_is_published(project: Path) -> None:
    ledger = Ledger(project, "ledger", "demo-1")
    for number in range(40):
        ledger.append(f"e{number}", str(number).encode())
    assert problems(project) == []
    ledger.close()
    assert problems(project) == []
    (project / "ledger/demo-1.dvc").unlink()
    assert "is missing" in problems(project)[0]


def test_a_verification_beside_a_removal_finds_nothing(project: Path) -> None:
    """Whenever weights leave while it reads: neither they nor the pointer's size are a fault."""
    for moment in range(12):
        ledger = Ledger(project, "ledger", "demo-1")
        for version in range(3):
            ledger.append(WEIGHTS.format(version), b"%d of %d" % (version, moment) * (version + 1))
        ledger.publish()
        looks = [moment]

        def leave(md5: str, ledger: Ledger = ledger, looks: list[int] = looks) -> None:
            looks[0] -= 1
            if looks[0] < 0 and WEIGHTS.format(1) in ledger:
                ledger.remove([WEIGHTS.format(1)])
                ledger.append("later", b"later")

        assert problems(project, leave) == [], moment
        ledger.remove(list(ledger))
        ledger.close()


def test_a_tree_that_is_lost_is_one_finding(project: Path) -> None:
    ledger = Ledger(project, "ledger", "demo-1")
    for number in range(3):
        ledger.append(f"e{number}", str(number).encode())
    ledger.close()
    (tree,) = (project / ".dvc/cache/files/md5").glob("*/*.dir")
    tree.unlink()
    (found,) = problems(project)
    assert found.startswith("pointer of ledger demo-1") and "dvc pull" in found


def test_a_line_that_a_kill_cut_off_counts_for_nothing(project: Path) -> None:
    ledger = Ledger(project, "ledger", "demo-1")
    ledger.append("a", b"a")
    ledger.release()
    (journal,) = (project / "ledger").glob("*.journal")
    with journal.open("ab") as file:
        file.write(b'\n["b", "01')
    again = Ledger(project, "ledger", "demo-1")
    again.append("c", b"c")
    again.release()
    assert sorted(Ledger(project, "ledger", "demo-1")) == ["a", "c"] and problems(project) == []


def test_a_ledger_of_an_earlier_release_is_entered_as_it_lies_there(project: Path) -> None:
    """It had no journal: a file that the cache has is as it was recorded."""
    ledger = Ledger(project, "ledger", "demo-1")
    md5 = ledger.append("a", b"a")
    ledger.release()
    (journal,) = (project / "ledger").glob("*.journal")
    journal.unlink()
    assert problems(project) == []
    again = Ledger(project, "ledger", "demo-1")
    assert again.md5("a") == md5 and again.unpublished == 1
    again.release()
    third = Ledger(project, "ledger", "demo-1")
    assert third.md5("a") == md5
    third.close()


@pytest.mark.parametrize("kept", [False, True])
def test_what_was_published_is_known_without_its_pointer(project: Path, kept: bool) -> None:
    """As the sentence on an altered pointer says: remove it, the files are there."""
    ledger = Ledger(project, "ledger", "demo-1", kept=kept)
    for name in "ab":
        ledger.append(name, name.encode())
    ledger.close()
    (project / "ledger" / ("demo-1.dvc" if kept else "demo-1.pointer")).unlink()
    again = Ledger(project, "ledger", "demo-1", kept=kept)
    assert sorted(again) == ["a", "b"]
    again.close()
    assert problems(project) == []


def test_what_came_after_an_older_pointer_is_known(project: Path) -> None:
    """As after `git checkout` of an older commit."""
    ledger = Ledger(project, "ledger", "demo-1")
    ledger.append("a", b"a")
    ledger.publish()
    pointer = project / "ledger/demo-1.dvc"
    older = pointer.read_bytes()
    ledger.append("b", b"b")
    ledger.close()
    pointer.write_bytes(older)
    again = Ledger(project, "ledger", "demo-1")
    assert sorted(again) == ["a", "b"]
    again.close()
    assert problems(project) == []


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("failing", ["write_atomically", "release"])
def test_a_removal_that_fails_is_done_by_the_next_one(
    project: Path, published: bool, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(project, "ledger", "demo-1")
    ledger.append("a", b"a")
    ledger.publish()
    for name in "bc":
        ledger.append(name, name.encode())
    if published:
        ledger.publish()

    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(UnavailableError, match="No space left"):
        if failing == "write_atomically":
            patch.setattr("antiphon.lineage.ledger.pins.write_atomically", full)
        ledger.remove(["a", "b"], full)
    assert sorted(ledger) == ["a", "b", "c"]
    ledger.publish()
    assert problems(project) == []
    ledger.remove(["a", "b"])
    ledger.close()
    assert problems(project) == [] and sorted(Ledger(project, "ledger", "demo-1")) == ["c"]


def test_a_verification_during_the_first_append_finds_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(project, "ledger", "demo-1")

    def listed(directory: Path) -> dict[str, Path]:
        if not len(ledger):
            ledger.append("a", b"a")
        return files_in(directory)

    monkeypatch.setattr("antiphon.lineage.layout.files_in", listed)
    assert problems(project) == []
