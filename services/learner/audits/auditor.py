"""Auditor: scores groups again under the very version that sampled them, beside the training.

It holds a second copy of the model, filled with the published snapshot of each version it needs:
the weights that workers sampled with, bit for bit, whatever the learner has become meanwhile. One
forward pass over prompt and completion gives the distribution of every token; the production
sampler's own arithmetic shows where each token's uniform had to fall, or under the Gumbel rule by how
much its sum of logit and noise falls short of the largest.

Legend: K tokens looked at, T completion tokens, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import structlog
import torch

from antiphon.core.config import RunConfig
from antiphon.core.errors import UnavailableError
from antiphon.core.records import GroupToAudit, SamplingParameters, Trajectory
from antiphon.core.seeds import branch_seed
from antiphon.core.spans import Branch, branches, kept_cache_tokens, token_versions
from antiphon.core.trust.audit import SampleStatistics
from antiphon.sampling import gumbel
from antiphon.sampling.keyed_sampler import (
    CHUNK,
    RowSampling,
    intervals,
    request_key,
    score,
    uniforms,
)
from antiphon.services.learner.audits.audit_loop import TokenScores
from antiphon.services.learner.scoring import Places, completion_logits, row_sampling
from antiphon.services.learner.snapshot_model import LOGITS_AT_ONCE, SnapshotModel
from antiphon.weights.payload_store import PayloadStore

ROUNDING = {
    "inverse_cdf": {"float32": 1e-4, "bfloat16": 1e-2},
    "gumbel": {"float32": 1e-3, "bfloat16": 1e-1},
}
"""How far a token may miss and still be rounding, by the rule and the weights' precision: how far outside
its interval its uniform lies, or by how many nats its sum falls short. Engines sum in another order than
one forward pass, which moves the ends of intervals and the logits."""
NEAR, GROSS = 0.01, 10.0
"""A token is near, or gross, that is off by more than this many of these."""
GROSS_DRIFT = {"float32": 0.05, "bfloat16": 2.0}
"""Most nats by which one logprob may differ: float32 engines show 3e-5, bfloat16 ones 0.13."""
_log = structlog.get_logger(__name__)


class Auditor:
    """One model whose weights are exchanged for those of the version at hand; for one thread."""

    def __init__(self, config: RunConfig, payloads: PayloadStore, model: Any = None) -> None:
        """Prepare; unless a causal model is given, the run's own is loaded for the first group."""
        self._config = config
        self._held = SnapshotModel(config, payloads, model)

    def examine(self, group: GroupToAudit) -> list[SampleStatistics]:
        """Return what the scores say, for each sample and each worker that sampled some of it.

        Tokens of versions that are kept no more are left out, and so are those that were sampled over a cache
        which earlier versions had filled: these are counted as such.

        Raises:
            IntegrityError: when a snapshot is damaged.
            UnavailableError: when no version of the group is kept any more.
        """
        trajectories = group.submission.trajectories
        parts = [(t, branch) for t in trajectories for branch in branches(group.prompt_token_ids, t)]
        scores = {t.sample_index: TokenScores.of(t) for t in trajectories}
        versions = sorted({span.version for t in trajectories for span in t.spans if not span.kept_cache})
        filled = 0
        for version in versions:
            if not self._held.fill(version):
                continue
            filled += 1
            # Of tokens that were sampled over a kept cache no clean pass gives the distribution.
            masks = {
                t.sample_index: (token_versions(t) == version) & ~kept_cache_tokens(t) for t in trajectories
            }
            found = [np.flatnonzero(masks[t.sample_index][b.start : b.stop]) for t, b in parts]
            own = [place for place, one in enumerate(found) if one.size]
            texts = [(b.context, t.token_ids[b.start : b.stop]) for t, b in (parts[place] for place in own)]
            wanted = [found[place] for place in own]
            for line, places, logits in completion_logits(
                self._held.model, texts, wanted, LOGITS_AT_ONCE, self._config.model.head == "float32"
            ):
                trajectory, branch = parts[own[line]]
                score_tokens(
                    scores[trajectory.sample_index],
                    logits.float(),
                    trajectory,
                    branch.start + places,
                    branch,
                    group.sampling or self._config.sampling.parameters(),
                    group.rule if self._config.sampling.sampler == "keyed" else None,
                    self._config.model.dtype,
                )
        if not filled:
            raise UnavailableError(f"version {versions[0]} is not kept any more (broadcast.snapshots_kept)")
        return [found for index, score in scores.items() for found in score.by_author(index, group.authors)]


def score_tokens(
    into: TokenScores,
    logits: torch.Tensor,
    trajectory: Trajectory,
    places: Places,
    branch: Branch,
    sampling: SamplingParameters,
    rule: str | None,
    dtype: str,
) -> None:
    """Compare tokens with the distributions they are said to come from.

    Args:
        into: scores of the completion, changed at `places`.
        logits: [K, V] of the tokens at `places`.
        trajectory: as the worker handed it in.
        places: [K] indices into the completion.
        branch: in which they were sampled; positions count from its beginning.
        sampling: as leased.
        rule: how keyed random numbers choose a token; None for a sampler without keys.
        dtype: precision of the weights.
    """
    count, vocabulary = logits.shape
    rows = row_sampling(sampling, count, vocabulary)
    tokens = torch.from_numpy(trajectory.token_ids[places].astype(np.int64))
    own = score(logits, tokens, rows).numpy().astype(np.float64)
    cut = np.isneginf(own)
    difference = np.where(cut, 0.0, np.abs(own - trajectory.logprobs[places].astype(np.float64)))
    into.scored[places], into.cut[places], into.difference[places] = True, cut, difference
    into.gross[places] = difference > GROSS_DRIFT[dtype]
    if rule is None:
        return
    keys = np.full(count, request_key(branch_seed(trajectory.seed, branch.number)), dtype=np.uint64)
    positions, rounding = branch.shift + places, ROUNDING[rule][dtype]
    by = _misses(rule, logits, tokens, keys, positions, rows)
    into.missed[places], into.near[places] = by > rounding, by > NEAR * rounding
    far = np.flatnonzero(by > GROSS * rounding)
    # Rounding may move what top-k and top-p cut off, and with it every interval: such a miss is no proof.
    for other in _cut_otherwise(sampling) if far.size else ():
        if far.size:
            part, chosen = torch.from_numpy(far), row_sampling(other, far.size, vocabulary)
            again = _misses(rule, logits[part], tokens[part], keys[far], positions[far], chosen)
            far = far[again > GROSS * rounding]
    into.gross[places[far]] = True


def _cut_otherwise(sampling: SamplingParameters) -> list[SamplingParameters]:
    """Return the sampling with a little more and a little less cut off; nothing where nothing is cut."""
    found = []
    if sampling.temperature and sampling.top_k > 0:
        found += [replace(sampling, top_k=max(1, sampling.top_k + by)) for by in (-1, 1)]
    if sampling.temperature and sampling.top_p < 1.0:
        found += [replace(sampling, top_p=min(1.0, sampling.top_p * by)) for by in (0.98, 1.02)]
    return found


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
        most = max(1, CHUNK // logits.shape[-1])
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
