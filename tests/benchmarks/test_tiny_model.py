"""The tiny tokenizer: what the environment writes and the judge parses survives the round trip."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from antiphon.benchmarks.parts.warmstart.recipe import Habit, demonstrate
from antiphon.benchmarks.parts.warmstart.tiny_model import (
    ModelShape,
    build_model,
    build_tokenizer,
    save_tiny_model,
)
from antiphon.core.digests import digest_file
from antiphon.core.errors import ConfigError
from antiphon.environments.registry import make_environment

ENVIRONMENT = make_environment("reasoning/chain_sum", {"max_terms": 9, "max_digits": 3}, 0, 64, 64)
SHAPE = ModelShape(hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_size=16)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    save_tiny_model(build_model(SHAPE, 0), build_tokenizer(ENVIRONMENT.problem("train", 0).text, SHAPE), out)
    return out


def test_transformers_loads_the_tokenizer_by_itself(saved: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert len(tokenizer) == SHAPE.vocabulary


def test_completions_come_back_letter_for_letter(saved: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved)
    rng = np.random.default_rng(0)
    for index in range(64):
        problem = ENVIRONMENT.problem("train", index)
        text = demonstrate(problem.text, {habit: 1 / len(Habit) for habit in Habit}, rng).text
        ids = tokenizer.encode(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
        assert ENVIRONMENT.reward(problem, [tokenizer.decode(ids)]) == [1.0]


def test_prompts_come_back_without_the_blanks_between_numbers(saved: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved)
    for split in ("train", "heldout"):
        for index in range(64):
            text = ENVIRONMENT.problem(split, index).text
            ids = tokenizer.encode(text)
            assert tokenizer.unk_token_id not in ids
            opening, _, chain = text.partition(": ")
            assert tokenizer.decode(ids) == f"{opening}:{chain.replace(' ', '')}"
            assert len(ids) == 1 + len(chain.replace(" ", ""))


def test_unknown_words_become_the_unknown_token(saved: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(saved)
    assert tokenizer.unk_token_id in tokenizer.encode("Compute the greatest common divisor")


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape\.vocabulary"):
        build_tokenizer("one two three", ModelShape(vocabulary=16))


def test_transformers_loads_the_model_and_the_bytes_follow_from_the_seed(saved: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(ENVIRONMENT.problem("train", 0).text, SHAPE)
    digests = {
        seed: digest_file(save_tiny_model(build_model(SHAPE, seed), tokenizer, tmp_path / str(seed)))
        for seed in (0, 1)
    }
    assert digests[0] == digest_file(saved / "model.safetensors") != digests[1]
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert model.config.model_type == "qwen3"
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
