"""Versions recorded by digest alone: made again by replay, handed out only with the recorded digest."""

import json
import shutil
from pathlib import Path

import pytest

from antiphon.api.policy_file import copy_policy, policy_facts
from antiphon.cli.app import execute
from antiphon.lineage.documents.replay_copy import find_copy
from antiphon.recorded_run import RecordedRun
from tests.support.replay_artifacts import RUN_ID, TinyRun, run_of_few_weights

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return run_of_few_weights(tmp_path_factory.mktemp("versions"))


@pytest.fixture(autouse=True)
def home(run: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(run.home))


def test_a_version_between_is_exported_as_it_was(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = find_copy(run.ledger, RUN_ID)
    assert (copy.published(), copy.recorded_by_digest()) == ([0, 3, 4], [1, 2])
    assert execute(["export", RUN_ID, "v1", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "version 1 of tiny-s0-1 is recorded by its digest alone" in said
    assert "1 step to repeat from the base model" in said
    made = tmp_path / "out" / "model.safetensors"
    assert copy_policy(made) == copy.weights_digest(1)
    assert policy_facts(made) == {"run": RUN_ID, "version": 1, "weights_digest": copy.weights_digest(1)}


def test_the_library_exports_it_too_and_starts_at_a_checkpoint(run: TinyRun, tmp_path: Path) -> None:
    said: list[str] = []
    found = RecordedRun(run.run_dir, run.home, run.store.root).export(tmp_path / "out", "v2", said.append)
    assert found.weights_digest == find_copy(run.ledger, RUN_ID).weights_digest(2)
    assert said[-1] == "0 steps to repeat from the checkpoint of version 2"


def test_verification_misses_nothing_and_proves_one(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    for words, version in (([], 2), (["--verify-version", "1"], 1)):
        assert execute(["lineage", RUN_ID, "--verify", *words]) == 0
        said = capsys.readouterr().out
        assert "are as recorded" in said
        assert f"version {version} came out with the recorded digest" in said
    assert execute(["lineage", RUN_ID, "--verify", "--verify-version", "3"]) == 2
    assert "--verify-version 3 is not recorded by its digest alone" in capsys.readouterr().err
    assert execute(["lineage", "--verify-version", "1"]) == 2
    assert "give both" in capsys.readouterr().err


def test_rollouts_are_scored_under_versions_that_are_not_kept(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["replay", RUN_ID, "--step", "3", "--rollouts"]) == 0
    assert "weights are not in the record" not in capsys.readouterr().out


def test_other_weights_than_the_recorded_ones_are_never_handed_out(
    run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "copy" / RUN_ID
    shutil.copytree(run.ledger, place)
    document = place / "versions" / "v000001.json"
    document.chmod(0o644)
    document.write_text(json.dumps({**json.loads(document.read_text()), "weights_digest": "0" * 64}))
    from antiphon.core.errors import IntegrityError
    from antiphon.services.learner.replay.steps import weights_of

    handed_out = []
    with (
        pytest.raises(IntegrityError, match="version 1 has weights"),
        weights_of(find_copy(place, RUN_ID), 1, None, print) as weights,
    ):
        handed_out.append(weights)
    assert not handed_out
