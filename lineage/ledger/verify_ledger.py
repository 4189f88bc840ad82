"""Verification of a ledger: pointer, tree, directory and DVC cache say the same.

No record of what was checked before is trusted: every file is read and its md5 compared with
what the tree says, and the tree's with what the ``.dvc`` file says.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from antiphon.core.errors import IntegrityError
from antiphon.lineage.layout import (
    PUBLISH_ENTRIES,
    files_in,
    kept_pointer_of,
    pointer_bytes,
    pointer_of,
    read_pointer,
    read_tree,
    run_of,
)
from antiphon.lineage.ledger.findings import FileReader, Findings
from antiphon.lineage.names import RUN_FOLDER, name_of, version_of_weights
from antiphon.lineage.run_events import EVENTS_FILE


class ShardCheck:
    """Checks one directory of a ledger."""

    def __init__(
        self,
        directory: Path,
        cached: Callable[[str], Path],
        reader: FileReader,
        findings: Findings,
        unfinished: bool = False,
    ) -> None:
        """Prepare; the ledger of an `unfinished` run may be so new that it was never published."""
        self._directory, self._cached, self._unfinished = directory, cached, unfinished
        self._reader, self._findings = reader, findings
        self._name = f"ledger {directory.name}"
        self._pointer, self._kept = pointer_of(directory), kept_pointer_of(directory)
        # DVC's commands know the pointers of ledgers that are kept.
        keep = "" if self._pointer == self._kept else f"`antiphon keep {run_of(directory)}`, then "
        self._dvc = f"{keep}`dvc {{}} {self._kept}`"
        self._repair = f"`git checkout {self._kept}` or {self._dvc.format('commit --force')} repairs it"

    def check(self) -> dict[str, Path | None]:
        """Read everything and return the entries: path -> file, None for one that is not as it was pinned."""
        files = files_in(self._directory)
        out = self._read_pointer(fresh := self._unfinished and 0 < len(files) < PUBLISH_ENTRIES)
        if out is not None and not self._cached(str(out["md5"])).is_file():
            out = self._read_pointer(fresh)  # the run that is going on may have written another one
        tree = None if out is None else self._read_tree(str(out["md5"]))
        entries = {rel: self._check_entry(rel, md5) for rel, md5 in sorted((tree or {}).items())}
        if out is not None and tree is not None and None not in entries.values():
            self._check_pointer(out, tree, [path for path in entries.values() if path])
        for rel in sorted(files.keys() - entries.keys()):
            if f"{RUN_FOLDER}/{EVENTS_FILE}" in entries:  # they come last
                name, fix = f"stranger in {self._name}", "move it elsewhere"
                self._findings.add(name, files[rel], "is no entry of the ledger", fix)
            elif version_of_weights(rel) is None:  # weights are being entered, or taken away
                entries[rel] = self._check_unpublished(rel, files[rel])
        return entries

    def _check_unpublished(self, rel: str, path: Path) -> Path | None:
        """Return a file that no tree names yet when DVC's cache has it as it is."""
        found = self._reader.read(path)
        if found is None or self._cached(found.md5).is_file():
            return path
        fix = "start the run again, which enters it as it was recorded"
        problem = f"was altered before it was published: the DVC cache has no file of its md5 {found.md5}"
        self._findings.add(name_of(rel), path, problem, fix)
        return None

    def _read_pointer(self, may_be_missing: bool) -> Mapping[str, Any] | None:
        named = f"pointer of {self._name}"
        if not self._pointer.is_file():
            if not may_be_missing:
                fix = f"`git checkout {self._kept}` or `dvc add {self._directory}` writes it"
                self._findings.add(named, self._kept, f"is missing, and so is {self._pointer}", fix)
            return None
        try:
            return read_pointer(self._pointer.read_bytes())
        except IntegrityError as error:
            self._findings.add(named, self._pointer, f"was altered: {error}", self._repair)
            return None

    def _read_tree(self, name: str) -> dict[str, str] | None:
        path = self._cached(name)
        tree = read_tree(path)
        if tree is None and path.is_file():
            fix = f"remove the file, then {self._repair}"
            self._findings.add(f"tree of {self._name}", path, f"does not match its md5 {name}", fix)
        elif tree is None:
            problem, fix = f"names the tree {name}, and {path} is missing", self._dvc.format("pull")
            self._findings.add(
                f"pointer of {self._name}", self._pointer, problem, f"{fix}, or {self._repair}"
            )
        return tree

    def _check_entry(self, rel: str, md5: str) -> Path | None:
        """Return the entry's file when it is as it was pinned."""
        path, cached, name = self._directory / rel, self._cached(md5), name_of(rel)
        found, kept = self._reader.read(path), self._reader.read(cached)
        if found is None and self._left_meanwhile(rel):
            return path
        restore = f"{self._dvc.format('checkout --force')} brings it back from the DVC cache"
        fetch = f"remove the file, then {self._dvc.format('pull')} brings it from a remote"
        copy = f"{self._dvc.format('commit --force')} puts the ledger's file there again"
        fix = restore if kept is not None and kept.md5 == md5 else fetch
        if found is None:
            self._findings.add(name, path, "is missing", fix)
        elif found.md5 != md5:
            self._findings.add(name, path, f"was altered: its md5 is {found.md5} instead of {md5}", fix)
        sound = found is not None and found.md5 == md5
        if kept is None:
            self._findings.add(name, cached, "is missing from the DVC cache", copy if sound else fetch)
        elif kept.md5 != md5:
            problem = f"was altered in the DVC cache: its md5 is {kept.md5}"
            self._findings.add(name, cached, problem, f"remove the file, then {copy}" if sound else fetch)
        return path if sound else None

    def _left_meanwhile(self, rel: str) -> bool:
        """Return whether the run that is going on has taken an entry away since its tree was read."""
        try:
            now = read_tree(self._cached(str(read_pointer(self._pointer.read_bytes())["md5"])))
        except IntegrityError:
            return False
        return now is not None and rel not in now

    def _check_pointer(self, out: Mapping[str, Any], tree: Mapping[str, str], files: list[Path]) -> None:
        size = sum(found.size for path in files if (found := self._reader.read(path)))
        wanted = read_pointer(pointer_bytes(self._directory, str(out["md5"]), size, len(tree)))
        for field, value in wanted.items():
            if out.get(field) != value:
                problem = f"was altered: {field} is {out.get(field)!r} instead of {value!r}"
                self._findings.add(f"pointer of {self._name}", self._pointer, problem, self._repair)
