"""Verification: every artifact of a run is read and compared with its digest.

What was deleted or altered, be it one bit, is named together with its file and its fix. The
ledger vouches for its files by md5, the store by blake3, the documents for each other and for
the files they describe; the run log must tell the same story. No record of what was checked before is
trusted, and nothing is changed. A run may go on meanwhile.

A file that several names lead to (the store, DVC's cache and the ledger share one where the
file system can) is read once and complained about once, with all its names.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from antiphon.api.policy_file import policy_facts
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.lineage import layout
from antiphon.lineage.documents.graph import LineageGraph, Node, logged_facts, node_of, parents_by_rule
from antiphon.lineage.ledger.pins import dvc_cache
from antiphon.lineage.names import RUN, RUN_FOLDER, batch_entry, kind_of, name_of
from antiphon.lineage.run_events import EVENTS_FILE
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.system.files import PREFIX

READ_BYTES = 1 << 20
"""Bytes read at a time."""
_PULL = "`dvc pull` brings it back from a remote, or take it from another copy of the run"
_FILES = {
    "batch_digest": ".parquet",
    "timings_digest": ".timings.parquet",
    "samples_digest": ".samples.parquet",
}
"""Field of a document or of the run log -> the end of the file that it names."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it was recorded."""

    artifact: str
    """What it is, such as `batch 7`."""
    paths: tuple[Path, ...]
    """The file, under each of its names."""
    problem: str
    fix: str

    @property
    def sentence(self) -> str:
        first, *others = map(str, self.paths)
        also = f" (the same file as {', '.join(others)})" if others else ""
        return f"{self.artifact}: {first}{also} {self.problem}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Verification:
    """What was read, and what is wrong with it."""

    files: int
    bytes: int
    findings: tuple[Finding, ...]

    def require_sound(self, what: str) -> None:
        """Raise IntegrityError with the first few findings when there are any."""
        if not self.findings:
            return
        names, count = list(dict.fromkeys(finding.artifact for finding in self.findings)), len(self.findings)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        said = "1 artifact" if count == 1 else f"{count} artifacts"
        are = "is" if count == 1 else "are"
        raise IntegrityError(
            f"{said} of {what} {are} not as recorded: {', '.join(names[:3])}{more}; "
            "the lines above name each file and its fix"
        )


class Fingerprint(NamedTuple):
    """What a file holds."""

    blake3: str
    md5: str
    size: int
    """Bytes."""


class Findings:
    """What was read and what is wrong with it so far; a file is read once, however many names it has."""

    def __init__(self) -> None:
        self._read: dict[tuple[int, int], Fingerprint] = {}
        self._found: list[Finding] = []
        self._by_file: dict[tuple[int, int], int] = {}

    def read(self, path: Path) -> Fingerprint | None:
        """Return what a file holds, or None when there is none."""
        try:
            place = identity(path)
            if place not in self._read:
                self._read[place] = _digest(path)
            return self._read[place]
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def add(self, artifact: str, path: Path, problem: str, fix: str) -> None:
        """Note a finding about a file that is there or is missing; a further name of one is added to it."""
        new = len(self._found)
        at = self._by_file.setdefault(identity(path), new) if path.exists() else new
        if at == new:
            self._found.append(Finding(artifact, (path,), problem, fix))
        elif path not in (known := self._found[at]).paths:
            self._found[at] = replace(known, paths=(*known.paths, path))

    def result(self) -> Verification:
        """Return all of it."""
        size = sum(fingerprint.size for fingerprint in self._read.values())
        return Verification(len(self._read), size, tuple(self._found))


def identity(path: Path) -> tuple[int, int]:
    """Return what is equal for two names that lead to one file."""
    status = path.stat()
    return status.st_dev, status.st_ino


def _digest(path: Path) -> Fingerprint:
    own, dvc, size = blake3(), hashlib.md5(usedforsecurity=False), 0
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            own.update(part)
            dvc.update(part)
            size += len(part)
    return Fingerprint(own.hexdigest(), dvc.hexdigest(), size)


