"""Scorer service: log-probabilities of given tokens under weights that never change.

Legend: G completions of one prompt, T tokens of one, K of them at a time, V vocabulary.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from antiphon.api.scorer import Scorer
from antiphon.core.errors import ContractError
from antiphon.core.records import FloatArray, IntArray
from antiphon.services.learner.scoring import completion_logits

LOGITS_AT_ONCE = 1 << 24
"""Most logits in memory, 64 MiB; the logarithms of their probabilities take as much again."""


class ScorerService(Scorer):
    """One causal model; it scores the completions of one prompt at a time."""

    def __init__(self, model: Any, temperature: float, float32_head: bool = False) -> None:
        """Serve a Hugging Face causal model; `temperature` divides its logits, and 0 counts as 1.

        `float32_head` is as of `completion_logits`.
        """
        self._model, self._temperature, self._float32_head = model, temperature or 1.0, float32_head
        # A call that nobody waits for any more goes on in its thread, and no other begins beside it.
        self._one = ThreadPoolExecutor(1)

    async def score(
        self, prompt_token_ids: IntArray, completions: Sequence[IntArray]
    ) -> Sequence[FloatArray]:
        vocabulary = len(self._model.get_output_embeddings().weight)
        tokens = np.concatenate([prompt_token_ids, *completions])
        if not prompt_token_ids.size or not ((tokens >= 0) & (tokens < vocabulary)).all():
            raise ContractError(
                f"a prompt of {prompt_token_ids.size} tokens and its completions cannot be scored: "
                f"there must be a prompt, and no token beyond {vocabulary - 1}; give all services one model"
            )
        asked = asyncio.get_running_loop().run_in_executor
        return await asked(self._one, self._score, prompt_token_ids, completions)

    def _score(self, prompt: IntArray, completions: Sequence[IntArray]) -> list[FloatArray]:
        found = [np.zeros(one.size, dtype=np.float32) for one in completions]
        rows = [(prompt, one) for one in completions]
        wanted = [np.arange(one.size) for one in completions]
        for line, places, logits in completion_logits(
            self._model, rows, wanted, LOGITS_AT_ONCE, self._float32_head
        ):
            taken = torch.from_numpy(completions[line][places].astype(np.int64)).to(logits.device)
            scaled = logits.float() / self._temperature
            logprobs = scaled.log_softmax(1).gather(1, taken[:, None])[:, 0]
            found[line][places] = logprobs.cpu().numpy()
        return found
