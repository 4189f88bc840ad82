"""Wire rewarding: groups that go to a judge or an auditor, and what these find.

Reading what was written gives an equal record; messages that cannot be meant raise ContractError.
"""

import numpy as np

from antiphon.core import records as r
from antiphon.core.errors import ContractError
from antiphon.core.trust.audit import SampleStatistics
from antiphon.protos import records_pb2
from antiphon.services.wire.arrays import finish_reason_from_text
from antiphon.services.wire.work import group_submission_from_proto, group_submission_to_proto


def rewarded_group_to_proto(x: r.RewardedGroup) -> records_pb2.RewardedGroup:
    """Translate."""
    return records_pb2.RewardedGroup(sample_index=x.sample_index, reward=x.reward)


def rewarded_group_from_proto(m: records_pb2.RewardedGroup) -> r.RewardedGroup:
    """Translate."""
    return r.RewardedGroup(sample_index=m.sample_index, reward=m.reward)


def group_to_reward_to_proto(x: r.GroupToReward) -> records_pb2.GroupToReward:
    """Translate."""
    return records_pb2.GroupToReward(
        group_id=x.group_id,
        prompt_key=x.prompt_key,
        completions=[
            records_pb2.Completion(token_ids=tokens.tolist(), finish_reason=reason.value)
            for tokens, reason in zip(x.completions, x.finish_reasons, strict=True)
        ],
    )


def group_to_reward_from_proto(m: records_pb2.GroupToReward) -> r.GroupToReward:
    """Translate."""
    return r.GroupToReward(
        group_id=m.group_id,
        prompt_key=m.prompt_key,
        completions=tuple(np.array(c.token_ids, dtype=np.int32) for c in m.completions),
        finish_reasons=tuple(finish_reason_from_text(c.finish_reason) for c in m.completions),
    )


def group_to_audit_to_proto(x: r.GroupToAudit) -> records_pb2.GroupToAudit:
    """Translate."""
    return records_pb2.GroupToAudit(
        submission=group_submission_to_proto(x.submission), prompt_token_ids=x.prompt_token_ids
    )


def group_to_audit_from_proto(m: records_pb2.GroupToAudit) -> r.GroupToAudit:
    """Translate."""
    return r.GroupToAudit(group_submission_from_proto(m.submission), tuple(m.prompt_token_ids))


def sample_statistics_to_proto(x: SampleStatistics) -> records_pb2.SampleStatistics:
    """Translate."""
    return records_pb2.SampleStatistics(
        sample_index=x.sample_index,
        tokens=x.tokens,
        missed=x.missed,
        impossible=x.impossible,
        drift=x.drift,
    )


def sample_statistics_from_proto(m: records_pb2.SampleStatistics) -> SampleStatistics:
    """Translate."""
    if not 0 <= m.missed <= m.tokens or not 0 <= m.impossible <= m.tokens or m.drift < 0:
        raise ContractError(f"the figures of sample {m.sample_index} cannot be: {m.missed} of {m.tokens}")
    return SampleStatistics(m.sample_index, m.tokens, m.missed, m.impossible, m.drift)
