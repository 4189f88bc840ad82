"""skip: mistakes are one sentence, and its help says what it does."""

from pathlib import Path

import pytest

from antiphon.cli.app import execute
from antiphon.core.config import build_config, dump_config


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was never started."""
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))
    folder = tmp_path / "runs" / "bare-1"
    folder.mkdir(parents=True)
    sizes = {"environment": {"train_size": 32, "heldout_size": 1}, "evaluation": {"prompts": 1}}
    (folder / "config.yaml").write_text(dump_config(build_config({"run": {"steps": 3}, **sizes})))
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "requires an argument"),
        (["bare-1", "1"], 2, "--reason"),
        (["bare-1", "one", "--reason", "x"], 2, "Invalid value"),
        (["bare-1", "1", "--reason", " "], 2, "--reason is empty; say in a sentence why"),
        (["nobody", "1", "--reason", "x"], 2, "there is no run nobody under"),
        (["bare-1", "7", "--reason", "x"], 1, "run bare-1 has no step 7: its steps are 0..2"),
        (["bare-1", "1", "--reason", "x"], 1, "step 1 of run bare-1 has no sealed batch yet"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert execute(["skip", *arguments]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and says in lines[0], lines


def test_help_says_what_it_does_and_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["skip", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "Train nothing in a step whose batch the learner cannot train on",
        "RUN STEP",
        "--reason",
        "--operator",
    ):
        assert words in said
