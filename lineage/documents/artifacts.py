"""Documents: one manifest for each artifact of a run, naming what it came from by digest.

A document is canonical JSON; its digest names it. ``parents`` maps a role to the digest of
the document it stands for, so a version's digest vouches for its batch, the versions that
sampled it, the run, the code and the machine, back to the base model. Documents hold no clock.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from antiphon.core.config import RunConfig
from antiphon.core.digests import digest_file
from antiphon.core.errors import IntegrityError
from antiphon.lineage.documents.manifest import build_manifest, canonical_json, manifest_digest
from antiphon.lineage.names import (
    CODE,
    HELDOUT,
    MACHINE,
    MODEL,
    ORIGINS,
    RUN,
    TRAIN,
    batch_entry,
    kind_of,
    version_entry,
)


def parents_by_rule(rel: str, sampled: Iterable[int] = ()) -> dict[str, str]:
    """Return the entries that a document of this place comes from, by role.

    Args:
        rel: the document's place in the ledger.
        sampled: for a batch, the versions that sampled its tokens.

    >>> sorted(parents_by_rule("versions/v000003.json"))
    ['batch t2', 'policy v2', 'run']
    """
    known = kind_of(rel)
    match known:
        case ("run", _):
            return dict(ORIGINS)
        case ("version", 0):
            return {"run": RUN, "base model": MODEL}
        case ("version", int(version)):
            before = version - 1
            return {
                "run": RUN,
                f"policy v{before}": version_entry(before),
                f"batch t{before}": batch_entry(before),
            }
        case ("batch", int()):
            return {"run": RUN, "train split": TRAIN} | {f"policy v{v}": version_entry(v) for v in sampled}
        case ("evaluation", int(version)):
            return {"run": RUN, "held-out split": HELDOUT, f"policy v{version}": version_entry(version)}
        case _:
            return {}


def build_document(
    rel: str,
    facts: Mapping[str, Any],
    digest_of: Callable[[str], str | None],
    sampled: Iterable[int] = (),
) -> bytes:
    """Return the document of one artifact.

    Args:
        rel: its place in the ledger, which says its kind.
        facts: plain values without clocks.
        digest_of: returns the digest of the document at another place, or None when it has none;
            such a parent is left out.
        sampled: for a batch, the versions that sampled its tokens.

    Raises:
        IntegrityError: when `rel` is no place of a document.
    """
    known = kind_of(rel)
    if known is None:
        raise IntegrityError(f"{rel} is no place of a document; use the functions named *_entry")
    found = {role: digest_of(place) for role, place in parents_by_rule(rel, sampled).items()}
    parents = {role: digest for role, digest in found.items() if digest is not None}
    return canonical_json({**facts, "kind": known[0], "parents": parents})


def run_document(
    config: RunConfig, run_id: str, source: Path, digest_of: Callable[[str], str | None]
) -> bytes:
    """Return the run's manifest, with its own digest inside, as `manifest.json` keeps it."""
    facts = build_manifest(config, run_id, source)
    plain = json.loads(build_document(RUN, facts, digest_of))
    return canonical_json({**plain, "digest": manifest_digest(plain)})


def origin_documents(config: RunConfig, manifest: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the documents of what a run starts from; two runs from the same have the same."""
    facts = origin_facts(config, manifest, model_files(Path(config.model.path)))
    return {rel: build_document(rel, fact, lambda _: None) for rel, fact in facts.items()}


def origin_facts(
    config: RunConfig, manifest: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return what is said of what a run starts from, by place in the ledger.

    `manifest` is what `build_manifest` returns, `files` the digest of each file of the base model.
    """
    environment = config.environment
    problems = {"name": environment.name, "parameters": environment.parameters, "seed": environment.seed}
    if "environment" in manifest:
        problems["package"] = manifest["environment"]
    return {
        CODE: {name: manifest.get(name, {}) for name in ("code", "locks")},
        MACHINE: {name: manifest.get(name, {}) for name in ("hardware", "threads", "libraries")},
        MODEL: {"path": config.model.path, "files": dict(files)},
        TRAIN: {**problems, "split": "train", "size": environment.train_size},
        HELDOUT: {**problems, "split": "heldout", "size": environment.heldout_size},
    }


def model_files(folder: Path) -> dict[str, str]:
    """Return the digest of each file of a model directory; empty for a model known by name only."""
    if not folder.is_dir():
        return {}
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size)
    return {path.name: digest_file(path) for path in files}


def read_document(body: bytes) -> dict[str, Any]:
    """Return a document's fields.

    Raises:
        IntegrityError: when the bytes are no document in canonical form.
    """
    try:
        plain = json.loads(body)
    except ValueError as error:
        raise IntegrityError(f"the bytes are no manifest: {error}") from error
    if not isinstance(plain, dict) or canonical_json(plain) != body:
        raise IntegrityError("the bytes are no manifest in canonical form")
    return plain


BATCH_FACTS = (
    "trajectories",
    "groups",
    "tokens",
    "reward_mean",
    "staleness_histogram",
    "replaced",
    "samples_digest",
)
"""What a batch's document repeats of its profile."""
VERSION_FACTS = ("step", "version", "weights_digest", "batch_digest", "metrics")
"""What a version's document takes from the run log's line."""


def batch_facts(
    run_id: str, step: int, digest: str, timings_digest: str, profile: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what is said of a batch."""
    known = {name: profile[name] for name in BATCH_FACTS if name in profile}
    own = {"run_id": run_id, "step": step, "batch_digest": digest, "timings_digest": timings_digest}
    return {**known, **own}


def version_facts(run_id: str, version: int, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of a version, from its line of the run log and `retention.recompute_note`.

    >>> sorted(version_facts("demo-1", 0, {"version": 0, "weights_digest": "ab", "timings": {}}))
    ['parent', 'run_id', 'version', 'weights_digest']
    """
    known = {name: line[name] for name in (*VERSION_FACTS, "recompute") if name in line}
    return {**known, "run_id": run_id, "version": version, "parent": max(0, version - 1)}


def evaluation_facts(run_id: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of an evaluation, from its line of the run log."""
    return {**{name: value for name, value in line.items() if name != "timings"}, "run_id": run_id}
