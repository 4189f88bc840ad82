"""What `benchmarks/stragglers.py` makes of a journal, and what it refuses; one short run without trouble."""

import pytest

from antiphon.benchmarks.stragglers import HANGING, recovery_s, run_once, violations
from antiphon.core.loop import events as e
from antiphon.services.coordinator.journal.journal import StoredEvent


def journal(*told: tuple[float, e.JournalEvent]) -> list[StoredEvent]:
    return [
        StoredEvent(number, at, event.kind, e.dump_event(event))
        for number, (at, event) in enumerate(told, start=1)
    ]


def leased(group: str, worker: str = f"{HANGING}-1") -> e.LeaseGranted:
    return e.LeaseGranted(group, f"{group}-{worker}", worker, 1, 0, 0.0)


def submitted(group: str, worker: str = "worker-1-1") -> e.GroupSubmitted:
    return e.GroupSubmitted(group, "lease", worker, 1, "digest", 0, (1,), 0.1, 0.0)


def test_recovery_counts_every_group_that_the_engine_held() -> None:
    before = [(1.0, leased("g1")), (2.0, submitted("g1", f"{HANGING}-1")), (3.0, leased("other", "w-1"))]
    assert recovery_s(journal(*before), None) is None
    assert recovery_s(journal(*before), 5.0) is None  # it held none
    both = [*before, (4.0, leased("g2")), (4.0, leased("g3")), (6.0, submitted("g3"))]
    dropped = (9.0, e.GroupDropped("g2", "stale"))
    assert recovery_s(journal(*both, dropped), 5.0) == 4.0
    assert recovery_s(journal(*both, (12.0, submitted("other"))), 5.0) == 7.0  # one waits to the end


def test_what_is_refused() -> None:
    assert violations([1.01, 1.03, 1.2], 2.0) == []
    assert violations([1.04], 2.1) == [
        "a step takes 1.040 times as long, not at most 1.03",
        "groups of a hung engine took 2.1 lease periods, not at most 2.0",
    ]
    assert violations([1.0], None) == ["no engine that hung held a group"]


@pytest.mark.long  # `scripts/benchmarks --smoke` runs it
@pytest.mark.timeout(180)
def test_a_run_without_trouble_reaches_its_last_step() -> None:
    found = run_once(steps=6, seed=3, troubled=False)
    assert found.seconds_per_step is not None and found.why == "" and found.recovery_s is None
