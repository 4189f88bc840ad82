"""Fuzz: every RPC and every reader gets what it should never get.

Messages are made from their own descriptors; bytes are sound ones that were damaged; what a worker sends is
also sound but for extreme numbers, and everyone else asks for everything after each. A crash is
any answer but a sentence of ours; a change is anything that a refused call left behind. What is
found is printed with what provokes it; the same seed makes the same inputs.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from antiphon.api.manifest import check_manifest, manifest_from_bytes, manifest_to_bytes
from antiphon.api.policy_file import policy_facts
from antiphon.benchmarks.parts.nightly.table import read_table
from antiphon.core.drafting.history_codec import EncodedHistory, decode_history
from antiphon.core.errors import AntiphonError
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
from antiphon.lineage.documents.graph import read_document
from antiphon.lineage.layout import read_pointer
from antiphon.lineage.rollout_table import decode_batch, decode_timings, encode_batch, encode_timings
from antiphon.net import wire
from antiphon.net.rpc.codec import array_from_bytes, known
from antiphon.net.security.access_tokens import load_claims, make_token
from antiphon.net.security.credentials import load_credentials
from antiphon.net.security.keys import signing_key
from antiphon.net.wire import FLOAT32
from antiphon.protos import (
    broadcast_pb2,
    coordinator_pb2,
    learner_pb2,
    records_pb2,
    reward_pb2,
    rollout_pb2,
    scorer_pb2,
)
from antiphon.services.coordinator.journal import payloads
from antiphon.services.learner.checkpoints import CheckpointStore
from antiphon.weights.payload_store import PAYLOADS, PayloadStore
from antiphon.weights.snapshot import open_snapshot, weights_of, write_snapshot
from tests.support.fuzzed_services import (
    KINDS,
    ClaimedRun,
    RunningServices,
    known_values,
)


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
    yield Reader("submission payload", (payloads.dump(submission),), payloads.load_submission)
    yield Reader(
        "manifest payload",
        (payloads.dump(manifest),),
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


DEEPEST = 4
"""Messages within messages; deeper ones stay empty."""
MOST = 5
"""Elements of a repeated field."""

_INT32 = st.sampled_from([0, 1, 2, 3, 7, 63, 64, -1, 2**31 - 1, -(2**31)]) | st.integers(-(2**31), 2**31 - 1)
_INT64 = st.sampled_from([0, 1, 2, 3, 4, -1, 2**62, 2**63 - 1, -(2**63)]) | st.integers(-(2**63), 2**63 - 1)
_UINT64 = st.sampled_from([0, 1, 2**64 - 1]) | st.integers(0, 2**64 - 1)
_DOUBLE = (
    st.sampled_from([0.0, 1.0, 0.5, -1.0, float("nan"), float("inf"), -float("inf"), 1e308]) | st.floats()
)
_TEXT = st.sampled_from(
    ["", "w", "../x", "/etc/passwd", "a\x00b", "\u202e", "x" * 5000, "stop", "length"]
) | st.text(max_size=40)
_BYTES = st.sampled_from([b"", b"\x00" * 4, b"\x00" * 8, b"\xff" * 7, b"\x00\x00\xc0\x7f"]) | st.binary(
    max_size=64
)

_KINDS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_INT32: _INT32,
    FieldDescriptor.TYPE_INT64: _INT64,
    FieldDescriptor.TYPE_FIXED64: _UINT64,
    FieldDescriptor.TYPE_UINT64: _UINT64,
    FieldDescriptor.TYPE_DOUBLE: _DOUBLE,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: _TEXT,
    FieldDescriptor.TYPE_BYTES: _BYTES,
}


def messages(
    descriptor: Descriptor, known: Mapping[str, Sequence[Any]] | None = None, depth: int = 0
) -> st.SearchStrategy[Any]:
    """Return a strategy for messages of a type.

    Args:
        descriptor: the type.
        known: field name -> values worth trying, drawn half of the time.
        depth: how deep the message stands in another one.
    """
    known = known or {}
    fields = {
        field.name: _field(field, known, depth)
        for field in descriptor.fields
        if depth < DEEPEST or field.type != FieldDescriptor.TYPE_MESSAGE
    }
    made = st.fixed_dictionaries({}, optional=fields)
    return made.map(lambda values: GetMessageClass(descriptor)(**values))


def _field(field: Any, known: Mapping[str, Sequence[Any]], depth: int) -> st.SearchStrategy[Any]:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        key, value = (inner.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_value(key, known, depth), _value(value, known, depth), max_size=MOST)
    value = _value(field, known, depth)
    return st.lists(value, max_size=MOST) if field.is_repeated else value


def _value(field: Any, known: Mapping[str, Sequence[Any]], depth: int) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return messages(field.message_type, known, depth + 1)
    value = _KINDS[field.type]
    text = field.type == FieldDescriptor.TYPE_STRING  # two fields of one name may differ
    tried = [one for one in known.get(field.name, ()) if isinstance(one, str) is text]
    return st.sampled_from(tried) | value if tried else value


def damaged(sound: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Return a strategy for bytes near sound ones: cut, flipped, spliced, doubled; or of no kind at all."""

    @st.composite
    def near(draw: Any) -> bytes:
        payload = bytearray(draw(st.sampled_from(list(sound))))
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, max(0, len(payload) - 1)))
            match draw(st.sampled_from(["cut", "flip", "set", "insert", "splice", "drop"])):
                case "cut":
                    del payload[at:]
                case "flip" if payload:
                    payload[at] ^= 1 << draw(st.integers(0, 7))
                case "set" if payload:
                    payload[at] = draw(st.sampled_from([0, 0x7F, 0x80, 0xFF, 0x22, 0x5B, 0x7B, 0x2D, 0x39]))
                case "insert":
                    payload[at:at] = draw(st.binary(min_size=1, max_size=8))
                case "splice":
                    other = draw(st.sampled_from(list(sound)))
                    payload[at:] = other[draw(st.integers(0, max(0, len(other) - 1))) :]
                case "drop":
                    del payload[at : at + draw(st.integers(1, 16))]
                case _:
                    pass  # nothing left to change
        return bytes(payload)

    return near() | st.binary(max_size=200)


