"""Wire progress: unfinished completions in heartbeats, leases and the journal.

Reading what was written gives an equal record; invalid messages raise ContractError.
"""

from antiphon.core import records as r
from antiphon.core.errors import ContractError
from antiphon.core.loop.partials import KeptGroup, KeptSample
from antiphon.protos import records_pb2, rollout_pb2
from antiphon.services.wire.arrays import (
    finish_reason_from_text,
    logprobs_from_bytes,
    logprobs_to_bytes,
    tokens_from_bytes,
    tokens_to_bytes,
)


def partial_trajectory_to_proto(x: r.PartialTrajectory) -> records_pb2.PartialTrajectory:
    """Translate."""
    return records_pb2.PartialTrajectory(
        sample_index=x.sample_index,
        start=x.start,
        token_ids=tokens_to_bytes(x.token_ids),
        behaviour_logprobs=logprobs_to_bytes(x.logprobs),
        spans=[records_pb2.VersionSpan(version=s.version, start=s.start, stop=s.stop) for s in x.spans],
        finish_reason="" if x.finish_reason is None else x.finish_reason.value,
    )


def partial_trajectory_from_proto(m: records_pb2.PartialTrajectory) -> r.PartialTrajectory:
    """Translate.

    Raises:
        ContractError: when its spans do not begin where it says that it begins.
    """
    found = r.PartialTrajectory(
        tokens_from_bytes(m.token_ids),
        logprobs_from_bytes(m.behaviour_logprobs),
        tuple(r.VersionSpan(span.version, span.start, span.stop) for span in m.spans),
        finish_reason_from_text(m.finish_reason) if m.finish_reason else None,
        sample_index=m.sample_index,
    )
    if m.start != found.start:
        raise ContractError(
            f"progress of sample {m.sample_index}: start={m.start}, "
            f"but its version spans begin at {found.start}"
        )
    return found


def lease_progress_to_proto(x: r.LeaseProgress) -> rollout_pb2.LeaseProgress:
    """Translate."""
    return rollout_pb2.LeaseProgress(
        lease_id=x.lease_id, pieces=[partial_trajectory_to_proto(piece) for piece in x.pieces]
    )


def lease_progress_from_proto(m: rollout_pb2.LeaseProgress) -> r.LeaseProgress:
    """Translate."""
    return r.LeaseProgress(m.lease_id, tuple(partial_trajectory_from_proto(piece) for piece in m.pieces))


def kept_group_to_proto(x: KeptGroup) -> records_pb2.KeptGroup:
    """Translate."""
    return records_pb2.KeptGroup(
        samples=[
            records_pb2.KeptSample(
                whole=partial_trajectory_to_proto(sample.whole),
                authors=[records_pb2.Authorship(worker_id=w, stop=stop) for w, stop in sample.authors],
            )
            for sample in x.samples
        ]
    )


def kept_group_from_proto(m: records_pb2.KeptGroup) -> KeptGroup:
    """Translate."""
    return KeptGroup(
        tuple(
            KeptSample(
                partial_trajectory_from_proto(sample.whole),
                tuple((author.worker_id, author.stop) for author in sample.authors),
            )
            for sample in m.samples
        )
    )
