"""Verification of a ledger: pointer, tree, journal, directory and DVC cache say the same.

No record of what was checked before is trusted: every file is read and its md5 compared with
what the tree says, and the tree's with what the ``.dvc`` file says.
"""

import fcntl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.errors import IntegrityError
from antiphon.lineage.layout import (
    PUBLISH_ENTRIES,
    Entry,
    ShardJournal,
    journal_of,
    journal_text,
    kept_pointer_of,
    pointer_bytes,
    pointer_of,
    read_journal,
    read_pointer,
    read_tree,
    run_of,
    tree_bytes,
    tree_name,
)
from antiphon.lineage.ledger.findings import FileReader, Findings
from antiphon.lineage.names import name_of
from antiphon.system.files import PREFIX


@dataclass(frozen=True, slots=True)
class ShardState:
    """What one shard holds, as far as it is as it was recorded."""

    expected: Mapping[str, Entry]
    """Every entry the shard should have, by path."""
    intact: Mapping[str, Path]
    """The files of those that are as they were pinned, by path."""


class ShardCheck:
    """Checks one shard."""

    def __init__(
        self,
        directory: Path,
        cached: Callable[[str], Path],
        reader: FileReader,
        findings: Findings,
        unfinished: bool = False,
    ) -> None:
        """Prepare; the ledger of an `unfinished` run may be so new that it was never published."""
        self._unfinished = unfinished
        self._being_written = False
        self._directory = directory
        self._cached = cached
        self._reader = reader
        self._findings = findings
        self._name = f"ledger {directory.name}"
        self._pointer = pointer_of(directory)
        self._journal = journal_of(directory)
        kept = kept_pointer_of(directory)
        # DVC's commands know the pointers of ledgers that are kept.
        self._dvc = (
            f"`dvc {{}} {kept}`"
            if self._pointer == kept
            else f"`antiphon keep {run_of(directory)}`, then `dvc {{}} {kept}`"
        )
        self._restore = f"{self._dvc.format('checkout --force')} brings it back from the DVC cache"
        self._fetch = f"remove the file, then {self._dvc.format('pull')} brings it from a remote"
        self._repair = f"`git checkout {kept}` or {self._dvc.format('commit --force')} repairs it"

    def check(self) -> ShardState:
        """Read everything and return what is sound."""
        self._being_written = is_being_written(self._directory)
        journal = self._read_journal()
        fresh = self._unfinished and 0 < len(journal.entries) < PUBLISH_ENTRIES
        tree = self._read_tree(self._being_written or fresh)
        if self._being_written:
            journal = self._read_journal()  # what has left the tree by now is in it
        # An entry that left may be in the tree still, or its file there: nobody counts on either.
        expected = dict(tree if tree is not None else journal.entries)
        if tree is not None:
            self._compare_journal(tree, journal.entries, expected)
        expected = {rel: entry for rel, entry in expected.items() if rel not in journal.left}
        if not expected:
            expected = {rel: Entry(rel, "", None) for rel in self._files()}
        intact = {rel: path for rel in sorted(expected) if (path := self._check_entry(expected[rel]))}
        self._check_strangers({**expected, **journal.left})
        if tree is not None and len(intact) == len(expected) and not tree.keys() & journal.left.keys():
            self._check_pointer(tree, {rel: intact[rel] for rel in tree})
        return ShardState(expected, intact)

    def _read_journal(self) -> ShardJournal:
        name = f"journal of {self._name}"
        fix = "remove the file: the .dvc file and its tree name every published entry"
        try:
            text = journal_text(self._directory)
            if text and not text.endswith("\n") and not self._being_written:
                self._findings.add(name, self._journal, "ends in the middle of a line", fix)
            return read_journal(text)
        except (UnicodeDecodeError, IntegrityError) as error:
            self._findings.add(name, self._journal, f"cannot be read: {error}", fix)
            return ShardJournal({}, {})

    def _read_tree(self, expected_missing: bool) -> dict[str, Entry] | None:
        named = f"pointer of {self._name}"
        again = self._repair
        if not self._pointer.is_file():
            if not expected_missing:
                kept = kept_pointer_of(self._directory)
                fix = f"`git checkout {kept}` or `dvc add {self._directory}` writes it"
                self._findings.add(named, kept, f"is missing, and so is {self._pointer}", fix)
            return None
        try:
            tree = str(read_pointer(self._pointer.read_bytes())["md5"])
        except IntegrityError as error:
            self._findings.add(named, self._pointer, f"was altered: {error}", again)
            return None
        path = self._cached(tree)
        if not path.is_file():
            problem = f"names the tree {tree}, and {path} is missing"
            self._findings.add(named, self._pointer, problem, f"{self._dvc.format('pull')}, or {again}")
            return None
        body = path.read_bytes()
        if tree_name(body) != tree:
            problem = f"does not match its md5 {tree}"
            self._findings.add(f"tree of {self._name}", path, problem, f"remove the file, then {again}")
            return None
        return {entry.rel: entry for entry in read_tree(body)}

    def _compare_journal(
        self, tree: Mapping[str, Entry], journalled: Mapping[str, Entry], expected: dict[str, Entry]
    ) -> None:
        fix = "remove the journal: the tree has every published entry"
        for rel, entry in journalled.items():
            path = self._directory / rel
            found = self._reader.read(path)
            if rel in tree:
                sized = found is None or found.md5 != tree[rel].md5 or found.size == entry.size
                wrong = "" if tree[rel].md5 == entry.md5 and sized else "says something else than the tree of"
            else:
                wrong = "" if found else "names what is neither in the tree nor there,"
                if not wrong:
                    expected[rel] = entry  # appended and not published yet
            if wrong:
                self._findings.add(f"journal of {self._name}", self._journal, f"{wrong} {rel}", fix)

    def _check_entry(self, entry: Entry) -> Path | None:
        """Return the entry's file when it is as it was pinned."""
        path = self._directory / entry.rel
        name = name_of(entry.rel)
        found = self._reader.read(path)
        if not entry.md5:
            return path if found else None  # it is no longer known what it should be
        cached = self._cached(entry.md5)
        kept = self._reader.read(cached)
        cache_is_whole = kept is not None and kept.md5 == entry.md5
        is_whole = found is not None and found.md5 == entry.md5
        if found is None and self._being_written and entry.rel in self._read_journal().left:
            return None  # it left meanwhile
        if found is None:
            self._findings.add(name, path, "is missing", self._restore if cache_is_whole else self._fetch)
        elif not is_whole:
            problem = f"was altered: its md5 is {found.md5} instead of {entry.md5}"
            self._findings.add(name, path, problem, self._restore if cache_is_whole else self._fetch)
        copy = f"{self._dvc.format('commit --force')} puts the ledger's file there again"
        if kept is None:
            fix = copy if is_whole else self._fetch
            self._findings.add(name, cached, "is missing from the DVC cache", fix)
        elif not cache_is_whole:
            fix = f"remove the file, then {copy}" if is_whole else self._fetch
            self._findings.add(name, cached, f"was altered in the DVC cache: its md5 is {kept.md5}", fix)
        return path if is_whole else None

    def _check_strangers(self, expected: Mapping[str, Entry]) -> None:
        for rel in self._files():
            if rel not in expected:
                name, path = f"stranger in {self._name}", self._directory / rel
                self._findings.add(name, path, "is no entry of the ledger", "move it elsewhere")

    def _check_pointer(self, tree: Mapping[str, Entry], files: Mapping[str, Path]) -> None:
        out = read_pointer(self._pointer.read_bytes())
        size = sum(found.size for path in files.values() if (found := self._reader.read(path)))
        body = tree_bytes(tree)
        wanted = read_pointer(pointer_bytes(self._directory, tree_name(body), size, len(tree)))
        for field, value in wanted.items():
            if out.get(field) != value:
                problem = f"was altered: {field} is {out.get(field)!r} instead of {value!r}"
                self._findings.add(f"pointer of {self._name}", self._pointer, problem, self._repair)

    def _files(self) -> list[str]:
        found = (path for path in self._directory.rglob("*") if path.is_file())
        kept = (path for path in found if not path.name.startswith(PREFIX))
        return sorted(path.relative_to(self._directory).as_posix() for path in kept)


def is_being_written(directory: Path) -> bool:
    """Return whether some process has the shard's ledger open for appending."""
    first = directory.with_name(run_of(directory))
    for journal in {journal_of(directory), journal_of(first)}:
        if not journal.is_file():
            continue
        with journal.open("rb") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False
