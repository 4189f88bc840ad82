"""The load of the drafting benchmark: sides are compared at equal work, or not at all."""

from collections.abc import Sequence
from functools import partial
from itertools import count

import numpy as np
import pytest

from antiphon.api.engine import EngineOutput, EngineRequest
from antiphon.benchmarks.parts.drafting import bench as load
from antiphon.benchmarks.parts.drafting.bench import GroupWork, LoadRun, compare, with_lengths
from antiphon.core.errors import ContractError
from antiphon.core.records import FinishReason, SamplingParameters


class EndingEngine:
    """Samples a token a step and request; a request ends after `ends[seed]` tokens, if that is given."""

    def __init__(self, ends: dict[int, int]) -> None:
        self.ends = ends
        self.live: list[tuple[EngineRequest, int]] = []

    @property
    def unfinished(self) -> int:
        return len(self.live)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self.live += [(request, 0) for request in requests]

    def step(self) -> list[EngineOutput]:
        self.live = [(request, tokens + 1) for request, tokens in self.live]
        done = [(r, n) for r, n in self.live if n >= min(r.sampling.max_tokens, self.ends.get(r.seed, 99))]
        self.live = [pair for pair in self.live if pair not in done]
        none = np.empty(0, np.float32)
        return [
            EngineOutput(np.zeros(n, np.int32), none, (), FinishReason.LENGTH, request_id=r.request_id)
            for r, n in done
        ]


WORK = [
    GroupWork("a", (1,), (7, 8), SamplingParameters(max_tokens=20)),
    GroupWork("b", (1,), (9,), SamplingParameters(max_tokens=5)),
]


@pytest.fixture(autouse=True)
def _cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count()
    monkeypatch.setattr(load.time, "process_time", lambda: float(next(seconds)))


def sides(work: Sequence[GroupWork], *ends: dict[int, int]) -> dict[str, partial[LoadRun]]:
    return {str(i): partial(LoadRun, EndingEngine(end), work, 2) for i, end in enumerate(ends)}  # type: ignore[arg-type]


def test_sides_that_end_by_themselves_are_not_compared() -> None:
    with pytest.raises(ContractError, match="one length on all sides"):
        compare(sides(WORK, {7: 3}, {7: 4}), 1)


def test_with_stated_lengths_all_sides_sample_the_same() -> None:
    work = with_lengths(EndingEngine({7: 3, 8: 12}), WORK, 2)  # type: ignore[arg-type]
    assert [group.lengths for group in work] == [(3, 12), (5,)]
    found = compare(sides(work, {}, {}), 2)
    assert {run.tokens for runs in found.runs.values() for run in runs} == {20}
    assert {name: len(said) for name, said in found.warm_up["0"].outputs.items()} == {
        "a-0": 3,
        "a-1": 12,
        "b-0": 5,
    }
