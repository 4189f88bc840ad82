"""Graph reader: the documents of a run, from its ledger, or drawn from its run log.

The ledger's documents are read as they are. A run that keeps no ledger is described from its
manifest and its run log by the same rules.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.core.config import build_config
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import IntegrityError
from antiphon.lineage.documents.artifacts import build_document, origin_facts, parents_by_rule
from antiphon.lineage.documents.facts import batch_facts, evaluation_facts, version_facts
from antiphon.lineage.layout import shard_directories
from antiphon.lineage.names import RUN, batch_entry, evaluation_entry, kind_of, name_of, version_entry
from antiphon.lineage.retention import recompute_note
from antiphon.lineage.run_log import read_base, read_evaluations, read_steps


def read_documents(ledger: Path, run_id: str) -> dict[str, bytes]:
    """Return the documents that lie in a run's ledger, by their place there; {} without one."""
    found = {}
    for directory in shard_directories(ledger, run_id):
        for path in sorted(directory.rglob("*.json")):
            rel = path.relative_to(directory).as_posix()
            if kind_of(rel):
                found[rel] = path.read_bytes()
    return found


def all_documents(run_dir: Path, ledger: Path | None) -> dict[str, bytes]:
    """Return the documents of a run; what its ledger has not got is drawn from its run log.

    Args:
        run_dir: the run's directory.
        ledger: the folder of ledgers; None for a run that keeps none.

    Raises:
        IntegrityError: when the run's manifest cannot be read.
    """
    found = read_documents(ledger, run_dir.name) if ledger is not None else {}
    if RUN not in found:
        kept = run_dir / RUN
        if not kept.is_file():
            return found  # nothing was recorded yet
        found[RUN] = kept.read_bytes()
    _draw(found, run_dir)
    return found


def _draw(found: dict[str, bytes], run_dir: Path) -> None:
    def digest_of(rel: str) -> str | None:
        return digest_bytes(found[rel]) if rel in found else None

    def add(rel: str, facts: Mapping[str, Any], sampled: tuple[int, ...] = ()) -> None:
        if rel not in found:
            found[rel] = build_document(rel, facts, digest_of, sampled)
        elif parents_by_rule(rel) and not (plain := _plain(rel, found[rel])).get("parents"):
            found[rel] = build_document(rel, plain, digest_of, sampled)  # a run without a ledger

    manifest = _plain(RUN, found[RUN])
    config = build_config(dict(manifest.get("config", {})))
    for rel, facts in origin_facts(config, manifest, files={}).items():
        add(rel, facts)
    add(RUN, manifest)
    run_id = run_dir.name
    base = read_base(run_dir)
    if base is not None or version_entry(0) in found:
        add(version_entry(0), version_facts(run_id, 0, base or {}))
    for line in read_steps(run_dir):
        step, version = int(line["step"]), int(line["version"])
        if line["batch"] is not None:
            facts = batch_facts(
                run_id, step, line["batch_digest"], line["timings"]["timings_digest"], line["batch"]
            )
            # Without the batch itself only the oldest version of each trajectory is known.
            oldest = {step - int(staleness) for staleness in line["batch"]["staleness_histogram"]}
            add(batch_entry(step), facts, tuple(sorted(oldest)))
        add(
            version_entry(version),
            version_facts(run_id, version, {**line, **recompute_note(version, config)}),
        )
    for line in read_evaluations(run_dir):
        version = int(line["version"])
        add(evaluation_entry(version), evaluation_facts(run_id, line))


def _plain(rel: str, body: bytes) -> dict[str, Any]:
    try:
        plain = json.loads(body)
    except ValueError as error:
        raise IntegrityError(
            f"{name_of(rel)} ({rel}) cannot be read: {error}; "
            "`antiphon lineage RUN --verify` says how to fix it"
        ) from error
    return dict(plain)
