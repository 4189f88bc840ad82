"""Sharded engine: one engine over several devices of a host, a process for each, with a part of every layer.

Each process runs vLLM whole, scheduler and sampler too (its external launcher), and they meet only where
activations are added up. So all must do the same in the same order: rank 0, which is the worker, passes on
what it adds, aborts and loads, histories for drafts too, and each step, before it does that itself. What is
drawn depends on keys that come with the requests, and where time decides, it is that of rank 0. The tests of
itself that an engine begins with are run by each rank alike.

With each step rank 0 says how large the last one was, and with each `COMPARED_STEPS`-th a digest of the
schedule. A follower that planned otherwise ends, and with it all: their supervisor starts the worker again.
"""

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import structlog
import torch
from blake3 import blake3

from antiphon.api.engine import EngineOutput, EngineRequest
from antiphon.api.manifest import manifest_from_bytes, manifest_to_bytes
from antiphon.core.config import RunConfig, dump_config
from antiphon.core.drafting.history_codec import EncodedHistory, decode_history, encode_history
from antiphon.core.errors import AntiphonError, ConfigError, ContractError, IntegrityError
from antiphon.core.records import PromptHistory, SamplingParameters
from antiphon.services.ranks.followers import Followers
from antiphon.services.ranks.group import Ranks, leave, message_of, open_group
from antiphon.services.rollout.engine.environment import SHARED_NAME, EngineSettings, prepare_environment
from antiphon.services.rollout.engine.vllm_engine import VllmEngine
from antiphon.system import shared_memory
from antiphon.system.processes import LEFT_GROUP, SAME_ORDER
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import VerifiedWeights, open_snapshot

COMPARED_STEPS = 64
"""Steps from one comparison of the schedules to the next."""
_FOLLOWER = "antiphon.services.rollout.engine.follower"
_SEEN = 256
"""Last tokens of each running request that count in a digest."""

_log = structlog.get_logger(__name__)


class Order(IntEnum):
    """What all ranks do next."""

    ADD = 1
    ABORT = 2
    LOAD = 3
    STEP = 4
    CHECK = 5
    """Run the tests of itself that an engine begins with."""
    STOP = 6


class EngineRanks(Ranks):
    """The ranks of one engine."""

    def order(self, order: Order, *numbers: int, content: bytes = b"") -> None:
        """Have the other ranks do what rank 0 does next; at most 6 numbers."""
        with self.running():
            self.broadcast(message_of(order, len(content), *numbers))
            if content:
                self.broadcast(torch.from_numpy(np.frombuffer(content, np.uint8).copy()))

    def ordered(self) -> tuple[Order, tuple[int, ...], bytes]:
        """Wait for the next order: which it is, its numbers [6] and content."""
        with self.running():
            order, size, *numbers = self.broadcast(message_of()).tolist()
            content = self.broadcast(torch.zeros(size, dtype=torch.uint8)) if size else torch.zeros(0)
        return Order(order), tuple(numbers), content.numpy().tobytes()


