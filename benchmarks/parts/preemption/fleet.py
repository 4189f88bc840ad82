"""Preemption fleet: what is measured, the same in the simulator and in processes, and what it came to."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from antiphon.core.loop.work_account import WorkAccount
from antiphon.simulator.faults import Fault, FaultKind
from antiphon.simulator.scenario import Scenario

MAX_TOKENS = 24
"""Three times the mean length of a completion that nothing ends but the stand-in's own end token."""
END_SHARE = 1 / 8
"""Probability of the stand-in's end token at each place."""
HEARTBEAT_S = 5.0
LEASE_S = 60.0
STALL_S = 36_000.0
"""A fleet that waits for new machines has not stalled."""
CHUNKS = 2
"""A snapshot of the stand-ins has so many."""
HANGS_AT = 0.25
"""Share of the span after which an engine hangs, with groups in flight."""
WARM_UP_STEPS = 3
"""Steps left out at the beginning: the pipeline fills."""


@dataclass(frozen=True, slots=True)
class Site:
    """One fleet and its learner; times in seconds of the simulated clock."""

    max_staleness: int = 2
    headroom: float = 0.0
    """Share by which workers sample faster than `group_s` says."""
    handover: bool = True
    workers: int = 8
    stragglers: bool = False
    """The first worker's link is so slow that a snapshot takes as long as a learner step, and there are two
    workers more: one that joins and never loads, and one whose engine hangs."""
    groups_at_once: int = 2
    """Groups that one worker samples at the same time."""
    group_size: int = 4
    prompts_per_step: int = 32
    group_s: float = 120.0
    """Seconds in which a worker without headroom hands in `groups_at_once` groups."""

    @property
    def train_s(self) -> float:
        """Return the seconds of a learner step: as long as an undisturbed fleet needs for a batch."""
        return self.prompts_per_step * self.group_s / (self.workers * self.groups_at_once)

    @property
    def engine_step_s(self) -> float:
        """Return the seconds of an engine step, which gives each completion a token."""
        steps = _engine_steps_per_group(self.groups_at_once, self.group_size)
        return self.group_s / self.groups_at_once / steps / (1.0 + self.headroom)

    def trouble(self, span_s: float) -> list[Fault]:
        """Return what goes wrong in `span_s` seconds but for reclaimed workers."""
        if not self.stragglers:
            return []
        return [
            Fault(0.0, FaultKind.SLOW_LINK, "worker-0", span_s),
            Fault(0.0, FaultKind.DEAD_TRANSFER, f"worker-{self.workers}", span_s),
            Fault(HANGS_AT * span_s, FaultKind.HANG, f"worker-{self.workers + 1}", span_s),
        ]

    def scenario(self, seed: int, span_s: float, scale: float = 1.0) -> Scenario:
        """Return the run of `span_s` seconds; `scale` of them pass in one second of the run's own clock."""
        return Scenario(
            name="preemption",
            run={
                "run": {"name": "preemption", "steps": 100_000, "seed": seed},
                "environment": {"train_size": 4096, "heldout_size": 1},
                "evaluation": {"prompts": 1, "interval": 0},
                "loop": {
                    "mode": "elastic",
                    "max_staleness": self.max_staleness,
                    "prompts_per_step": self.prompts_per_step,
                    "group_size": self.group_size,
                    "filter": "none",
                },
                "sampling": {"max_tokens": MAX_TOKENS},
                "rollout": {"concurrent_groups": self.groups_at_once},
                "drafting": {"enabled": False},
                "coordinator": {
                    "lease_s": LEASE_S / scale,
                    "heartbeat_s": HEARTBEAT_S / scale,
                    "partials_mib": 64 if self.handover else 0,
                },
                "services": {"stall_timeout_s": STALL_S / scale},
            },
            workers=self.workers + 2 * self.stragglers,
            slow_chunk_s=self.train_s / CHUNKS,
            engine_step_s=(self.engine_step_s, self.engine_step_s),
            worker_slowness=(1.0, 1.0),
            learner_step_s=(self.train_s, self.train_s),
            limit_s=2.0 * span_s,
            span_s=span_s,
        )


@cache
def _engine_steps_per_group(groups_at_once: int, group_size: int, groups: int = 4096) -> float:
    """Return the engine steps in which a worker ends one group, on the average over `groups` of them.

    It begins another as soon as it has room for all of its completions, with the step after the one that
    runs.
    """
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.geometric(END_SHARE, size=(groups, group_size)), MAX_TOKENS)
    ends: list[int] = []  # a heap: the step in which each completion ends
    step = 0
    for counts in lengths:
        while len(ends) + group_size > groups_at_once * group_size:
            step = max(step, heapq.heappop(ends))
        for count in counts:
            heapq.heappush(ends, step + 1 + int(count))
    return max(ends) / groups


@dataclass(frozen=True, slots=True)
class FleetRun:
    """What one fleet came to over its span."""

    steps_per_hour: float
    """Learner steps."""
    wasted_share: float
    """Of the worker seconds under a lease: what no step trained on, as the work account books it."""
    preempted_share: float
    """The part of these that was lost with a worker."""
    continued: int
    """Leases that began with tokens of an earlier holder."""
    violations: tuple[str, ...]
    """What must not be: tokens beyond the bound, wrong tokens, lost groups."""
    hung_leases: int = 0
    """Leases that were taken back because an engine stood still."""


def shares(account: WorkAccount) -> tuple[float, float]:
    """Return the wasted and the preempted share of the seconds under a lease."""
    leased_s = account.leased_s
    return account.wasted_share(), account.seconds["preempted"] / leased_s if leased_s else 0.0


def steps_per_hour(commits: Sequence[float], train_s: float, span_s: float) -> float:
    """Return the rate after the warm-up; a step that is late when the span ends counts as late.

    Args:
        commits: second of each commit.
        train_s: seconds that a step takes where nothing is late.
        span_s: second at which the run was stopped.
    """
    ends = commits[WARM_UP_STEPS:]
    if len(ends) < 2:
        return 0.0
    return 3600.0 * (len(ends) - 1) / (max(ends[-1], span_s - train_s) - ends[0])
