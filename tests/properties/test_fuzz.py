"""No input crashes a party, and what is refused changes nothing; ANTIPHON_FUZZ_EXAMPLES=600 feeds more."""

import os
from pathlib import Path

import pytest

from antiphon.core.errors import ContractError, IntegrityError
from antiphon.core.loop.acceptance import accept_commit
from antiphon.core.loop.run_state import RunState
from antiphon.core.records import StepCommit
from antiphon.protos import coordinator_pb2
from tests.support.fuzzed_services import claimed_run, open_services
from tests.support.fuzzing import Tally, Target, all_targets, claim_targets, feed
from tests.support.messages import read

EXAMPLES = int(os.environ.get("ANTIPHON_FUZZ_EXAMPLES", "12"))
"""Inputs of each target."""


def test_a_share_of_the_fuzz_finds_nothing(tmp_path: Path) -> None:
    tally = Tally()
    with open_services(tmp_path / "run") as services:
        targets: list[Target] = list(all_targets(services, tmp_path, tally))
        for target in targets:
            feed(target, 0, EXAMPLES, tally)
    assert not tally.crashes and not tally.changes
    assert len(tally.fed) == len(targets) and {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION"} <= set(
        tally.answers
    )


def test_what_a_worker_claims_ends_nothing_that_others_ask_for(tmp_path: Path) -> None:
    tally = Tally()
    with claimed_run(tmp_path / "claimed") as run:
        for target in claim_targets(run):
            feed(target, 0, 3 * EXAMPLES, tally)
    assert not tally.crashes and len(tally.fed) == 4


def test_a_worker_after_one_that_left_held_out_prompts_goes_back_for_them(tmp_path: Path) -> None:
    with claimed_run(tmp_path / "claimed") as run:
        assert run.feed("heartbeat", []) is None  # leases a held-out prompt of version 0 and keeps it
        while run.version == 0:
            assert run.feed("submission", []) is None
        run.lose("it is silent")
        assert run.feed("submission", []) is None


def test_a_commit_of_a_step_below_0_is_refused() -> None:
    state = RunState(group_size=2, payload_retention_steps=2)
    with pytest.raises(IntegrityError, match="steps begin at 0"):
        accept_commit(state, StepCommit(-1, 0, "a", "b"), 0.0)


def test_a_worker_state_of_another_version_is_refused_in_words() -> None:
    status = coordinator_pb2.RunStatus(workers=[coordinator_pb2.WorkerRecord(state="asleep")])
    with pytest.raises(ContractError, match="state='asleep' is unknown here"):
        read(status)
