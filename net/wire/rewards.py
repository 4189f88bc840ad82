"""Wire rewards: groups that go to a reward service or an auditor, and what these find."""

import numpy as np

from antiphon.core import records as r
from antiphon.core.errors import ContractError
from antiphon.core.trust.audit import AuthoredSpan, SampleStatistics
from antiphon.net.rpc.codec import by_hand, codec
from antiphon.net.wire import work  # noqa: F401 - says how a submission travels
from antiphon.net.wire.arrays import finish_reason_from_text
from antiphon.protos import records_pb2


def _group_to_reward_to_proto(x: r.GroupToReward) -> records_pb2.GroupToReward:
    return records_pb2.GroupToReward(
        group_id=x.group_id,
        prompt_key=x.prompt_key,
        completions=[
            records_pb2.Completion(token_ids=tokens.tolist(), finish_reason=reason.value)
            for tokens, reason in zip(x.completions, x.finish_reasons, strict=True)
        ],
    )


def _group_to_reward_from_proto(m: records_pb2.GroupToReward) -> r.GroupToReward:
    return r.GroupToReward(
        group_id=m.group_id,
        prompt_key=m.prompt_key,
        completions=tuple(np.array(c.token_ids, dtype=np.int32) for c in m.completions),
        finish_reasons=tuple(finish_reason_from_text(c.finish_reason) for c in m.completions),
    )


def _check_statistics(m: records_pb2.SampleStatistics) -> None:
    counts = {name: getattr(m, name) for name in ("missed", "impossible", "near", "gross")}
    if not all(0 <= count <= m.tokens for count in counts.values()) or m.drift < 0:
        said = ", ".join(f"{count} {name}" for name, count in counts.items())
        raise ContractError(
            f"the statistics of sample {m.sample_index} are invalid: {said} of {m.tokens} tokens, "
            f"drift {m.drift}"
        )


codec(r.SampleReward, records_pb2.SampleReward)
codec(r.GroupRewards, records_pb2.GroupRewards)
by_hand(records_pb2.GroupToReward, _group_to_reward_to_proto, _group_to_reward_from_proto)
codec(AuthoredSpan, records_pb2.AuthoredSpan)
codec(r.GroupToAudit, records_pb2.GroupToAudit)
sample_statistics_to_proto, sample_statistics_from_proto = codec(
    SampleStatistics, records_pb2.SampleStatistics, _check_statistics
)
