"""Poker's benchmarks: a hand that ends otherwise is named, and a match is the same each time."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from antiphon.benchmarks import poker, poker_league
from antiphon.core.messages import Message

SIX_HANDED = {
    "id": "pluribus/101b/93",
    "variant": "NT",
    "ante_trimming_status": True,
    "antes": [0, 0, 0, 0, 0, 0],
    "blinds_or_straddles": [50, 100, 0, 0, 0, 0],
    "min_bet": 100,
    "starting_stacks": [10000] * 6,
    "actions": [
        *("d dh p1 QcTd", "d dh p2 8d2h", "d dh p3 9h4s", "d dh p4 JsQs", "d dh p5 KdJd", "d dh p6 KhJc"),
        *("p3 f", "p4 cbr 225", "p5 cbr 750", "p6 f", "p1 f", "p2 f", "p4 cc", "d db 7s9d2c"),
        *("p4 cc", "p5 cbr 1025", "p4 f"),
    ],
    "final_stacks": [9950, 9900, 10000, 9250, 10900, 10000],
}
"""A recorded hand, of github.com/wjsutton/phh-dataset (MIT)."""
STUD = {
    "id": "stud",
    "variant": "F7S",
    "ante_trimming_status": True,
    "antes": [1, 1],
    "bring_in": 1,
    "small_bet": 2,
    "big_bet": 4,
    "starting_stacks": [50, 50],
    "actions": ["d dh p1 2c3d4h", "d dh p2 KsQsAs", "p1 pb", "p2 cbr 2", "p1 f"],
    "final_stacks": [48, 52],
}
REFERENCE = {
    "id": "hu-1-1",
    "acpc": "STATE:0:r202r651r20000c///:7c2d|2h2s/Jd6dTd/Jh/Qs",
    "returns": [-20000.0, 20000.0],
    "legal": [[1, 1, 200, 20000], [1, 1, 304, 20000], [1, 1, 1100, 20000], [1, 1, None, None]],
}
"""A hand of open-spiel's universal_poker."""


def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *rows: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    hands = tmp_path / "hands.jsonl"
    hands.write_text("\n".join(map(json.dumps, rows)))
    status = poker.main(["--hands", str(hands)])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_recorded_hands_end_with_the_recorded_stacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_SMOKE", "1")  # speeds are no part of this test
    other = SIX_HANDED | {
        "antes": [10] * 6,
        "id": "antes",
        "final_stacks": [9940, 9890, 9990, 9240, 10950, 9990],
    }
    status, found = run(tmp_path, capsys, SIX_HANDED, other, STUD, REFERENCE)
    assert status == 0
    assert found | {"hands": 3, "replayed": 3, "reference": 1, "returns_equal": 1, "legal_equal": 4} == found


@pytest.mark.parametrize(
    "row",
    [
        SIX_HANDED | {"final_stacks": [9950, 9900, 10000, 9350, 10800, 10000]},
        SIX_HANDED | {"actions": [*SIX_HANDED["actions"][:-1], "p4 cbr 1100"]},  # type: ignore[index]
        REFERENCE | {"returns": [20000.0, -20000.0]},
        REFERENCE | {"legal": [[1, 1, 300, 20000], *REFERENCE["legal"][1:]]},  # type: ignore[index]
    ],
)
def test_a_hand_that_ends_otherwise_is_named(
    row: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run(tmp_path, capsys, row)
    assert status == 1
    assert any(sentence.startswith(row["id"]) for sentence in found["violated"])


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "x"}'])
def test_a_file_that_has_something_else_is_named(line: str, tmp_path: Path) -> None:
    hands = tmp_path / "hands.jsonl"
    hands.write_text(line)
    for path in (hands, tmp_path / "missing.jsonl"):
        with pytest.raises(SystemExit, match=f"{path.name} (is|cannot)"):
            poker.main(["--hands", str(path)])


class Told:
    """Stands for a model and its renderer: a character is a token, and the reply is always a call."""

    end_token_id = 0

    def __init__(self) -> None:
        self.codec, self.seen = self, list[str]()

    def encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def opening(self, said: Sequence[Message], tools: tuple[()]) -> tuple[int, ...]:
        return self.encode(f"<{said[0].content}>", False)

    def following(self, context: Any, reply: Any, said: Sequence[Message], tools: Any) -> tuple[int, ...]:
        return self.opening(said, tools)

    def generate(self, ids: torch.Tensor, **_: object) -> torch.Tensor:
        self.seen += [self.decode(row).replace("\0", "") for row in ids.tolist()]
        return torch.cat([ids, torch.tensor([[ord("c"), 0]] * len(ids))], 1)


def test_recorded_seats_are_conversations_in_which_the_recorded_players_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hands.jsonl").write_text(json.dumps(SIX_HANDED))
    agent, told = object.__new__(poker_league.ModelAgent), Told()
    vars(agent).update(_renderer=told, _model=told, _told=WeakKeyDictionary(), decisions=0, illegal=0)
    monkeypatch.setattr(poker_league, "agent_of", lambda name: agent)
    found = poker_league.agreement("model", [tmp_path / "hands.jsonl"], 100)
    assert found == {"share": 0.2, "decisions": 10} and agent.decisions == 10
    assert told.seen[0].startswith("<9h4s pot 3, ") and "200 200" in told.seen[0], "chips as models know them"
    replies = [re.findall(r">(\w+)<", row) for row in told.seen]
    assert replies == [[], [], [], [], [], [], ["r4"], ["r4", "c"], ["r15"], ["r4", "c", "c"]]
    assert all(len(set(re.findall(r"<(\w{4}) ", row))) == 1 for row in told.seen), "cards of another seat"


def test_a_match_is_the_same_each_time_and_fair_to_both() -> None:
    ours, _, _ = poker_league.play(("station", "tight"), 20, 7, range(4))
    assert ours == poker_league.play(("station", "tight"), 20, 7, range(4))[0]
    mirrored, _, _ = poker_league.play(("station", "station"), 20, 7, range(8))
    assert mirrored == [0.0] * 8, "the same cards, played alike from both seats, are worth nothing"
