"""The run view: it shows of recorded journals what was shown of them, and remembers only what it must."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from antiphon.core.loop.events import (
    BatchSealed,
    GroupOpened,
    GroupRewarded,
    GroupSubmitted,
    JournalEvent,
    LeaseGranted,
    StepCommitted,
    dump_event,
)
from antiphon.core.reporting.run_view import Bar, Rows, RunView, merge
from antiphon.core.status import Event
from antiphon.lineage.log_fold import LogFold
from tests.report.test_page import journal
from tests.support.client_model import ClientModel, asking, client_config
from tests.support.golden import read_golden
from tests.support.loop_model import LoopModel, make_config, run_to_end
from tests.support.run_views import view_of

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
EXPECTED: dict[str, dict[str, Any]] = json.loads((GOLDEN / "run_view.json").read_text())


def rounded(value: float) -> float:
    return round(value, 6)


def bars(found: Any) -> list[float]:
    seconds = [rounded(sum(bar.start_s for bar in found)), rounded(sum(bar.seconds for bar in found))]
    return [len(found), *seconds, sum(bar.number for bar in found)]


def shown(view: RunView) -> dict[str, Any]:
    lanes = ("reward", "training", "publishing", "broadcast", "evaluating")
    return {
        "steps": [
            [
                *(s.step, rounded(s.at_s), s.reward_mean and rounded(s.reward_mean), s.tokens, s.groups),
                *(s.groups_filtered, [list(age) for age in sorted(s.staleness.items())], s.epoch),
                s.commit.weights_digest[-8:],
            ]
            for s in view.steps
        ],
        "evaluations": [
            [e.version, rounded(e.at_s), rounded(e.reward_mean), e.prompts] for e in view.evaluations
        ],
        "rollout": {name: bars(lane) for name, lane in view.rollout.items()},
        "lanes": {name: bars(getattr(view, name)) for name in lanes},
        "generated": [
            *(len(view.generated), rounded(sum(at for at, _ in view.generated))),
            sum(tokens for _, tokens in view.generated),
        ],
        "counts": dict(view.counts),
        "base": view.base_digest[:8],
        "breaks": [rounded(at) for at in view.breaks],
        "offered_again": dict(view.offered_again),
        "epochs": [list(start) for start in view.epoch_starts()],
        "busy": {name: rounded(value) for name, value in view.busy_shares().items()},
        "drafting": sorted(view.drafting_by_epoch),
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_shown_of_a_recorded_run_stays_the_same(name: str) -> None:
    """The expected values are those of the fold that the report had before this one."""
    if name == "overlapped":
        events = journal(12, workers=3)
    else:
        rows = read_golden(GOLDEN / f"{name}.jsonl.gz")[1]
        events = [Event(n, row.at, row.kind, row.body) for n, row in enumerate(rows, 1)]
    assert shown(view_of(events)) == EXPECTED[name]


def test_a_view_remembers_nothing_of_groups_that_ended() -> None:
    model = LoopModel(make_config(steps=30), workers=3)
    run_to_end(model, np.random.default_rng(2), faults=0.1)
    view = RunView()
    for number, event in enumerate(model.journal, 1):
        view.apply(Event(number, float(number), event.kind, dump_event(event)))
    living = set(model.state.groups)
    for known in (view._leases, view._submitted, view._epochs):
        assert set(known) <= living
    assert set(view._sealed) == set(range(len(model.state.commits), model.state.next_seal))


def test_gaps_too_narrow_to_be_seen_are_not_drawn() -> None:
    bars = [Bar(float(i), i + 0.9, 0) for i in range(1000)]
    assert merge(bars, 0.0, 1000.0, gap_s=0.2) == [(0.0, 999.9)]
    assert len(merge(bars, 0.0, 1000.0, gap_s=0.05)) == 1000


def test_the_view_folds_what_the_journal_says() -> None:
    view = view_of(journal(5))
    assert [step.step for step in view.steps] == list(range(5))
    assert view.steps[0].commit.metrics["train/loss"] == 0.1
    assert {worker: len(bars) for worker, bars in view.rollout.items()} == {"worker-0": 15, "worker-1": 15}
    assert [round(bar.seconds, 6) for bar in view.training] == [2.5] * 5
    assert [round(bar.seconds, 6) for bar in view.publishing] == [0.3] * 5
    assert [round(bar.seconds, 6) for bar in view.broadcast] == [1.1] * 5
    assert [e.version for e in view.evaluations] == [0, 5] and view.evaluations[0].prompts == 192
    assert sum(tokens for _, tokens in view.generated) == sum(
        sum(json.loads(event.data_json)["token_counts"])
        for event in journal(5)
        if event.kind == "group.submitted"
    )
    shares = view.busy_shares()
    assert set(shares) == {"rollout worker-0", "rollout worker-1", "reward", "training", "broadcast"}
    assert all(0 < share <= 1 for share in shares.values())


@pytest.mark.parametrize(
    ("handed_in", "rewarded", "waited_s"),
    [
        ((2.0, 5.0), (9.0, 6.0), 4.0 + 3.0),  # of step 1 since the learner is free
        ((2.0, 9.0), (3.0, 9.5), 0.5 + 0.5),
        ((2.0, 3.0), (2.5, 3.5), 0.5 + 0.0),
    ],
)
def test_waiting_for_rewards_is_what_the_learner_waits_when_all_else_is_there(
    handed_in: tuple[float, ...], rewarded: tuple[float, ...], waited_s: float
) -> None:
    said: list[tuple[float, JournalEvent]] = []
    for step, later in ((0, 0.0), (1, 14.0)):
        for number, (a, b) in enumerate(zip(handed_in, rewarded, strict=True)):
            name, lease = f"{step}{number}", f"l{step}{number}"
            said += [
                (0.0, GroupOpened(name, number, 0, 0, None, None, False)),
                (later, LeaseGranted(name, lease, "w", 1, 0, later)),
                (later + a, GroupSubmitted(name, lease, "w", 1, "d" * 64, 0, (1,), 1.0, later + a)),
                (later + b, GroupRewarded(name, (0.0,), "judge", later + b)),
            ]
        groups, done = (f"{step}0", f"{step}1"), 20.0 * (step + 1)
        sealed = BatchSealed(step, groups, (), "d" * 64, "d" * 64, 2, 0, 0, 2, 0.0, 1.0, ())
        said.append((later + max(rewarded), sealed))
        said.append((done, StepCommitted(step, step + 1, "d" * 64, "d" * 64, {}, True, done)))
    said.sort(key=lambda one: one[0])
    view = view_of(Event(n, 1.7e9 + at, one.kind, dump_event(one)) for n, (at, one) in enumerate(said))
    assert view.rewards_waited_s == pytest.approx(waited_s)
    assert view.idle_share_from_rewards == pytest.approx(waited_s / 40.0)


def test_busy_time_counts_no_moment_twice() -> None:
    view = view_of(journal(1))
    view.steps[0].at_s = 10.0
    view.training = Rows(3, Bar)
    for bar in ((0, 6, 0), (4, 8, 1)):
        view.training.add(*bar)
    assert view.busy_shares()["training"] == pytest.approx(0.8)


def test_a_run_that_a_client_drives_is_shown_and_logged_and_remembers_nothing_of_its_requests() -> None:
    model, fold, view = ClientModel(client_config()), LogFold(), RunView()
    for step in range(3):
        model.make_version()
        model.ask(asking(f"r{step}", step, 3))
        model.work_off()
    lines = []
    for seq, event in enumerate(model.events, 1):
        told = Event(seq, float(seq), event.kind, dump_event(event))
        view.apply(told)
        lines.append(fold.take(told))
    assert [step.step for step in view.steps] == [0, 1] and len(view.generated) == 3
    assert [line.number for line in lines if line is not None and line.kind == "step.committed"] == [0, 1]
    for known in (view._leases, view._submitted, view._epochs, view._rewarded):
        assert not known
    assert model.loop.run.work_accounts.account(model.now).tokens["useful"] > 0
