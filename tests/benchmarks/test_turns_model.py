"""The base model of turns: what it is shown is what environments accept, and it is made again alike."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from antiphon.benchmarks.parts.warmstart.build import RECORD
from antiphon.benchmarks.parts.warmstart.imitation import IGNORED
from antiphon.benchmarks.parts.warmstart.tiny_model import WEIGHTS, ModelShape
from antiphon.benchmarks.parts.warmstart.turns import (
    Stage,
    TurnsRecipe,
    adding,
    batches,
    guessing,
    recipe_as_json,
    warmstart_turns,
)
from antiphon.core.digests import digest_file
from antiphon.core.messages import Message
from antiphon.models.rendering import Renderer
from tests.support.turn_model import load_renderer

COMMITTED = Path(__file__).parents[2] / "examples" / "models" / "turns"
SHAPE = replace(TurnsRecipe().shape, hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, mlp_size=64)
SHORT = TurnsRecipe(stages=(Stage(4, 1e-3, 0.5, 0.2, 2), Stage(2, 1e-3, 0.1, 0.3, 1)), shape=SHAPE, batch=4)


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return load_renderer(str(COMMITTED))


@pytest.mark.parametrize("care", ["careful", "hasty", "careless"])
def test_guesses_are_answered_truly(care: str) -> None:
    for seed in range(50):
        shown = guessing(care, np.random.default_rng(seed))
        guesses = [int(reply) for reply, _ in shown.turns]
        for guess, (_, answer) in zip(guesses, shown.turns, strict=True):
            if answer is not None and shown.turns[-1][1] is None:
                assert answer.content == ("higher" if guess < guesses[-1] else "lower")
        if care == "careful":
            assert shown.turns[-1][1] is None


@pytest.mark.parametrize(("care", "right"), [("careful", True), ("careless", False)])
def test_sums_are_asked_of_the_tool(renderer: Renderer, care: str, right: bool) -> None:
    agrees = 0
    for seed in range(100):
        shown = adding(care, np.random.default_rng(seed))
        opening = renderer.opening([Message("user", shown.opening)], shown.tools)
        (call,) = renderer.reply(opening, renderer.codec.encode(shown.turns[0][0]), shown.tools).tool_calls
        a, b = map(int, shown.opening.removeprefix("What is ").removesuffix("?").split(" + "))
        agrees += call.name == "add" and dict(call.arguments) == {"a": a, "b": b}
    assert agrees == 100 if right else 30 < agrees < 70


def test_only_what_is_sampled_is_learned(renderer: Renderer) -> None:
    ids, targets = next(batches(renderer, SHORT.stages[0], 8, np.random.default_rng(1)))
    end = renderer.codec.end_token_id
    for row, wanted in zip(ids.tolist(), targets.tolist(), strict=True):
        learned = [place for place, token in enumerate(wanted) if token != IGNORED]
        assert [row[place] for place in learned] == [wanted[place] for place in learned]
        first = learned[0]
        assert row[learned[-1]] == end
        text = renderer.codec.tokenizer.decode(row[:first], skip_special_tokens=False)
        assert text.endswith("<|im_start|>assistant\n")


def test_the_same_recipe_makes_the_same_bytes(tmp_path: Path) -> None:
    first, again = (warmstart_turns(SHORT, tmp_path / name, lambda *_: None) for name in "ab")
    assert first == again == digest_file(tmp_path / "a" / WEIGHTS)
    assert warmstart_turns(replace(SHORT, seed=1), tmp_path / "c", lambda *_: None) != first
    for file in (tmp_path / "a").iterdir():
        assert (tmp_path / "b" / file.name).read_bytes() == file.read_bytes()


def test_the_committed_model_is_that_of_its_record() -> None:
    record = json.loads((COMMITTED / RECORD).read_text())
    assert record["recipe"] == recipe_as_json(TurnsRecipe())
    assert record["result"]["weights_digest"] == digest_file(COMMITTED / WEIGHTS)
    assert ModelShape(**record["recipe"]["shape"]) == TurnsRecipe().shape
