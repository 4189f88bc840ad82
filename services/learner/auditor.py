"""Auditor: scores groups again under the very version that sampled them, beside the training.

It holds a second copy of the model, filled with the published snapshot of each version it needs:
the weights that workers sampled with, bit for bit, whatever the learner has become meanwhile. One
forward pass over prompt and completion gives the distribution of every token; the production
sampler's own arithmetic shows where each token's uniform had to fall, or under the Gumbel rule by how
much its sum of logit and noise falls short of the largest.

Legend: G samples of a group, W positions of the longest, T completion tokens, V vocabulary.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import structlog
import torch

from antiphon.core.config import RunConfig
from antiphon.core.errors import AntiphonError, IntegrityError, UnavailableError
from antiphon.core.records import GroupToAudit, SamplingParameters, Trajectory
from antiphon.core.spans import token_versions
from antiphon.core.trust.audit import SampleStatistics
from antiphon.services.broadcast.chunk_store import ChunkStore
from antiphon.services.broadcast.snapshot import rebuild
from antiphon.services.coordinator.api import Coordinator
from antiphon.services.learner.policy import load_causal_model
from antiphon.services.learner.row_sampling import row_sampling
from antiphon.services.rollout.engine import gumbel
from antiphon.services.rollout.engine.keyed_sampler import (
    RowSampling,
    intervals,
    request_key,
    score,
    uniforms,
)
from antiphon.services.rpc.retry import MOST_PAUSE_S

ROUNDING = {
    "inverse_cdf": {"float32": 1e-4, "bfloat16": 1e-2},
    "gumbel": {"float32": 1e-3, "bfloat16": 1e-1},
}
"""How far a token may miss and still be rounding, by the rule and the weights' precision: how far outside
its interval its uniform lies, or by how many nats its sum falls short. Engines sum in another order than
one forward pass, which moves the ends of intervals and the logits."""
PULL_S = 20.0
"""How long one question for groups stays open at the coordinator."""
GROUPS_PER_PULL = 4

_log = structlog.get_logger(__name__)


class Auditor:
    """One model whose weights are exchanged for those of the version at hand; for one thread."""

    def __init__(self, config: RunConfig, chunks: ChunkStore, model: Any = None) -> None:
        """Prepare; unless a causal model is given, the run's own is loaded for the first group."""
        self._config = config
        self._chunks = chunks
        self._model = model
        self._version: int | None = None

    def examine(self, group: GroupToAudit) -> list[SampleStatistics]:
        """Return what the scores say, a sample each; tokens of versions that were dropped are left out.

        Raises:
            IntegrityError: when a snapshot is damaged.
        """
        trajectories = group.submission.trajectories
        scored: dict[int, list[tuple[int, int, int, float]]] = {t.sample_index: [] for t in trajectories}
        for version in sorted({span.version for t in trajectories for span in t.spans}):
            if not self._fill(version):
                continue
            own = [t for t in trajectories if any(span.version == version for span in t.spans)]
            for trajectory, logits in zip(own, self._logits(group.prompt_token_ids, own), strict=True):
                mask = token_versions(trajectory) == version
                found = examine_tokens(
                    logits[torch.from_numpy(mask)],
                    trajectory,
                    np.flatnonzero(mask),
                    len(group.prompt_token_ids),
                    group.sampling or self._config.sampling.parameters(),
                    group.rule if self._config.sampling.sampler == "keyed" else None,
                    self._config.model.dtype,
                )
                scored[trajectory.sample_index].append(found)
        return [_added(index, parts) for index, parts in scored.items()]

    def _fill(self, version: int) -> bool:
        if version == self._version:
            return True
        try:
            tensors = rebuild(self._chunks.manifest(version), self._chunks.get)
        except UnavailableError:
            return False  # pruned meanwhile
        if self._model is None:
            dtype = torch.float32 if self._config.model.dtype == "float32" else torch.bfloat16
            self._model = load_causal_model(self._config.model.path, dtype, False)
        self._version = None
        self._model.load_state_dict(tensors, strict=False)  # a tied head is published once
        self._version = version
        return True

    def _logits(self, prompt: Sequence[int], rows: Sequence[Trajectory]) -> list[torch.Tensor]:
        """Return [T, V] logits of each row's completion tokens."""
        width = len(prompt) + max(row.token_ids.size for row in rows) - 1
        inputs = torch.zeros((len(rows), width), dtype=torch.int64)
        for place, row in enumerate(rows):
            whole = np.concatenate([np.asarray(prompt, dtype=np.int64), row.token_ids[:-1]])
            inputs[place, : whole.size] = torch.from_numpy(whole)
        with torch.no_grad():
            states = self._model.get_decoder()(input_ids=inputs, use_cache=False).last_hidden_state
            head = self._model.get_output_embeddings().weight
            start = len(prompt) - 1
            return [
                (states[place, start : start + row.token_ids.size] @ head.T).float()
                for place, row in enumerate(rows)
            ]


