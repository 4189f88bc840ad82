"""Documents: one manifest for each artifact of a run, naming what it came from by digest, and their graph.

A document is canonical JSON; its digest names it. ``parents`` maps a role to the digest of
the document it stands for, so a version's digest vouches for its batch, the versions that
sampled it, the run, the code and the machine, back to the base model. Documents hold no clock.

The graph is built from documents alone, wherever they were read. An edge is a digest that one document names
and another one has; a digest that none has is kept as a missing parent.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.core.config import RunConfig, build_config
from antiphon.core.digests import digest_bytes, digest_file
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.lineage.documents.manifest import build_manifest, canonical_json, manifest_digest
from antiphon.lineage.layout import ledger_files
from antiphon.lineage.names import (
    CODE,
    HELDOUT,
    MACHINE,
    MODEL,
    ORIGINS,
    RUN,
    TRAIN,
    batch_entry,
    evaluation_entry,
    kind_of,
    name_of,
    version_entry,
)
from antiphon.lineage.retention import recompute_note
from antiphon.lineage.run_log import read_base, read_evaluations, read_steps

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
VERSION_FACTS = ("step", "version", "weights_digest", "batch_digest", "metrics", "exactness")
"""What a version's document takes from the run log's line."""
LEAST_DIGITS = 4
"""Hex digits a digest must be named by."""
_DIGEST_START = re.compile(f"[0-9a-f]{{{LEAST_DIGITS},64}}")
_CONTENTS = {
    "batch": ("batch_digest", "timings_digest", "samples_digest"),
    "evaluation": ("samples_digest",),
    "version": ("weights_digest",),
    "run": ("digest",),
}
"""Fields of a document that hold the digest of what it describes; it can be found by them too."""
_WORDS = {**ORIGINS, "run": RUN, "model": MODEL, "train": TRAIN, "heldout": HELDOUT, "held-out": HELDOUT}
_NUMBERED = (
    (re.compile(r"(?:v|version |policy |policy v)(\d+)"), version_entry),
    (re.compile(r"(?:t|batch |batch t|step )(\d+)"), batch_entry),
    (re.compile(r"evaluation (?:of )?v?(\d+)"), evaluation_entry),
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


def line_facts(run_id: str, line: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a line of the run log says of artifacts, by place in the ledger: batch and version, or one.

    >>> line_facts("demo-1", {"version": 0, "weights_digest": "ab"})
    {'versions/v000000.json': {'version': 0, 'weights_digest': 'ab', 'run_id': 'demo-1', 'parent': 0}}
    """
    version, batch, run = int(line["version"]), line.get("batch"), {"run_id": run_id}
    if "reward_mean" in line:  # an evaluation
        return {evaluation_entry(version): {k: v for k, v in line.items() if k != "timings"} | run}
    known = {name: line[name] for name in VERSION_FACTS if name in line}
    made = {version_entry(version): {**known, **run, "parent": max(0, version - 1)}}
    if batch is None:
        return made
    known = {name: batch[name] for name in BATCH_FACTS if name in batch}
    known |= {"batch_digest": line["batch_digest"], "timings_digest": line["timings"]["timings_digest"]}
    return {batch_entry(int(line["step"])): {**known, **run, "step": int(line["step"])}} | made


@dataclass(frozen=True, slots=True)
class Node:
    """One artifact: its document and the documents that this names."""

    rel: str
    """The document's place in the ledger."""
    kind: str
    number: int | None
    """Version or step; None for what a run has one of."""
    digest: str
    """blake3 of the document."""
    facts: Mapping[str, Any]
    """The document's fields, kind and parents left out."""
    parents: Mapping[str, str]
    """Role -> digest of a document."""

    @property
    def name(self) -> str:
        """Return the short name, as roles use it."""
        words = {"version": "policy v", "batch": "batch t", "evaluation": "evaluation of v"}
        return self.kind if self.number is None else f"{words[self.kind]}{self.number}"

    @property
    def contents(self) -> dict[str, str]:
        """Return the digests of the artifacts the document describes, by field."""
        fields = _CONTENTS.get(self.kind, ())
        return {field: str(self.facts[field]) for field in fields if field in self.facts}


