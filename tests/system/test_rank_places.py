"""A process that is one of several ranks knows which, or is told what is missing."""

from pathlib import Path

import pytest

from antiphon.core.config import build_config
from antiphon.core.errors import ConfigError
from antiphon.system.rank_places import check_place, rank_environment

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ANTIPHON_MEETING")
TWO = build_config({"learner": {"ranks": 2}})


@pytest.fixture(autouse=True)
def nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_a_launcher_or_the_supervisor_says_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    for told in (launcher, rank_environment(1, 2, Path("/meeting"))):
        with monkeypatch.context() as patch:
            for name, value in told.items():
                patch.setenv(name, value)
            assert check_place(TWO) == 1


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, "needs a process for each rank, and RANK is not set; start the run with `antiphon run`"),
        ({"RANK": "0"}, "and WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "and MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "3", "ANTIPHON_MEETING": "f"}, "process 0 of 3 that were started"),
        ({"RANK": "2", "WORLD_SIZE": "2", "ANTIPHON_MEETING": "f"}, "process 2 of 2 that were started"),
        ({"RANK": "one", "WORLD_SIZE": "2", "ANTIPHON_MEETING": "f"}, "process one of 2"),
    ],
)
def test_a_process_that_was_not_started_as_a_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, str], words: str
) -> None:
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"learner\.ranks=2") as refused:
        check_place(TWO)
    assert words in str(refused.value)


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    assert check_place(build_config({})) == 0
