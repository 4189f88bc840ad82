"""Wire completions: the trajectories of a group in one message, column by column, and back.

A group is handed in once and is the largest thing that a worker sends. Row by row, each completion
costs the coordinator several small arrays; in columns a group costs two, and its completions are views.
"""

from collections.abc import Sequence

import numpy as np

from antiphon.core import records as r
from antiphon.core.errors import ContractError
from antiphon.core.message_sizes import MOST_SPANS
from antiphon.net.wire.arrays import (
    finish_reason_from_text,
    logprobs_from_bytes,
    logprobs_to_bytes,
    tokens_from_bytes,
    tokens_to_bytes,
)
from antiphon.protos import records_pb2

_NO_TOKENS = np.empty(0, dtype=np.int32)
_NO_LOGPROBS = np.empty(0, dtype=np.float32)


def completions_to_proto(trajectories: Sequence[r.Trajectory]) -> records_pb2.Completions:
    """Return the completions of a group as columns."""
    spans = [span for trajectory in trajectories for span in trajectory.spans]
    tokens = np.concatenate([_NO_TOKENS, *(t.token_ids for t in trajectories)])
    logprobs = np.concatenate([_NO_LOGPROBS, *(t.logprobs for t in trajectories)])
    return records_pb2.Completions(
        sample_indices=[t.sample_index for t in trajectories],
        seeds=[t.seed for t in trajectories],
        lengths=[t.token_ids.size for t in trajectories],
        token_ids=tokens_to_bytes(tokens),
        behaviour_logprobs=logprobs_to_bytes(logprobs),
        span_counts=[len(t.spans) for t in trajectories],
        span_versions=[span.version for span in spans],
        span_starts=[span.start for span in spans],
        span_stops=[span.stop for span in spans],
        finish_reasons=[t.finish_reason.value for t in trajectories],
        span_kept_caches=[s.kept_cache for s in spans] if any(s.kept_cache for s in spans) else (),
    )


def completions_from_proto(m: records_pb2.Completions) -> tuple[r.Trajectory, ...]:
    """Return the completions of a group; their tokens and log-probabilities share its memory.

    Raises:
        ContractError: when the columns do not fit each other.
    """
    tokens, logprobs = tokens_from_bytes(m.token_ids), logprobs_from_bytes(m.behaviour_logprobs)
    lengths, counts = list(m.lengths), list(m.span_counts)
    if not len(m.sample_indices) == len(m.seeds) == len(lengths) == len(counts) == len(m.finish_reasons):
        raise ContractError(
            f"a group came with {len(lengths)} lengths, {len(m.sample_indices)} sample indices, "
            f"{len(m.seeds)} seeds, {len(counts)} span counts and {len(m.finish_reasons)} finish reasons; "
            "one each is needed for every completion"
        )
    if min(lengths, default=0) < 0 or sum(lengths) != tokens.size:
        raise ContractError(f"completions of {sum(lengths)} tokens came with {tokens.size} tokens")
    if logprobs.size != tokens.size:
        raise ContractError(
            f"{logprobs.size} behaviour logprobs for {tokens.size} tokens; one each is needed"
        )
    if not len(m.span_versions) == len(m.span_starts) == len(m.span_stops) == sum(counts) or (
        min(counts, default=0) < 0
    ):
        raise ContractError(f"completions with {sum(counts)} version spans came with other columns of them")
    if max(counts, default=0) > MOST_SPANS:
        raise ContractError(
            f"a completion came with {max(counts)} version spans; at most {MOST_SPANS} can be within a bound"
        )
    kept = list(m.span_kept_caches) or [False] * sum(counts)
    if len(kept) != sum(counts):
        raise ContractError(f"{len(kept)} marks of a kept cache came for {sum(counts)} version spans")
    spans = tuple(map(r.VersionSpan, m.span_versions, m.span_starts, m.span_stops, kept))
    found = []
    at = span_at = 0
    for index, seed, length, count, reason in zip(
        m.sample_indices, m.seeds, lengths, counts, m.finish_reasons, strict=True
    ):
        found.append(
            r.Trajectory(
                tokens[at : at + length],
                logprobs[at : at + length],
                spans[span_at : span_at + count],
                finish_reason_from_text(reason),
                sample_index=index,
                seed=seed,
            )
        )
        at, span_at = at + length, span_at + count
    return tuple(found)