class ShardedEngine(VllmEngine):
    """One rank of an engine. On rank 0 it is used as any engine; on others `follow` does."""

    def __init__(
        self, settings: EngineSettings, ranks: EngineRanks, followers: Followers | None = None
    ) -> None:
        """Start this rank's part; all ranks do so at the same time, and rank 0 brings its followers.

        Raises:
            ConfigError: when the model directory or a setting cannot be used.
        """
        self._ranks, self._followers = ranks, followers
        self._alone = ranks.rank > 0
        """Whether nothing is passed on: by a follower, or inside of what each rank does by itself."""
        self._steps, self._ended = 0, blake3()
        super().__init__(settings)
        if self.scheduler is not None:
            self.scheduler.clock = lambda: 0.0  # the time of its drafts is part of the step's

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self._pass_on(Order.ADD, content=encode_requests(requests))
        super().add(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._pass_on(Order.ABORT, content=json.dumps(list(request_ids)).encode())
        super().abort(request_ids)

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        """Serve these weights on all ranks, as `VllmEngine.load_weights`.

        Raises:
            ContractError: also when they are not views of a snapshot's file, which the other ranks open too.
        """
        opened = tensors.opened if isinstance(tensors, VerifiedWeights) else None
        if opened is None:
            raise ContractError(
                f"the weights of version {version} are in no file that the other ranks of the engine could "
                "open; take them from `open_snapshot`"
            )
        store, manifest = opened
        head = json.dumps([version, weights_digest, str(store.root.absolute())]).encode()
        self._pass_on(Order.LOAD, content=head + b"\n" + manifest_to_bytes(manifest))
        with self._by_itself():
            super().load_weights(version, tensors, weights_digest)

    def step(self) -> list[EngineOutput]:
        outputs = super().step()
        for one in outputs:
            self._ended.update(f"{one.request_id} {self.version}".encode())
            self._ended.update(one.token_ids.tobytes())
        return outputs

    def close(self) -> None:
        self._pass_on(Order.STOP)
        self._alone = True
        self._ranks.rest()
        super().close()
        if self._followers is not None:
            self._followers.close()

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Have the other ranks run the tests of itself that this one runs inside the block."""
        self._pass_on(Order.CHECK)
        with self._by_itself():
            yield

    def follow(self, check: Callable[[VllmEngine], None]) -> None:
        """Do what rank 0 orders until it orders to stop.

        Args:
            check: runs the tests of itself.
        """
        self._rehearsing = True  # it is rank 0 that may not add or step
        while True:
            order, numbers, content = self._ranks.ordered()
            try:
                match order:
                    case Order.ADD:
                        self.add(decode_requests(content))
                    case Order.ABORT:
                        self.abort(json.loads(content))
                    case Order.LOAD:
                        self._follow_load(content)
                    case Order.STEP:
                        if (own := self._schedule()) != numbers[: len(own)]:
                            self._give_up(f"its schedule is {own} where that of rank 0 is {numbers}")
                        self.step()
                    case Order.CHECK:
                        check(self)
                    case Order.STOP:
                        self.close()
                        return
            except AntiphonError as error:  # rank 0 raised the same, and knows what to do
                _log.warning("order.refused", order=order.name, reason=str(error))

    def _follow_load(self, content: bytes) -> None:
        head, _, manifest = content.partition(b"\n")
        version, digest, folder = json.loads(head)
        try:
            weights = open_snapshot(manifest_from_bytes(manifest), PayloadStore(Path(folder)), checked=True)
        except AntiphonError as error:  # rank 0 has them open, and waits for this rank
            self._give_up(str(error))
        self.load_weights(version, weights, digest)

    def _give_up(self, reason: str) -> NoReturn:
        leave(f"rank {self._ranks.rank} of the engine cannot go on at step {self._steps}: {reason}", 1)

    def _advance(self) -> Any:
        self._pass_on(Order.STEP, *self._schedule())
        self._steps += 1
        # Where one rank alone fails, the others wait inside the step, and no order would reach them.
        with self._ranks.running():
            return super()._advance()

    def _schedule(self) -> tuple[int, ...]:
        """Return requests in flight, rows and accepted drafts of the last step, and two numbers of a digest.

        The digest is that of what ended and of the state of what runs, and 0 in most steps.
        """
        digest = b"\0" * 16
        if self._steps % COMPARED_STEPS == 0:
            hasher = self._ended.copy()
            for name, live in self._live.items():
                request = live.request
                state = (name, request.num_tokens, request.num_computed_tokens, live.spans[-1])
                hasher.update(f"{state} {request.output_token_ids[-_SEEN:]}".encode())
            digest = hasher.digest(16)
        numbers = np.frombuffer(digest, np.int64).tolist()
        return len(self._live), self._hook.rows, self._hook.accepted, *numbers

    def _pass_on(self, order: Order, *numbers: int, content: bytes = b"") -> None:
        if not self._alone:
            self._ranks.order(order, *numbers, content=content)

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Pass nothing on inside the block: each rank does it."""
        before, self._alone = self._alone, True
        try:
            yield
        finally:
            self._alone = before

    @contextmanager
    def _together(self) -> Iterator[None]:
        with self._ranks.running(), self._ranks.together():
            try:
                yield
            except AntiphonError:
                raise
            except Exception as error:  # vLLM raises whatever its layers do, on one rank alone perhaps
                raise IntegrityError(f"{type(error).__name__}: {error}") from error

    def _agreed(self, seconds: float) -> float:
        with self._ranks.running():
            return int(self._ranks.broadcast(message_of(int(seconds * 1e9)))[0]) * 1e-9


def start_sharded(settings: EngineSettings, config: RunConfig) -> ShardedEngine:
    """Start an engine of `settings.tensor_parallel` processes, of which this one is rank 0.

    What killed engines left in shared memory is removed before. A follower that ends or answers no more ends
    this process, with its words: it may be inside a step that waits for that one.

    Args:
        settings: of the engine.
        config: that gave them; its `model.path` is a folder here, or an example's name.

    Raises:
        ConfigError: when there are fewer GPUs here, or this process was not started as an engine's must be.
        UnavailableError: when one of the processes does not come up, with what it said.
    """
    world = settings.tensor_parallel
    if torch.cuda.is_available() and torch.cuda.device_count() < world:
        raise ConfigError(
            f"rollout.tensor_parallel={world} needs as many GPUs in one host, but there are "
            f"{torch.cuda.device_count()} here; lower it"
        )
    if any(os.environ.get(name) != value for name, value in SAME_ORDER.items()):
        raise ConfigError(
            f"rollout.tensor_parallel={world} needs a process that was started with {SAME_ORDER}, since all "
            "ranks must take sets in one order; start it with `child_environment`"
        )
    list(shared_memory.remove_leftovers(named=shared_memory.ENGINES))
    os.environ[SHARED_NAME] = shared_memory.new_name()
    followers = Followers(world, "engine")
    (followers.folder / "config.yaml").write_text(dump_config(config))
    patience_s = config.services.start_timeout_s
    followers.start(_FOLLOWER, [str(followers.folder / "config.yaml")], patience_s)
    ranks: EngineRanks | None = None
    engines: list[ShardedEngine] = []

    def lost(reason: str) -> NoReturn:
        said = followers.end(reason)
        leave(said, LEFT_GROUP if engines else followers.status)  # what refuses to start is not tried again

    try:
        ranks = join(settings, patience_s, broken=lost)
        engines.append(ShardedEngine(settings, ranks, followers))
    except BaseException:
        if ranks is not None:
            ranks.abandon()
        followers.close()
        raise
    return engines[0]


def join(
    settings: EngineSettings,
    patience_s: float,
    arrived: Callable[[], None] = lambda: None,
    broken: Callable[[str], str] | None = None,
) -> EngineRanks:
    """Meet the other ranks of an engine; nothing of vLLM may have been started before.

    Args:
        settings: of the engine.
        patience_s: longest wait of rank 0, seconds.
        arrived: called when nothing is left but to meet them.
        broken: as of `Ranks`.
    """
    prepare_environment(settings)
    rank = int(os.environ["RANK"])
    open_group(rank, settings.tensor_parallel, "rollout.tensor_parallel", patience_s, arrived)
    ranks = EngineRanks(rank, settings.tensor_parallel, broken, "engine")
    ranks.meet()
    return ranks


def encode_requests(requests: Sequence[EngineRequest]) -> bytes:
    """Return requests as JSON; a history that several have is in it once."""
    histories: dict[int, PromptHistory] = {id(one.history): one.history for one in requests if one.history}
    places = {key: place for place, key in enumerate(histories)}
    kept = []
    for history in histories.values():
        fields = asdict(encode_history(history))
        kept.append(fields | {"tokens": base64.b64encode(fields["tokens"]).decode()})
    rows = [asdict(replace(one, history=None)) | {"history": places.get(id(one.history))} for one in requests]
    return json.dumps([kept, rows]).encode()


def decode_requests(content: bytes) -> list[EngineRequest]:
    """Return what `encode_requests` was given."""
    kept, rows = json.loads(content)
    histories = []
    for fields in kept:
        fields["tokens"] = base64.b64decode(fields["tokens"])
        histories.append(decode_history(EncodedHistory(**_tuples(fields))))
    return [
        EngineRequest(
            **_tuples(fields)
            | {
                "sampling": SamplingParameters(**_tuples(fields["sampling"])),
                "history": None if fields["history"] is None else histories[fields["history"]],
            }
        )
        for fields in rows
    ]


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
