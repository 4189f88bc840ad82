"""Client runs in memory: versions are numbers, tokens are made of seeds, the loss is a sum."""

import asyncio
from collections.abc import Sequence

import numpy as np

from antiphon.api.client_run import ClientRun, ClientRuns, ModelInfo, ModelOrder, SavedVersion
from antiphon.core.client_checks import check_call
from antiphon.core.client_records import (
    AdamParameters,
    CallResult,
    SampledReply,
    SampleRequest,
    SavedWeights,
    Scores,
    TrainingCall,
)
from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, Trajectory, VersionSpan
from antiphon.system.clock import wall_clock

VOCABULARY, ROOM = 100, 64


class MemoryRun(ClientRun):
    """One run; `weights` is a list of what made each version, so that order and repetition show."""

    def __init__(self, runs: "MemoryRuns", run_id: str, order: ModelOrder) -> None:
        self.runs, self.order = runs, order
        self._info = ModelInfo(run_id, order.rank, VOCABULARY, ROOM, "tiny", "tokenizer")
        self.history: list[object] = []
        self.held: list[TrainingCall] = []
        self.done: list[str] = []
        self.answered: dict[str, tuple[Trajectory, ...]] = {}
        self.requests: dict[str, SampleRequest] = {}

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def version(self) -> int:
        return len(self.history)

    async def sample(self, request: SampleRequest, wait_s: float) -> SampledReply:
        if max(request.prompt_token_ids) >= VOCABULARY:
            raise ContractError(
                f"token {max(request.prompt_token_ids)} is beyond the vocabulary of {VOCABULARY}"
            )
        assert self.requests.setdefault(request.request_id, request) == request
        await self.runs.fault("sample")
        if self.runs.holding.is_set():
            try:
                async with asyncio.timeout(min(wait_s, 0.05)):
                    await self.runs.released.wait()
            except TimeoutError:
                return SampledReply(waiting_for="a worker")
        version = self.version if request.version is None else request.version
        made = []
        for place, seed in enumerate(request.seeds):
            draw = np.random.default_rng([seed, version])
            count = int(draw.integers(1, request.sampling.max_tokens + 1))
            full = count == request.sampling.max_tokens
            made.append(
                Trajectory(
                    draw.integers(0, VOCABULARY, count, dtype=np.int32),
                    -draw.random(count, dtype=np.float32),
                    (VersionSpan(version, 0, count),),
                    FinishReason.LENGTH if full else FinishReason.STOP,
                    sample_index=place,
                    seed=seed,
                )
            )
        self.answered[request.request_id] = tuple(made)
        return SampledReply(tuple(made), cached_tokens=3)

    async def sequences(self, request_id: str) -> tuple[Trajectory, ...]:
        return self.answered.get(request_id, ())

    async def score(self, version: int, token_ids: Sequence[int], top: int) -> Scores:
        logprobs = -np.asarray(token_ids, dtype=np.float32) - version
        logprobs[0] = np.nan
        ids = np.tile(np.arange(top, dtype=np.int32), (len(token_ids), 1))
        ids[0] = -1
        tops = -ids.astype(np.float32)
        tops[0] = np.nan
        return Scores(logprobs, ids, tops)

    async def call(self, place: int, call: TrainingCall) -> CallResult:
        await self.runs.fault("call")
        check_call(call, VOCABULARY, ROOM, ours=True)
        self.done.append(call.loss)
        if not call.forward_only:
            assert place <= len(self.held), f"call {place} with {len(self.held)} before it"
            self.held[place:] = [call]
        logprobs = tuple(-one.targets.astype(np.float32) for one in call.data)
        return CallResult(logprobs, {"loss:sum": float(sum(one.sum() for one in logprobs))})

    async def step(self, step: int, calls: Sequence[TrainingCall], adam: AdamParameters) -> dict[str, float]:
        assert step <= self.version
        await self.runs.fault("adam")
        said = ([_said(one) for one in calls], adam)
        if step == self.version:
            self.history.append(said)
            self.held.clear()
        assert self.history[step] == said, "another step was made before"
        await self.runs.fault("step")
        return {"grad_norm": float(len(calls))}

    async def load(self, step: int, source: SavedWeights, optimizer: bool) -> None:
        if step == self.version:
            self.history.append((source, optimizer))
            self.held.clear()
        assert self.history[step] == (source, optimizer)
        await self.runs.fault("load")

    async def save(self, saved: SavedWeights, ttl_s: float | None) -> SavedVersion:
        await self.runs.fault("save")
        ends = None if ttl_s is None else wall_clock() + ttl_s
        made = SavedVersion(saved, self.version, "d" * 64, 10, 1.0, ends, self.order)
        self.runs.kept[saved] = made
        return made


class MemoryRuns(ClientRuns):
    """All runs; they outlive a door."""

    def __init__(self, places: int = 8) -> None:
        self.places = places
        self.all: dict[str, MemoryRun] = {}
        self.up: list[str] = []
        self.opened = 0
        """How often a run took a place."""
        self.kept: dict[SavedWeights, SavedVersion] = {}
        self.dropped: list[SavedWeights] = []
        self.faults: list[tuple[str, Exception | None]] = []
        self.holding, self.released = asyncio.Event(), asyncio.Event()

    async def fault(self, where: str) -> None:
        """Raise what a test wants raised there next; None: wait for ever."""
        if self.faults and self.faults[0][0] == where:
            error = self.faults.pop(0)[1]
            if error is None:
                await asyncio.Event().wait()
            else:
                raise error

    async def create(self, run_id: str, order: ModelOrder) -> ClientRun:
        if order.rank > 64:
            raise ContractError(f"rank {order.rank} is larger than door.most_rank=64; ask for a smaller one")
        self._check_place(run_id)
        self.all.setdefault(run_id, MemoryRun(self, run_id, order))
        return await self.open(run_id)

    def _check_place(self, run_id: str) -> None:
        if run_id not in self.up and len(self.up) >= self.places:
            raise ContractError(f"all {self.places} places for models are taken")

    async def open(self, run_id: str) -> ClientRun:
        if run_id not in self.all:
            raise ContractError(f"there is no model {run_id} here; create it first")
        self._check_place(run_id)
        if run_id not in self.up:
            self.up.append(run_id)
            self.opened += 1
        return self.all[run_id]

    async def close(self, run_id: str) -> None:
        if run_id in self.up:
            self.up.remove(run_id)

    def runs(self) -> Sequence[str]:
        return list(self.all)

    def saved(self, run_id: str | None = None) -> Sequence[SavedVersion]:
        return [one for one in self.kept.values() if run_id in (None, one.saved.run_id)]

    def find(self, saved: SavedWeights) -> SavedVersion | None:
        return self.kept.get(saved)

    async def drop(self, saved: SavedWeights) -> None:
        await self.fault("drop")
        self.dropped.append(saved)
        self.kept.pop(saved, None)


def _said(call: TrainingCall) -> object:
    data = [
        (one.token_ids.tolist(), one.targets.tolist(), {a: b.tolist() for a, b in sorted(one.inputs.items())})
        for one in call.data
    ]
    return (call.loss, dict(call.config), data)
