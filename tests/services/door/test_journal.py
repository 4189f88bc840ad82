"""What was written is there after a kill; what could not be is said to who wrote it, and not there."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from antiphon.core.errors import UnavailableError
from antiphon.services.door import journal as kept
from antiphon.services.door.journal import Journal, open_journal


def test_what_is_written_at_one_moment_is_flushed_once_and_found_again(tmp_path: Path) -> None:
    path, commits = tmp_path / "journal.sqlite", list[int]()

    async def write() -> None:
        async with open_journal(path) as journal:
            commit = journal._commit

            def counting(statements: list[kept.Statement]) -> None:
                commits.append(len(statements))
                commit(statements)

            journal._commit = counting  # type: ignore[method-assign]
            journal.note(kept.keep("model", "m", b"said"))
            await asyncio.gather(
                *(journal.write(kept.begin(f"m:{n}", "m", n, "optim_step", b"body")) for n in range(50))
            )
            await journal.write(kept.answer("m:1", "json", b"{}"), kept.stepping("m:1", 7))
            # Another process sees it: nothing waits for the end.
            seen = sqlite3.connect(path).execute("SELECT step FROM futures WHERE form = 'json'")
            assert seen.fetchall() == [(7,)]
            journal.note(kept.told("m:1", 1.5), kept.forget("m:2"))

    asyncio.run(write())
    assert sum(commits[:-2]) <= 51 and len(commits) <= 4
    found = Journal(path)
    rows = {row.id: row for row in found.rows()}
    assert list(found.things("model")) == [b"said"] and len(rows) == 49
    assert rows["m:1"][4:] == (7, "json", 1.5) and found.body("m:1") == b"body"
    assert found.answer("m:1") == b"{}" and [row.seq for row in found.rows()][:3] == [0, 1, 3]
    found.close()


def test_what_cannot_be_written_is_said_and_is_not_there(tmp_path: Path) -> None:
    async def write() -> None:
        async with open_journal(tmp_path / "journal.sqlite") as journal:
            await journal.write(kept.begin("a", "m", 1, "optim_step", b""))
            with pytest.raises(UnavailableError, match="cannot be used"):
                await journal.write(
                    kept.begin("b", "m", 2, "optim_step", b""), ("INSERT INTO futures (id) VALUES ('a')", ())
                )
            await journal.write(kept.begin("c", "m", 3, "optim_step", b""))
            assert [row.id for row in journal.rows()] == ["a", "c"]

    asyncio.run(write())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="ANTIPHON_HOME"):
        Journal(tmp_path / "none" / "journal.sqlite")
