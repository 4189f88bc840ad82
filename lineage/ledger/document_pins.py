"""Document pins: a run's artifacts enter the ledger together with the documents that explain them.

Every document is an object of the store under its digest and an entry of the ledger under its
name. What is pinned stays as it is: repeating a call, also in another process, changes nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_bytes, digest_file
from antiphon.core.errors import IntegrityError
from antiphon.lineage.documents.artifacts import (
    batch_facts,
    build_document,
    evaluation_facts,
    origin_documents,
    run_document,
    version_facts,
)
from antiphon.lineage.documents.manifest import build_manifest, source_tree
from antiphon.lineage.ledger.pins import Ledger
from antiphon.lineage.names import RUN, batch_entry, evaluation_entry, version_entry
from antiphon.lineage.rollout_table import sampled_versions
from antiphon.lineage.store.artifact_store import ArtifactStore
from antiphon.system.files import write_atomically


class DocumentPins:
    """Pins of one run; used by one thread at a time, parents before children."""

    def __init__(self, ledger: Ledger, store: ArtifactStore, run_id: str) -> None:
        self.ledger = ledger
        self._store = store
        self._run_id = run_id
        self._digests: dict[str, str] = {}

    def run(self, config: RunConfig, kept: Path) -> None:
        """Pin what the run starts from and its manifest, which is also written to `kept`.

        A manifest that is there already is pinned as it is: it says how the run began.
        """
        source = source_tree()
        for rel, body in origin_documents(config, build_manifest(config, self._run_id, source)).items():
            if self.ledger.md5(rel) is None:
                self._append(rel, body)
        if not kept.exists():
            write_atomically(kept, run_document(config, self._run_id, source, self.digest_of))
        if self.ledger.md5(RUN) is None:
            self._append(RUN, kept.read_bytes())

    def batch(self, step: int, digest: str, timings_digest: str, profile: Mapping[str, Any]) -> str:
        """Pin the two files of a batch and its document; return the md5 of what the step used."""
        rel = batch_entry(step)
        md5 = self.ledger.append(batch_entry(step, "parquet"), self._object(digest))
        self.ledger.append(batch_entry(step, "timings.parquet"), self._object(timings_digest))
        self._samples(batch_entry(step, "samples.parquet"), profile)
        if self.ledger.md5(rel) is None:
            facts = batch_facts(self._run_id, step, digest, timings_digest, profile)
            sampled = sampled_versions(self._store.get(digest))
            self._append(rel, build_document(rel, facts, self.digest_of, sampled))
        return md5

    def version(self, version: int, facts: Mapping[str, Any]) -> str:
        """Pin a version's document and return its md5."""
        return self._document(version_entry(version), version_facts(self._run_id, version, facts))

    def evaluation(self, version: int, facts: Mapping[str, Any]) -> str:
        """Pin an evaluation's document and its kept answers; return the document's md5."""
        self._samples(evaluation_entry(version, "samples.parquet"), facts)
        return self._document(evaluation_entry(version), evaluation_facts(self._run_id, facts))

    def _samples(self, rel: str, facts: Mapping[str, Any]) -> None:
        if digest := facts.get("samples_digest"):
            self.ledger.append(rel, self._object(digest))

    def digest_of(self, rel: str) -> str | None:
        """Return the digest of a pinned document, also of an earlier process; None without one."""
        if rel not in self._digests:
            path = self.ledger.path(rel)
            if path is None or not path.is_file():
                return None
            self._digests[rel] = digest_file(path)
        return self._digests[rel]

    def _document(self, rel: str, facts: Mapping[str, Any]) -> str:
        known = self.ledger.md5(rel)
        return known or self._append(rel, build_document(rel, facts, self.digest_of))

    def _append(self, rel: str, body: bytes) -> str:
        md5 = self.ledger.append(rel, self._store.path(self._store.put(body)))
        self._digests[rel] = digest_bytes(body)
        return md5

    def _object(self, digest: str) -> Path:
        if not self._store.has(digest):
            raise IntegrityError(f"object {digest} is not in {self._store.root}, so it cannot be pinned")
        return self._store.path(digest)