TOKENS = b"\x01\x00\x00\x00\x07\x00\x00\x00"
SCORED = {"prompt_token_ids": [TOKENS], "completions": [TOKENS, b""]}
"""Of the scorer, whose tokens are bytes: two of its model's."""
DEADLINE_S = 0.2
"""Of each call; a long poll that outlives it was held open as asked, which is no crash."""
ENDINGS = frozenset({"Finish", "Pause"})
"""Calls after which nothing more could be reached; they get damaged bytes alone."""
PARSED = (
    "worker_hello",
    "worker_heartbeat",
    "lease_request",
    "group_submission",
    "sample_reward",
    "step_commit",
    "snapshot_manifest",
    "lease_reply",
    "heartbeat_reply",
    "stage_reply",
    "run_status",
    "event",
    "worker_welcome",
    "pull_reply",
    "group_to_audit",
    "sample_statistics",
)
"""Messages that somebody translates; the one that sent them may be anybody."""

Run = Callable[[Any], str | None]
"""Feeds one input and returns what is wrong, or None."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something to feed."""

    name: str
    inputs: st.SearchStrategy[Any]
    feed: Run


@dataclass
class Tally:
    """What came of it."""

    fed: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    crashes: dict[str, str] = field(default_factory=dict)
    """Target and kind -> the first input that showed it."""
    changes: dict[str, str] = field(default_factory=dict)


def feed(target: Target, seed: int, examples: int, tally: Tally) -> None:
    """Give a target this many inputs and write down what is wrong."""

    def give(value: Any) -> None:
        tally.fed[target.name] += 1
        wrong = target.feed(value)
        if wrong is not None:
            kept = tally.changes if wrong.startswith("changed") else tally.crashes
            kept.setdefault(f"{target.name}: {wrong[:160]}", repr(value)[:400])

    check = settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    seeded(seed)(check(given(target.inputs)(give)))()


def all_targets(services: RunningServices, folder: Path, tally: Tally) -> Iterator[Target]:
    """Yield every RPC (with messages and with damaged bytes), every translation and every reader."""
    yield from rpc_targets(services, tally)
    yield from translation_targets()
    for reader in readers(folder / "files"):
        yield Target(f"reader {reader.name}", damaged(reader.sound), _only_ours(reader.read))


