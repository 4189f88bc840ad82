"""Bench of drafting: the engines of one model side by side in one process, and loads for them.

Sides of a comparison, an engine each: `native` samples with vLLM's own sampler in an engine built
without drafting, `keyed` with the keyed sampler in such an engine, `drafted` drafts. None of them
knows an end token: how long each response is was decided by a keyed engine that does.
"""

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from antiphon.api.engine import Engine, EngineRequest
from antiphon.benchmarks.parts.drafting.chain_model import ChainModel
from antiphon.core.config import load_config
from antiphon.core.drafting.config import DraftingSection
from antiphon.core.drafting.statistics import add_statistics
from antiphon.core.errors import ContractError
from antiphon.core.records import (
    BatchRow,
    DraftingStatistics,
    IntArray,
    PastCompletion,
    Prompt,
    PromptHistory,
    SamplingParameters,
)
from antiphon.core.seeds import derive_seed, request_seeds
from antiphon.lineage.rollout_table import decode_batch
from antiphon.models.codec import resolve_model_path
from antiphon.runs.finding import find_run
from antiphon.services.coordinator.prompts import load_prompts
from antiphon.services.rollout.engine.environment import EngineSettings
from antiphon.services.rollout.engine.vllm_engine import VllmEngine
from antiphon.weights.snapshot import verify


class RecordedRun:
    """Prompts, completions by epoch and weights of the finished run of a home, which left no group out."""

    def __init__(self, home: Path) -> None:
        directory = find_run(home, None)
        self.config = load_config(directory / "config.yaml")
        self._ledger = home / self.config.record.ledger / directory.name
        self.model_dir = Path(resolve_model_path(self.config.model.path))
        self._prompts = load_prompts(self.config)
        size = self.config.environment.train_size
        self.prompts = [self._prompts.prompt("train", index) for index in range(size)]
        self.epochs = self.config.run.steps * self.config.loop.prompts_per_step // size
        """Whole epochs that were trained on."""

    def heldout(self, count: int) -> list[Prompt]:
        """Return prompts that were never trained on."""
        size = self.config.environment.heldout_size
        return [self._prompts.prompt("heldout", index) for index in range(min(count, size))]

    def weights(self, version: int) -> dict[str, Any]:
        """Return the published tensors of a version."""
        tensors: dict[str, Any] = load_file(self._ledger / "versions" / f"v{version:06d}.safetensors")
        return tensors

    def histories(self, epoch: int) -> dict[str, PromptHistory]:
        """Return prompt key -> what workers are sent as the history of an epoch."""
        groups: dict[str, list[BatchRow]] = defaultdict(list)
        for path in sorted((self._ledger / "batches").glob("t*.parquet")):
            if not path.name.endswith(".timings.parquet"):
                for row in decode_batch(path.read_bytes()):
                    if int(row.group_id.removeprefix("g")) // len(self.prompts) == epoch:
                        groups[row.prompt_key].append(row)
        return {
            key: PromptHistory(
                key,
                epoch,
                tuple(
                    PastCompletion(row.token_ids, row.oldest_version, epoch, row.sample_index, row.reward)
                    for row in sorted(rows, key=lambda row: row.sample_index)
                ),
            )
            for key, rows in groups.items()
        }


SLICE_S = 0.1
"""CPU seconds of a side's turn: long against a step, short against the moods of a shared machine."""


@dataclass(frozen=True, slots=True)
class GroupWork:
    """One group to sample."""

    name: str
    prompt: tuple[int, ...]
    seeds: tuple[int, ...]
    """One per sample."""
    sampling: SamplingParameters
    history: PromptHistory | None = None
    lengths: tuple[int, ...] = ()
    """Tokens of each sample, on engines that know no end token; else `sampling.max_tokens` at most."""

    def requests(self) -> list[EngineRequest]:
        """Return one request per sample; a group of one stands alone."""
        group = self.name if len(self.seeds) > 1 else ""
        lengths = self.lengths or (self.sampling.max_tokens,) * len(self.seeds)
        return [
            EngineRequest(
                f"{self.name}-{i}",
                self.prompt,
                seed,
                replace(self.sampling, max_tokens=length),
                group,
                self.history,
            )
            for i, (seed, length) in enumerate(zip(self.seeds, lengths, strict=True))
        ]


@dataclass(frozen=True, slots=True, eq=False)
class LoadResult:
    """What one run of a load did."""

    tokens: int
    cpu_s: float
    """CPU seconds of the process, drafter and index included."""
    steps: int
    outputs: Mapping[str, IntArray] = field(repr=False)
    drafting: DraftingStatistics | None
    """Sums over all completions; None from an engine that cannot draft."""

    @property
    def rate(self) -> float:
        """Return tokens per CPU-second."""
        return self.tokens / self.cpu_s


