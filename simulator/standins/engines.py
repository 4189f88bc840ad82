"""Engines: seeded stand-ins for vLLM, tokenizer and environment; all else of a worker is production.

Each does what the real one promises and nothing more: the engine samples position-keyed tokens and
swaps weights at step boundaries. How long things take is virtual.
"""

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from antiphon.api.engine import (
    ALL_ABILITIES,
    Engine,
    EngineAbilities,
    EngineOutput,
    EngineProgress,
    EngineRequest,
)
from antiphon.api.manifest import check_manifest, full_payload
from antiphon.api.snapshots import Broadcast, Place
from antiphon.core.checks import TokenRules
from antiphon.core.config import RunConfig
from antiphon.core.dissemination.reports import NetworkLog
from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.messages import UNIT_RANGE, Ended, Message, Reply
from antiphon.core.records import (
    FinishReason,
    FloatArray,
    IntArray,
    Prompt,
    SnapshotManifest,
    TurnLimits,
    VersionSpan,
)
from antiphon.core.spans import spans_of_changes
from antiphon.environments.conversation import user
from antiphon.environments.environment import Problem, SplitEnvironment, key_of
from antiphon.environments.scoring.conversations import Conversations
from antiphon.environments.scoring.messages import Failed, Turn
from antiphon.services.rollout.engine.thread import EngineThread
from antiphon.simulator.standins import arithmetic
from antiphon.simulator.virtual.chunks import MemoryPayloads
from antiphon.weights.transport import AskPlan, Connect, RelayTransport


