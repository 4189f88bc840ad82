"""Prompt logprobs: a reference model behind an OpenAI-compatible server, as vLLM is one.

Prompt and completion together are the server's prompt, whose tokens it says the log-probabilities of
(`prompt_logprobs` of `/v1/completions`), at temperature 1. It also writes one token, which is not used.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from antiphon.api.scorer import Scorer
from antiphon.core.checks import LOGPROB_CEILING
from antiphon.core.config import RunConfig
from antiphon.core.errors import ConfigError, ContractError, UnavailableError
from antiphon.core.records import FloatArray, IntArray
from antiphon.models.codec import TextCodec
from antiphon.services.reward.json_server import ANSWER_BYTES, JsonServer

AT_ONCE = 16
"""Groups that are asked for at the same time."""
TOKEN_BYTES = 1024
"""Of an answer, most for each token: its own entry and that of the likeliest one, each with its text."""
TRIED_CHARS = 200
"""Of the text that is scored before the start."""


class ServedScorer(Scorer):
    """Asks the server of `reference.url`; an asynchronous context."""

    def __init__(self, config: RunConfig) -> None:
        """Prepare; nothing is asked before the context is entered.

        Raises:
            ConfigError: when the variable with the API key is not set.
        """
        section = config.reference
        self._url, self._model = f"{section.url.rstrip('/')}/completions", section.model
        self._server = JsonServer("reference", section.key, section.timeout_s, AT_ONCE)
        self._places = asyncio.Semaphore(AT_ONCE)  # who waits for another's answer has not asked yet

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._server.__aexit__()

    async def score(
        self, prompt_token_ids: IntArray, completions: Sequence[IntArray]
    ) -> Sequence[FloatArray]:
        rows = [np.concatenate([prompt_token_ids, one]).tolist() for one in completions]
        try:
            async with self._places:
                choices = await self._choices(rows, sum(map(len, rows)))
            start = prompt_token_ids.size
            return [_logprobs(one, row, start, self._server) for one, row in zip(choices, rows, strict=True)]
        except (ContractError, UnavailableError) as error:
            raise type(error)(f"reference.url: {error}") from error

    async def check_text(self, text: str, token_ids: Sequence[int]) -> None:
        """Check that the server makes the same tokens of a text.

        Raises:
            ContractError: when it makes others, or its answer has another form.
            UnavailableError: when it does not answer in time.
        """
        (choice,) = await self._choices(text, len(text))
        _logprobs(choice, token_ids, 1, self._server)

    async def _choices(self, prompt: Any, tokens: int) -> list[Any]:
        """Return what a server says of a text, or of rows of token ids, in order."""
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0,
            "prompt_logprobs": 1, "add_special_tokens": False,
        }  # fmt: skip
        tree = await self._server.post(self._url, body, ANSWER_BYTES + TOKEN_BYTES * tokens)
        try:
            found = sorted(tree["choices"], key=lambda choice: choice["index"])
            places = [choice["index"] for choice in found]
        except (KeyError, TypeError):
            raise ContractError("its answer has no choices with an index each") from None
        if places != list(range(1 if isinstance(prompt, str) else len(prompt))):
            raise ContractError(f"it answered {len(places)} choices, and not one for each prompt")
        return found


def _logprobs(choice: Any, token_ids: Sequence[int], start: int, server: JsonServer) -> FloatArray:
    """Return what a choice says of the tokens from `start` on, [T] float32 nats.

    Raises:
        ContractError: when it does not say that of each.
    """
    given = choice.get("prompt_logprobs") if isinstance(choice, dict) else None
    if not isinstance(given, list):
        raise ContractError(
            "its answer has no prompt_logprobs; serve the model with vLLM, or one that has them"
        )
    if len(given) != len(token_ids):
        raise ContractError(
            f"it has {len(given)} tokens where model.path has {len(token_ids)}; serve a model with the same "
            "tokenizer"
        )
    found = np.empty(len(token_ids) - start, dtype=np.float32)
    for place in range(start, len(token_ids)):
        try:
            found[place - start] = float(given[place][str(token_ids[place])]["logprob"])
            if not -np.inf < found[place - start] <= LOGPROB_CEILING:  # NaN neither
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            said = server.plain(repr(given[place]), most=100)
            raise ContractError(
                f"it does not say how probable token {token_ids[place]} is at place {place}, but {said}; "
                "serve a model with the tokenizer of model.path"
            ) from None
    return found


def check_server(config: RunConfig, codec: TextCodec, text: str) -> None:
    """Score one short row by the server of `reference.url`, and compare what tokens it makes of a text.

    Raises:
        ConfigError: when it does not answer, answers in another form, or has another tokenizer.
    """
    text = text[:TRIED_CHARS] or "1 + 2"
    token_ids = codec.encode(text, add_special_tokens=False)
    last = max(codec.tokenizer.get_vocab(with_added_tokens=True).values())
    row = np.array([*token_ids, last], dtype=np.int32)

    async def tried() -> None:
        async with ServedScorer(config) as scorer:
            await scorer.score(row[:1], [row[1:]])
            await scorer.check_text(text, token_ids)

    try:
        asyncio.run(tried())
    except (ContractError, UnavailableError) as error:
        said = str(error).removeprefix("reference.url: ")
        section = config.reference
        raise ConfigError(
            f"reference.url={section.url}: {section.model} did not score a short row: {said}"
        ) from error