class LineageGraph:
    """Documents of one run and the edges between them."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes: dict[str, Node] = {node.rel: node for node in nodes}
        self._by_digest: dict[str, Node] = {node.digest: node for node in self.nodes.values()}
        self._children: defaultdict[str, list[Node]] = defaultdict(list)
        for node in self.nodes.values():
            for digest in sorted(set(node.parents.values())):
                self._children[digest].append(node)

    def parents(self, node: Node) -> dict[str, Node | None]:
        """Return the parents by role; None where no document has the digest."""
        ordered = sorted(node.parents, key=lambda role: (role.rstrip("0123456789"), len(role), role))
        return {role: self._by_digest.get(node.parents[role]) for role in ordered}

    def children(self, node: Node) -> list[Node]:
        """Return the documents that name this one as a parent, in order of kind and number."""
        return sorted(self._children[node.digest], key=_order)

    def ancestors(self, node: Node) -> list[Node]:
        """Return everything an artifact came from, in order of kind and number."""
        seen: dict[str, Node] = {}
        waiting = [node]
        while waiting:
            for parent in self.parents(waiting.pop()).values():
                if parent is not None and parent.rel not in seen:
                    seen[parent.rel] = parent
                    waiting.append(parent)
        return sorted(seen.values(), key=_order)

    def missing(self) -> list[tuple[Node, str, str]]:
        """Return (document, role, digest) for every parent that no document has."""
        return [
            (node, role, digest)
            for node in sorted(self.nodes.values(), key=_order)
            for role, digest in sorted(node.parents.items())
            if digest not in self._by_digest
        ]

    def find(self, words: str) -> Node:
        """Return the node that words mean: `v12`, `batch 7`, `evaluation 10`, `code`, a digest's start.

        Raises:
            ConfigError: when they mean nothing, or more than one thing, in this graph.
        """
        plain = " ".join(words.lower().split())
        if place := _place(plain):
            if place in self.nodes:
                return self.nodes[place]
            raise ConfigError(f"the run has no {plain}; it has {self.summary()}")
        if _DIGEST_START.fullmatch(plain):
            nodes = sorted(self.nodes.values(), key=_order)
            found = [n for n in nodes if any(d.startswith(plain) for d in (n.digest, *n.contents.values()))]
            if len(found) > 1:
                known = ", ".join(node.name for node in found)
                raise ConfigError(
                    f"{plain} is the start of several digests ({known}); give more of its digits"
                )
            if found:
                return found[0]
            raise ConfigError(f"no artifact of the run has a digest that begins with {plain}")
        raise ConfigError(
            f"{words!r} names no run and no artifact; write v12, batch 7, evaluation 10, run, code, machine, "
            f"model, train, heldout, or at least {LEAST_DIGITS} digits of a digest"
        )

    def summary(self) -> str:
        """Say how many of what there are."""
        return ", ".join(summed(self.nodes.values(), none=True))


def build_graph(documents: Mapping[str, bytes]) -> LineageGraph:
    """Return the graph of documents given by their place in the ledger.

    Raises:
        IntegrityError: when the bytes of one are no document.
    """
    return LineageGraph(map(_named, documents, documents.values()))


def _named(rel: str, body: bytes) -> Node:
    try:
        return node_of(rel, body)
    except IntegrityError as error:
        raise IntegrityError(
            f"{name_of(rel)} ({rel}): {error}; `antiphon lineage RUN --verify` says how to fix it"
        ) from error


def node_of(rel: str, body: bytes) -> Node:
    """Return one document as a node.

    Raises:
        IntegrityError: when the bytes are no document.
    """
    known = kind_of(rel) or ("other", None)
    plain = read_document(body)
    parents = plain.get("parents", {})
    facts = {name: value for name, value in plain.items() if name not in {"kind", "parents"}}
    return Node(rel, known[0], known[1], digest_bytes(body), facts, parents)


def summed(nodes: Iterable[Node], *, none: bool = False) -> list[str]:
    """Say which versions, batches and evaluations there are; with `none`, also of which there are none."""
    said, known = [], list(nodes)
    for kind, plural, letter in (
        ("version", "versions", "v"),
        ("batch", "batches", "t"),
        ("evaluation", "evaluations", "v"),
    ):
        numbers = sorted(node.number for node in known if node.kind == kind and node.number is not None)
        if numbers or none:
            said.append(f"{plural} {ranges(numbers, letter)}" if numbers else f"no {plural}")
    return said


def ranges(numbers: Sequence[int], letter: str) -> str:
    """Write ascending numbers with the gaps left out.

    >>> ranges([0, 1, 2, 5, 7, 8], "v")
    'v0-v2, v5, v7-v8'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(f"{letter}{end}" for end in part) for part in parts)


def means_artifact(words: str) -> bool:
    """Return whether words have the form that names an artifact, whatever the run."""
    plain = " ".join(words.lower().split())
    return _place(plain) is not None or bool(_DIGEST_START.fullmatch(plain))


def _place(plain: str) -> str | None:
    if plain in _WORDS:
        return _WORDS[plain]
    for pattern, entry in _NUMBERED:
        if match := pattern.fullmatch(plain):
            return entry(int(match[1]))
    return None


_KINDS = (*ORIGINS, "run", "version", "batch", "evaluation")


def _order(node: Node) -> tuple[int, int, str]:
    rank = _KINDS.index(node.kind) if node.kind in _KINDS else len(_KINDS)
    return rank, node.number if node.number is not None else -1, node.rel


def read_documents(ledger: Path, run_id: str) -> dict[str, bytes]:
    """Return the documents that lie in a run's ledger, by their place there; {} without one."""
    files = sorted(ledger_files(ledger, run_id).items())
    return {rel: path.read_bytes() for rel, path in files if kind_of(rel)}


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
    manifest = _named(RUN, found[RUN]).facts
    config = build_config(dict(manifest.get("config", {})))

    def digest_of(rel: str) -> str | None:
        return digest_bytes(found[rel]) if rel in found else None

    def draw(rel: str, facts: Mapping[str, Any], sampled: tuple[int, ...] = ()) -> None:
        if rel in found:
            known = _named(rel, found[rel])
            if known.parents or not parents_by_rule(rel):
                return
            facts = known.facts  # of a run without a ledger
        found[rel] = build_document(rel, facts, digest_of, sampled)

    for rel, facts in origin_facts(config, manifest, files={}).items():
        draw(rel, facts)
    draw(RUN, manifest)
    for rel, line, sampled in logged_facts(run_dir):
        note = recompute_note(line["version"], config) if rel == version_entry(line.get("version", 0)) else {}
        draw(rel, {**line, **note}, sampled)
    return found


def logged_facts(run_dir: Path) -> Iterator[tuple[str, dict[str, Any], tuple[int, ...]]]:
    """Yield what a run's log says of its artifacts: place of the document, facts, versions that sampled it.

    Without the batch itself only the oldest version of each trajectory is known.
    """
    base = read_base(run_dir)
    for line in (*([] if base is None else [base]), *read_steps(run_dir), *read_evaluations(run_dir)):
        histogram = (line.get("batch") or {}).get("staleness_histogram", {})
        oldest = tuple(sorted({int(line["step"]) - int(staleness) for staleness in histogram}))
        for rel, facts in line_facts(run_dir.name, line).items():
            yield rel, facts, oldest
