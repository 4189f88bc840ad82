"""Poker's benchmarks: a hand that ends otherwise is named, and a match is the same each time."""

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.benchmarks import poker, poker_league
from antiphon.benchmarks.parts.poker_model import PokerModel, Talk
from antiphon.benchmarks.parts.results import read
from antiphon.core.errors import ConfigError
from antiphon.core.messages import Ended, Reply
from antiphon.core.seeds import generator
from antiphon.environments.poker.hand import Hand
from antiphon.environments.registry import make_environment

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


MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "poker"


def test_recorded_seats_are_conversations_in_which_the_recorded_players_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hands.jsonl").write_text(json.dumps(SIX_HANDED))
    player, seen = PokerModel(str(MODEL)), list[str]()

    def calls(talks: Sequence[Talk], seed: int) -> list[list[int]]:
        seen.extend(player.renderer.codec.decode(talk.ids) for talk in talks)
        return [list(player.renderer.codec.encode("c", add_special_tokens=False)) for _ in talks]

    monkeypatch.setattr(player, "replies", calls)
    monkeypatch.setattr(poker_league, "agent_of", lambda name: player)
    found = poker_league.agreement("model", [tmp_path / "hands.jsonl"], 100)
    assert found == {"share": 0.2, "decisions": 10} and player.decisions == 10
    assert "9h4s pot 3, " in seen[0] and "200 200" in seen[0], "chips as models know them"
    replies = [re.findall(r"assistant\n(\w+)", row) for row in seen]
    assert replies == [[], [], [], [], [], [], ["r4"], ["r4", "c"], ["r15"], ["r4", "c", "c"]]
    assert all(len(set(re.findall(r"user\n(\w{4}) ", row))) == 1 for row in seen), "cards of another seat"


def test_what_a_model_keeps_is_what_it_would_work_out_again() -> None:
    player, random = PokerModel(str(MODEL)), generator("kept")
    hands = [Hand(generator("deck", deal).permutation(52).tolist(), [40, 40], (1, 2)) for deal in range(24)]
    while asked := [hand for hand in hands if hand.actor is not None]:
        for hand, action in zip(asked, player(asked, random), strict=True):
            hand.act(action)
    talks = [talk for hand in hands for talk in player.talks[hand].values()]
    again = [replace(talk, ids=talk.ids[: talk.asked], kept=talk.kept[:0]) for talk in talks]
    assert any(talk.ids.count(player.renderer.codec.end_token_id) > 3 for talk in talks), (
        "all hands are short"
    )
    player.replies(again, 0)
    for kept, made in zip(talks, again, strict=True):
        assert len(kept.kept) == kept.asked
        torch.testing.assert_close(kept.kept, made.kept, rtol=1e-3, atol=1e-3)


def test_a_match_is_the_same_each_time_and_fair_to_both() -> None:
    ours, _, _ = poker_league.play(("station", "tight"), 2, 20, 7, range(4))
    assert ours == poker_league.play(("station", "tight"), 2, 20, 7, range(4))[0]
    for seats in (2, 6):
        mirrored, _, _ = poker_league.play(("station", "station"), seats, 20, 7, range(8))
        assert mirrored == pytest.approx([0.0] * 8), "the same cards, played alike, are worth nothing"


def test_a_league_that_was_stopped_goes_on_and_other_weights_play_again(tmp_path: Path) -> None:
    kept, model = tmp_path / "matches.jsonl", tmp_path / "model.safetensors"
    played = iter([{"low": 1.0}, {"low": 2.0}])
    for weights, low in ((b"one", 1.0), (b"one", 1.0), (b"two", 2.0), (b"one", 1.0)):
        model.write_bytes(weights)
        assert poker_league.once(kept, lambda: next(played), ((str(tmp_path), "tight"), 2)) == {"low": low}


def test_a_table_may_have_models_at_its_seats() -> None:
    place = "antiphon.benchmarks.parts.poker_versions:AgainstVersions"
    table = make_environment(place, {"opponents": f"station,{MODEL}"}, 0, 16, 4)
    with ThreadPoolExecutor(4) as threads:
        ends = list(threads.map(partial(talk, table), range(8)))
    assert ends == [talk(table, index) for index in range(8)], "the same replies have another end"
    with pytest.raises(ConfigError, match="'missing', which is no model's folder"):
        make_environment(place, {"opponents": "missing"}, 0, 16, 4)


def talk(table: Any, index: int) -> Ended:
    """Return how a conversation ends in which every reply is a call."""
    conversation = table.conversation()
    conversation.begin(table.problem("train", index), 5)
    while not isinstance(said := conversation.answer(Reply("c")), Ended):
        pass
    return said


def test_the_guide_has_the_table_of_the_league() -> None:
    guide = (MODEL.parents[2] / "docs" / "guides" / "poker.md").read_text(encoding="utf-8")
    assert poker_league.table(read()["poker_league"].result) in guide
