"""Prompts that a tokenizer cannot say are refused before anything starts."""

from pathlib import Path

import pytest

from antiphon.core.config import load_config
from antiphon.core.errors import ConfigError
from antiphon.environments.environment import Problem
from antiphon.models.codec import TextCodec, resolve_model_path
from antiphon.runs.preflight import check_characters, preflight

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NO_LEDGER = ["record.dvc=false"]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(resolve_model_path("examples/models/chain-sum"))


def test_the_share_the_first_character_and_its_prompt_are_named(codec: TextCodec) -> None:
    problems = [Problem("train-0-0", "1 + 2 =", "3"), Problem("train-0-1", "1 + Q =", "?")]
    check_characters(problems[:1], codec, 0.0)
    with pytest.raises(ConfigError) as refused:
        check_characters(problems, codec, 0.1)
    said = str(refused.value)
    assert "12.5% of the prompts' characters" in said
    assert "the first is 'Q' in train-0-1: '1 + Q ='" in said
    assert "environment.max_lost_share=0.1" in said
    check_characters(problems, codec, 0.125)


def test_another_task_is_refused_for_the_small_model_unless_it_is_accepted(tmp_path: Path) -> None:
    task = ["environment.name=reasoning/spell_backward", "environment.parameters={}", *NO_LEDGER]
    with pytest.raises(ConfigError, match=r"'S' in train-0-0: 'Spell this word backward"):
        preflight(load_config(EXAMPLES / "quickstart.yaml", task), tmp_path)
    preflight(load_config(EXAMPLES / "quickstart.yaml", [*task, "environment.max_lost_share=1"]), tmp_path)


@pytest.mark.parametrize("name", ["quickstart", "gspo", "clipped_updates"])
def test_the_examples_lose_nothing(name: str, tmp_path: Path) -> None:
    preflight(load_config(EXAMPLES / f"{name}.yaml", NO_LEDGER), tmp_path)