class LoadRun:
    """One run of a load on one engine, advanced in slices, so that sides can share a clock."""

    def __init__(self, engine: Engine, work: Sequence[GroupWork], concurrency: int) -> None:
        """Queue the work; nothing runs before `advance`."""
        self._engine = engine
        self._concurrency = concurrency
        self._waiting = [request for group in work for request in group.requests()][::-1]
        self._outputs: dict[str, IntArray] = {}
        self._drafting: list[DraftingStatistics | None] = []
        self._cpu_s = 0.0
        self._steps = 0

    @property
    def done(self) -> bool:
        """Tell whether every request has ended."""
        return not self._waiting and not self._engine.unfinished

    def advance(self, cpu_s: float) -> None:
        """Run engine steps for about `cpu_s` CPU seconds, at least one."""
        begun = now = time.process_time()
        while not self.done and (now == begun or now - begun < cpu_s):
            room = min(len(self._waiting), self._concurrency - self._engine.unfinished)
            if room > 0:
                self._engine.add([self._waiting.pop() for _ in range(room)])
            for output in self._engine.step():
                self._outputs[output.request_id] = output.token_ids
                self._drafting.append(output.drafting)
            self._steps += 1
            now = time.process_time()
        self._cpu_s += now - begun

    def result(self) -> LoadResult:
        """Return what the run did so far."""
        tokens = sum(len(tokens) for tokens in self._outputs.values())
        return LoadResult(tokens, self._cpu_s, self._steps, self._outputs, add_statistics(self._drafting))


def run_load(engine: Engine, work: Sequence[GroupWork], concurrency: int) -> LoadResult:
    """Keep `concurrency` requests in flight until all are done."""
    run = LoadRun(engine, work, concurrency)
    while not run.done:
        run.advance(SLICE_S)
    return run.result()


Side = Callable[[], LoadRun]
"""Begins a run of the load, on one engine in one way."""


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Runs of one load by every side, in alternating order."""

    warm_up: Mapping[str, LoadResult]
    """The first run of each side, which no ratio below counts."""
    runs: Mapping[str, Sequence[LoadResult]]

    def ratios(self, side: str, base: str) -> list[float]:
        """Return one side's tokens per CPU-second over another's, a value for each round."""
        return [one.rate / other.rate for one, other in zip(self.runs[side], self.runs[base], strict=True)]

    def ratio(self, side: str, base: str) -> float:
        """Return the median over rounds of the sides' tokens per CPU-second."""
        return statistics.median(self.ratios(side, base))

    def rate(self, side: str) -> float:
        """Return the median of a side's tokens per CPU-second."""
        return statistics.median(run.rate for run in self.runs[side])

    def drafting(self, side: str) -> DraftingStatistics:
        """Return what drafting did over the counted runs of a side.

        Raises:
            ContractError: for a side whose engine cannot draft.
        """
        found = add_statistics(run.drafting for run in self.runs[side])
        if found is None:
            raise ContractError(
                f"side {side} has no drafting statistics; its engine was started without drafts"
            )
        return found