def claim_targets(run: ClaimedRun) -> Iterator[Target]:
    """Yield a target for each message of a worker: sound but for extreme numbers."""
    choices = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 55)), min_size=1, max_size=3)
    for kind in KINDS:
        yield Target(f"claims of a {kind}", choices, partial(run.feed, kind))


def rpc_targets(services: RunningServices, tally: Tally) -> Iterator[Target]:
    """Yield two targets for each method of every service."""
    known = known_values()
    for module in (coordinator_pb2, broadcast_pb2, learner_pb2, reward_pb2, scorer_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            channel = grpc.insecure_channel(services.addresses[service.name])
            for method in service.methods:
                sound = messages(method.input_type, known | SCORED if module is scorer_pb2 else known)
                raw = st.binary(max_size=60) | st.builds(_cut, sound, st.integers(0, 80))
                call = _caller(channel, service, method)
                feeder = _rpc_feeder(services, call, method, tally)
                if method.name not in ENDINGS:
                    yield Target(f"{service.name}.{method.name}", sound.map(_bytes_of), feeder)
                yield Target(f"{service.name}.{method.name} (bytes)", raw.filter(_breaks(method)), feeder)


def _cut(message: Any, keep: int) -> bytes:
    return bytes(message.SerializeToString())[:keep]


def _bytes_of(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _breaks(method: Any) -> Callable[[bytes], bool]:
    """Return what keeps endings from being reached by bytes that happen to parse."""
    cls = GetMessageClass(method.input_type)

    def breaks(payload: bytes) -> bool:
        if method.name not in ENDINGS:
            return True
        try:
            cls.FromString(payload)
        except DecodeError:
            return True
        return False

    return breaks


def _caller(channel: Any, service: Any, method: Any) -> Callable[[bytes], None]:
    path = f"/{service.full_name}/{method.name}"
    if method.client_streaming:
        ask = channel.stream_stream(path)
    else:
        ask = channel.unary_stream(path) if method.server_streaming else channel.unary_unary(path)

    def call(payload: bytes) -> None:
        answer = ask(iter([payload]) if method.client_streaming else payload, timeout=DEADLINE_S)
        if method.server_streaming:
            for _ in answer:
                pass  # to its end

    return call


def _rpc_feeder(services: RunningServices, call: Callable[[bytes], None], method: Any, tally: Tally) -> Run:
    cls = GetMessageClass(method.input_type)

    def feeder(payload: bytes) -> str | None:
        before = services.picture()
        try:
            call(payload)
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            tally.answers[code.name] += 1
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return None
            after = services.picture()
            if after != before:
                return f"changed by a call that was refused with {code.name} {details}: {before} -> {after}"
            if code is grpc.StatusCode.INTERNAL and not _parses(cls, payload):
                return None  # what is no message never reaches a service
            if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL) or not details:
                return f"{code.name} {details}"
            return None
        tally.answers["OK"] += 1
        return (
            None
            if services.state_machine.failure is None
            else f"the coordinator failed: {services.state_machine.failure}"
        )

    return feeder


def _parses(cls: Any, payload: bytes) -> bool:
    try:
        cls.FromString(payload)
    except DecodeError:
        return False
    return True


def translation_targets() -> Iterator[Target]:
    """Yield the translation of every message that comes from outside."""
    modules = (coordinator_pb2, records_pb2, reward_pb2, rollout_pb2)
    classes = {
        name: getattr(module, name) for module in modules for name in module.DESCRIPTOR.message_types_by_name
    }
    for name in PARSED:
        message = classes[name.title().replace("_", "")]
        translations = known(message)
        assert translations is not None, f"no record stands behind {name}"
        yield Target(f"translation {name}", messages(message.DESCRIPTOR), _only_ours(translations[1]))
    verdict = messages(classes["SubmitReply"].DESCRIPTOR)
    yield Target("translation submit_verdict", verdict, _only_ours(wire.WORK_CALLS["submission"].read_reply))
    history = messages(classes["PromptHistory"].DESCRIPTOR)
    yield Target("translation prompt_history", history, _only_ours(wire.prompt_history_from_proto))


def _only_ours(read: Callable[[Any], object]) -> Run:
    def feeder(value: Any) -> str | None:
        try:
            read(value)
        except AntiphonError as error:
            return None if str(error).strip() else "refused without a word"
        except Exception as error:  # noqa: BLE001 - whatever else comes out is what is looked for
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        return None

    return feeder