def examine_tokens(
    logits: torch.Tensor,
    trajectory: Trajectory,
    places: np.ndarray[Any, np.dtype[np.int64]],
    prompt_tokens: int,
    sampling: SamplingParameters,
    rule: str | None,
    dtype: str,
) -> tuple[int, int, int, float]:
    """Compare tokens with the distributions they are said to come from.

    Args:
        logits: [K, V] of the tokens at `places`.
        trajectory: as the worker handed it in.
        places: [K] indices into the completion.
        prompt_tokens: length of the prompt; positions count from its start.
        sampling: as leased.
        rule: how keyed random numbers choose a token; None for a sampler without keys.
        dtype: precision of the weights.

    Returns:
        Tokens, missed tokens, tokens that were cut off, and the sum of |auditor - worker| logprobs.
    """
    count, vocabulary = logits.shape
    if not count:
        return 0, 0, 0, 0.0
    rows = row_sampling(sampling, count, vocabulary)
    tokens = torch.from_numpy(trajectory.token_ids[places].astype(np.int64))
    own = score(logits, tokens, rows).numpy().astype(np.float64)
    cut = np.isneginf(own)
    reported = trajectory.logprobs[places].astype(np.float64)
    differences = np.abs(own - reported)[~cut]
    missed = 0
    if rule is not None:
        keys = np.full(count, request_key(trajectory.seed), dtype=np.uint64)
        by = _misses(rule, logits, tokens, keys, prompt_tokens + places, rows)
        missed = int((by > ROUNDING[rule][dtype]).sum())
    return count, missed, int(cut.sum()), float(differences.sum())


def _misses(
    rule: str,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    keys: np.ndarray[Any, np.dtype[np.uint64]],
    positions: np.ndarray[Any, np.dtype[np.int64]],
    rows: RowSampling,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return by how much each token misses what the rule draws, [K], in the rule's own unit."""
    if rule == "gumbel":
        numbers = torch.from_numpy(gumbel.row_keys(keys, positions))
        # Chunks like those of drawing: the noise takes many times the memory of the logits.
        most = max(1, gumbel.CHUNK_GPU // logits.shape[-1])
        parts = [
            gumbel.shortfalls(
                logits[at : at + most],
                tokens[at : at + most],
                numbers[at : at + most],
                rows.part(at, at + most),
            )
            for at in range(0, len(tokens), most)
        ]
        short: np.ndarray[Any, np.dtype[np.float64]] = torch.cat(parts).numpy()
        return short
    low, high = (end.numpy() for end in intervals(logits, tokens, rows))
    u = uniforms(keys, positions)
    outside: np.ndarray[Any, np.dtype[np.float64]] = np.maximum(low - u, u - high)
    return outside


def _added(index: int, parts: list[tuple[int, int, int, float]]) -> SampleStatistics:
    tokens, missed, impossible = (sum(int(part[k]) for part in parts) for k in range(3))
    scored = tokens - impossible
    drift = sum(part[3] for part in parts) / scored if scored else 0.0
    return SampleStatistics(index, tokens, missed, impossible, float(drift))


async def audit_forever(coordinator: Coordinator, auditor: Auditor, client_id: str) -> None:
    """Examine what the coordinator hands out, until cancelled; it may come and go meanwhile."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, "audit") as thread:
        while True:
            try:
                groups = await coordinator.pull_for_audit(client_id, GROUPS_PER_PULL, PULL_S)
                for group in groups:
                    samples = await loop.run_in_executor(thread, auditor.examine, group)
                    await coordinator.submit_audit(group.submission.group_id, samples)
            except (UnavailableError, IntegrityError) as error:
                _log.warning("audit.failed", reason=str(error))
                await asyncio.sleep(MOST_PAUSE_S)
            except AntiphonError as error:
                # A worker's group must not end the learner, whatever is in it.
                _log.error("audit.stopped", reason=str(error))
                return


def log_end(task: "asyncio.Task[None]") -> None:
    """Say why audits ended, if they did by themselves."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("audit.broke", exc_info=error)
