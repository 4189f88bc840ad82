"""Outcome of a modelled run, and of each of its batches."""

from dataclasses import dataclass

from antiphon.core.loop.assembly import SealPlan
from antiphon.core.loop.events import BatchSealed
from antiphon.core.loop.work_account import WorkAccount


@dataclass(frozen=True, slots=True)
class Modelled:
    """What a modelled run came to."""

    commits_s: tuple[float, ...]
    """When each step was committed, virtual seconds since the first lease."""
    learner_s: float
    """In which the learner trained."""
    staleness: dict[int, int]
    """Staleness in versions -> trained completions."""
    account: WorkAccount
    worker_hours: float
    usd: float
    tokens: int
    """Accepted."""
    losses: int
    events: int
    digest: str
    """blake3 of all events and their times; the same seed gives the same."""

    @property
    def seconds(self) -> float:
        return self.commits_s[-1]

    @property
    def idle_share(self) -> float:
        return max(0.0, 1.0 - self.learner_s / self.seconds)


def sealed_event(plan: SealPlan, filtered_before: int) -> BatchSealed:
    """Return the event of a batch; `filtered_before` groups were dropped since the one before."""
    ages: dict[int, int] = {}
    for group in plan.used:
        age = plan.step - group.oldest_version
        ages[age] = ages.get(age, 0) + group.samples
    tokens, count = sum(sum(group.token_counts) for group in plan.used), sum(ages.values())
    filtered = tuple(group.group_id for group in plan.filtered)
    return BatchSealed(
        step=plan.step,
        group_ids=tuple(group.group_id for group in plan.used),
        filtered_ids=filtered,
        digest="",
        timings_digest="",
        trajectories=count,
        groups_filtered=len(filtered) + filtered_before,
        groups_dropped_stale=0,
        tokens=tokens,
        reward_mean=0.0,
        completion_tokens_mean=tokens / max(1, count),
        staleness=tuple(sorted(ages.items())),
    )
