"""Fuzz: every RPC and every reader gets what it should never get.

Messages are made from their own descriptors; bytes are sound ones that were damaged; what a worker sends is
also sound but for extreme numbers, and everyone else asks for everything after each. A crash is
any answer but a sentence of ours; a change is anything that a refused call left behind. What is
found is printed with what provokes it; the same seed makes the same inputs.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from antiphon.benchmarks.parts.fuzz.claims import KINDS, ClaimedRun, claimed_run
from antiphon.benchmarks.parts.fuzz.messages import damaged, messages
from antiphon.benchmarks.parts.fuzz.readers import readers
from antiphon.benchmarks.parts.fuzz.targets import RunningServices, known_values, open_services
from antiphon.benchmarks.parts.results import benchmark_parser, finish
from antiphon.core.errors import AntiphonError
from antiphon.net import wire
from antiphon.net.rpc.unary import known
from antiphon.protos import broadcast_pb2, coordinator_pb2, learner_pb2, records_pb2, reward_pb2, rollout_pb2
from antiphon.system.logs import configure_logs

EXAMPLES = 60
"""Inputs of one target before the next one has its turn."""
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
    "group_to_reward",
    "group_to_audit",
    "sample_statistics",
)
"""Messages that somebody translates; whoever sent them may be anybody."""

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Feed for a while and print what was found; exit code 1 for a crash or a change."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="where the inputs start (default 0)")
    options = parser.parse_args(arguments)
    configure_logs("error")
    begun, tally, round_number = time.perf_counter(), Tally(), 0
    with (
        tempfile.TemporaryDirectory() as scratch,
        open_services(Path(scratch) / "run") as services,
        claimed_run(Path(scratch) / "claimed") as claimed,
    ):
        targets = [*all_targets(services, Path(scratch), tally), *claim_targets(claimed)]
        while time.perf_counter() - begun < 60.0 * options.minutes:
            for target in targets:
                feed(target, options.seed + round_number, EXAMPLES, tally)
                if time.perf_counter() - begun >= 60.0 * options.minutes:
                    break
            round_number += 1
    for found in (tally.crashes, tally.changes):
        for name, words in found.items():
            print(f"{name}: {words}")
    result = {
        "targets": len(targets),
        "inputs": sum(tally.fed.values()),
        "seconds": round(time.perf_counter() - begun, 1),
        "answers": dict(tally.answers),
        "crashes": len(tally.crashes),
        "state_changes": len(tally.changes),
    }
    counts = {"crashes": len(tally.crashes), "changes of state": len(tally.changes)}
    violated = [f"there are {count} {kind}" for kind, count in counts.items() if count]
    return finish(result, record=options.record, violated=violated)


def feed(target: Target, seed: int, examples: int, tally: Tally) -> None:
    """Give a target so many inputs and write down what is wrong."""

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
    for module in (coordinator_pb2, broadcast_pb2, learner_pb2, reward_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            channel = grpc.insecure_channel(services.addresses[service.name])
            for method in service.methods:
                sound = messages(method.input_type, known)
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
    yield Target("translation submit_verdict", verdict, _only_ours(wire.submit_verdict_from_proto))
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


if __name__ == "__main__":
    sys.exit(main())
