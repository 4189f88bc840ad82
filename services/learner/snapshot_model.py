"""Snapshot model: a second copy of the model, filled with the stored snapshot of any version.

They are the weights that workers sample with, bit for bit, whatever the learner has become meanwhile. The
copy is loaded when it is first needed, and used on one thread.

Legend: P tokens, K most probable ones of each place, V vocabulary.
"""

from typing import Any

import numpy as np
import torch

from antiphon.core.client_records import Scores
from antiphon.core.config import RunConfig
from antiphon.core.errors import ContractError, UnavailableError
from antiphon.core.records import IntArray
from antiphon.services.learner.policy import load_causal_model, load_published
from antiphon.services.learner.scoring import completion_logits
from antiphon.weights.payload_store import PayloadStore
from antiphon.weights.snapshot import open_snapshot

LOGITS_AT_ONCE = 1 << 22
"""Most logits in memory, 16 MiB, or those of one token."""


class SnapshotModel:
    """One model whose weights are exchanged for those of the version at hand."""

    def __init__(self, config: RunConfig, payloads: PayloadStore, model: Any = None) -> None:
        """Prepare; unless a causal model is given, the run's own is loaded for the first version."""
        self._config, self._payloads = config, payloads
        self.model = model
        self._version: int | None = None

    def fill(self, version: int) -> bool:
        """Hold the weights of a version; return whether it is still stored.

        Raises:
            IntegrityError: when the snapshot is damaged.
        """
        if version == self._version:
            return True
        try:
            tensors = open_snapshot(self._payloads.manifest(version), self._payloads)
        except UnavailableError:
            return False  # pruned meanwhile
        if self.model is None:
            dtype = torch.float32 if self._config.model.dtype == "float32" else torch.bfloat16
            self.model = load_causal_model(self._config.model.path, dtype, False)
        self._version = None  # until all of it is there: what is held may be half of something
        load_published(self.model, tensors)
        self._version = version
        return True

    def scores(self, version: int, token_ids: IntArray, top: int) -> Scores:
        """Return the log-probabilities of tokens [P], and the `top` most probable ones at each place.

        Raises:
            ContractError: when the version is not stored, or the tokens cannot be scored.
            IntegrityError: when the snapshot is damaged.
        """
        count, most = len(token_ids), self._config.rollout.max_model_tokens
        if not 1 <= count <= most:
            raise ContractError(
                f"{count} tokens cannot be scored; give 1 to {most} (rollout.max_model_tokens)"
            )
        if not self.fill(version):
            raise ContractError(
                f"the weights of version {version} are not kept any more; score a newer version, or one that "
                "was saved"
            )
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        wrong = np.flatnonzero((token_ids < 0) | (token_ids >= vocabulary))
        if wrong.size:
            raise ContractError(
                f"token {token_ids[wrong[0]]} at place {wrong[0]} is none of the model; give 0 to "
                f"{vocabulary - 1}"
            )
        if not 0 <= top <= vocabulary:
            raise ContractError(f"the {top} most probable tokens cannot be given; ask for 0 to {vocabulary}")
        logprobs = np.full(count, np.nan, dtype=np.float32)
        ids = np.full((count, top), -1, dtype=np.int32)
        values = np.full((count, top), np.nan, dtype=np.float32)
        wanted = [np.arange(count - 1)]
        rows = [(token_ids[:1], token_ids[1:])]
        wide = self._config.model.head == "float32"
        for _, places, logits in completion_logits(self.model, rows, wanted, LOGITS_AT_ONCE, wide):
            found = logits.float().log_softmax(-1)
            own = torch.from_numpy(token_ids[1:][places].astype(np.int64)).to(found.device)
            logprobs[1 + places] = found.gather(1, own[:, None])[:, 0].cpu().numpy()
            if top:
                best = found.topk(top, dim=-1)
                ids[1 + places], values[1 + places] = best.indices.cpu().numpy(), best.values.cpu().numpy()
        return Scores(logprobs, ids, values)
