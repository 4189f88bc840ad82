"""Verification: every artifact of a run is read and compared with its digest.

What was deleted or altered, be it one bit, is named together with its file and its fix. The
ledger vouches for its files by md5, the store by blake3, the documents for each other and for
the files they describe; the run log must tell the same story. Nothing is changed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.api.policy_file import policy_facts
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.lineage.documents.artifacts import parents_by_rule
from antiphon.lineage.documents.graph import LineageGraph, Node, logged_facts, node_of
from antiphon.lineage.layout import shard_directories
from antiphon.lineage.ledger.findings import FileReader, Finding, Findings, shortened
from antiphon.lineage.ledger.pins import dvc_cache
from antiphon.lineage.ledger.verify_ledger import ShardCheck
from antiphon.lineage.names import (
    OUTCOME_FILE,
    RUN,
    batch_entry,
    kind_of,
    name_of,
)
from antiphon.lineage.store.artifact_store import ArtifactStore


@dataclass(frozen=True, slots=True)
class Verification:
    """What was read, and what is wrong with it."""

    files: int
    bytes: int
    findings: tuple[Finding, ...]

    def require_sound(self, what: str) -> None:
        """Raise IntegrityError with the first few findings when there are any."""
        if self.findings:
            named = shortened(dict.fromkeys(finding.artifact for finding in self.findings))
            count = "1 artifact" if len(self.findings) == 1 else f"{len(self.findings)} artifacts"
            raise IntegrityError(
                f"{count} of {what} {'is' if len(self.findings) == 1 else 'are'} not as recorded: {named}; "
                "the lines above name each file and its fix"
            )


class RunCheck:
    """Checks one run."""

    def __init__(self, run_dir: Path, store_root: Path) -> None:
        self._run_dir = run_dir
        self._run_id = run_dir.name
        self._store = ArtifactStore(store_root)
        self._reader, self._findings = FileReader(), Findings()
        self._files: dict[str, Path] = {}
        self._expected: set[str] = set()
        self._nodes: dict[str, Node] = {}

    def check(self, ledgers: Path | None, cached: Callable[[str], Path]) -> Verification:
        """Read the run's ledger, its objects in the store, and its own directory.

        `ledgers` is the folder of ledgers, None for a run that keeps none; `cached` gives the
        place of an md5's object in the DVC cache.
        """
        if ledgers is not None:
            directories = shard_directories(ledgers, self._run_id)
            if not directories and self._run_dir.is_dir():
                fix = "`dvc checkout` or `dvc pull` bring it back if it was kept; else take a copy of it"
                name = f"ledger of run {self._run_id}"
                self._findings.add(name, ledgers / self._run_id, "is missing", fix)
            unfinished = self._run_dir.is_dir() and not (self._run_dir / OUTCOME_FILE).exists()
            for directory in directories:
                entries = ShardCheck(directory, cached, self._reader, self._findings, unfinished).check()
                self._files.update({rel: path for rel, path in entries.items() if path is not None})
                self._expected.update(entries)
        self._check_documents()
        self._check_contents()
        self._check_run_directory(pinned=ledgers is not None)
        return Verification(self._reader.files, self._reader.bytes, self._findings.all())

    def _check_documents(self) -> None:
        for rel, path in self._files.items():
            if kind_of(rel) is None:
                continue
            try:
                self._nodes[rel] = node_of(rel, path.read_bytes())
            except IntegrityError as error:
                self._findings.add(name_of(rel), path, f"cannot be read: {error}", _PULL)
        for node, role, digest in LineageGraph(self._nodes.values()).missing():
            sampled = [int(role.removeprefix("policy v"))] if role.startswith("policy v") else []
            place = parents_by_rule(node.rel, sampled).get(role, "")
            if place in self._expected and place not in self._nodes:
                continue  # named already
            problem = f"names {role} by the digest {digest[:16]}, which no document of the run has"
            self._findings.add(name_of(node.rel), self._files[node.rel], problem, _PULL)
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
                if trained_on is None:
                    continue
                batch = self._nodes.get(batch_entry(step))
                if batch is None:
                    self._check_object(str(trained_on), f"batch {step}", None)
                elif batch.facts["batch_digest"] != trained_on:
                    problem = f"says it was trained on {trained_on[:16]}, which is not that step's batch"
                    self._findings.add(name_of(rel), self._files[rel], problem, _PULL)

    def _check_content(self, rel: str, digest: str) -> None:
        path = self._files.get(rel)
        if path is not None and (found := self._reader.read(path)) and found.blake3 != digest:
            problem = f"has digest {found.blake3[:16]}, but its manifest describes {digest[:16]}"
            self._findings.add(name_of(rel), path, problem, _PULL)
        elif path is None and rel not in self._expected:
            problem = "is no entry of the ledger, but its manifest is"
            self._findings.add(name_of(rel), self._where(rel), problem, _PULL)
        self._check_object(digest, name_of(rel), path)

    def _check_weights(self, node: Node, rel: str) -> None:
        path = self._files.get(rel)
        found = self._reader.read(path) if path is not None else None
        if path is None or found is None:
            return  # a version that was not published has no weights of its own
        held = policy_facts(path).get("weights_digest")
        if held != node.facts.get("weights_digest"):
            problem = f"holds the weights {str(held)[:16]}, not those its manifest describes"
            self._findings.add(name_of(rel), path, problem, _PULL)
        self._check_object(found.blake3, name_of(rel), path)

    def _check_object(self, digest: str, name: str, copy: Path | None) -> None:
        """Compare an object of the store with its name; `copy` is an intact file of the same bytes."""
        path = self._store.path(digest)
        found = self._reader.read(path)
        fix = f"copy {copy} there" if copy else "restore it from a copy of the store"
        if found is None:
            # A ledger brought from elsewhere, or of a run that was given up, needs no store.
            if self._run_dir.is_dir():
                self._findings.add(name, path, "is missing from the store", fix)
        elif found.blake3 != digest:
            problem = f"was altered in the store: its digest is {found.blake3[:16]}"
            self._findings.add(name, path, problem, f"remove the file and {fix}")

    def _check_run_directory(self, *, pinned: bool) -> None:
        kept = self._run_dir / RUN
        pinned_manifest = self._files.get(RUN)
        if kept.is_file() and pinned_manifest and kept.read_bytes() != pinned_manifest.read_bytes():
            fix = f"copy {pinned_manifest} there"
            self._findings.add(name_of(RUN), kept, "differs from the one in the ledger", fix)
        run = self._nodes.get(RUN)
        config = self._run_dir / "config.yaml"
        if run and config.is_file() and digest_bytes(config.read_bytes()) != run.facts.get("config_digest"):
            problem = "is not the configuration that the run's manifest describes"
            self._findings.add("configuration of the run", config, problem, "take it from the manifest")
        if not self._run_dir.is_dir():
            return  # a ledger brought from elsewhere
        try:
            lines = [(rel, facts) for rel, facts, _ in logged_facts(self._run_dir)]
        except (ValueError, KeyError, TypeError) as error:
            path = self._run_dir / "metrics.jsonl"
            self._findings.add("run log", path, f"cannot be read: {error!r}", "restore it")
            return
        for rel, facts in lines:
            self._compare_line(rel, facts, pinned=pinned)

    def _compare_line(self, rel: str, facts: dict[str, Any], *, pinned: bool) -> None:
        node = self._nodes.get(rel)
        if node is None:
            for field, end in _FILES.items():
                if not rel.startswith("versions/") and field in facts and rel not in self._expected:
                    self._check_object(facts[field], name_of(rel.replace(".json", end)), None)
            if pinned and rel not in self._expected and not rel.startswith("batches/"):
                problem = "is missing: the run log has it, the ledger has not"
                self._findings.add(name_of(rel), self._where(rel), problem, _PULL)
            return
        for field, value in facts.items():
            known = node.facts.get(field)
            if field in node.facts and json.dumps(known, sort_keys=True) != json.dumps(value, sort_keys=True):
                problem = f"disagrees with the run log about {field}"
                self._findings.add(name_of(rel), self._files[rel], problem, "one of the two was altered")

    def _where(self, rel: str) -> Path:
        first = next(iter(self._files.items()), None)
        if first is None:
            return Path(rel)
        return first[1].parents[len(Path(first[0]).parts) - 1] / rel


_FILES = {
    "batch_digest": ".parquet",
    "timings_digest": ".timings.parquet",
    "samples_digest": ".samples.parquet",
}
"""Field of a document or of the run log -> the end of the file that it names."""
_PULL = "`dvc pull` brings it back from a remote, or take it from another copy of the run"


def verify_run(run_dir: Path, store_root: Path, project: Path | None, folder: str) -> Verification:
    """Check every artifact of one run; without a DVC `project` it keeps no ledger.

    Raises:
        ConfigError: when `project` is in no DVC project.
    """
    if project is None:
        return check_run(run_dir, store_root, None, Path)
    with dvc_cache(project) as cached:
        return check_run(run_dir, store_root, project / folder, cached)


def check_run(
    run_dir: Path, store_root: Path, ledgers: Path | None, cached: Callable[[str], Path]
) -> Verification:
    """Check every artifact of one run, with the DVC project open already; see `RunCheck.check`."""
    return RunCheck(run_dir, store_root).check(ledgers, cached)


def verify_store(store_root: Path) -> Verification:
    """Check every object of the store against its name, whichever run it belongs to."""
    reader, findings = FileReader(), Findings()
    for path in sorted((store_root / "objects").glob("??/*")):
        if path.name.startswith(".incoming-"):
            continue
        found = reader.read(path)
        if found is not None and found.blake3 != path.name:
            problem = f"was altered: its digest is {found.blake3[:16]}"
            fix = "remove the file and restore it from a copy"
            findings.add(f"object {path.name[:16]} of the store", path, problem, fix)
    return Verification(reader.files, reader.bytes, findings.all())
