"""Load of a rollout worker: groups of requests in a closed loop, and what it cost.

Sides of a comparison take turns of a tenth of a CPU-second, each in an engine of its own, so a
machine that is slow for a while is slow for all of them.

All sides do equal work: every request has the same length on each of them. Where each ended at an
end token of its own, one side would run more of its steps with a batch that is half empty, and at few
requests that alone is several percent.

Concurrency is the number of requests in flight: whenever one ends, the next one of the list
starts, as in a worker that always holds enough leases. Groups follow one another, so the members
of a group run together and late ones find finished siblings.
"""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from antiphon.api.engine import Engine, EngineRequest
from antiphon.core.drafting.statistics import add_statistics
from antiphon.core.errors import ContractError
from antiphon.core.records import DraftingStatistics, IntArray, PromptHistory, SamplingParameters

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

    def ratio(self, side: str, base: str) -> float:
        """Return the median over rounds of the sides' tokens per CPU-second."""
        pairs = zip(self.runs[side], self.runs[base], strict=True)
        return statistics.median(one.rate / other.rate for one, other in pairs)

    def warm_up_ratio(self, side: str, base: str) -> float:
        """Return the ratio of the first runs."""
        return self.warm_up[side].rate / self.warm_up[base].rate

    def spread(self, side: str, base: str) -> tuple[float, float]:
        """Return the least and the largest ratio of a round."""
        pairs = zip(self.runs[side], self.runs[base], strict=True)
        ratios = [one.rate / other.rate for one, other in pairs]
        return min(ratios), max(ratios)

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
