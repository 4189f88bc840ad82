"""`antiphon evaluate --samples` reads like a page and gives programs the same as JSON."""

import json

import pytest

import antiphon
from antiphon.cli.app import execute
from antiphon.core.errors import ConfigError
from tests.support.artifacts import RecordedRun


@pytest.fixture
def run(tmp_path, monkeypatch):
    made = RecordedRun(tmp_path, record={"mlflow": False, "samples": 2})
    made.complete(2)
    monkeypatch.setenv("ANTIPHON_HOME", str(made.home))
    return made


def test_a_version_is_shown_with_prompt_answer_reward_and_reason(run, capsys):
    assert execute(["evaluate", "--samples", run.run_id, "v0", "-n", "1", "--split", "heldout"]) == 0
    head, blank, first, prompt, answer, reason, *_ = capsys.readouterr().out.splitlines()
    assert (head, blank) == ("run demo-1, version 0", "")
    assert first == "held-out best: reward 1 (heldout-0-2)"
    assert prompt.startswith("  prompt  ") and answer.startswith("  answer  ")
    assert reason.startswith("  reason  cut at 6 tokens; no closing answer")


def test_without_words_it_is_the_newest_version_of_the_newest_run(run, capsys):
    assert execute(["evaluate", "--samples", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {sample["version"] for sample in found} == {2}
    assert {"prompt", "answer", "reward", "reason", "kept_as", "split", "trained"} <= found[0].keys()
    assert execute(["evaluate", "--samples", "v1", "--json"]) == 0
    assert {sample["version"] for sample in json.loads(capsys.readouterr().out)} == {1}


def test_the_library_gives_the_same_as_a_table(run, capsys):
    assert execute(["evaluate", "--samples", "v1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    table = antiphon.load_run(run.run_id, home=run.home).samples(1)
    for name in ("version", "split", "key", "prompt", "answer", "reward", "reason", "kept_as", "trained"):
        assert list(table[name]) == [sample[name] for sample in found]


def test_one_table_has_all_that_was_sampled_for_a_step(run):
    table = antiphon.load_run(run.run_id, home=run.home).rollouts(0)
    counts = {key: len(rows) for key, rows in table.groupby(["split", "trained"])}
    assert counts == {("train", True): 1, ("train", False): 3, ("heldout", False): 3}
    assert table["token_ids"].map(len).min() > 0
    with pytest.raises(ConfigError, match="recorded no step 99"):
        antiphon.load_run(run.run_id, home=run.home).rollouts(99)


def test_a_run_that_goes_on_shows_what_it_has(tmp_path, monkeypatch, capsys):
    run = RecordedRun(tmp_path, record={"mlflow": False, "dvc": False})
    monkeypatch.setenv("ANTIPHON_HOME", str(run.home))
    assert execute(["evaluate", "--samples"]) == 0
    assert capsys.readouterr().out.strip() == "run demo-1, nothing was recorded yet"
    records = run.records()
    run.tell(range(1))
    records.flush(30.0)
    assert execute(["evaluate", "--samples"]) == 0
    assert "training best: reward 1, trained on, step 0 (train/0)" in capsys.readouterr().out
    records.close(30.0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["demo-9"], "there is no run demo-9"),
        (["demo-1", "v9"], "no completion of version 9 of run demo-1 is kept; there are those of v0 to v2"),
        (["demo-1", "newest"], "'newest' is no version; write v12"),
        (["demo-1", "-n", "0"], "--number 0 must be at least 1"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(run, capsys, words, says):
    assert execute(["evaluate", "--samples", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