class ShardCheck:
    """Checks that journal, pointer, tree, directory and DVC cache of one shard say the same."""

    def __init__(self, directory: Path, cached: Callable[[str], Path], findings: Findings) -> None:
        self._directory, self._cached, self._findings = directory, cached, findings
        self._name = f"ledger {directory.name}"
        self._pointer, self._kept = layout.pointer_of(directory), layout.kept_pointer_of(directory)
        # DVC's commands know the pointers of ledgers that are kept.
        keep = "" if self._pointer == self._kept else f"`antiphon keep {layout.run_of(directory)}`, then "
        self._dvc = f"{keep}`dvc {{}} {self._kept}`"
        self._repair = f"`git checkout {self._kept}` or {self._dvc.format('commit --force')} repairs it"

    def check(self) -> dict[str, Path | None]:
        """Read everything and return the entries: path -> file, None for one that is not as it was pinned."""
        # What comes is in the journal first, and what leaves until it has left: it is read before the tree.
        journal, files = layout.read_journal(self._directory), layout.files_in(self._directory)
        noted = {} if journal is None else journal[1]
        finished = f"{RUN_FOLDER}/{EVENTS_FILE}" in files  # they come last
        earlier = journal is None and not finished  # an earlier release kept no journal
        growing = noted or not files or self._noted_by_now()
        out, tree = self._read_published(may_be_missing=bool(growing) or earlier)
        entries = {rel: self._check_entry(rel, md5) for rel, md5 in sorted(tree.items())}
        if out is not None and None not in entries.values():
            self._check_pointer(out, [path for path in entries.values() if path])
        for rel in sorted(files.keys() - tree.keys()):
            found = self._findings.read(files[rel])
            # One may have come after the journal and the tree were read.
            md5 = noted.get(rel) or self._noted_by_now().get(rel) or (self._tree_by_now() or {}).get(rel)
            if found is None or not files[rel].exists():
                continue  # it has left
            if md5 is None and (earlier or not tree) and self._cached(found.md5).is_file():
                md5 = found.md5  # a tree that is lost was named once
            entries[rel] = files[rel] if found.md5 == md5 else None
            if md5 is None:
                problem, fix = "is no entry of the ledger", "move it elsewhere"
                self._findings.add(f"stranger in {self._name}", files[rel], problem, fix)
            elif found.md5 != md5:
                problem = f"was altered before it was published: its md5 is {found.md5} instead of {md5}"
                fix = f"take it from {self._cached(md5)} or from another copy of the run"
                self._findings.add(name_of(rel), files[rel], problem, fix)
        return entries

    def _noted_by_now(self) -> dict[str, str]:
        journal = layout.read_journal(self._directory)
        return {} if journal is None else journal[1]

    def _tree_by_now(self) -> dict[str, str] | None:
        try:
            return layout.read_tree(self._cached(str(layout.read_pointer(self._pointer.read_bytes())["md5"])))
        except (FileNotFoundError, IntegrityError):
            return None

    def _read_published(self, *, may_be_missing: bool) -> tuple[Mapping[str, Any] | None, dict[str, str]]:
        """Return what the pointer says, and the tree that it names: (None, {}) where one of them is lost."""
        named = f"pointer of {self._name}"
        if not self._pointer.is_file():
            if not may_be_missing:
                fix = f"`git checkout {self._kept}` or `dvc add {self._directory}` writes it"
                self._findings.add(named, self._kept, f"is missing, and so is {self._pointer}", fix)
            return None, {}
        body = self._pointer.read_bytes()
        try:
            out = layout.read_pointer(body)
        except IntegrityError as error:
            self._findings.add(named, self._pointer, f"was altered: {error}", self._repair)
            return None, {}
        name = str(out["md5"])
        place = self._cached(name)
        if (tree := layout.read_tree(place)) is not None:
            return out, tree
        if self._pointer.read_bytes() != body:  # the run that goes on has written another one
            return self._read_published(may_be_missing=may_be_missing)
        if place.is_file():
            fix = f"remove the file, then {self._repair}"
            self._findings.add(f"tree of {self._name}", place, f"does not match its md5 {name}", fix)
        else:
            problem, fix = f"names the tree {name}, and {place} is missing", self._dvc.format("pull")
            self._findings.add(named, self._pointer, problem, f"{fix}, or {self._repair}")
        return None, {}

    def _check_entry(self, rel: str, md5: str) -> Path | None:
        """Return the entry's file when it is as it was pinned, or has left meanwhile."""
        path, cached, name = self._directory / rel, self._cached(md5), name_of(rel)
        found, kept = self._findings.read(path), self._findings.read(cached)
        if (found is None or kept is None) and rel not in (self._tree_by_now() or {rel: md5}):
            return path
        restore = f"{self._dvc.format('checkout --force')} brings it back from the DVC cache"
        fetch = f"remove the file, then {self._dvc.format('pull')} brings it from a remote"
        copy = f"{self._dvc.format('commit --force')} puts the ledger's file there again"
        fix = restore if kept is not None and kept.md5 == md5 else fetch
        sound = found is not None and found.md5 == md5
        if found is None:
            self._findings.add(name, path, "is missing", fix)
        elif not sound:
            self._findings.add(name, path, f"was altered: its md5 is {found.md5} instead of {md5}", fix)
        if kept is None:
            self._findings.add(name, cached, "is missing from the DVC cache", copy if sound else fetch)
        elif kept.md5 != md5:
            problem = f"was altered in the DVC cache: its md5 is {kept.md5}"
            self._findings.add(name, cached, problem, f"remove the file, then {copy}" if sound else fetch)
        return path if sound else None

    def _check_pointer(self, out: Mapping[str, Any], files: list[Path]) -> None:
        sizes = [found.size for path in files if (found := self._findings.read(path))]
        if len(sizes) < len(files):
            return  # some have left, and the pointer is another one
        wanted = layout.read_pointer(
            layout.pointer_bytes(self._directory, str(out["md5"]), sum(sizes), len(sizes))
        )
        for field, value in wanted.items():
            if out.get(field) != value:
                problem = f"was altered: {field} is {out.get(field)!r} instead of {value!r}"
                self._findings.add(f"pointer of {self._name}", self._pointer, problem, self._repair)


