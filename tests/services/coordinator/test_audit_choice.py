"""How many groups are audited follows the least trusted worker that sampled some of a group."""

from types import SimpleNamespace
from typing import Any, cast

from antiphon.core.coordinator.loop_state import LoopState
from antiphon.core.loop.group_state import GroupState, Receipt
from antiphon.core.trust.reputation import Standing
from antiphon.services.coordinator.audit_queue import AuditQueue
from tests.support.light_parties import LightPrompts
from tests.support.loop_model import make_config

GROUPS = 60


def drawn(handed_in_by: str, begun_by: str) -> list[str]:
    """Return the groups that are audited of those that one worker began and another handed in."""
    authors = ((0, begun_by, 0, 2),) if begun_by else ()
    groups = {
        f"g{n}": GroupState(f"g{n}", n, "train", prompt_index=n, epoch=0, samples=2) for n in range(GROUPS)
    }
    state = SimpleNamespace(
        groups=groups,
        receipts={group_id: Receipt("lease", "digest", 0, authors=authors) for group_id in groups},
        standings={"old": Standing(passed=10_000)},
    )
    config = make_config()
    loop = LoopState(config, "run-1", LightPrompts(), bytes(32), 0.0)
    machine = SimpleNamespace(state=state, config=config, clock=lambda: 0.0, loop=loop, submissions=None)
    queue = AuditQueue(cast("Any", machine), bytes(32))
    for group_id in groups:
        assert not [*queue.choose(cast("Any", SimpleNamespace(group_id=group_id, worker_id=handed_in_by)))]
    return list(queue._waiting)


def test_a_newcomers_tokens_are_audited_as_often_whoever_hands_them_in() -> None:
    assert len(drawn("old-1", "")) < len(drawn("new-1", "")), "else nothing is shown"
    assert drawn("old-1", "new-1") == drawn("new-1", "") == drawn("new-1", "old-1")
