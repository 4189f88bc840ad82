"""What a run keeps for good: a value that is as ever is not written, and another one is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import ConfigError
from antiphon.core.loop.run_state import REWARD_RANGE, range_of
from antiphon.services.coordinator.journal.pinned import check_same_run, input_files, pinned_values

USUAL, WIDE = (0.0, 1.0), (-2.5, 3.0)


def config(samples: int = 1) -> RunConfig:
    return build_config({"evaluation": {"samples": samples}})


def test_what_is_usual_leaves_no_trace() -> None:
    found = pinned_values(config())
    assert REWARD_RANGE not in found and "evaluation.samples" not in found
    assert range_of(found) == USUAL and json.loads(found["evaluation.prompts"]) == 192


def test_what_is_not_usual_is_kept() -> None:
    found = pinned_values(config(4), {"files": "digest"}, WIDE)
    assert range_of(found) == WIDE and found["evaluation.samples"] == "4" and found["files"] == "digest"


def test_a_judge_stays_the_same_wherever_it_is_served() -> None:
    def judged(**fields: Any) -> dict[str, str]:
        return pinned_values(build_config({"judge": {"url": "http://a", "model": "m", **fields}}))

    assert not [name for name in pinned_values(config()) if name.startswith("judge.")]
    check_same_run("run-1", judged(), judged(url="http://b", timeout_s=5.0, at_once=1))
    for before, now, words in (
        (judged(), judged(model="n"), 'judge.model="n" differs from "m"'),
        (judged(), judged(scale=[0, 1]), r"judge\.scale=.* differs from .*10"),
        (pinned_values(config()), judged(), 'judge.model="m" differs from ""'),
        (judged(), pinned_values(config()), 'judge.model="" differs from "m"'),
    ):
        with pytest.raises(ConfigError, match=words):
            check_same_run("run-1", before, now)


def test_how_a_host_is_started_may_change() -> None:
    assert "environment.host_command" not in pinned_values(config())


def test_the_adapter_that_a_run_starts_from_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("as it was")
    started = build_config({"learner": {"lora": {"rank": 4, "start": "~"}}})
    before = pinned_values(started, input_files(started))
    check_same_run("run-1", before, pinned_values(started, input_files(started)))
    earlier = before | {"learner.lora.start": '"~"'}  # as releases before noted it
    check_same_run("run-1", earlier, pinned_values(started, input_files(started)))
    (tmp_path / "adapter_model.safetensors").write_text("another one")
    with pytest.raises(ConfigError, match=r"digest of learner\.lora\.start's files=.* differs from"):
        check_same_run("run-1", before, pinned_values(started, input_files(started)))
    (tmp_path / "adapter_config.json").unlink()
    check_same_run("run-1", before, pinned_values(started, input_files(started)))  # not on this machine


@pytest.mark.parametrize(("before", "now"), [("a", None), (None, "b")])
def test_an_adapter_to_start_from_is_neither_added_nor_taken_away(
    before: str | None, now: str | None
) -> None:
    old, new = (
        pinned_values(build_config({"learner": {"lora": {"rank": 4, "start": start}}}))
        for start in (before, now)
    )
    check_same_run("run-1", old, old)
    with pytest.raises(
        ConfigError, match=r"learner\.lora\.start=.* differs from .*put it back, or start a new"
    ):
        check_same_run("run-1", old, new)


def test_a_function_of_ones_own_is_compared_where_it_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = build_config({"algorithm": {"objective": "one_loss:loss"}})

    def pinned() -> dict[str, str]:
        return pinned_values(asked, input_files(asked))

    away = pinned()
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "one_loss.py").write_text("def loss(): ...\n")
    here = pinned()
    check_same_run("run-1", here, away)
    check_same_run("run-1", away, here)
    (tmp_path / "one_loss.py").write_text("def loss(): return 1.0\n")
    with pytest.raises(ConfigError, match=r"the digest of algorithm\.objective's files=\w+ differs"):
        check_same_run("run-1", here, pinned())


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ((1, USUAL), (1, USUAL), ""),
        ((4, WIDE), (4, WIDE), ""),
        ((1, USUAL), (4, USUAL), r"evaluation\.samples=4 differs from 1"),
        ((4, USUAL), (1, USUAL), r"evaluation\.samples=1 differs from 4"),
        ((1, USUAL), (1, WIDE), r"reward range .*=\[-2\.5, 3\.0\] differs from \[0\.0, 1\.0\]"),
        ((1, WIDE), (1, (0.0, 2.0)), r"=\[0\.0, 2\.0\] differs from \[-2\.5, 3\.0\]"),
        ((1, WIDE), (1, USUAL), ""),  # who did not build the environment does not know its range
    ],
)
def test_a_run_goes_on_with_the_values_that_it_began_with(
    before: tuple[int, tuple[float, float]], now: tuple[int, tuple[float, float]], words: str
) -> None:
    kept, asked = (pinned_values(config(samples), None, within) for samples, within in (before, now))
    if not words:
        return check_same_run("run-1", kept, asked)
    with pytest.raises(ConfigError, match=words):
        check_same_run("run-1", kept, asked)
