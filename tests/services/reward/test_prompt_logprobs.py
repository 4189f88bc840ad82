"""A reference model behind a URL gives what the run's scorer does, or a sentence says what is wrong."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from antiphon.core.config import RunConfig, build_config
from antiphon.core.errors import AntiphonError, ConfigError, ContractError, UnavailableError
from antiphon.core.records import FloatArray
from antiphon.models.codec import TextCodec
from antiphon.services.coordinator.journal.pinned import check_same_run, input_files, pinned_values
from antiphon.services.reward import prompt_logprobs
from antiphon.services.reward.prompt_logprobs import ServedScorer, check_server
from antiphon.services.scorer.server import open_scorer
from antiphon.services.scorer.service import ScorerService
from tests.support.logprob_server import LogprobServer, logprobs_of

MODEL = Path(__file__).parents[3] / "examples" / "models" / "chain-sum"
PROMPT = np.array([5, 6, 7], dtype=np.int32)
COMPLETIONS = [np.array(ids, dtype=np.int32) for ids in ([8], [9, 10, 11, 5], [])]


def config_of(url: str, **fields: Any) -> RunConfig:
    reference = {"kl": 0.1, "url": url, "model": "teacher", "timeout_s": 20.0, **fields}
    return build_config({"model": {"path": str(MODEL)}, "reference": reference})


async def scored(server: LogprobServer, **fields: Any) -> Sequence[FloatArray]:
    async with ServedScorer(config_of(server.url, **fields)) as scorer:
        return await scorer.score(PROMPT, COMPLETIONS)


def test_its_logprobs_are_those_of_a_scorer_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "hush")
    with logprobs_of(MODEL) as server:
        found = asyncio.run(scored(server, key="TEACHER_KEY"))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    own = asyncio.run(ScorerService(model, 1.0).score(PROMPT, COMPLETIONS))
    assert [one.dtype for one in found] == [np.float32] * 3
    for ours, theirs in zip(own, found, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    (asked,) = server.asked
    assert (asked["path"], asked["model"], asked["key"]) == ("/v1/completions", "teacher", "Bearer hush")
    assert asked["prompt"] == [[5, 6, 7, 8], [5, 6, 7, 9, 10, 11, 5], [5, 6, 7]]
    assert (asked["max_tokens"], asked["prompt_logprobs"]) == (1, 1)


@pytest.mark.parametrize(
    ("told", "kind", "said"),
    [
        ("503", UnavailableError, "reference.url: it answered with status 503: no, Bearer $TEACHER_KEY"),
        ("401", ContractError, "reference.url: it answered with status 401: no, Bearer $TEACHER_KEY"),
        ("slow", UnavailableError, "did not answer within 0.2 s"),
        ("plain", ContractError, "it answered 1 choices, and not one for each prompt"),
        ("one short", ContractError, "not one for each prompt"),
        ("redirect", ContractError, "go to http://a/Bearer $TEACHER_KEY?yyy"),
        ("no HTTP", UnavailableError, "reference.url: it cannot be asked: "),
        ("NaN", ContractError, "how probable token 8 is at place 3, but {'0': {'logprob': nan}"),
        ("0.5", ContractError, "how probable token 8 is"),
        ("-Infinity", ContractError, "how probable token 8 is"),
        ("-" + "1" * 400, ContractError, "how probable token 8 is"),
        ("other tokens", ContractError, "how probable token 8 is at place 3, but {'-1': {'logprob': -1.0}}"),
    ],
)
def test_whatever_it_answers_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, told: str, kind: type[AntiphonError], said: str
) -> None:
    monkeypatch.setenv("TEACHER_KEY", "hush")
    limit_s = 0.2 if told == "slow" else 20.0
    with logprobs_of(MODEL, told) as server, pytest.raises(kind) as caught:
        asyncio.run(scored(server, key="TEACHER_KEY", timeout_s=limit_s))
    assert said in str(caught.value) and "hush" not in str(caught.value) and len(str(caught.value)) < 300


def test_who_waits_for_its_turn_has_not_begun_to_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "AT_ONCE", 1)

    async def story(url: str) -> None:
        async with ServedScorer(config_of(url, timeout_s=3.0)) as scorer:
            await asyncio.gather(*(scorer.score(PROMPT, COMPLETIONS) for _ in range(6)))

    with logprobs_of(MODEL, *["0.6 s"] * 6) as server:
        asyncio.run(story(server.url))
        assert len(server.asked) == 6


@pytest.mark.parametrize("key", ["hush\n", "hush ", "h\u00fcsh"])
def test_a_key_that_no_header_carries_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("TEACHER_KEY", key)
    with pytest.raises(ConfigError, match=r"reference\.key: the value of TEACHER_KEY has") as caught:
        ServedScorer(config_of("http://a/v1", key="TEACHER_KEY"))
    assert key.strip() not in str(caught.value)


def test_it_is_tried_before_the_start_with_one_row_and_one_text() -> None:
    codec = TextCodec.load(str(MODEL))
    with logprobs_of(MODEL) as server:
        check_server(config_of(server.url), codec, "1 + 2 = ")
        row, text = (one["prompt"] for one in server.asked)
        assert text == "1 + 2 = " and row[0][:-1] == list(codec.encode(text, add_special_tokens=False))
        for script, said in (
            (["404"], "did not score a short row: it answered with status 404"),
            (["plain"], "has no prompt_logprobs; serve the model with vLLM"),
            (["honest", "other tokens"], "serve a model with the tokenizer of model.path"),
        ):
            server.script = script
            with pytest.raises(ConfigError, match=said):
                check_server(config_of(server.url), codec, "1 + 2 = ")
    with pytest.raises(ConfigError, match="it cannot be asked"):
        check_server(config_of(server.url), codec, "1 + 2 = ")


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"url": "127.0.0.1:8000"}, "reference.url is no address"),
        ({"model": ""}, "reference.url needs reference.model"),
        ({"key": "hush-hush"}, "reference.key is no name of a variable"),
        ({"threads": 2}, "reference.threads has no effect with reference.url"),
        ({"url": "", "timeout_s": 3.0}, "reference.timeout_s has no effect without reference.url"),
        ({"temperature": 0.7}, "sampling.temperature=0.7, but the server of reference.url"),
    ],
)
def test_what_cannot_act_is_refused_in_a_sentence(tree: dict[str, Any], named: str) -> None:
    sampling = {name: tree.pop(name) for name in ("temperature",) if name in tree}
    reference = {"kl": 0.1, "url": "http://a/v1", "model": "teacher", **tree}
    with pytest.raises(ConfigError, match=named) as caught:
        build_config({"reference": reference, "sampling": sampling})
    assert "hush" not in str(caught.value)


def test_a_service_of_the_run_has_nothing_to_score_then() -> None:
    with pytest.raises(ConfigError, match="this service has nothing to do"):
        open_scorer(config_of("http://a/v1"))


def test_a_run_keeps_the_name_and_not_the_place() -> None:
    before = pinned_values(config_of("http://a/v1"), input_files(config_of("http://a/v1")))
    check_same_run("run-1", before, pinned_values(config_of("http://b/v1", timeout_s=5.0)))
    with pytest.raises(ConfigError, match=r'reference\.model="other" differs from "teacher"'):
        check_same_run("run-1", before, pinned_values(config_of("http://a/v1", model="other")))
