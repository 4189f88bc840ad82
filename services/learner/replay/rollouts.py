"""Replay of rollouts: recorded tokens scored again under the versions that sampled them.

Sampling parameters shape the distribution as the engine's sampler does. A completion that changed versions
is scored under each of them, whole, since a worker recomputes what it has when weights are swapped. Where it
kept its cache instead, no clean pass gives the log-probabilities after the swap: these tokens are counted and
not compared.

Both programs round. A trajectory that float32 puts outside the tolerance is scored again in
float64, so that what remains is the rounding of the engine that sampled it, not one's own.

Legend: T tokens of a completion, H hidden, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.core.errors import IntegrityError
from antiphon.core.records import BatchRow, FloatArray, SamplingParameters
from antiphon.core.reporting.replay_checks import LOGPROB_TOLERANCE, LogprobCheck, compare_logprobs
from antiphon.core.spans import kept_cache_tokens, token_versions
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.lineage.rollout_table import decode_batch
from antiphon.sampling.keyed_sampler import score
from antiphon.services.learner.policy import load_causal_model
from antiphon.services.learner.replay.base import load_version
from antiphon.services.learner.scoring import completion_states, row_sampling

BoolArray = npt.NDArray[np.bool_]

PASS_LOGITS = 1 << 24
"""Most logits held at once: 128 MiB of float64."""


class RolloutScorer:
    """One model whose weights are exchanged for those of any recorded version."""

    def __init__(self, copy: ReplayCopy, model_path: str, made: Mapping[int, Path]) -> None:
        """Load the model.

        Args:
            copy: the run's artifacts.
            model_path: folder of the base model; only its shape matters.
            made: safetensors files of versions that were made again, since the copy does not keep them; may
                grow between two calls.

        Raises:
            ConfigError: when it cannot be loaded.
        """
        self._copy, self._made = copy, made
        self._sampling = copy.config.sampling.parameters()
        self._model = _load(model_path, torch.float32)
        exact = copy.config.model.dtype == "float32"  # bfloat16 rounds a thousand times more than this
        self._exact = _load(model_path, torch.float64) if exact else None

    def check(self, step: int) -> LogprobCheck:
        """Score the batch of a step again and compare with what the workers reported.

        Raises:
            IntegrityError: when the batch or recorded weights are missing or altered.
        """
        rows = decode_batch(self._copy.batch(step))
        scored = [np.full(len(row.token_ids), np.nan, dtype=np.float32) for row in rows]
        sampled_by, kept = [token_versions(row) for row in rows], [kept_cache_tokens(row) for row in rows]
        for version in sorted({span.version for row in rows for span in row.spans}):
            if self._made.get(version) or self._copy.weights(version) is not None:
                masks = [(by == version) & ~over for by, over in zip(sampled_by, kept, strict=True)]
                own = {place: mask for place, mask in enumerate(masks) if mask.any()}
                self._score_version(version, rows, own, scored)
        return compare_logprobs(
            step,
            [row.logprobs for row in rows],
            scored,
            [f"sample {row.sample_index} of group {row.group_id}" for row in rows],
            sampled_by,
            kept,
        )

    def _score_version(
        self,
        version: int,
        rows: Sequence[BatchRow],
        own: Mapping[int, BoolArray],
        scored: Sequence[FloatArray],
    ) -> None:
        """Write the logprobs of a version's own tokens (place -> [T] mask) into `scored`."""
        tensors = load_version(self._copy, version, self._made.get(version))
        # Later tokens do not change earlier ones, so what other versions continued with is left off.
        parts = {place: _until(rows[place], int(np.flatnonzero(own[place])[-1]) + 1) for place in own}
        for model in (self._model, self._exact):
            if model is None or not parts:
                return
            self._fill(model, tensors, version)
            for place, logprobs in zip(parts, self._score(model, list(parts.values())), strict=True):
                mask = own[place]
                scored[place][mask] = logprobs[mask[: len(logprobs)]]
            parts = {
                place: part
                for place, part in parts.items()
                if _beyond(rows[place].logprobs[own[place]], scored[place][own[place]])
            }

    def _fill(self, model: Any, tensors: dict[str, torch.Tensor], version: int) -> None:
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        unknown = next((name for name in tensors if shapes.get(name) != tensors[name].shape), None)
        if unknown is not None:
            raise IntegrityError(
                f"version {version} of {self._copy.run_id} has a tensor {unknown} that the base model lacks "
                "or has in another shape; give the run's own model with --model"
            )
        model.load_state_dict(tensors, strict=False)  # a tied head is recorded once

    def _score(self, model: Any, rows: Sequence[BatchRow]) -> list[FloatArray]:
        """Return the logprobs [T] of each row's completion under a model's weights."""
        found: list[FloatArray] = [np.empty(0, dtype=np.float32)] * len(rows)
        head = model.get_output_embeddings().weight
        texts = [(row.prompt_token_ids, row.token_ids) for row in rows]
        with torch.no_grad():
            for place, states in completion_states(model, texts):
                found[place] = _token_logprobs(states, head, rows[place], self._sampling)
        return found


def _token_logprobs(
    states: torch.Tensor, head: torch.Tensor, row: BatchRow, sampling: SamplingParameters
) -> FloatArray:
    """Return the logprobs [T] of the tokens that follow `states` [T, H] under `head` [V, H]."""
    vocabulary = head.shape[0]
    tokens = torch.from_numpy(row.token_ids.astype(np.int64))
    at_once = max(1, PASS_LOGITS // vocabulary)
    parts = []
    for start in range(0, len(tokens), at_once):
        chosen = tokens[start : start + at_once]
        logits = states[start : start + at_once] @ head.T
        parts.append(score(logits, chosen, row_sampling(sampling, len(chosen), vocabulary)))
    found: FloatArray = torch.cat(parts).numpy()
    return found


def _load(path: str, dtype: torch.dtype) -> Any:
    model = load_causal_model(path, torch.float32, gradient_checkpointing=False)
    return model.to(dtype).eval()


def _until(row: BatchRow, tokens: int) -> BatchRow:
    return replace(row, token_ids=row.token_ids[:tokens], logprobs=row.logprobs[:tokens])


def _beyond(recorded: FloatArray, scored: FloatArray) -> bool:
    return not bool((np.abs(recorded - scored) <= LOGPROB_TOLERANCE).all())
