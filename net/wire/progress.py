"""Wire progress: unfinished completions in heartbeats, leases and the journal.

Reading what was written gives an equal record; invalid messages raise ContractError.
"""

from antiphon.core import records as r
from antiphon.core.errors import ContractError
from antiphon.core.loop.partials import KeptGroup, KeptSample
from antiphon.core.message_sizes import MOST_SPANS
from antiphon.net.rpc.codec import by_hand, codec
from antiphon.net.wire.arrays import (
    finish_reason_from_text,
    logprobs_from_bytes,
    logprobs_to_bytes,
    tokens_from_bytes,
    tokens_to_bytes,
)
from antiphon.protos import records_pb2, rollout_pb2


def partial_trajectory_to_proto(x: r.PartialTrajectory) -> records_pb2.PartialTrajectory:
    """Return the message."""
    return records_pb2.PartialTrajectory(
        sample_index=x.sample_index,
        start=x.start,
        token_ids=tokens_to_bytes(x.token_ids),
        behaviour_logprobs=logprobs_to_bytes(x.logprobs),
        spans=[
            records_pb2.VersionSpan(version=s.version, start=s.start, stop=s.stop, kept_cache=s.kept_cache)
            for s in x.spans
        ],
        finish_reason="" if x.finish_reason is None else x.finish_reason.value,
    )


def partial_trajectory_from_proto(m: records_pb2.PartialTrajectory) -> r.PartialTrajectory:
    """Return the record.

    Raises:
        ContractError: when its spans do not begin where it says that it begins, or are too many.
    """
    if len(m.spans) > MOST_SPANS:
        raise ContractError(
            f"progress of sample {m.sample_index} came with {len(m.spans)} version spans; "
            f"at most {MOST_SPANS} can be within a bound"
        )
    found = r.PartialTrajectory(
        tokens_from_bytes(m.token_ids),
        logprobs_from_bytes(m.behaviour_logprobs),
        tuple(r.VersionSpan(s.version, s.start, s.stop, s.kept_cache) for s in m.spans),
        finish_reason_from_text(m.finish_reason) if m.finish_reason else None,
        sample_index=m.sample_index,
    )
    if m.start != found.start:
        raise ContractError(
            f"progress of sample {m.sample_index}: start={m.start}, "
            f"but its version spans begin at {found.start}"
        )
    return found


def _author_to_proto(author: tuple[str, int]) -> records_pb2.Authorship:
    return records_pb2.Authorship(worker_id=author[0], stop=author[1])


def _author_from_proto(m: records_pb2.Authorship) -> tuple[str, int]:
    return m.worker_id, m.stop


by_hand(records_pb2.PartialTrajectory, partial_trajectory_to_proto, partial_trajectory_from_proto)
codec(r.LeaseProgress, rollout_pb2.LeaseProgress)
codec(KeptSample, records_pb2.KeptSample, authors=(_author_to_proto, _author_from_proto))
kept_group_to_proto, kept_group_from_proto = codec(KeptGroup, records_pb2.KeptGroup)
