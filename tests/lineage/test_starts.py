"""Starts: what began and continued a run is noted as it happens, and of older runs as far as it is known."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from antiphon.lineage import starts
from antiphon.lineage.starts import Start, add_start, read_starts


def test_every_start_is_noted_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = {"revision": "ab" * 20, "modified": True, "changes_md5": "0"}
    monkeypatch.setattr(starts, "code_revision", lambda _: code)
    add_start(tmp_path, "./antiphon demo run.name='a b'")
    monkeypatch.setattr(starts, "code_revision", lambda _: {})
    add_start(tmp_path, "")
    first, second = read_starts(tmp_path)
    assert (first.command, first.commit, first.modified) == (
        "./antiphon demo run.name='a b'",
        "ab" * 20,
        True,
    )
    assert (second.command, second.commit, second.modified) == ("", "", False)
    assert first.at is not None and second.at is not None and 1.7e9 < first.at <= second.at


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_start_names_the_commit_of_the_code_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, run = tmp_path / "tree", tmp_path / "run"
    run.mkdir()

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        done = subprocess.run(
            ["git", "-C", str(tree), *identity, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    tree.mkdir()
    (tree / "code.py").write_text("one")
    git("init", "-q")
    git("add", "code.py")
    git("commit", "-qm", "one")
    monkeypatch.setattr(starts, "source_tree", lambda: tree)
    add_start(run, "x")
    (tree / "code.py").write_text("two")
    add_start(run, "x")
    commit = git("rev-parse", "HEAD")
    assert [(start.commit, start.modified) for start in read_starts(run)] == [(commit, False), (commit, True)]


def test_of_an_older_run_the_manifest_tells_the_commit(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == []
    code = {"revision": "cd" * 20, "modified": False, "changes_md5": ""}
    (tmp_path / "manifest.json").write_text(json.dumps({"code": code}))
    assert read_starts(tmp_path) == [Start("", "cd" * 20, False)]
    (tmp_path / "manifest.json").write_text(json.dumps({"code": {}}))
    assert read_starts(tmp_path) == []
