"""A run of two ranks repeats from its artifacts alone: exact on two, within a tolerance on one."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from antiphon.cli import app as cli
from antiphon.core.errors import UnavailableError
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.services.learner.ranks import followers
from antiphon.services.learner.ranks.followers import Followers
from antiphon.services.learner.replay.steps import Replayer
from antiphon.services.ranks import group
from tests.support.processes import children_that_run
from tests.support.replay_artifacts import RUN_ID, STEPS, TinyRun, make_config, save_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the ledger of a finished run; home and model are gone."""
    root = tmp_path_factory.mktemp("replay")
    config = make_config(save_model(root / "model"), learner__ranks=2, learner__zero_stage=2)
    home = root / "home"
    others = Followers(config, home / "runs" / RUN_ID / "checkpoints", home / "store")
    try:
        run = TinyRun(home, config)
    finally:
        others.close()
    shutil.copytree(run.ledger, root / "copies" / RUN_ID)
    shutil.rmtree(home)
    shutil.rmtree(root / "model")
    return root / "copies"


@pytest.mark.parametrize(
    ("arguments", "words", "equal"),
    [
        # From stage 1 on DeepSpeed pickles an object of its own: a copy's checkpoints are not opened.
        (("--from", "3"), ("exact on CPU x 2", "from the base model"), 1.0),
        (("--ranks", "1"), ("within tolerance: trained by 2 ranks, repeated by 1",), 0.0),
    ],
)
def test_a_replay_says_how_exact_it_is(
    copies: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: tuple[str, ...],
    equal: float,
) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path / "empty"))
    results = tmp_path / "replay.json"
    command = ["replay", RUN_ID, "--copy", str(copies), "--results", str(results), *arguments]
    assert cli.execute(command) == 0
    assert not children_that_run(f"{followers.__package__}.follower")
    said, found = capsys.readouterr().out, json.loads(results.read_text())
    assert all(part in said for part in words) and f"of {found['steps']} steps of {RUN_ID} repeat" in said
    assert (found["steps_equal_share"], found["first_difference"]) == (equal, None)
    assert found["steps"] == STEPS


def test_the_record_says_which_ranks_trained(copies: Path) -> None:
    manifest = json.loads((copies / RUN_ID / "manifest.json").read_text())
    assert manifest["ranks"] == {"ranks": 2, "stage": 2, "plan": 1}
    version = json.loads((copies / RUN_ID / "versions" / f"v{STEPS:06d}.json").read_text())
    assert version["exactness"] == "exact on CPU x 2"


def test_ranks_that_cannot_be_are_refused(copies: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["replay", RUN_ID, "--copy", str(copies), "--ranks", "0"]) == 2
    assert "--ranks 0 is not possible" in capsys.readouterr().err


def replayer_of(copies: Path) -> Replayer:
    return Replayer(ReplayCopy(copies / RUN_ID))


def test_a_rank_that_is_gone_ends_the_replay_and_not_its_caller(
    copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "LATE_S", 8.0)
    before = dict(os.environ)
    for sent, words in (  # the same process replays again after each
        (signal.SIGKILL, r"rank 1 of the learner was ended by SIGKILL"),
        (signal.SIGSTOP, r"rank 1 of the learner has not answered for 8 s"),
    ):
        replayer = replayer_of(copies)
        try:
            replayer.start(0)
            assert replayer.step(0).equal
            assert replayer._followers is not None
            (follower,) = replayer._followers.processes
            follower.send_signal(sent)
            with pytest.raises(UnavailableError, match=words):
                for step in (1, 2, 3):
                    replayer.step(step)
        finally:
            replayer.close()
        assert not follower.alive() and dict(os.environ) == before


def test_a_rank_that_cannot_begin_is_told_of_at_once_in_its_own_words(
    copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "dump_config", lambda config: "learner: {ranks: many}")
    replayer = replayer_of(copies)
    try:
        with pytest.raises(
            UnavailableError, match=r"rank 1 .* status 2: learner\.ranks='many' is not possible"
        ):
            replayer.start(0)
    finally:
        replayer.close()
