"""Replay of rollouts: recorded tokens scored again under the versions that sampled them.

Sampling parameters shape the distribution as the engine's sampler does. A completion that changed versions
is scored under each of them, whole, since a worker recomputes what it has when weights are swapped. Where it
kept its cache instead, no clean pass gives the log-probabilities after the swap: these tokens are counted and
not compared.

Both programs round. A trajectory that float32 puts outside the tolerance is scored again in
float64, so that what remains is the rounding of the engine that sampled it, not one's own.

Legend: T tokens of a completion.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from antiphon.core.errors import IntegrityError
from antiphon.core.records import BatchRow, FloatArray
from antiphon.core.reporting.replay_checks import LogprobCheck, compare_logprobs, logprob_tolerance
from antiphon.core.spans import branches, kept_cache_tokens, token_versions
from antiphon.lineage.documents.replay_copy import ReplayCopy
from antiphon.lineage.rollout_table import decode_batch
from antiphon.sampling.keyed_sampler import score
from antiphon.services.learner.policy import load_causal_model, load_published
from antiphon.services.learner.replay.base import load_version
from antiphon.services.learner.scoring import completion_logits, row_sampling

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
        self._tolerance = logprob_tolerance(len(self._model.get_output_embeddings().weight))
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
            self._tolerance,
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
        left = {
            (place, branch): branch.start + np.flatnonzero(mask[branch.start : branch.stop])
            for place, mask in own.items()
            for branch in branches(rows[place].prompt_token_ids, rows[place])
        }
        left = {part: wanted for part, wanted in left.items() if wanted.size}
        for model in (self._model, self._exact):
            if model is None or not left:
                return
            self._fill(model, tensors, version)
            parts = list(left)
            # Later tokens do not change earlier ones, so what other versions continued with is left off.
            texts = [
                (branch.context, rows[place].token_ids[branch.start : wanted[-1] + 1])
                for (place, branch), wanted in left.items()
            ]
            counted = [wanted - branch.start for (_, branch), wanted in left.items()]
            for line, at, logits in completion_logits(model, texts, counted, PASS_LOGITS):
                place, branch = parts[line]
                tokens = torch.from_numpy(rows[place].token_ids[branch.start + at].astype(np.int64))
                sampling = row_sampling(self._sampling, at.size, logits.shape[-1])
                scored[place][branch.start + at] = score(logits, tokens, sampling).numpy()
            left = {
                (place, branch): wanted
                for (place, branch), wanted in left.items()
                if not bool(
                    (np.abs(rows[place].logprobs[wanted] - scored[place][wanted]) <= self._tolerance).all()
                )
            }

    def _fill(self, model: Any, tensors: dict[str, torch.Tensor], version: int) -> None:
        try:
            load_published(model, tensors)
        except IntegrityError as error:
            raise IntegrityError(f"version {version} of {self._copy.run_id}: {error}") from error


def _load(path: str, dtype: torch.dtype) -> Any:
    model = load_causal_model(path, torch.float32, gradient_checkpointing=False)
    return model.to(dtype).eval()
