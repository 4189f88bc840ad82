"""Lineage graph: what every artifact of a run came from, and what came of it.

Built from documents alone (`lineage.documents.artifacts`), wherever they were read. An edge is a digest
that one document names and another one has; a digest that none has is kept as a missing parent.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.core.config import build_config
from antiphon.core.digests import digest_bytes
from antiphon.core.errors import ConfigError, IntegrityError
from antiphon.lineage.documents.artifacts import (
    batch_facts,
    build_document,
    evaluation_facts,
    origin_facts,
    parents_by_rule,
    read_document,
    version_facts,
)
from antiphon.lineage.layout import shard_directories
from antiphon.lineage.names import (
    HELDOUT,
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

LEAST_DIGITS = 4
_DIGEST_START = re.compile(f"[0-9a-f]{{{LEAST_DIGITS},64}}")
"""Hex digits a digest must be named by."""

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
        names = {"version": "policy v", "batch": "batch t", "evaluation": "evaluation of v"}
        return self.kind if self.number is None else f"{names[self.kind]}{self.number}"

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
            found = self.with_digest(plain)
            if len(found) > 1:
                names = ", ".join(node.name for node in found)
                raise ConfigError(
                    f"{plain} is the start of several digests ({names}); give more of its digits"
                )
            if found:
                return found[0]
            raise ConfigError(f"no artifact of the run has a digest that begins with {plain}")
        raise ConfigError(
            f"{words!r} names no run and no artifact; write v12, batch 7, evaluation 10, run, code, machine, "
            f"model, train, heldout, or at least {LEAST_DIGITS} digits of a digest"
        )

    def with_digest(self, start: str) -> list[Node]:
        """Return the nodes whose document's or artifact's digest begins with `start`."""
        found = [
            node
            for node in self.nodes.values()
            if any(digest.startswith(start) for digest in (node.digest, *node.contents.values()))
        ]
        return sorted(found, key=_order)

    def summary(self) -> str:
        """Say how many of what there are."""
        said = []
        for kind, letter, plural in (
            ("version", "v", "versions"),
            ("batch", "t", "batches"),
            ("evaluation", "v", "evaluations"),
        ):
            numbers = sorted(n.number for n in self.nodes.values() if n.kind == kind and n.number is not None)
            said.append(f"{plural} {ranges(numbers, letter)}" if numbers else f"no {plural}")
        return ", ".join(said)


def build_graph(documents: Mapping[str, bytes]) -> LineageGraph:
    """Return the graph of documents given by their place in the ledger.

    Raises:
        IntegrityError: when the bytes of one are no document.
    """
    nodes = []
    for rel, body in documents.items():
        try:
            nodes.append(node_of(rel, body))
        except IntegrityError as error:
            raise IntegrityError(
                f"{name_of(rel)} ({rel}): {error}; `antiphon lineage RUN --verify` says how to fix it"
            ) from error
    return LineageGraph(nodes)


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
    for rel, facts, sampled in logged_facts(run_dir):
        known = kind_of(rel)
        if known is not None and known[0] == "version":
            facts |= recompute_note(facts["version"], config)
        add(rel, facts, sampled)


def logged_facts(run_dir: Path) -> Iterator[tuple[str, dict[str, Any], tuple[int, ...]]]:
    """Yield what a run's log says of its artifacts: place of the document, facts, versions that sampled it.

    Without the batch itself only the oldest version of each trajectory is known.
    """
    run_id = run_dir.name
    if (base := read_base(run_dir)) is not None:
        yield version_entry(0), version_facts(run_id, 0, base), ()
    for line in read_steps(run_dir):
        step, version, batch = int(line["step"]), int(line["version"]), line.get("batch")
        if batch is not None:
            digest, timings = line["batch_digest"], line["timings"]["timings_digest"]
            oldest = {step - int(staleness) for staleness in batch.get("staleness_histogram", {})}
            yield batch_entry(step), batch_facts(run_id, step, digest, timings, batch), tuple(sorted(oldest))
        yield version_entry(version), version_facts(run_id, version, line), ()
    for line in read_evaluations(run_dir):
        yield evaluation_entry(int(line["version"])), evaluation_facts(run_id, line), ()


def _plain(rel: str, body: bytes) -> dict[str, Any]:
    try:
        plain = json.loads(body)
    except ValueError as error:
        raise IntegrityError(
            f"{name_of(rel)} ({rel}) cannot be read: {error}; "
            "`antiphon lineage RUN --verify` says how to fix it"
        ) from error
    return dict(plain)
