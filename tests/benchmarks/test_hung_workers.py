"""Real processes of fixed runs in which an engine hangs: the run goes on, and its tokens are the same."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from antiphon.benchmarks.kills import KilledRun, Tally, make_config, undisturbed
from antiphon.benchmarks.parts.kills.audit import audit
from antiphon.benchmarks.parts.kills.standins import AFTER_VARIABLE, HANG_VARIABLE
from antiphon.core.config import RunConfig
from antiphon.core.loop.events import GroupSubmitted, JournalEvent, LeaseExpired
from antiphon.services.coordinator.journal.journal import JOURNAL_NAME, Journal
from antiphon.services.rollout.engine.watchdog import HUNG_EXIT

STEPS = 4
HANGING = "worker-0"


def configured(hung_step_s: float) -> RunConfig:
    config = make_config("fixed", STEPS)
    rollout = config.rollout.model_copy(update={"hung_step_s": hung_step_s})
    return config.model_copy(update={"rollout": rollout})


def live(folder: Path, config: RunConfig) -> tuple[Tally, list[JournalEvent], tuple[str, ...]]:
    """Run with one engine that hangs in its first life."""
    started: list[str] = []

    def surroundings(role: str) -> Mapping[str, str]:
        first = role not in started
        started.append(role)
        if role == HANGING:
            return {HANG_VARIABLE: "12"} if first else {}
        # So that the one that hangs has groups when it does, the one that of them starts fastest.
        return {AFTER_VARIABLE: f"{HANGING}.hung"} if role.startswith("worker") else {}

    tally = Tally()
    KilledRun(folder, config, np.random.default_rng(0), tally, surroundings=surroundings).live(0)
    journal = Journal(folder / JOURNAL_NAME, config.run.name)
    events = list(journal.replay())
    asyncio.run(journal.close())
    found = asyncio.run(audit(folder, config))
    assert (found.lost, found.twice, found.beyond_bound, found.wrong) == (0, 0, 0, 0)
    return tally, events, found.digests


@pytest.mark.timeout(300)
def test_a_process_that_ends_itself_is_started_again(tmp_path: Path) -> None:
    tally, _, digests = live(tmp_path / "run", configured(hung_step_s=3.0))
    assert len(tally.other_exits) == 1, tally.other_exits
    assert tally.other_exits[0].startswith(f"{HANGING} ended with {HUNG_EXIT}: ")
    assert "the engine has not come back from a step for" in (tmp_path / "run" / f"{HANGING}.log").read_text()
    assert digests == undisturbed(make_config("fixed", STEPS))


@pytest.mark.long  # tests/simulation shows the same in virtual time
@pytest.mark.timeout(300)
def test_others_do_the_groups_of_an_engine_that_hangs_while_its_worker_is_heard(
    tmp_path: Path,
) -> None:
    tally, events, digests = live(tmp_path / "run", configured(hung_step_s=600.0))
    assert not tally.other_exits
    hung = [event for event in events if isinstance(event, LeaseExpired) and event.hung]
    assert hung and {event.worker_id for event in hung} == {f"{HANGING}-1"}
    ended_at = events.index(hung[-1])
    later = [event for event in events[ended_at:] if isinstance(event, GroupSubmitted)]
    assert {event.group_id for event in hung} <= {event.group_id for event in later}
    assert all(not event.worker_id.startswith(f"{HANGING}-") for event in later)
    assert digests == undisturbed(make_config("fixed", STEPS))