def compare(sides: Mapping[str, Side], rounds: int) -> Comparison:
    """Run every side once per round, all of them in turns, after one round that is not counted.

    Raises:
        ContractError: when the sides sampled different numbers of tokens, so that nothing is compared.
    """
    first = _round(sides, 0)
    runs: dict[str, list[LoadResult]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, result in _round(sides, number).items():
            runs[name].append(result)
    return Comparison(first, runs)


def _round(sides: Mapping[str, Side], number: int) -> dict[str, LoadResult]:
    gc.collect()  # what earlier loads left behind is no cost of this one
    runs = {name: begin() for name, begin in sides.items()}
    order = list(runs.values()) if number % 2 else list(runs.values())[::-1]
    while not all(run.done for run in order):
        for run in order:
            if not run.done:
                run.advance(SLICE_S)
    results = {name: run.result() for name, run in runs.items()}
    tokens = {name: result.tokens for name, result in results.items()}
    if len(set(tokens.values())) > 1:
        raise ContractError(f"the sides sampled {tokens} tokens; give every request one length on all sides")
    return results


def with_lengths(engine: Engine, work: Sequence[GroupWork], concurrency: int) -> list[GroupWork]:
    """Return the work with the lengths that its samples have on `engine`, which ends at end tokens."""
    said = run_load(engine, work, concurrency).outputs
    return [
        replace(group, lengths=tuple(len(said[f"{group.name}-{i}"]) for i in range(len(group.seeds))))
        for group in work
    ]


def identical(one: Mapping[str, IntArray], other: Mapping[str, IntArray]) -> int:
    """Count the requests whose tokens are the same in both."""
    return sum(bool(len(a) == len(other[k]) and (a == other[k]).all()) for k, a in one.items())


GROUP = 8
"""Responses of a group, and of history per prompt."""

FRESH_EPOCH = 1_000_000
"""No run gets that far, so the seeds of the loads are none that history was sampled with."""


@dataclass(slots=True)
class Bench:
    """The engines of one model; the weights in all of them are the same."""

    ending: VllmEngine
    """Samples with the keyed sampler until an end token: for history, and for the lengths of the loads."""
    native: VllmEngine
    keyed: VllmEngine
    drafted: VllmEngine

    def sides(self, names: Sequence[str], work: Sequence[GroupWork], concurrency: int) -> dict[str, Side]:
        """Return functions that begin a load on the named sides."""
        return {name: partial(LoadRun, getattr(self, name), work, concurrency) for name in names}

    def close(self) -> None:
        """Free the engines."""
        for engine in (self.ending, self.native, self.keyed, self.drafted):
            engine.close()


def open_bench(model_dir: Path, tensors: Mapping[str, Any], max_model_len: int) -> Bench:
    """Start four engines on a model directory and load `tensors` into all."""
    drafting = DraftingSection()
    sizes: dict[str, Any] = {"max_num_seqs": 64, "kv_cache_bytes": 256 << 20}
    keyed = EngineSettings(model_dir=model_dir, max_model_len=max_model_len, stop_token_ids=(), **sizes)
    return Bench(
        ending=_start(replace(keyed, stop_token_ids=None), tensors),
        native=_start(replace(keyed, sampler="native"), tensors),
        keyed=_start(keyed, tensors),
        drafted=_start(replace(keyed, draft_tokens=drafting.max_window, drafting=drafting), tensors),
    )


def _start(settings: EngineSettings, tensors: Mapping[str, Any]) -> VllmEngine:
    engine, found = VllmEngine(settings), verify(tensors)
    engine.load_weights(0, found, found.digest)
    return engine


def greedy_work(model: ChainModel, repeats: int, prompts: int) -> list[GroupWork]:
    """Return chain prompts that were answered before, word for word, as greedy decoding does."""
    work = []
    for index in range(prompts):
        said = np.array(model.greedy(index), dtype=np.int32)
        past = PastCompletion(said, version=0, epoch=0, sample_index=0, reward=1.0)
        history = PromptHistory(f"chain-{index}", 0, (past,))
        sampling = SamplingParameters(temperature=0.0, max_tokens=len(said) + 8)
        work += [
            GroupWork(f"greedy-{index}-{n}", model.prompt(index), (0,), sampling, history)
            for n in range(repeats)
        ]
    return work


def wandering_work(model: ChainModel, bench: Bench, prompts: int, max_tokens: int) -> list[GroupWork]:
    """Return chain prompts at temperature 1 with history of the same distribution, which says little."""
    sampling = SamplingParameters(max_tokens=max_tokens)
    asked = [index % len(model.chains) for index in range(prompts)]
    earlier = [
        GroupWork(f"past-{index}", model.prompt(index), _seeds("past", index, GROUP), sampling)
        for index in sorted(set(asked))
    ]
    said = run_load(bench.ending, earlier, 64).outputs
    histories = {}
    for index in sorted(set(asked)):
        past = tuple(
            PastCompletion(said[f"past-{index}-{i}"], version=0, epoch=0, sample_index=i, reward=0.0)
            for i in range(GROUP)
        )
        histories[index] = PromptHistory(f"chain-{index}", 0, past)
    return [
        GroupWork(
            f"wander-{n}-{index}", model.prompt(index), _seeds("wander", n, 1), sampling, histories[index]
        )
        for n, index in enumerate(asked)
    ]


def sampled_work(run: RecordedRun, histories: Mapping[str, PromptHistory], prompts: int) -> list[GroupWork]:
    """Return training prompts with their history of the epoch before, under fresh seeds."""
    sampling = run.config.sampling.parameters()
    return [
        GroupWork(
            prompt.key,
            prompt.token_ids,
            request_seeds(run.config.run.seed, prompt.key, FRESH_EPOCH, GROUP),
            sampling,
            histories.get(prompt.key),
        )
        for prompt in run.prompts[:prompts]
    ]


def unseen_work(run: RecordedRun, prompts: int) -> list[GroupWork]:
    """Return held-out prompts, one request each, without history."""
    sampling = run.config.sampling.parameters()
    return [GroupWork(p.key, p.token_ids, _seeds("unseen", p.key, 1), sampling) for p in run.heldout(prompts)]


def _seeds(stream: str, name: str | int, count: int) -> tuple[int, ...]:
    return tuple(derive_seed("drafting-benchmark", stream, name, i) for i in range(count))