@dataclass(slots=True)
class _Live:
    """A completion being sampled."""

    request: EngineRequest
    prompt: int
    changes: list[tuple[int, int]]
    """(version, first token that it samples), in order."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def sampled(self, start: int) -> tuple[IntArray, FloatArray, tuple[VersionSpan, ...]]:
        return (
            np.array(self.tokens[start:], dtype=np.int32),
            np.array(self.logprobs[start:], dtype=np.float32),
            spans_of_changes(self.changes, start, len(self.tokens)),
        )


class ArithmeticEngine(Engine):
    """The engine's protocol without a model: every token is a function of weights, seed and place."""

    drafts = False
    abilities: EngineAbilities = replace(ALL_ABILITIES, drafts=False)
    continues = True
    numerics = "arithmetic"
    vocabulary_size = arithmetic.VOCABULARY

    def __init__(self) -> None:
        self._version: int | None = None
        self._digest: str | None = None
        self._weights = 0
        self._live: dict[str, _Live] = {}

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def weights_digest(self) -> str | None:
        return self._digest

    @property
    def unfinished(self) -> int:
        return len(self._live)

    def load_weights(self, version: int, tensors: Mapping[str, Any], weights_digest: str) -> None:
        self._weights = arithmetic.weights_number(str(tensors["weights"]))
        self._version, self._digest = version, str(tensors["weights"])
        for live in self._live.values():
            live.changes.append((version, len(live.tokens)))

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Raises ContractError before the first weights, or for a request that is in flight."""
        if self._version is None:
            raise ContractError("the engine holds no weights yet")
        for request in requests:
            if request.request_id in self._live:
                raise ContractError(f"request {request.request_id} is in flight already")
            number = arithmetic.prompt_number(request.prompt_token_ids)
            self._live[request.request_id] = _Live(request, number, [(self._version, 0)])

    def step(self) -> list[EngineOutput]:
        finished = []
        for request_id, live in list(self._live.items()):
            request = live.request
            at = len(request.prefix_token_ids) + len(live.tokens)
            token, logprob = arithmetic.token_at(self._weights, live.prompt, request.seed, at)
            live.tokens.append(token)
            live.logprobs.append(logprob)
            ends = token in request.sampling.stop_token_ids
            if ends or token == arithmetic.END_TOKEN or at + 1 >= request.sampling.max_tokens:
                del self._live[request_id]
                reason = FinishReason.STOP if ends else arithmetic.finish_reason(token)
                finished.append(EngineOutput(*live.sampled(0), reason, request_id=request_id))
        return finished

    def progress(self, since: Mapping[str, int]) -> list[EngineProgress]:
        found = []
        for request_id, known in since.items():
            live = self._live.get(request_id)
            if live is not None and len(live.tokens) > known:
                found.append(EngineProgress(*live.sampled(known), request_id=request_id))
        return found

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._live.pop(request_id, None)

    def close(self) -> None:
        """There is nothing to free."""


class EditingEngine(ArithmeticEngine):
    """An engine whose owner changes the first token of some completions and keeps its logprob."""

    def __init__(self, edits: Callable[[], bool]) -> None:
        """Ask `edits` for each completion."""
        super().__init__()
        self._edits = edits

    def step(self) -> list[EngineOutput]:
        finished = super().step()
        for live in self._live.values():
            if len(live.tokens) == 1 and self._edits():
                live.tokens[0] = 1 + live.tokens[0] % (arithmetic.VOCABULARY - 1)
        return finished


class _Mailbox(queue.SimpleQueue[Callable[[Engine], None]]):
    """Messages to an engine; `news` is set by each."""

    def __init__(self) -> None:
        self.news = asyncio.Event()

    def put(
        self, message: Callable[[Engine], None], block: bool = True, timeout: float | None = None
    ) -> None:
        super().put(message)
        self.news.set()


class LoopDriver(EngineThread):
    """The production driver on the event loop instead of a thread, one step every this many virtual
    seconds."""

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        deliver: Callable[[list[EngineOutput]], None],
        step_s: Callable[[], float],
    ) -> None:
        """Build nothing before `run`; `step_s` returns the seconds of the next engine step."""
        super().__init__(make_engine, deliver)
        self._step_s = step_s
        self._mailbox: _Mailbox = _Mailbox()

    async def run(self) -> None:
        await asyncio.sleep(self._step_s())
        engine = self._make_engine()
        self._look(engine)
        self._started.set()
        while True:
            while not self._mailbox.empty():
                self._mailbox.get()(engine)
            if engine.unfinished:
                seconds = self._step_s()
                await asyncio.sleep(seconds)
                self.busy_s += seconds
                if outputs := engine.step():
                    self._deliver(outputs)
            else:
                self._mailbox.news.clear()
                await self._mailbox.news.wait()

    def _call_soon(self, callback: Callable[[], None]) -> None:
        callback()


_PIECES = 32
"""Of a chunk that comes over a slow link."""


class SlowLink(Broadcast):
    """Chunks of an origin, each as late as the link makes it, some of them with other bytes."""

    def __init__(self, origin: Broadcast, chunk_s: Callable[[], float], alters: Callable[[], bool]) -> None:
        self._origin = origin
        self._chunk_s = chunk_s
        self._alters = alters

    async def get_chunks(
        self, payload_digest: str, indices: Sequence[int], held_only: bool = False
    ) -> AsyncIterator[tuple[int, bytes]]:
        for one in indices:
            async for index, data in self._origin.get_chunks(payload_digest, [one], held_only):
                if self._alters():
                    data = data[::-1]
                if not (seconds := self._chunk_s()):
                    yield index, data
                    continue
                piece = -(-len(data) // _PIECES)  # a slow link is not silent for the whole of a chunk
                for start in range(0, len(data), piece):
                    await asyncio.sleep(seconds * piece / len(data))
                    yield index, data[start : start + piece]

    async def where(self) -> Place:
        return Place(Path(), "")  # no two simulated processes share files


class SnapshotSource:
    """A worker's snapshots: production transfer into a payload store in memory."""

    def __init__(
        self, payloads: MemoryPayloads, connect: Connect, timeout_s: float, ask_plan: AskPlan
    ) -> None:
        """Give up a transfer that brings nothing for `timeout_s`; `ask_plan` says whom to fetch from."""
        self._payloads = payloads
        self.bytes_fetched = 0
        self.network = NetworkLog()
        self._transport = RelayTransport(
            payloads, connect, timeout_s, network=self.network, ask_plan=ask_plan
        )

    async def fetch(self, manifest: SnapshotManifest, find: object = None) -> None:
        check_manifest(manifest)
        await self._transport.fetch(manifest, full_payload(manifest), self._arrived)

    def _arrived(self, length: int) -> None:
        self.bytes_fetched += length

    def open(self, manifest: SnapshotManifest) -> Mapping[str, Any]:
        weights = bytes(self._payloads.map(full_payload(manifest).digest)[-manifest.full_bytes :]).decode()
        if weights != manifest.weights_digest:
            raise IntegrityError(f"the payload of version {manifest.version} holds other weights")
        return {"weights": weights}

    def prune(self, kept: Sequence[SnapshotManifest]) -> None:
        self._payloads.prune(kept)


