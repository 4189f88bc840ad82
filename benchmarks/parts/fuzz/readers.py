"""Fuzz readers: everything that turns bytes from outside into something, with sound bytes to start from.

A reader may return, or refuse with an error of our own tree. Anything else is a crash.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from antiphon.api.manifest import check_manifest, manifest_from_bytes, manifest_to_bytes
from antiphon.api.policy_file import policy_facts
from antiphon.benchmarks.parts.nightly.table import read_table
from antiphon.core.drafting.history_codec import EncodedHistory, decode_history
from antiphon.core.loop import events as e
from antiphon.core.records import (
    BatchRow,
    FinishReason,
    GroupSubmission,
    PastCompletion,
    PromptHistory,
    RowTiming,
    Trajectory,
    VersionSpan,
)
from antiphon.core.trust.access_tokens import Scope, TokenClaims
from antiphon.lineage.documents.artifacts import read_document
from antiphon.lineage.layout import Entry, journal_line, read_journal, read_pointer, read_tree
from antiphon.lineage.rollout_table import decode_batch, decode_timings, encode_batch, encode_timings
from antiphon.net.security.access_tokens import load_claims, make_token
from antiphon.net.security.credentials import load_credentials
from antiphon.net.security.keys import signing_key
from antiphon.net.wire import FLOAT32, array_from_bytes
from antiphon.services.coordinator.journal import payloads
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.weights.payload_store import PAYLOADS, PayloadStore
from antiphon.weights.snapshot import weights_of, write_snapshot
from antiphon.weights.verified_weights import open_snapshot


@dataclass(frozen=True, slots=True)
class Reader:
    """Something that takes bytes."""

    name: str
    sound: tuple[bytes, ...]
    """What it reads without complaint; damaged by the fuzzer."""
    read: Callable[[bytes], object]


def readers(folder: Path) -> Iterator[Reader]:
    """Yield every reader; those of files write the bytes into `folder` first."""
    store = PayloadStore(folder / PAYLOADS)
    tensors = {"a.weight": torch.arange(24.0).reshape(4, 6), "b": torch.zeros(3, dtype=torch.bfloat16)}
    manifest = write_snapshot(store, "run-1", 1, weights_of(tensors), 1024)
    submission = GroupSubmission("0" * 32, "g0000000", "w-1", (trajectory(),), 0.5)
    history = PromptHistory("p", 1, (PastCompletion(np.arange(5, dtype=np.int32), 0, 1, 0, 1.0),))

    def whole(payload: bytes) -> None:
        open_snapshot(manifest_from_bytes(payload), store)

    yield Reader("manifest", (manifest_to_bytes(manifest),), whole)
    yield Reader("submission payload", (payloads.dump_submission(submission),), payloads.load_submission)
    yield Reader(
        "manifest payload",
        (payloads.dump_manifest(manifest),),
        lambda b: check_manifest(payloads.load_manifest(b)),
    )
    yield Reader("history payload", (payloads.dump_history(history),), payloads.load_history)
    yield Reader("packed history", (payloads.dump_history(history),), packed_history)
    yield Reader("logprobs", (b"\x00" * 8,), lambda payload: array_from_bytes(payload, FLOAT32))
    yield Reader("batch table", (encode_batch([batch_row()]),), decode_batch)
    yield Reader("timings table", (encode_timings([timing()]),), decode_timings)
    yield from texts()
    yield from files(folder)


def texts() -> Iterator[Reader]:
    """Yield the readers of text."""
    claims = TokenClaims("0" * 32, "run-1", "w", (Scope.LEASE,), 2**31, 4)
    key = signing_key(bytes(32))
    token = make_token(claims, key).encode()
    yield Reader("access token", (token,), lambda b: load_claims(b.decode("latin-1"), key.public))
    yield Reader("claims", (token,), lambda b: load_claims(b.decode("latin-1"), None))
    kinds = e.event_kinds()
    bodies = tuple(f"{kind} {json.dumps(event_fields(kind))}".encode() for kind in kinds)
    yield Reader("event", bodies, lambda b: e.load_event(*b.decode("latin-1").partition(" ")[::2]))
    entry = Entry("versions/v000001.json", "0" * 32, 10)
    tree = json.dumps([{"md5": entry.md5, "relpath": entry.rel}]).encode()
    yield Reader("ledger tree", (tree,), read_tree)
    yield Reader(
        "ledger journal", (journal_line(entry).encode(),), lambda b: read_journal(b.decode("latin-1"))
    )
    yield Reader("ledger pointer", (b"outs:\n- md5: 00.dir\n  size: 1\n",), read_pointer)
    yield Reader("document", (b'{"a":1}',), read_document)


def files(folder: Path) -> Iterator[Reader]:
    """Yield the readers of files."""

    def through(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        def write_and_read(payload: bytes) -> object:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(payload)
            return read(path)

        return write_and_read

    def bundle(path: Path) -> object:
        for name in ("ca.pem", "cert.pem", "key.pem"):
            (path.parent / name).write_bytes(b"x")
            (path.parent / name).chmod(0o600)
        return load_credentials(path.parent)

    partial_groups = CheckpointStore(folder / "partial_groups", 2)
    header = json.dumps({"__metadata__": {"antiphon": json.dumps({"run": "r"})}}).encode()
    policy = len(header).to_bytes(8, "little") + header
    table = json.dumps({"format": 1, "commit": "c", "at": "t"}).encode()
    contents = json.dumps({"state/model.pt": "0" * 64}).encode()
    yield Reader("public key", (b"0" * 64,), through("bundle/tokens.pub", bundle))
    yield Reader("policy file", (policy,), through("policy.safetensors", policy_facts))
    yield Reader("benchmark table", (table,), through("table.json", read_table))
    yield Reader(
        "checkpoint list",
        (contents,),
        through("partial_groups/v00000001/contents.json", lambda path: partial_groups.newest_sound(9)),
    )


def packed_history(payload: bytes) -> object:
    """Read the bytes as a history's compressed tokens, of lengths that are often right."""
    encoded = EncodedHistory("p", 1, (5,), (0,), (1,), (0,), (1.0,), payload)
    return decode_history(encoded)


def trajectory() -> Trajectory:
    """Return a sound trajectory."""
    return Trajectory(
        np.arange(4, dtype=np.int32),
        -np.ones(4, dtype=np.float32),
        (VersionSpan(0, 0, 4),),
        FinishReason.STOP,
        sample_index=0,
        seed=7,
    )


def batch_row() -> BatchRow:
    """Return a sound row."""
    made = trajectory()
    return BatchRow(
        made.token_ids,
        made.logprobs,
        made.spans,
        made.finish_reason,
        group_id="g0000000",
        prompt_key="p",
        sample_index=0,
        prompt_token_ids=np.arange(3, dtype=np.int32),
        reward=1.0,
        advantage=0.5,
    )


def timing() -> RowTiming:
    """Return a sound timing."""
    return RowTiming("g0000000", 0, "w-1", "0" * 32, 1, 0.5, 1.0, 2.0, 3.0)


def event_fields(kind: str) -> Mapping[str, Any]:
    """Return fields of roughly the right types for an event of a kind."""
    cls = next(c for c in e.JournalEvent.__subclasses__() if getattr(c, "kind", None) == kind)
    values = {"int": 1, "str": "x", "float": 0.5, "bool": True}
    return {f.name: values.get(str(f.type).removesuffix(" | None"), [1]) for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