class RunCheck:
    """Checks one run."""

    def __init__(self, run_dir: Path, store_root: Path) -> None:
        self._run_dir, self._store = run_dir, ArtifactStore(store_root)
        self._findings = Findings()
        self._folder = Path()
        self._files: dict[str, Path] = {}
        self._expected: set[str] = set()
        self._nodes: dict[str, Node] = {}

    def check(self, ledgers: Path | None, cached: Callable[[str], Path]) -> Verification:
        """Read the run's ledger, its objects in the store, and its own directory.

        `ledgers` is the folder of ledgers, None for a run that keeps none; `cached` gives the
        place of an md5's object in the DVC cache.
        """
        if ledgers is not None:
            directories = layout.shard_directories(ledgers, self._run_dir.name)
            if not directories and self._run_dir.is_dir():
                fix = "`dvc checkout` or `dvc pull` bring it back if it was kept; else take a copy of it"
                place = ledgers / self._run_dir.name
                self._findings.add(f"ledger of run {place.name}", place, "is missing", fix)
            self._folder = next(iter(directories), self._folder)
            for directory in directories:
                entries = ShardCheck(directory, cached, self._findings).check()
                self._files.update({rel: path for rel, path in entries.items() if path is not None})
                self._expected.update(entries)
        self._check_documents()
        self._check_contents()
        if self._run_dir.is_dir():  # else it is a ledger brought from elsewhere
            self._check_run_directory(pinned=ledgers is not None)
        return self._findings.result()

    def _check_documents(self) -> None:
        for rel, path in self._files.items():
            if kind_of(rel) is None:
                continue
            try:
                self._nodes[rel] = node_of(rel, path.read_bytes())
            except IntegrityError as error:
                self._fault(rel, f"cannot be read: {error}")
        for node, role, digest in LineageGraph(self._nodes.values()).missing():
            sampled = [int(role.removeprefix("policy v"))] if role.startswith("policy v") else []
            place = parents_by_rule(node.rel, sampled).get(role, "")
            if place in self._expected and place not in self._nodes:
                continue  # named already
            self._fault(
                node.rel, f"names {role} by the digest {digest[:16]}, which no document of the run has"
            )
        for rel, node in self._nodes.items():
            if node.parents or not parents_by_rule(rel):
                self._check_object(node.digest, name_of(rel), self._files[rel])

    def _check_contents(self) -> None:
        """Compare what documents say of files with the files, in the ledger and in the store."""
        for rel, node in self._nodes.items():
            stem = rel.removesuffix(".json")
            if node.kind in ("batch", "evaluation"):
                for field, end in _FILES.items():
                    if field in node.contents:
                        self._check_content(f"{stem}{end}", node.contents[field])
            elif node.kind == "version":
                self._check_weights(node, f"{stem}.safetensors")
                step, trained_on = (node.number or 0) - 1, node.facts.get("batch_digest")
                batch = self._nodes.get(batch_entry(step))
                if trained_on is not None and batch is None:
                    self._check_object(str(trained_on), f"batch {step}", None)
                elif trained_on is not None and batch and batch.facts["batch_digest"] != trained_on:
                    self._fault(
                        rel, f"says it was trained on {trained_on[:16]}, which is not that step's batch"
                    )

    def _check_content(self, rel: str, digest: str) -> None:
        path = self._files.get(rel)
        if path is not None and (found := self._findings.read(path)) and found.blake3 != digest:
            self._fault(rel, f"has digest {found.blake3[:16]}, but its manifest describes {digest[:16]}")
        elif path is None and rel not in self._expected:
            self._fault(rel, "is no entry of the ledger, but its manifest is")
        self._check_object(digest, name_of(rel), path)

    def _check_weights(self, node: Node, rel: str) -> None:
        path = self._files.get(rel)
        found = self._findings.read(path) if path is not None else None
        if path is None or found is None:
            return  # a version that was not published has no weights of its own
        held = policy_facts(path).get("weights_digest")
        if held != node.facts.get("weights_digest"):
            self._fault(rel, f"holds the weights {str(held)[:16]}, not those its manifest describes")
        self._check_object(found.blake3, name_of(rel), path)

    def _check_object(self, digest: str, name: str, copy: Path | None) -> None:
        """Compare an object of the store with its name; `copy` is an intact file of the same bytes."""
        path = self._store.path(digest)
        found = self._findings.read(path)
        fix = f"copy {copy} there" if copy else "restore it from a copy of the store"
        if found is not None and found.blake3 != digest:
            problem = f"was altered in the store: its digest is {found.blake3[:16]}"
            self._findings.add(name, path, problem, f"remove the file and {fix}")
        elif found is None and self._run_dir.is_dir():
            # A ledger brought from elsewhere, or of a run that was given up, needs no store.
            self._findings.add(name, path, "is missing from the store", fix)

    def _check_run_directory(self, *, pinned: bool) -> None:
        kept, config = self._run_dir / RUN, self._run_dir / "config.yaml"
        document, run = self._files.get(RUN), self._nodes.get(RUN)
        if kept.is_file() and document and kept.read_bytes() != document.read_bytes():
            problem, fix = "differs from the one in the ledger", f"copy {document} there"
            self._findings.add(name_of(RUN), kept, problem, fix)
        if run and config.is_file() and digest_bytes(config.read_bytes()) != run.facts.get("config_digest"):
            problem = "is not the configuration that the run's manifest describes"
            self._findings.add("configuration of the run", config, problem, "take it from the manifest")
        try:
            lines = list(logged_facts(self._run_dir))
        except (ValueError, KeyError, TypeError) as error:
            path = self._run_dir / "metrics.jsonl"
            self._findings.add("run log", path, f"cannot be read: {error!r}", "restore it")
            return
        for rel, facts, _ in lines:
            self._compare_line(rel, facts, pinned=pinned)

    def _compare_line(self, rel: str, facts: dict[str, Any], *, pinned: bool) -> None:
        node = self._nodes.get(rel)
        if node is None and rel not in self._expected:
            for field, end in _FILES.items():
                if not rel.startswith("versions/") and field in facts:
                    self._check_object(facts[field], name_of(rel.replace(".json", end)), None)
            if pinned and not rel.startswith("batches/"):
                self._fault(rel, "is missing: the run log has it, the ledger has not")
        known = node.facts if node else {}
        for field in [field for field in facts if field in known]:
            if json.dumps(known[field], sort_keys=True) != json.dumps(facts[field], sort_keys=True):
                self._fault(rel, f"disagrees with the run log about {field}", "one of the two was altered")

    def _fault(self, rel: str, problem: str, fix: str = _PULL) -> None:
        """Note what is wrong with an entry, or with one that is missing, where it would lie."""
        self._findings.add(name_of(rel), self._files.get(rel, self._folder / rel), problem, fix)


def verify_run(run_dir: Path, store_root: Path, project: Path | None, folder: str) -> Verification:
    """Check every artifact of one run; without a DVC `project` it keeps no ledger.

    Raises:
        ConfigError: when `project` is in no DVC project.
    """
    if project is None:
        return RunCheck(run_dir, store_root).check(None, Path)
    with dvc_cache(project) as cached:
        return RunCheck(run_dir, store_root).check(project / folder, cached)


def verify_store(store_root: Path) -> Verification:
    """Check every object of the store against its name, whichever run it belongs to."""
    findings = Findings()
    for path in sorted((store_root / "objects").glob("??/*")):
        if path.name.startswith(PREFIX):
            continue
        found = findings.read(path)
        if found is not None and found.blake3 != path.name:
            problem = f"was altered: its digest is {found.blake3[:16]}"
            fix = "remove the file and restore it from a copy"
            findings.add(f"object {path.name[:16]} of the store", path, problem, fix)
    return findings.result()