class ArithmeticPrompts:
    """Prompts of a few tokens, by split and index."""

    rules = TokenRules(arithmetic.VOCABULARY, frozenset({arithmetic.END_TOKEN}))

    def __init__(self, limits: TurnLimits | None = None) -> None:
        """Begin a task; with limits, one whose environment answers."""
        self.limits = limits
        self.hosted = limits is not None and limits.hosted

    def prompt(self, split: str, index: int) -> Prompt:
        return Prompt(f"{split}-0-{index}", () if self.hosted else (len(split), 1 + index % 7, index))


class ArithmeticEnvironment(SplitEnvironment):
    """Rewards by the sum of the token ids."""

    name = "simulated/arithmetic"
    only_compares = True

    def __init__(self, config: RunConfig, reward_rarity: int, failure_rarity: int = 0) -> None:
        """Reward a run; see `arithmetic.reward` and `arithmetic.failure` for the rarities."""
        super().__init__(0, config.environment.train_size, config.environment.heldout_size)
        self._reward_rarity = reward_rarity
        self._failure_rarity = failure_rarity

    def make(self, split: str, index: int) -> Problem:
        return Problem(key_of(split, 0, index), "", "")

    def reward(self, problem: Problem, completions: Sequence[str]) -> list[float]:
        answers = [np.array(json.loads(text), dtype=np.int32) for text in completions]
        if any(arithmetic.failure(answer, self._failure_rarity) for answer in answers):
            raise ArithmeticError("this answer cannot be scored")
        return [arithmetic.reward(problem.key, answer, self._reward_rarity) for answer in answers]


class _Answering:
    """What is asked of an environment that answers, beside its conversations."""

    tools = ()
    rebuildable = True
    reward_range = UNIT_RANGE


class ArithmeticConversations(Conversations):
    """Conversations that say what `arithmetic.said` does; the process of a turn may die, once."""

    def __init__(
        self,
        reward_rarity: int,
        failure_rarity: int,
        answer_s: Callable[[], float],
        dies: Callable[[], bool],
    ) -> None:
        """Answer, or die, after `answer_s` seconds, asked each time; the rarities are those of rewards."""
        super().__init__(cast(Any, _Answering()))
        self._reward_rarity, self._failure_rarity = reward_rarity, failure_rarity
        self._answer_s, self._dies = answer_s, dies
        self._died: set[tuple[str, int]] = set()

    async def _turn(self, held: Any, asked: Any, follows: bool) -> Turn:
        await asyncio.sleep(self._answer_s())
        name = asked.trajectory, len(asked.replies)
        if name not in self._died and self._dies():
            self._died.add(name)
            return Failed("its process was killed", infrastructure=True)
        goes_on = follows and held.state is not None
        row: list[int] = held.state if goes_on else []
        said: tuple[int, ...] | None = ()
        for reply in asked.replies[-1:] if goes_on else asked.replies:
            row = [*row, *json.loads(reply.text)]
            said = arithmetic.said(np.array(row, dtype=np.int32))
            held.state = row = [*row, *(said or ())]
        if said is not None:
            return (user(json.dumps(said)),)
        tokens = np.array(row, dtype=np.int32)
        if failure := arithmetic.failure(tokens, self._failure_rarity):
            return Failed(failure)
        return Ended(arithmetic.reward(asked.key, tokens, self._reward_rarity))

    async def _drop(self, trajectory: str, held: Any) -> None:
        held.state = None


class JsonRenderer:
    """Messages of token ids: their list as text."""

    def reply(self, context: Sequence[int], turn: Sequence[int], tools: object) -> Reply:
        return Reply(json.dumps(list(turn)))

    def following(
        self, context: Sequence[int], turn: Sequence[int], messages: Sequence[Message], tools: object
    ) -> tuple[int, ...]:
        return tuple(json.loads(messages[0].content))


class JsonDecoder:
    """Text of token ids: their list."""

    vocabulary_size = arithmetic.VOCABULARY
    end_tokens = frozenset({arithmetic.END_TOKEN})

    def decode(self, token_ids: Iterable[int]) -> str:
        return json.dumps([int(token) for token in token_ids])
