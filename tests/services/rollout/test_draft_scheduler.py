"""Draft scheduler without an engine: what it tells the gate, and which tokens it counts as rested."""

import numpy as np
import pytest

from antiphon.api.engine import EngineRequest
from antiphon.core.drafting.config import DraftingSection
from antiphon.core.drafting.gate import DraftGate, StepPlan
from antiphon.core.records import PastCompletion, PromptHistory, SamplingParameters
from antiphon.services.rollout.drafting.scheduler import IDLE_SHARE, DraftScheduler

PAST = np.arange(10, 60, dtype=np.int32)
SLOTS = np.array([0])


class Clock:
    """Seconds that pass by one half at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


class Gate(DraftGate):
    """Plans what it is told to, and notes what it is shown."""

    drafts = opened = verified = True
    steps = 0
    shown: list[tuple[float, bool]]
    asked: list[tuple[int, float]]
    unused: list[float]
    woken: int

    def plan(self, requests: int) -> StepPlan:
        return StepPlan(draft=self.drafts, floor=0.0)

    def wake(self) -> None:
        self.woken += 1

    def is_open(self, requests: int) -> bool:
        return self.opened

    def verifies(self, requests: int, drafted: int, expected: float) -> bool:
        self.asked.append((drafted, expected))
        return self.verified

    def observe(  # type: ignore[override]
        self, requests, rows, tokens, seconds, drafted, stands_for=1, unused_s=0.0
    ) -> None:
        self.shown.append((seconds, drafted))
        self.unused.append(unused_s)
        self.steps += stands_for


@pytest.fixture
def scheduler() -> DraftScheduler:
    made = DraftScheduler(DraftingSection(), 4, 1, 100, Clock())
    made._gate = Gate(256)
    made._gate.shown, made._gate.asked, made._gate.unused, made._gate.woken = [], [], [], 0
    history = PromptHistory("p", 0, (PastCompletion(PAST, 0, 0, 0, 1.0),))
    sampling = SamplingParameters(max_tokens=len(PAST))
    made.admit(0, EngineRequest("r", (1, 2), 7, sampling, history=history))
    return made


def advance(scheduler: DraftScheduler, tokens: int, verified: int, accepted: int) -> tuple[int, int]:
    """Run one step of two seconds; return how many tokens there are and how many are drafted next."""
    scheduler.begin_step()
    if verified:
        scheduler.verified(SLOTS, np.array([verified]), np.array([accepted]))
    else:
        scheduler.passed(SLOTS)
    tokens += accepted + 1
    row = np.concatenate([[1, 2], PAST[:tokens]]).astype(np.int32)[None]
    drafts = scheduler.propose(SLOTS, row, np.array([2 + tokens]))
    assert drafts is not None
    scheduler.end_step(1, 1 + verified, 1 + accepted, 2.0)
    return tokens, len(drafts[0])


def test_a_step_is_charged_with_the_drafts_it_verifies(scheduler: DraftScheduler) -> None:
    gate = scheduler._gate
    assert isinstance(gate, Gate)
    tokens, drafted = advance(scheduler, 2, 0, 0)
    assert drafted > 0
    gate.drafts = False
    tokens, none = advance(scheduler, tokens, drafted, drafted)
    assert none == 0
    advance(scheduler, tokens, 0, 0)
    assert gate.shown == [(1.5, False), (2.5, True), (2.0, False)]


def test_drafts_that_are_not_worth_verifying_cost_their_making_alone(scheduler: DraftScheduler) -> None:
    gate = scheduler._gate
    assert isinstance(gate, Gate)
    gate.verified = False
    tokens, none = advance(scheduler, 2, 0, 0)
    assert none == 0 and gate.asked[0][0] > 0 and 0.0 < gate.asked[0][1] <= gate.asked[0][0]
    gate.opened = False  # a trial may wait for drafts that are worth it; they are booked all the same
    tokens, none = advance(scheduler, tokens, 0, 0)
    gate.verified = True
    advance(scheduler, tokens, 0, 0)
    assert gate.shown == [(1.5, False)] * 3
    assert gate.unused == [0.0, 0.5, 0.5]


def test_a_gate_that_rests_is_shown_few_steps_which_stand_for_all(scheduler: DraftScheduler) -> None:
    gate = scheduler._gate
    assert isinstance(gate, Gate)
    gate.drafts = gate.opened = False
    tokens = 2
    for _ in range(2 * IDLE_SHARE):
        tokens, _ = advance(scheduler, min(tokens, 8), 0, 0)
    assert len(gate.shown) == 2 and gate.steps == 2 * IDLE_SHARE


def test_rested_tokens_are_those_that_good_drafts_could_have_had(scheduler: DraftScheduler) -> None:
    gate = scheduler._gate
    assert isinstance(gate, Gate)
    tokens, drafted = advance(scheduler, 2, 0, 0)
    tokens, drafted = advance(
        scheduler, tokens, drafted, drafted
    )  # no draft was verified before these tokens
    known = tokens
    for _ in range(2):
        tokens, drafted = advance(scheduler, tokens, drafted, drafted)
    gate.drafts = False
    tokens, none = advance(scheduler, tokens, drafted, drafted)
    for _ in range(2):
        tokens, none = advance(scheduler, tokens, 0, 0)
    statistics = scheduler.release(0, PAST[:tokens])
    assert none == 0 and statistics is not None
    assert (statistics.promising, statistics.rested) == (tokens - known, 2)


def test_where_drafts_were_wrong_nothing_rests(scheduler: DraftScheduler) -> None:
    gate = scheduler._gate
    assert isinstance(gate, Gate)
    tokens, drafted = advance(scheduler, 2, 0, 0)
    for _ in range(3):
        tokens, drafted = advance(scheduler, tokens, drafted, 0)
    gate.drafts = False
    tokens, _ = advance(scheduler, tokens, drafted, 0)
    advance(scheduler, tokens, 0, 0)
    statistics = scheduler.release(0, None)
    assert statistics is not None and (statistics.promising, statistics.rested) == (0, 0)


def test_history_wakes_the_gate_only_while_it_is_news(scheduler: DraftScheduler) -> None:
    gate = scheduler._gate
    assert isinstance(gate, Gate)
    history = PromptHistory("p", 0, (PastCompletion(PAST, 0, 0, 0, 1.0),))

    def serve(count: int, past: PromptHistory | None) -> int:
        before = gate.woken
        for number in range(count):
            scheduler.release(0, None)
            sampling = SamplingParameters(max_tokens=len(PAST))
            scheduler.admit(0, EngineRequest(f"n{number}", (1, 2), 7, sampling, history=past))
        return gate.woken - before

    assert gate.woken == 1
    assert 0 < serve(100, history) < 32
    assert serve(100, history) == 0
    assert serve(100, None) == 0
    assert serve(1, history) == 1
